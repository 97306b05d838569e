"""Everything that a coordinator decides, as one pure state machine over what its nodes say.

Outputs are to be carried out in their order. :class:`Remember` comes before what follows from it: a plane that is made
from the remembered events of one that ended goes on where that one was, because a membership is the replay of its
events. What the nodes know, they say again when they attach to a new coordinator: everything here may be heard twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from chaoskit import messages
from chaoskit.config import RunConfig
from chaoskit.control import events
from chaoskit.control.attendance import Attendance
from chaoskit.control.contact import Contact
from chaoskit.control.deferral import Deferral
from chaoskit.control.elasticity import Elasticity
from chaoskit.control.facts import Facts
from chaoskit.control.fitness import Fitness
from chaoskit.control.link_speed import LinkSpeeds
from chaoskit.control.links import SUSPECT_S, SUSPICION_S, Links
from chaoskit.control.losses import difference, lost_workers, news
from chaoskit.control.membership import Membership
from chaoskit.control.outputs import Disconnect, End, Note, Output, Remember, Send, Show
from chaoskit.control.reasons import Reasons
from chaoskit.control.rendezvous import Client, RendezvousBoard
from chaoskit.control.repeats import Repeats
from chaoskit.control.results import Results
from chaoskit.control.rulings import Excused, Hopeless, Rulings
from chaoskit.control.timetable import Timetable
from chaoskit.control.watch import Watch
from chaoskit.control.workload import SLOW, GiveUp, TryLinks, Workload, tell_links
from chaoskit.elastic import events as happenings
from chaoskit.elastic.events import Answer, Evict
from chaoskit.errors import Refused
from chaoskit.messages import (
    Accuse,
    AgentHello,
    Answered,
    Arm,
    EndJob,
    Formed,
    GroupBroken,
    Healed,
    HealthReport,
    Heard,
    Heartbeat,
    HookReached,
    LendNodes,
    LeverPulled,
    LinesMatched,
    LinksMeasured,
    LinksTested,
    Ping,
    Plan,
    Pong,
    PullNode,
    Recall,
    Release,
    ReturnNodes,
    RuleFired,
    ScaleTo,
    Sealed,
    SourceFailed,
    SpotNotice,
    StartWorker,
    StopWorker,
    Store,
    Trigger,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
    WorldSize,
)
from chaoskit.vocabulary import LOG_RULE, Event

STALLS_MAX = 20
#: A lost rank is usually known sooner than the broken collectives it leaves behind.
BROKEN_GRACE_S = 0.15
#: So long the members of a generation that a coordinator left unsettled may say that it is formed. A rendezvous that
#: ended with the coordinator is told by who was in it: this is for what is never told, and a busy machine needs time.
FORMING_GRACE_S = 1.0
#: A new coordinator gives the nodes that the one before it knew so long to attach to it.
REATTACH_S = 2.0
#: A node that is new forks its zygote before it reports; the end of its connection is noticed at once all the same.
ATTACH_S = 2.0


class ControlPlane:
    """Serves one run.

    Args:
        memory: what the coordinators before this one have remembered, in order.
    """

    def __init__(self, config: RunConfig, memory: Sequence[Remember] = (), now_s: float = 0.0) -> None:
        self._config = config
        self._membership = Membership(config)
        self._elasticity = Elasticity(config.elastic) if config.elastic is not None else None
        self._reasons = Reasons()
        self._watch = Watch(config)
        self._workload = Workload(config)
        self._link_speeds = LinkSpeeds()
        self._timetable = Timetable(config.disk.every_s if config.disk is not None else 0.0)
        self._deferral: Deferral[str] = Deferral()
        self._repeats = Repeats(limit=config.nodes)
        self._stalls = Repeats(limit=STALLS_MAX)
        self._rulings = Rulings(config.nodes, config.strike_window_s)
        self._contact = Contact(config.heartbeat_ms / 1000, config.lease_beats, config.coordinator_outage_s)
        self._contact.listen((), now_s)  # to nobody yet; from now on it counts how long this process was deaf itself
        self._links = Links()
        self._fitness = Fitness(enforce=config.health == "enforce")
        self._suspicious_until_s = -math.inf  # a generation broke, and no loss explains it
        self._board = RendezvousBoard()
        self._results = Results()
        self._facts = Facts()  # for observers
        self._hosts: dict[str, str] = {}  # every worker there ever was -> node
        self._ordered_s: dict[str, float] = {}  # worker -> when its node was told to start it, perhaps long after
        self._formed: set[str] = set()
        self._settled = 0
        self._met = False  # the members of a plan have, or may have at the coordinator before: only then they can train
        self._broken: tuple[float, str] | None = None  # when to plan the generation again, and why
        self._inherited = 0  # a generation that the coordinator before this one left unsettled
        self._inherited_until_s: float | None = None
        self._joined: dict[str, events.NodeJoined] = {}  # by node: which agent it was when it came
        self._armed: dict[str, list[Trigger]] = {}  # by node, for workers that are started later; as many as faults
        self._begun = bool(memory)
        self._lag_s = 0.0
        self._untold: list[Output] = []  # losses of which the coordinator before this one may not have told
        self._end: EndJob | None = None
        self._started_s = now_s
        self._attendance = Attendance(config.nodes, now_s + config.startup_s)
        self._resuming = bool(memory)
        if memory:
            self._recall(memory, now_s)

    def _recall(self, memory: Sequence[Remember], now_s: float) -> None:
        # The clock of another machine may read anything: the last event counts as just now. Every replay of the record
        # must come to the same plans, so the time of the membership goes on where it was.
        self._lag_s = now_s - (memory[-1].now_s - memory[-1].lag_s)
        for entry in memory:
            if entry.now_s == memory[-1].now_s:  # decided and written down together: all before was carried out
                self._untold += self._tell_loss(entry.event, entry.now_s)
            match entry.event:
                case events.NodeJoined(node):
                    self._joined[node] = entry.event
                case events.Armed(node, trigger):
                    self._armed.setdefault(node, []).append(trigger)
                case events.GenerationSeen():
                    self._attendance.hurry(now_s + REATTACH_S)
                    self._attendance.linger(now_s + REATTACH_S)
            self._reasons.note(entry.event, self._membership, entry.now_s)
            for action in self._membership.handle(entry.event, entry.now_s - entry.lag_s):
                if isinstance(action, events.Publish):
                    self._reasons.tell(action.plan, self._membership.size)
                elif isinstance(action, events.StartWorker):
                    self._hosts[action.worker] = action.node
                elif isinstance(action, events.Finish):
                    self._end = EndJob(action.ok, action.reason)
            if self._elasticity is not None:  # what follows from it comes next in the record, or is wanted still
                self._elasticity.take_in(entry.event, self._membership, entry.now_s - entry.lag_s)
        if self._membership.nodes or self._membership.plan is not None:
            self._attendance.begin()
        for node in self._membership.nodes:
            self._contact.expect(node, now_s + REATTACH_S)
        if self._membership.plan is not None:
            self._met = True
            self._board.begin(self._membership.generation, self._membership.world)
        if self._membership.settled:
            self._settled = self._membership.generation
        else:
            self._inherited = self._membership.generation

    @property
    def membership(self) -> Membership:
        """Who is in."""
        return self._membership

    @property
    def attached(self) -> frozenset[str]:
        """Nodes that are connected."""
        return self._attendance.attached

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self._end is not None

    def picture(self) -> list[messages.Message]:
        """What an observer that comes now must be told."""
        plan = self._reasons.plan
        told: list[messages.Message] = [*self._facts.tell()]
        if plan is not None:
            told.append(plan)
        if self._elasticity is not None:
            told.append(self._world_size(""))
        if self._end is not None:
            told.append(self._end)
        return told

    # -- nodes come and go ----------------------------------------------------------------------------------------

    def attach(self, hello: AgentHello, now_s: float, *, term: int = 1) -> list[Output]:
        """A node has connected.

        Args:
            term: of this coordinator, as its record has it.

        Raises:
            Refused: if another one of that name is connected already.
        """
        node = hello.node
        joined = events.NodeJoined(node, f"{hello.host_id}/{hello.pid}", hello.started)
        if node not in self._joined or self._joined[node].incarnation != joined.incarnation:
            self._attendance.connect(node)
        else:
            self._attendance.reconnect(node)
        if self._end is not None:
            return [Send(node, self._end)]
        self._links.introduce(hello)
        self._link_speeds.introduce(hello)
        if hello.term >= term or hello.started:  # it was here before, though nobody is known: so were others
            self._attendance.linger(now_s + REATTACH_S)
        outputs: list[Output] = []
        if detail := news(hello, self._membership, term):
            outputs += self._lose_record(hello, detail, now_s)
            if self._membership.finished:
                return outputs
        outputs += [Send(node, Arm(node, "", trigger)) for trigger in self._armed.get(node, ())]
        if node in self._membership.nodes:
            if self._joined[node].incarnation == joined.incarnation:
                return outputs + self._welcome_back(hello, now_s)
            outputs += self._lose_node(node, "another agent came in its place", now_s)
        self._joined[node] = joined
        self._fitness.forget(node)
        outputs += [Send(node, StopWorker(worker, "fenced")) for worker in hello.workers]
        return outputs + self._admit(self._attendance.arrive(node, now_s), now_s)

    def _lose_record(self, hello: AgentHello, detail: str, now_s: float) -> list[Output]:
        """The node knows more than the record: that was lost, or its end."""
        known = self._membership.newest_known
        fields = {"node": hello.node, "generation": hello.generation, "known": known, "detail": detail}
        if hello.generation > known:
            self._attendance.hurry(now_s + REATTACH_S)  # who has lived through it will come soon, or never
        seen = events.GenerationSeen(hello.generation, hello.node, hello.started)
        said = Note(Event.RECORD_LOST, fields)
        return [said, *self._advance(seen, now_s)] if hello.generation or hello.started else [said]

    def _welcome_back(self, hello: AgentHello, now_s: float) -> list[Output]:
        """A node whose loss was never decided: bring both sides to the same set of workers."""
        node, mine = hello.node, self._membership.workers_on(hello.node)
        self._contact.beat(node, now_s)
        strangers = sorted(set(hello.workers) - mine)
        unstarted = sorted(mine - {*hello.workers, *hello.ended, *self._deferral.held})  # those held have their time
        plan = self._reasons.plan
        missed = plan if plan is not None and hello.generation < plan.generation else None
        return [
            *(Send(node, StopWorker(worker, "fenced")) for worker in strangers),
            *(Send(node, StartWorker(worker)) for worker in unstarted),
            *([Send(node, missed)] if missed is not None else []),
            *([Send(node, Recall(self._membership.question))] if self._membership.asks(node) else []),
        ]

    def _admit(self, nodes: Sequence[str], now_s: float) -> list[Output]:
        outputs: list[Output] = []
        for node in nodes:
            self._contact.beat(node, now_s)
            self._contact.expect(node, now_s + ATTACH_S)
            outputs += self._advance(self._joined[node], now_s)
        return outputs

    def detach(self, node: str, detail: str, now_s: float, *, dead: bool = False) -> list[Output]:
        """The connection of a node ended. ``dead``: its agent is known to have ended, and its workers with it."""
        self._attendance.disconnect(node)
        if self._end is not None or node not in self._membership.nodes:
            self._contact.drop(node)
            return [Disconnect(node)]
        if dead:
            self._contact.drop(node)
            return [Disconnect(node), *self._lose_node(node, detail, now_s)]
        self._contact.leave(node, detail)
        return [Disconnect(node)]

    def _give_up_silent(self, now_s: float) -> list[Output]:
        """Nodes that are not heard, if training can go on without them."""
        outputs: list[Output] = []
        while lost := self._contact.lost(self._membership.keepers, now_s):
            node, detail = lost[0]  # one by one: each may take the last one who has the state
            self._contact.drop(node)
            self._attendance.disconnect(node)
            outputs += [Disconnect(node), *self._lose_node(node, detail, now_s, silent=True)]
        return outputs

    def _lose_node(self, node: str, detail: str, now_s: float, *, silent: bool = False) -> list[Output]:
        lost = events.NodeLost(node, detail, self._met, silent)
        told = self._tell_loss(lost, now_s)
        for worker in self._membership.workers_on(node):
            self._watch.forget(worker)
        return told + self._advance(lost, now_s)

    # -- what agents, workers and observers say -------------------------------------------------------------------

    def hear(self, message: Any, now_s: float) -> list[Output]:
        """A message of an agent, of a worker through its agent, or of an observer.

        Raises:
            Refused: if it is none that a coordinator listens to.
        """
        if not isinstance(message, WorkerFailed):  # most of these are a matter of the agent, which reports the loss
            self._facts.note(message)
        shown: list[Output] = [Show(message)] if isinstance(message, messages.Message) else []
        match message:
            case Heartbeat():
                return shown + self._hear_beats(message, now_s)
            case WorkerReady():
                return shown + self._note_ready(message, now_s)  # shown before the plan that it makes possible
            case WorkerLost(worker, node, cause, detail, detected_ns):
                if self._membership.host_of(worker) is None:
                    return [Send(node, StopWorker(worker, cause))]  # is in the record: need not be said again
                return self._lose_worker(events.WorkerLost(worker, cause, detail, detected_ns), now_s)
            case WorkerFailed(worker, error, fatal):
                fatal = fatal or self._repeats.note(error, self._watch.committed, worker)
                if not fatal or self._membership.outlives(worker):
                    return []  # the agent reports the loss
                self._facts.note(message)
                return shown + self._advance(events.JobFailed(error), now_s)
            case WorkerDone(worker, step, digest, generation):
                if self._is_of_the_past(generation):
                    return shown
                problem = self._results.note(worker, digest)
                event = events.JobFailed(problem) if problem else events.WorkerDone(worker, step)
                return self._advance(event, now_s) + shown
            case LinksTested(node, number, unreachable):
                self._links.answer(node, number, unreachable)
                return self._look_at_links(now_s)
            case HealthReport():
                return self._note_health(message, now_s) + shown
            case LinksMeasured():
                links = self._link_speeds.answer(message)
                return [] if links is None else [tell_links(links)]
            case Formed(worker, generation):
                return self._note_formed(worker, generation, now_s) + shown
            case Healed(worker, generation):
                if self._is_of_the_past(generation):
                    return shown
                return self._advance(events.Healed(worker), now_s) + shown
            case Sealed(node, snapshots, number, committed):
                return self._advance(events.Sealed(node, snapshots, number, committed), now_s) + shown
            case SourceFailed(_, snapshot, corrupt):
                return self._advance(events.SourceFailed(snapshot, corrupt), now_s) + shown
            case GroupBroken(_, generation, detail):
                self._note_broken(generation, detail, now_s)
                return shown
            case Accuse(_, accused, _, _, cause, detail):
                guilty = [name for name in accused if name in self._membership.members]
                return [out for name in guilty for out in self._stop_and_lose(name, cause, detail, now_s)] + shown
            case LinesMatched(worker, rules):
                self._rulings.note_matches(worker, rules)
                return []
            case RuleFired():
                return shown + self._follow_rule(message, now_s)
            case Release(worker=worker) | Ping(worker=worker):
                return [Send(self._hosts.get(worker, ""), message)]
            case PullNode(node):
                return [Send(node, message)]
            case Arm(node, worker, trigger):
                return (self._arm(node, trigger, now_s) if not worker else []) + [Send(node, message)]
            case ScaleTo() | LendNodes() | SpotNotice() | ReturnNodes():
                return self._ask_for(message, now_s)
            case EndJob(reason=reason):
                return self._advance(events.JobFailed(reason), now_s)  # remembered, like every decision
            case HookReached() | LeverPulled() | Pong():
                return shown
        raise Refused(f"unexpected {type(message).__name__}")

    def _is_of_the_past(self, generation: int) -> bool:
        """Whether a member speaks of a piece of the state that it must take over again."""
        return self._config.job.sharded and generation != self._membership.generation

    def _arm(self, node: str, trigger: Trigger, now_s: float) -> list[Output]:
        """An order for workers that are not there yet: the node, or another coordinator, may have to be told again."""
        armed = self._armed.setdefault(node, [])
        if trigger in armed:
            return []
        armed.append(trigger)
        return self._advance(events.Armed(node, trigger), now_s)

    def ask(self, client: Client, request: Any) -> list[Output]:
        """A request of a worker to the rendezvous."""
        replies = self._board.ask(client, request)
        self._met |= 0 < self._membership.world <= len(self._board.arrived(messages.STANDING))
        return [*replies]

    def hang_up(self, client: Client) -> None:
        """A worker closed its connection to the rendezvous."""
        self._board.forget(client)

    def _hear_beats(self, heartbeat: Heartbeat, now_s: float) -> list[Output]:
        heard = Send(heartbeat.node, Heard(heartbeat.sent_ns))
        if heartbeat.node not in self._membership.nodes:
            return [heard]  # it waits for the others
        self._contact.beat(heartbeat.node, now_s)
        live = [beat for beat in heartbeat.beats if self._membership.host_of(beat.worker) is not None]
        self._watch.hear(live, now_s)
        self._workload.hear(live)
        for beat in live:
            self._timetable.saw(beat.step, beat.generation, now_s)
        started = self._start(self._deferral.observe(heartbeat.beats, now_s), now_s)
        return [heard, *started, *self._look_for_hangs(now_s), *self._look_at_workload(now_s)]

    def _look_at_workload(self, now_s: float) -> list[Output]:
        outputs: list[Output] = []
        for decided in self._workload.look(self._membership):
            match decided:
                case Note():
                    outputs.append(decided)
                case GiveUp(worker, detail):
                    outputs += self._stop_and_lose(worker, SLOW, detail, now_s)
                case TryLinks(nodes):
                    outputs += self._link_speeds.order(nodes)
                case events.Rebalanced():
                    outputs += self._advance(decided, now_s)
        return outputs

    def _note_ready(self, ready: WorkerReady, now_s: float) -> list[Output]:
        known, fingerprint = self._membership.is_ready(ready.worker), self._membership.fingerprint
        if fingerprint and ready.fingerprint != fingerprint and self._membership.host_of(ready.worker) is not None:
            return self._stop_and_lose(ready.worker, "differs", difference(ready.fingerprint, fingerprint), now_s)
        event = events.WorkerReady(ready.worker, ready.node, ready.endpoint, ready.fingerprint)
        outputs = self._advance(event, now_s)
        if not known and ready.worker in self._membership.spares:
            outputs.append(Note(Event.SPARE_READY, {"worker": ready.worker}))
        return outputs

    def _note_formed(self, worker: str, generation: int, now_s: float) -> list[Output]:
        if generation != self._membership.generation:
            return []
        self._formed.add(worker)
        if self._settled == generation or not self._formed.issuperset(self._membership.members):
            return []
        self._settled = generation
        settled = events.Settled(generation)
        return [Note(Event.SETTLED, {"generation": generation}), *self._advance(settled, now_s)]

    def _note_broken(self, generation: int, detail: str, now_s: float) -> None:
        if generation == self._membership.generation and self._broken is None:
            self._broken = (now_s + BROKEN_GRACE_S, detail)

    def _stall(self, generation: int, detail: str, now_s: float) -> list[Output]:
        """Plan the same members again, unless that did not help often enough."""
        if generation != self._membership.generation:
            return []
        self._suspicious_until_s = now_s + SUSPICION_S
        if self._stalls.note("stalled", self._watch.committed):
            reason = f"no step is committed after {STALLS_MAX} new starts: {detail}"
            return self._advance(events.JobFailed(reason), now_s)
        return self._advance(events.Stalled(generation), now_s)

    # -- losses ---------------------------------------------------------------------------------------------------

    def _tell_loss(self, event: events.AnyEvent, now_s: float) -> list[Output]:
        """What is to be told of a loss that the membership has yet to take in. Two coordinators may tell of it."""
        outputs: list[Output] = []
        if isinstance(event, events.NodeLost) and event.node in self._membership.nodes:
            outputs.append(Note(Event.NODE_LOST, {"node": event.node, "detail": event.detail}, int(now_s * 1e9)))
        for lost, rank in lost_workers(event, self._membership, now_s):
            self._facts.note(lost)
            if rank is None and isinstance(event, events.NodeLost):
                continue
            fields = {"worker": lost.worker, "rank": rank, "cause": lost.cause, "detail": lost.detail}
            outputs += [Note(Event.DETECTED, fields, lost.detected_ns), Show(lost)]
        return outputs

    def resume(self, generation: int, now_s: float) -> list[Output]:
        """Begin with what an earlier run has stored, the newest of it in ``generation``. To be called first."""
        return self._advance(events.Resumes(generation), now_s)

    def retell(self) -> list[Output]:
        """What the coordinator before this one may not have lived to say. To be said before anything else."""
        untold, self._untold = self._untold, []
        return untold

    def _lose_worker(self, lost: events.WorkerLost, now_s: float) -> list[Output]:
        told = self._tell_loss(lost, now_s)
        self._watch.forget(lost.worker)
        return told + self._advance(lost, now_s)

    def _stop_and_lose(
        self, worker: str, cause: str, detail: str, now_s: float, *, aside: bool = False
    ) -> list[Output]:
        lost = events.WorkerLost(worker, cause, detail, int(now_s * 1e9), aside)
        return [Send(self._hosts.get(worker, ""), StopWorker(worker, cause)), *self._lose_worker(lost, now_s)]

    def _follow_rule(self, fired: RuleFired, now_s: float) -> list[Output]:
        """Do what a log rule asks for, if that can help."""
        membership = self._membership
        ruling = self._rulings.judge(fired, membership.generation, membership.members, now_s)
        if isinstance(ruling, Hopeless):
            return self._advance(events.JobFailed(ruling.reason), now_s)
        if isinstance(ruling, Excused):
            said = {"rule": fired.rule, "worker": fired.worker, "verdict": fired.verdict, "detail": ruling.why}
            return [Note(Event.RULE_EXCUSED, said)] if ruling.why else []
        if not ruling.whole_node or len(membership.nodes) == 1:
            return self._stop_and_lose(fired.worker, LOG_RULE, ruling.detail, now_s)
        outputs: list[Output] = [Note(Event.SET_ASIDE, {"node": fired.node, "strikes": 0, "detail": ruling.detail})]
        # its spares first: none of them is to take the rank
        for worker in sorted(membership.workers_on(fired.node), key=lambda worker: worker == fired.worker):
            outputs += self._stop_and_lose(worker, LOG_RULE, ruling.detail, now_s, aside=True)
        return outputs

    def _look_for_hangs(self, now_s: float) -> list[Output]:
        plan = self._membership.plan
        if plan is None:
            return []
        ranks = self._board.arrived(messages.STANDING)
        formed = self._settled == plan.generation  # perhaps at the rendezvous of the coordinator before this one
        arrived = {member.worker for member in plan.members if formed or member.rank in ranks}
        guilty, stalled = self._watch.look(
            plan,
            self._membership.crew,
            arrived,
            now_s,
            worked=self._membership.worked,
            over=self._membership.is_gathering,
        )
        outputs: list[Output] = []
        for worker, detail in guilty.items():
            if self._contact.steady(self._hosts[worker], now_s):  # else it may do what it cannot say
                outputs += self._stop_and_lose(worker, "hung", detail, now_s)
        if stalled:
            outputs += self._stall(plan.generation, "every rank waits for the others", now_s)
        return outputs

    def _look_at_links(self, now_s: float) -> list[Output]:
        """Go on without nodes that cannot reach others, and have links tried as long as there is a reason for it."""
        membership, attached = self._membership, self._attendance.attached
        if membership.finished:  # a node may still answer the coordinator before this one
            return []
        stuck = now_s < self._suspicious_until_s or self._watch.waiting_s(membership.members) > SUSPECT_S
        outputs: list[Output] = []
        for event in self._links.judge(membership, attached, now_s, stuck=stuck):
            workers = [worker for node in event.nodes for worker in membership.workers_on(node)]
            left_out = isinstance(event, events.LeftOut)
            outputs.append(Note(Event.LEFT_OUT if left_out else Event.RETURNED, msgspec.structs.asdict(event)))
            outputs += [*self._tell_loss(event, now_s), *self._advance(event, now_s)]
            for worker in workers if left_out else ():
                self._watch.forget(worker)
        return outputs + (self._links.test(membership, attached, now_s) if stuck or membership.left_out else [])

    def _note_health(self, report: HealthReport, now_s: float) -> list[Output]:
        verdict = self._fitness.hear(report)
        if verdict is None:
            return []
        fields = msgspec.structs.asdict(verdict) | {"findings": report.findings, "took_ms": report.took_ms}
        return [Note(Event.HEALTH, fields), *self._keep_unfit_out(now_s)]

    def _keep_unfit_out(self, now_s: float) -> list[Output]:
        """Go on without nodes that are not fit, as soon as they can be done without; let in who has proved itself."""
        outputs: list[Output] = []
        while not self._membership.finished and (event := self._fitness.judge(self._membership)) is not None:
            workers = self._membership.workers_on(event.node)
            outputs += [*self._tell_loss(event, now_s), *self._advance(event, now_s)]
            for worker in workers if isinstance(event, events.Unfit) else ():
                self._watch.forget(worker)
        return outputs

    # -- time -----------------------------------------------------------------------------------------------------

    def next_tick_s(self) -> float:
        """When the next node is given up, if nothing is heard until then."""
        return self._contact.next_look_s()

    def tick(self, now_s: float, starved_s: Mapping[str, float]) -> list[Output]:
        """To be called every few milliseconds, when all input was read.

        Args:
            starved_s: node -> time since the last call in which its agent waited for a CPU: no silence of its own.
        """
        if self._end is not None:
            # whoever has not heard of the end from the coordinator before this one will ask now
            return [] if self._resuming and now_s < self._started_s + REATTACH_S else [End()]
        for node, by_s in starved_s.items():
            self._contact.extend(node, by_s)
        outputs: list[Output] = []
        self._contact.listen(self._membership.keepers, now_s)
        outputs += self._give_up_silent(now_s)
        outputs += self._look_at_links(now_s)
        outputs += self._admit(self._attendance.due(now_s), now_s)
        outputs += self._keep_unfit_out(now_s)
        for worker in self._membership.overdue(now_s - self._lag_s):
            if (
                worker in self._deferral.held
                or now_s - self._ordered_s.get(worker, -math.inf) <= self._config.startup_s
            ):
                continue  # it was held back
            if not self._contact.steady(self._hosts[worker], now_s):
                continue  # perhaps it is ready, and cannot say so
            detail = f"not ready within startup_s={self._config.startup_s:g}"
            outputs += self._stop_and_lose(worker, "hung", detail, now_s)
        self._resume(now_s)
        if self._broken is not None and now_s >= self._broken[0]:
            outputs += self._stall(self._membership.generation, self._broken[1], now_s)
            self._broken = None
        if self._inherited_until_s is not None and now_s >= self._inherited_until_s:
            self._inherited_until_s = None
            if self._inherited and not self._membership.settled:
                outputs += self._stall(self._inherited, "its coordinator ended while it was formed", now_s)
        if self._elasticity is not None and now_s - self._lag_s >= self._elasticity.next_s():
            outputs += self._advance(events.Elastic(happenings.Tick()), now_s)
        if (step := self._timetable.due(now_s)) is not None:
            outputs += [Send(node, Store(step)) for node in sorted(self._membership.nodes)]
        return outputs + self._advance(events.Tick(), now_s)

    def _resume(self, now_s: float) -> None:
        """Once every node is back that comes back: a regroup that the last coordinator left half-way is repeated."""
        if self._resuming and self._attendance.attached.issuperset(self._membership.nodes):
            self._resuming = False
            self._inherited_until_s = now_s + FORMING_GRACE_S

    # -- decisions ------------------------------------------------------------------------------------------------

    def _advance(self, event: events.AnyEvent, now_s: float) -> list[Output]:
        if self._membership.finished:
            return []
        self._reasons.note(event, self._membership, now_s)
        actions = self._membership.handle(event, now_s - self._lag_s)
        first, self._begun = not self._begun, True  # from it the start-up time counts, also in the replay
        if isinstance(event, events.Tick) and not actions and not first:
            return []  # nothing came of it
        outputs: list[Output] = [Remember(event, now_s, self._lag_s)]
        if self._config.job.sharded and self._membership.revives:  # with a spare: its successor can wait
            self._deferral.recover(self._membership.newest_known + 1, self._membership.world, now_s)
        for action in actions:
            match action:
                case events.Publish(plan):
                    outputs += self._publish(self._reasons.tell(plan, self._membership.size), now_s)
                case events.StartWorker(node, worker):
                    self._hosts[worker] = node
                    outputs += self._start(self._deferral.submit(worker), now_s)
                case events.Recall(node, number):
                    outputs.append(Send(node, Recall(number)))
                    if not self._membership.revives:
                        outputs += self._start(
                            self._deferral.release(), now_s
                        )  # no step is repeated without replacements
                case events.StopWorker(worker, cause):
                    node = self._hosts.get(worker, "")
                    stop = StopWorker(worker, cause)
                    if cause == "left" and self._elasticity is not None:
                        stop = StopWorker(worker, cause, *self._elasticity.farewell(node, now_s - self._lag_s))
                    outputs.append(Send(node, stop))
                    if cause == "left":
                        self._facts.note(stop)
                        self._watch.forget(worker)
                case events.SetAside(node):
                    outputs.append(Note(Event.SET_ASIDE, {"node": node, "strikes": self._config.strikes_max}))
                case events.Finish(ok, reason):
                    outputs += self._finish(ok, reason)
        if self._membership.is_short and not self._membership.revives:
            outputs += self._start(self._deferral.release(), now_s)  # no step is repeated without replacements
        return outputs + self._resize(event, now_s)

    # -- the size of the world ------------------------------------------------------------------------------------

    def _ask_for(self, message: ScaleTo | LendNodes | SpotNotice | ReturnNodes, now_s: float) -> list[Output]:
        """Somebody wants another size."""
        if isinstance(message, LendNodes) and (message.nodes < 1 or not message.grace_s >= 0):
            return self._answer(Answer(message.request, False, "ask for 1 node or more, and a grace of 0 s or more"))
        match message:
            case ScaleTo(request, size, asked_by):
                happening: happenings.Event = happenings.Scale(request, size, asked_by)
            case LendNodes(request, job, nodes, grace_s):
                happening = happenings.Demand(request, job, nodes, grace_s)
            case SpotNotice(node, grace_s):
                happening = happenings.Notice(node, now_s - self._lag_s + max(0.0, grace_s))
            case ReturnNodes(job):
                happening = happenings.Returned(job)
        if self._elasticity is None:
            request = getattr(message, "request", "")
            return self._answer(Answer(request, False, "the run has no elastic policy: start it with one"))
        return self._advance(events.Elastic(happening), now_s)

    def _answer(self, answer: Answer) -> list[Output]:
        fields = msgspec.structs.asdict(said := Answered(answer.request, answer.accepted, answer.reason, answer.nodes))
        return [Note(Event.ASKED, fields), Show(said)]

    def _resize(self, event: events.AnyEvent, now_s: float) -> list[Output]:
        """What the elastic policy makes of an event that the membership has taken in."""
        if self._elasticity is None:
            return []
        outputs: list[Output] = []
        for decision in self._elasticity.take_in(event, self._membership, now_s - self._lag_s):
            if isinstance(decision, Answer):
                outputs += [*self._answer(decision), Show(self._world_size(""))]
            elif isinstance(decision, Evict):
                outputs += self._evict(decision, now_s)
        wish = self._elasticity.wish(self._membership)
        if wish is None or self._membership.finished:
            return outputs
        remembered, *rest = self._advance(wish, now_s)
        said = self._world_size(wish.reason)
        return [*outputs, remembered, Note(Event.RESIZED, msgspec.structs.asdict(said)), Show(said), *rest]

    def _world_size(self, reason: str) -> WorldSize:
        assert self._elasticity is not None
        membership = self._membership
        nodes = tuple(node for node in membership.nodes if node not in membership.idle)
        return WorldSize(membership.size, self._elasticity.wanted, nodes, reason)

    def _evict(self, decision: Evict, now_s: float) -> list[Output]:
        if not (workers := self._membership.workers_on(decision.node)):
            return []
        if self._membership.keepers <= {decision.node}:  # nobody could go on without it
            return []
        event = events.Evicted(decision.node, decision.reason)
        told = [Note(Event.EVICTED, msgspec.structs.asdict(event)), *self._tell_loss(event, now_s)]
        for worker in workers:
            self._watch.forget(worker)
        return told + self._advance(event, now_s)

    def _start(self, workers: list[str], now_s: float) -> list[Output]:
        alive = [worker for worker in workers if self._membership.host_of(worker) is not None]
        self._ordered_s.update(dict.fromkeys(alive, now_s))
        return [Send(self._hosts[worker], StartWorker(worker)) for worker in alive]

    def _publish(self, plan: Plan, now_s: float) -> list[Output]:
        if plan.abort or plan.leavers:
            self._deferral.recover(plan.generation, len(plan.members), now_s)
        self._formed.clear()
        self._broken = None
        if self._config.job.sharded:
            self._results = Results()  # the last steps are taken again, by fewer ranks perhaps
        fields = {
            "generation": plan.generation,
            "abort": plan.abort,
            "members": [{"rank": m.rank, "worker": m.worker, "node": m.node, "shards": m.shards} for m in plan.members],
            "leavers": plan.leavers,
            "reason": plan.reason,
        }
        nodes = [*(member.node for member in plan.members), *(self._hosts[worker] for worker in plan.leavers)]
        return [
            Note(Event.PLAN, fields),  # before anybody acts on it: this process may end at any moment
            *self._board.begin(plan.generation, len(plan.members)),
            *(Send(node, plan) for node in dict.fromkeys(nodes)),
            Show(plan),
        ]

    def _finish(self, ok: bool, reason: str) -> list[Output]:
        if self._end is not None:
            return []
        self._end = EndJob(ok, reason)
        told = [Send(node, self._end) for node in sorted(self._attendance.attached)]
        return [Note(Event.JOB_ENDED, {"ok": ok, "reason": reason}), Show(self._end), *told, End()]
