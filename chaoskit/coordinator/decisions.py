"""Decisions carried out: what nodes and observers are told when the membership has taken in an event.

The lowest of the classes that make the control plane, :mod:`chaoskit.coordinator.plane`.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.watch import Watch
from chaoskit.coordinator.losses import lost_workers
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.elasticity import Elasticity
from chaoskit.coordinator.membership.limits import Limits
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.policies import Policies
from chaoskit.coordinator.membership.rendezvous import RendezvousBoard
from chaoskit.coordinator.membership.results import Results
from chaoskit.coordinator.notes import note_of_end, note_of_plan, note_of_set_aside
from chaoskit.coordinator.outputs import End, Note, Output, Remember, Send, Show
from chaoskit.coordinator.reasons import Reasons
from chaoskit.coordinator.schedules.attendance import Attendance
from chaoskit.coordinator.schedules.save_schedule import NOTICE_S, Patience
from chaoskit.coordinator.schedules.start_order import Deferral
from chaoskit.vocabulary import Event
from chaoskit.wire.announcements import Facts
from chaoskit.wire.messages import (
    EndJob,
    Halt,
    NodeLost,
    Plan,
    Recall,
    StartWorker,
    StopWorker,
    Store,
)


class Decisions:
    """The membership, and what its actions mean for everybody else."""

    def __init__(self, config: RunConfig, now_s: float, policies: Policies, limits: Limits) -> None:
        self._config, self._policies, self._limits = config, policies, limits
        self._membership = Membership(config, policies=policies, limits=limits)
        self._elasticity: Elasticity | None = None
        if config.elastic is not None:
            self._elasticity = Elasticity(config.elastic, policies.happenings_of)
        self._reasons = Reasons()
        self._watch = Watch(config)
        self._deferral: Deferral[str] = Deferral()
        self._board = RendezvousBoard()
        self._results = Results()
        self._facts = Facts()  # for observers
        self._gone: dict[str, str] = {}  # nodes that are lost, and have not come back: why
        self._attendance = Attendance(config.nodes, now_s + config.startup_s)
        self._hosts: dict[str, str] = {}  # every worker there ever was -> node
        self._farewells: dict[
            str, tuple[float, str]
        ] = {}  # worker that is given up, and well -> until when, and why
        self._ordered_s: dict[
            str, float
        ] = {}  # worker -> when its node was told to start it, perhaps long after
        self._begun = False  # there is an event to remember
        self._lag_s = 0.0  # how far the clock is ahead of that of the membership
        self._end: EndJob | None = None
        self._halt_order: Halt | None = None
        self._last_step_patience = Patience(
            NOTICE_S + config.heartbeat_ms / 1000
        )  # with the step before the end
        self._stored_before_end = (
            0  # the newest step that was ordered to be stored while the next one lasts
        )

    def _decide(self, event: events.AnyEvent, now_s: float) -> list[Output]:
        """Have the membership take in an event. Empty if nothing came of it: else the event is to be remembered."""
        if self._membership.finished:
            return []
        self._reasons.note(event, self._membership, now_s)
        actions = self._membership.handle(event, now_s - self._lag_s)
        first, self._begun = (
            not self._begun,
            True,
        )  # from it the start-up time counts, also in the replay
        if isinstance(event, events.Tick) and not actions and not first:
            return []  # nothing came of it
        outputs: list[Output] = [Remember(event, now_s, self._lag_s)]
        if (
            self._config.job.sharded and self._membership.revives
        ):  # with a spare: its successor can wait
            self._deferral.recover(self._membership.newest_known + 1, self._membership.world, now_s)
        for action in actions:
            outputs += self._carry_out(action, now_s)
        if self._membership.is_short and not self._membership.revives:
            outputs += self._start(
                self._deferral.release(), now_s
            )  # no step is repeated without replacements
        return outputs

    def _carry_out(self, action: events.Action, now_s: float) -> list[Output]:
        match action:
            case events.Publish(plan):
                return self._publish(self._reasons.tell(plan, self._membership.size), now_s)
            case events.StartWorker(node, worker):
                self._hosts[worker] = node
                return self._start(self._deferral.submit(worker), now_s)
            case events.Recall(node, number):
                asked: list[Output] = [Send(node, Recall(number))]
                if not self._membership.revives:  # no step is repeated without replacements
                    asked += self._start(self._deferral.release(), now_s)
                return asked
            case events.StopWorker(worker, cause):
                return [self._stop(worker, cause, now_s)]
            case events.SetAside(node):
                return [note_of_set_aside(node, self._config.strikes_max, now_s)]
            case events.Finish(ok, reason):
                return self._finish(ok, reason, now_s)

    def _stop(self, worker: str, cause: str, now_s: float) -> Send:
        stop = StopWorker(worker, cause, *self._farewell(worker, cause, now_s))
        if cause == "left":
            self._facts.note(stop)
            self._watch.forget(worker)
        return Send(self._hosts.get(worker, ""), stop)

    def _farewell(self, worker: str, cause: str, now_s: float) -> tuple[float, str]:
        """How many seconds a worker that is to end may take for what it wants to do before, and why it is to end."""
        if worker in self._farewells:
            until_s, reason = self._farewells[worker]
            return max(0.0, until_s - now_s), reason
        if cause in ("left", "evicted") and self._elasticity is not None:
            return self._elasticity.farewell(self._hosts.get(worker, ""), now_s - self._lag_s)
        return 0.0, ""

    def _start(self, workers: list[str], now_s: float) -> list[Output]:
        alive = [worker for worker in workers if self._membership.host_of(worker) is not None]
        self._ordered_s.update(dict.fromkeys(alive, now_s))
        return [Send(self._hosts[worker], StartWorker(worker)) for worker in alive]

    def _publish(self, plan: Plan, now_s: float) -> list[Output]:
        if plan.abort or plan.leavers:
            self._deferral.recover(plan.generation, len(plan.members), now_s)
        if self._config.job.sharded:
            self._results = Results()  # the last steps are taken again, by fewer ranks perhaps
        nodes = [
            *(member.node for member in plan.members),
            *(self._hosts[worker] for worker in plan.leavers),
        ]
        return [
            note_of_plan(plan, now_s),  # before it is sent: this process may end at any moment
            *self._board.begin(plan.generation, len(plan.members)),
            *(Send(node, plan) for node in dict.fromkeys(nodes)),
            *self._tell_halt(dict.fromkeys(nodes)),
            Show(plan),
        ]

    def _tell_halt(self, nodes: Iterable[str]) -> list[Output]:
        """Order the ranks on these nodes to end, if the job is to: those that join have not been told."""
        return [] if self._halt_order is None else [Send(node, self._halt_order) for node in nodes]

    def _store_before_end(self, now_s: float) -> list[Output]:
        """Have the newest committed state stored while the step before the end lasts: the step may never end."""
        step = self._watch.committed
        is_due = self._halt_order is not None and self._last_step_patience.is_over(step, now_s)
        if not is_due or step <= self._stored_before_end:
            return []
        self._stored_before_end = step
        return [Send(node, Store(step)) for node in sorted(self._membership.nodes)]

    def _finish(self, ok: bool, reason: str, now_s: float) -> list[Output]:
        if self._end is not None:
            return []
        self._end = EndJob(ok, reason)
        attached = tuple(sorted({*self._attendance.met, *self._hosts.values()}))
        told = [Send(node, self._end) for node in sorted(self._attendance.attached)]
        return [note_of_end(ok, reason, now_s), Show(EndJob(ok, reason, attached)), *told, End()]

    def _tell_loss(self, event: events.AnyEvent, now_s: float) -> list[Output]:
        """What is to be told of a loss that the membership has yet to take in. Two coordinators may tell of it."""
        outputs: list[Output] = []
        if isinstance(event, events.NodeLost) and event.node in self._membership.nodes:
            outputs.append(
                Note(
                    Event.NODE_LOST, {"node": event.node, "detail": event.detail}, int(now_s * 1e9)
                )
            )
            outputs.append(Show(NodeLost(event.node, event.detail)))
            self._gone[event.node] = event.detail
        for lost, rank in lost_workers(event, self._membership, now_s):
            self._facts.note(lost)
            if rank is None and isinstance(event, events.NodeLost):
                continue
            fields = {
                "worker": lost.worker,
                "rank": rank,
                "cause": lost.cause,
                "detail": lost.detail,
            }
            outputs += [Note(Event.DETECTED, fields, lost.detected_ns), Show(lost)]
        return outputs
