"""Whom to go on without: workers that are lost, hang, are slow or late, and nodes that are cut off or not fit."""

from __future__ import annotations

import msgspec

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.clocks import Clocks
from chaoskit.coordinator.detectors.contact import Contact
from chaoskit.coordinator.detectors.fitness import ITSELF, Fitness
from chaoskit.coordinator.detectors.hang import Hang
from chaoskit.coordinator.detectors.link_speed import LinkSpeeds
from chaoskit.coordinator.detectors.links import SUSPECT_S, Links
from chaoskit.coordinator.detectors.newcomers import Newcomers
from chaoskit.coordinator.detectors.rulings import Excused, Hopeless, Rulings, reason_of
from chaoskit.coordinator.detectors.workload import GiveUp, TryLinks, Workload, tell_links
from chaoskit.coordinator.generations import Generations
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import Limits
from chaoskit.coordinator.membership.policies import Policies
from chaoskit.coordinator.membership.repeats import Repeats
from chaoskit.coordinator.membership.strikes import STRIKE_WINDOW_S
from chaoskit.coordinator.notes import note_of_event
from chaoskit.coordinator.outputs import Note, Output, Show
from chaoskit.health.finding import of_node
from chaoskit.vocabulary import HUNG, LOG_RULE, SLOW, Event
from chaoskit.wire import messages
from chaoskit.wire.messages import HealthReport, Heartbeat, LinksMeasured, RuleFired

_LINKS, _CLOCK = "links", "clock"  # looks at a node
_SUSPECTS_LEAST = (
    3  # of a small world, before a job is given up in which rank after rank hangs in the same step
)


class Attention(Generations):
    """Decisions about whoever holds up the others."""

    def __init__(self, config: RunConfig, now_s: float, policies: Policies, limits: Limits) -> None:
        super().__init__(config, now_s, policies, limits)
        self._workload = Workload(config)
        # a node may answer a coordinator what the one before it has asked
        first_question = int(now_s * 1e6)
        self._link_speeds = LinkSpeeds(first_question)
        self._links = Links(first_question)
        self._newcomers = Newcomers(first_question)
        self._clocks = Clocks()
        self._fitness = Fitness(enforce=config.health == "enforce")
        self._suspects = Repeats(tolerated=max(config.nodes, _SUSPECTS_LEAST))
        self._rulings = Rulings(config.nodes, STRIKE_WINDOW_S)
        self._contact = Contact(
            config.heartbeat_ms / 1000,
            config.lease_beats,
            config.coordinator_outage_s,
            limits.slow_agent_s,
            policies.may_give_up,
        )
        self._contact.listen(
            (), now_s
        )  # to nobody yet; from now on it counts how long this process was deaf itself

    def _lose_worker(self, lost: events.WorkerLost, now_s: float) -> list[Output]:
        told = self._tell_loss(lost, now_s)
        self._watch.forget(lost.worker)
        self._ended.discard(lost.worker)
        return told + self._advance(lost, now_s)

    def _stop_and_lose(
        self,
        worker: str,
        cause: str,
        detail: str,
        now_s: float,
        *,
        aside: bool = False,
        suspicion: events.Suspicion | None = None,
    ) -> list[Output]:
        lost = events.WorkerLost(
            worker, cause, detail, int(now_s * 1e9), aside, suspicion=suspicion
        )
        return [self._stop(worker, cause, now_s), *self._lose_worker(lost, now_s)]

    def _follow_rule(self, fired: RuleFired, now_s: float) -> list[Output]:
        """Do what a log rule asks for, if that can help."""
        membership = self._membership
        ruling = self._rulings.judge(
            fired, membership.generation, membership.members, now_s - self._lag_s
        )
        if isinstance(ruling, Hopeless):
            return self._advance(events.JobFailed(ruling.reason), now_s)
        if isinstance(ruling, Excused):
            said = {
                "rule": fired.rule,
                "worker": fired.worker,
                "verdict": fired.verdict,
                "detail": ruling.why,
            }
            return [Note(Event.RULE_EXCUSED, said)] if ruling.why else []
        aside = ruling.whole_node and len(membership.nodes) > 1
        # its spares first: none of them is to take the rank
        staff = sorted(membership.workers_on(fired.node), key=lambda worker: worker == fired.worker)
        ruled = events.Ruled(
            fired, membership.generation, tuple(staff) if aside else (fired.worker,), aside
        )
        self._rulings.take_in(ruled, now_s - self._lag_s)
        return [
            *note_of_event(ruled, now_s),
            *self._advance(ruled, now_s),
            *self._carry_out_ruling(ruled, now_s),
        ]

    def _carry_out_ruling(self, ruled: events.Ruled, now_s: float) -> list[Output]:
        """Give up whom it names, as far as they are there."""
        outputs: list[Output] = []
        for worker in ruled.workers:
            if self._membership.host_of(worker) is not None:
                outputs += self._stop_and_lose(
                    worker, LOG_RULE, reason_of(ruled.fired), now_s, aside=ruled.aside
                )
        return outputs

    def _look_for_hangs(self, now_s: float) -> list[Output]:
        plan = self._membership.plan
        if plan is None:
            return []
        ranks = self._board.arrived(messages.STANDING)
        formed = (
            self._settled == plan.generation
        )  # perhaps at the rendezvous of the coordinator before this one
        arrived = {member.worker for member in plan.members if formed or member.rank in ranks}
        guilty, stalled = self._watch.look(
            plan,
            self._membership.crew,
            arrived,
            now_s,
            worked=self._membership.worked,
            over=self._membership.is_gathering,
            grows=bool(self._membership.spares)
            and len(self._membership.members) < self._membership.size,
            starts=self._membership.is_starting,
        )
        outputs: list[Output] = []
        for hang in guilty:
            if self._contact.steady(
                self._hosts[hang.worker], now_s
            ):  # else it may do what it cannot say
                outputs += self._give_up_suspect(hang, now_s)
        if (limits := self._watch.moved_limits()) is not None:
            outputs.append(Note(Event.HANG_LIMITS, limits))
        if stalled:
            outputs += self._stall(plan.generation, "every rank waits for the others", now_s)
        return outputs

    def _give_up_suspect(self, hang: Hang, now_s: float) -> list[Output]:
        """Go on without a rank that hangs, unless rank after rank hangs in the same step.

        The age of a phase that no rank waited for says nothing about how long a phase of the step may take.
        """
        suspicion = events.Suspicion(hang.phase, hang.age_s, hang.limit_s) if hang.waited else None
        if suspicion is not None:
            self._watch.limits.suspect(suspicion)
        step = self._watch.committed
        if self._suspects.note(hang.phase.label, step, hang.worker):
            reason = f"rank after rank hangs in the {hang.phase.label} phase of step {step}: {hang.detail}"
            return self._advance(events.JobFailed(reason), now_s)
        return self._stop_and_lose(hang.worker, HUNG, hang.detail, now_s, suspicion=suspicion)

    def _dismiss_behind(self, now_s: float) -> list[Output]:
        """Have ranks leave that wait for a group, when all others are at the end of the job and will build none."""
        behind = [worker for worker in self._membership.parting if self._watch.regroups(worker)]
        return [
            output for worker in behind for output in self._advance(events.Behind(worker), now_s)
        ]

    def _look_at_links(self, now_s: float) -> list[Output]:
        """Go on without nodes that cannot reach others, and have links tried as long as there is a reason for it."""
        membership, attached = self._membership, self._attendance.attached
        if membership.finished:  # a node may still answer the coordinator before this one
            return []
        stuck = (
            now_s < self._suspicious_until_s
            or self._watch.waiting_s(membership.members) > SUSPECT_S
        )
        outputs: list[Output] = []
        for event in self._links.judge(membership, attached, now_s, stuck=stuck):
            workers = [worker for node in event.nodes for worker in membership.workers_on(node)]
            outputs += [
                *note_of_event(event, now_s),
                *self._tell_loss(event, now_s),
                *self._advance(event, now_s),
            ]
            for worker in workers if isinstance(event, events.LeftOut) else ():
                self._watch.forget(worker)
        return outputs + (
            self._links.test(membership, attached, now_s) if stuck or membership.left_out else []
        )

    def _look_at_workload(self, now_s: float) -> list[Output]:
        outputs: list[Output] = []
        for decided in self._workload.look(self._membership):
            match decided:
                case Note():
                    outputs.append(decided)
                case GiveUp(worker, detail):
                    self._farewells[worker] = (
                        now_s + self._limits.farewell_of(self._config),
                        detail,
                    )  # it is well
                    outputs += self._stop_and_lose(worker, SLOW, detail, now_s)
                case TryLinks(nodes):
                    outputs += self._link_speeds.order(nodes)
                case events.Rebalanced():
                    outputs += self._advance(decided, now_s)
        return outputs

    def _test_newcomers(self, now_s: float) -> list[Output]:
        if self._config.health == "off" or self._membership.finished:
            return []
        return [*self._newcomers.order(self._membership, self._attendance.attached, now_s)]

    def _hear_of_links(self, answer: LinksMeasured, now_s: float) -> list[Output]:
        if not answer.joins:
            links = self._link_speeds.answer(answer)
            return [] if links is None else [tell_links(links)]
        self._newcomers.answer(answer, lambda node: self._contact.steady(node, now_s), now_s)
        outputs: list[Output] = []
        for node, found in self._newcomers.news(self._membership):
            if node not in self._membership.unfit - self._membership.on_probation:
                report = HealthReport(node, tuple(of_node(node, found)), 0.0)
                outputs += self._note_health(report, now_s, look=_LINKS)
        return outputs

    def _look_at_clocks(self, heartbeat: Heartbeat, now_s: float) -> list[Output]:
        found = self._clocks.hear(heartbeat) if self._config.health != "off" else None
        if found is None:
            return []
        report = HealthReport(heartbeat.node, tuple(of_node(heartbeat.node, [found])), 0.0)
        if found.severity == "ok" and not self._fitness.knows(heartbeat.node, _CLOCK):
            self._fitness.hear(report, _CLOCK)  # is told with what else is found
            return []
        return self._note_health(report, now_s, look=_CLOCK)

    def _note_health(self, report: HealthReport, now_s: float, look: str = ITSELF) -> list[Output]:
        verdict = self._fitness.hear(report, look)
        known = self._fitness.report(report.node)
        self._facts.note(known)
        if verdict is None:
            return []
        fields = msgspec.structs.asdict(verdict) | {
            "findings": known.findings,
            "took_ms": known.took_ms,
        }
        return [Note(Event.HEALTH, fields), Show(known), *self._keep_unfit_out(now_s)]

    def _keep_unfit_out(self, now_s: float) -> list[Output]:
        """Go on without nodes that are not fit, as soon as they can be done without; let in who has proved itself."""
        outputs: list[Output] = []
        membership = self._membership
        while not membership.finished and (event := self._next_judgement()) is not None:
            workers = self._membership.workers_on(event.node)
            outputs += [*self._tell_loss(event, now_s), *self._advance(event, now_s)]
            for worker in workers if isinstance(event, events.Unfit) else ():
                self._watch.forget(worker)
        return outputs

    def _next_judgement(self) -> events.Unfit | events.Fit | None:
        membership, held = self._membership, self._membership.on_probation
        untested = (
            self._newcomers.untested(membership, self._attendance.attached)
            if held
            else frozenset[str]()
        )
        is_short = len(membership.members) < membership.size
        needed = (
            held.difference(self._config.on_probation) if is_short else ()
        )  # others must prove themselves first
        return self._fitness.judge(membership, untested, needed)

    def _give_up_late(self, now_s: float) -> list[Output]:
        """Workers that were started, and are not ready in time."""
        outputs: list[Output] = []
        held, startup_s = self._deferral.held, self._config.startup_s
        started = [
            worker for worker in self._membership.overdue(now_s - self._lag_s) if worker not in held
        ]
        for worker in self._policies.overdue(started, self._ordered_s, startup_s, now_s):
            if not self._contact.steady(self._hosts[worker], now_s):
                continue  # perhaps it is ready, and cannot say so
            detail = f"not ready within startup_s={startup_s:g}"
            outputs += self._stop_and_lose(worker, HUNG, detail, now_s)
        return outputs
