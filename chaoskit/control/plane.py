"""Everything that a coordinator decides, as one pure state machine over what its nodes say.

Outputs are to be carried out in their order. :class:`Remember` comes before what follows from it: a plane that is made
from the remembered events of one that ended goes on where that one was, because a membership is the replay of its
events. What the nodes know, they say again when they attach to a new coordinator: everything here may be heard twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaoskit import messages
from chaoskit.config import RunConfig
from chaoskit.control import membership
from chaoskit.control.deferral import Deferral
from chaoskit.control.facts import Facts
from chaoskit.control.hang import HangDetector
from chaoskit.control.lease import Leases
from chaoskit.control.membership import AnyEvent, Membership
from chaoskit.control.muster import Muster
from chaoskit.control.rendezvous import Client, RendezvousBoard, Reply
from chaoskit.control.repeats import Repeats
from chaoskit.control.results import Results
from chaoskit.errors import Refused
from chaoskit.messages import (
    Accuse,
    AgentHello,
    Arm,
    Beat,
    EndJob,
    Formed,
    GroupBroken,
    Healed,
    Heartbeat,
    HookReached,
    LeverPulled,
    Ping,
    Plan,
    Pong,
    Recall,
    Release,
    Sealed,
    SourceFailed,
    StartWorker,
    StopWorker,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from chaoskit.vocabulary import Event, Phase

STALLS_MAX = 20
#: A lost rank is usually known sooner than the broken collectives it leaves behind.
BROKEN_GRACE_S = 0.15
#: A new coordinator gives the nodes that the one before it knew so long to attach to it.
REATTACH_S = 2.0
#: A node that is new forks its zygote before it reports; the end of its connection is noticed at once all the same.
ATTACH_S = 2.0


@dataclass(frozen=True, slots=True)
class Remember:
    """Must survive this process before any later output is carried out."""

    event: AnyEvent
    now_s: float


@dataclass(frozen=True, slots=True)
class Send:
    """To the agent of a node, if it is attached."""

    node: str
    message: messages.Message


@dataclass(frozen=True, slots=True)
class Show:
    """To every observer."""

    message: messages.Message


@dataclass(frozen=True, slots=True)
class Note:
    """Into the journal. ``t_ns``: when it happened, if that was not now."""

    event: Event
    fields: dict[str, Any] = field(default_factory=dict)
    t_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Whoever speaks for this node from now on is not heard."""

    node: str


@dataclass(frozen=True, slots=True)
class End:
    """The job is over; everybody was told."""


Output = Remember | Send | Show | Note | Disconnect | End | Reply


class ControlPlane:
    """Serves one run.

    Args:
        memory: what the coordinators before this one have remembered, in order.
    """

    def __init__(self, config: RunConfig, memory: Sequence[Remember] = (), now_s: float = 0.0) -> None:
        self._config = config
        self._membership = Membership(config)
        self._hangs = HangDetector(config)
        self._muster = Muster()
        self._deferral: Deferral[str] = Deferral()
        self._repeats = Repeats(limit=config.nodes)
        self._stalls = Repeats(limit=STALLS_MAX)
        self._leases = Leases(config.heartbeat_ms / 1000, config.lease_beats)
        self._leases.expired(now_s)  # nobody yet; from now on it counts how long this process was deaf itself
        self._board = RendezvousBoard()
        self._results = Results()
        self._facts = Facts()  # for observers
        self._attached: set[str] = set()
        self._hosts: dict[str, str] = {}  # every worker there ever was -> node
        self._beats: dict[str, Beat] = {}
        self._formed: set[str] = set()
        self._settled = 0
        self._broken: tuple[float, str] | None = None  # when to plan the generation again, and why
        self._inherited = 0  # a generation that the coordinator before this one left unsettled
        self._inherited_until_s: float | None = None
        self._incarnations: dict[str, str] = {}  # node -> which agent it was when it joined
        self._begun = bool(memory)
        self._end: EndJob | None = None
        self._waiting_nodes: list[str] | None = []
        self._started_s = now_s
        self._resuming = bool(memory)
        if memory:
            self._recall(memory, now_s)

    def _recall(self, memory: Sequence[Remember], now_s: float) -> None:
        # The clock of another machine may read anything: the last event counts as just now.
        shift_s = now_s - memory[-1].now_s
        for entry in memory:
            if isinstance(entry.event, membership.NodeJoined):
                self._incarnations[entry.event.node] = entry.event.incarnation
            for action in self._membership.handle(entry.event, entry.now_s + shift_s):
                if isinstance(action, membership.StartWorker):
                    self._hosts[action.worker] = action.node
                elif isinstance(action, membership.Finish):
                    self._end = EndJob(action.ok, action.reason)
        if self._membership.nodes:
            self._waiting_nodes = None
        for node in self._membership.nodes:
            self._leases.beat(node, now_s + REATTACH_S)
        if self._membership.plan is not None:
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
        return frozenset(self._attached)

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self._end is not None

    def picture(self) -> list[messages.Message]:
        """What an observer that comes now must be told."""
        plan = self._membership.plan
        told: list[messages.Message] = [*self._facts.tell()]
        if plan is not None:
            told.append(plan)
        if self._end is not None:
            told.append(self._end)
        return told

    # -- nodes come and go ----------------------------------------------------------------------------------------

    def attach(self, hello: AgentHello, now_s: float) -> list[Output]:
        """A node has connected.

        Raises:
            Refused: if one of that name is connected already.
        """
        node = hello.node
        if node in self._attached:
            raise Refused(f"a node named {node} is connected already")
        self._attached.add(node)
        if self._end is not None:
            return [Send(node, self._end)]
        outputs: list[Output] = []
        if hello.generation > self._membership.generation:
            outputs += self._advance(membership.GenerationSeen(hello.generation), now_s)
        incarnation = f"{hello.host_id}/{hello.pid}"
        if node in self._membership.nodes:
            if self._incarnations.get(node) == incarnation:
                return outputs + self._welcome_back(hello, now_s)
            outputs += self._lose_node(node, "another agent came in its place", now_s)
        self._incarnations[node] = incarnation
        outputs += [Send(node, StopWorker(worker, "fenced")) for worker in hello.workers]
        return outputs + self._join(node, now_s)

    def _welcome_back(self, hello: AgentHello, now_s: float) -> list[Output]:
        """A node whose loss was never decided: bring both sides to the same set of workers."""
        node, mine = hello.node, self._membership.workers_on(hello.node)
        self._leases.beat(node, now_s)
        strangers = sorted(set(hello.workers) - mine)
        unstarted = sorted(mine - {*hello.workers, *hello.ended})
        plan = self._membership.plan
        missed = plan if plan is not None and hello.generation < plan.generation else None
        return [
            *(Send(node, StopWorker(worker, "fenced")) for worker in strangers),
            *(Send(node, StartWorker(worker)) for worker in unstarted),
            *([Send(node, missed)] if missed is not None else []),
            *([Send(node, Recall())] if self._membership.asks(node) else []),
        ]

    def _join(self, node: str, now_s: float) -> list[Output]:
        """Ranks follow the names of the nodes, not the accident of who connected first."""
        if self._waiting_nodes is None:
            return self._admit(node, now_s)
        self._waiting_nodes.append(node)
        return self._admit_waiting(now_s) if len(self._waiting_nodes) >= self._config.nodes else []

    def _admit_waiting(self, now_s: float) -> list[Output]:
        waiting, self._waiting_nodes = sorted(self._waiting_nodes or []), None
        return [output for node in waiting if node in self._attached for output in self._admit(node, now_s)]

    def _admit(self, node: str, now_s: float) -> list[Output]:
        self._leases.beat(node, now_s + ATTACH_S)
        return self._advance(membership.NodeJoined(node, self._incarnations[node]), now_s)

    def detach(self, node: str, detail: str, now_s: float) -> list[Output]:
        """The connection of a node ended, or its lease."""
        self._attached.discard(node)
        self._leases.drop(node)
        if self._waiting_nodes and node in self._waiting_nodes:
            self._waiting_nodes.remove(node)
        if self._end is not None or node not in self._membership.nodes:
            return [Disconnect(node)]
        return [Disconnect(node), *self._lose_node(node, detail, now_s)]

    def _lose_node(self, node: str, detail: str, now_s: float) -> list[Output]:
        outputs: list[Output] = [Note(Event.NODE_LOST, {"node": node, "detail": detail})]
        now_ns = int(now_s * 1e9)
        for worker in sorted(self._membership.workers_on(node)):
            self._beats.pop(worker, None)
            lost = WorkerLost(worker, node, "node lost", detail, now_ns)
            self._facts.note(lost)
            rank = self._rank_of(worker)
            if rank is not None:
                fields = {"worker": worker, "rank": rank, "cause": "node lost", "detail": detail}
                outputs.append(Note(Event.DETECTED, fields, now_ns))
                outputs.append(Show(lost))
        return outputs + self._advance(membership.NodeLost(node), now_s)

    # -- what agents, workers and observers say -------------------------------------------------------------------

    def hear(self, message: Any, now_s: float) -> list[Output]:
        """A message of an agent, of a worker through its agent, or of an observer.

        Raises:
            Refused: if it is none that a coordinator listens to.
        """
        self._facts.note(message)
        shown: list[Output] = [Show(message)] if isinstance(message, messages.Message) else []
        match message:
            case Heartbeat():
                return shown + self._hear_beats(message, now_s)
            case WorkerReady():
                return shown + self._note_ready(message, now_s)  # shown before the plan that it makes possible
            case WorkerLost(worker, _, cause, detail, detected_ns):
                if self._membership.host_of(worker) is None:
                    return []
                return shown + self._lose_worker(worker, cause, detail, detected_ns, now_s)
            case WorkerFailed(worker, error, fatal):
                fatal = fatal or self._repeats.note(error, self._committed())
                if not fatal or self._membership.outlives(worker):
                    return []  # the agent reports the loss
                return shown + self._advance(membership.JobFailed(error), now_s)
            case WorkerDone(worker, step, digest):
                problem = self._results.note(worker, digest)
                event = membership.JobFailed(problem) if problem else membership.WorkerDone(worker, step)
                return self._advance(event, now_s) + shown
            case Formed(worker, generation):
                return self._note_formed(worker, generation, now_s) + shown
            case Healed(worker):
                return self._advance(membership.Healed(worker), now_s) + shown
            case Sealed(node, snapshots):
                return self._advance(membership.Sealed(node, snapshots), now_s) + shown
            case SourceFailed(_, snapshot, corrupt):
                return self._advance(membership.SourceFailed(snapshot, corrupt), now_s) + shown
            case GroupBroken(_, generation, detail):
                self._note_broken(generation, detail, now_s)
                return shown
            case Accuse(_, accused, _, _, cause, detail):
                guilty = [name for name in accused if name in self._membership.members]
                return [out for name in guilty for out in self._stop_and_lose(name, cause, detail, now_s)] + shown
            case Release(worker=worker) | Ping(worker=worker):
                return [Send(self._hosts.get(worker, ""), message)]
            case Arm(node):
                return [Send(node, message)]
            case EndJob(reason=reason):
                return self._advance(membership.JobFailed(reason), now_s)  # remembered, like every decision
            case HookReached() | LeverPulled() | Pong():
                return shown
        raise Refused(f"unexpected {type(message).__name__}")

    def ask(self, client: Client, request: Any) -> list[Output]:
        """A request of a worker to the rendezvous."""
        return [*self._board.ask(client, request)]

    def hang_up(self, client: Client) -> None:
        """A worker closed its connection to the rendezvous."""
        self._board.forget(client)

    def _hear_beats(self, heartbeat: Heartbeat, now_s: float) -> list[Output]:
        if heartbeat.node not in self._membership.nodes:
            return []
        self._leases.beat(heartbeat.node, now_s)
        self._beats.update(
            (beat.worker, beat) for beat in heartbeat.beats if self._membership.host_of(beat.worker) is not None
        )
        return self._start(self._deferral.observe(heartbeat.beats, now_s)) + self._look_for_hangs(now_s)

    def _note_ready(self, ready: WorkerReady, now_s: float) -> list[Output]:
        known, fingerprint = self._membership.is_ready(ready.worker), self._membership.fingerprint
        if fingerprint and ready.fingerprint != fingerprint and self._membership.host_of(ready.worker) is not None:
            return self._stop_and_lose(ready.worker, "differs", _difference(ready.fingerprint, fingerprint), now_s)
        event = membership.WorkerReady(ready.worker, ready.node, ready.endpoint, ready.fingerprint)
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
        settled = membership.Settled(generation)
        return [Note(Event.SETTLED, {"generation": generation}), *self._advance(settled, now_s)]

    def _note_broken(self, generation: int, detail: str, now_s: float) -> None:
        if generation == self._membership.generation and self._broken is None:
            self._broken = (now_s + BROKEN_GRACE_S, detail)

    def _stall(self, generation: int, detail: str, now_s: float) -> list[Output]:
        """Plan the same members again, unless that did not help often enough."""
        if generation != self._membership.generation:
            return []
        if self._stalls.note("stalled", self._committed()):
            reason = f"no step is committed after {STALLS_MAX} new starts: {detail}"
            return self._advance(membership.JobFailed(reason), now_s)
        return self._advance(membership.Stalled(generation), now_s)

    def _committed(self) -> int:
        """Steps that some rank has committed."""
        return max((beat.step for beat in self._beats.values()), default=0)

    # -- losses ---------------------------------------------------------------------------------------------------

    def _rank_of(self, worker: str) -> int | None:
        plan = self._membership.plan
        member = plan.member(worker) if plan is not None else None
        return member.rank if member is not None else None

    def _lose_worker(self, worker: str, cause: str, detail: str, detected_ns: int, now_s: float) -> list[Output]:
        self._beats.pop(worker, None)
        fields = {"worker": worker, "rank": self._rank_of(worker), "cause": cause, "detail": detail}
        return [Note(Event.DETECTED, fields, detected_ns), *self._advance(membership.WorkerLost(worker), now_s)]

    def _stop_and_lose(self, worker: str, cause: str, detail: str, now_s: float) -> list[Output]:
        node, now_ns = self._hosts.get(worker, ""), int(now_s * 1e9)
        lost = WorkerLost(worker, node, cause, detail, now_ns)
        self._facts.note(lost)
        return [
            Send(node, StopWorker(worker, cause)),
            Show(lost),
            *self._lose_worker(worker, cause, detail, now_ns, now_s),
        ]

    def _look_for_hangs(self, now_s: float) -> list[Output]:
        plan = self._membership.plan
        if plan is None:
            return []
        members = self._membership.members
        beats = [self._beats[worker] for worker in members if worker in self._beats]
        ranks = self._board.arrived(messages.STANDING)
        formed = self._settled == plan.generation  # perhaps at the rendezvous of the coordinator before this one
        arrived = {member.worker for member in plan.members if formed or member.rank in ranks}
        hangs = {hang.worker: hang for hang in self._muster.observe(plan, beats, arrived, now_s)}
        hangs |= {hang.worker: hang for hang in self._hangs.observe(beats, now_s)}
        outputs: list[Output] = []
        for hang in hangs.values():
            detail = (
                f"{Phase(hang.phase).label} for {hang.age_s * 1000:.0f} ms, limit {hang.limit_s * 1000:.0f} ms, "
                "while others wait"
            )
            outputs += self._stop_and_lose(hang.worker, "hung", detail, now_s)
        gathered = not plan.abort or all(beat.generation == plan.generation for beat in beats)
        if not hangs and gathered and len(beats) == len(members) and self._hangs.stalled(now_s):
            outputs += self._stall(plan.generation, "every rank waits for the others", now_s)
        return outputs

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now_s: float, starved_s: Mapping[str, float]) -> list[Output]:
        """To be called every few milliseconds, when all input was read.

        Args:
            starved_s: node -> time since the last call in which its agent waited for a CPU: no silence of its own.
        """
        if self._end is not None:
            # whoever has not heard of the end from the coordinator before this one will ask now
            return [] if self._resuming and now_s < self._started_s + REATTACH_S else [End()]
        for node, by_s in starved_s.items():
            self._leases.extend(node, by_s)
        outputs: list[Output] = []
        for node in self._leases.expired(now_s):
            outputs += self.detach(node, f"silent for {self._config.lease_beats} beats", now_s)
        if self._waiting_nodes and now_s - self._started_s > self._config.startup_s:
            outputs += self._admit_waiting(now_s)
        for worker in self._membership.overdue(now_s):
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
        return outputs + self._advance(membership.Tick(), now_s)

    def _resume(self, now_s: float) -> None:
        """Once every node is back that comes back: a regroup that the last coordinator left half-way is repeated."""
        if self._resuming and self._attached.issuperset(self._membership.nodes):
            self._resuming = False
            self._inherited_until_s = now_s + BROKEN_GRACE_S  # so long its members may still say that it is formed

    # -- decisions ------------------------------------------------------------------------------------------------

    def _advance(self, event: AnyEvent, now_s: float) -> list[Output]:
        if self._membership.finished:
            return []
        actions = self._membership.handle(event, now_s)
        first, self._begun = not self._begun, True  # from it the start-up time counts, also in the replay
        if isinstance(event, membership.Tick) and not actions and not first:
            return []  # nothing came of it
        outputs: list[Output] = [Remember(event, now_s)]
        for action in actions:
            match action:
                case membership.Publish(plan):
                    outputs += self._publish(plan, now_s)
                case membership.StartWorker(node, worker):
                    self._hosts[worker] = node
                    outputs += self._start(self._deferral.submit(worker))
                case membership.Recall(node):
                    outputs.append(Send(node, Recall()))
                    outputs += self._start(self._deferral.release())  # no step is repeated without replacements
                case membership.StopWorker(worker, cause):
                    outputs.append(Send(self._hosts.get(worker, ""), StopWorker(worker, cause)))
                case membership.SetAside(node):
                    outputs.append(Note(Event.SET_ASIDE, {"node": node, "strikes": self._config.strikes_max}))
                case membership.Finish(ok, reason):
                    outputs += self._finish(ok, reason)
        return outputs

    def _start(self, workers: list[str]) -> list[Output]:
        alive = [worker for worker in workers if self._membership.host_of(worker) is not None]
        return [Send(self._hosts[worker], StartWorker(worker)) for worker in alive]

    def _publish(self, plan: Plan, now_s: float) -> list[Output]:
        if plan.abort:
            self._deferral.recover(plan.generation, len(plan.members), now_s)
        self._formed.clear()
        self._broken = None
        fields = {
            "generation": plan.generation,
            "abort": plan.abort,
            "members": [{"rank": m.rank, "worker": m.worker, "node": m.node, "shards": m.shards} for m in plan.members],
        }
        return [
            Note(Event.PLAN, fields),  # before anybody acts on it: this process may end at any moment
            *self._board.begin(plan.generation, len(plan.members)),
            *(Send(node, plan) for node in dict.fromkeys(member.node for member in plan.members)),
            Show(plan),
        ]

    def _finish(self, ok: bool, reason: str) -> list[Output]:
        if self._end is not None:
            return []
        self._end = EndJob(ok, reason)
        told = [Send(node, self._end) for node in sorted(self._attached)]
        return [Note(Event.JOB_ENDED, {"ok": ok, "reason": reason}), Show(self._end), *told, End()]


def _difference(mine: str, expected: str) -> str:
    """Where two fingerprints differ, in words."""
    pairs = zip(mine.split(", "), expected.split(", "), strict=False)
    return "; ".join(f"{one} instead of {other}" for one, other in pairs if one != other)
