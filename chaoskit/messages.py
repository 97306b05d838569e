"""The control protocol: what coordinator, agents, workers and the harness say to each other; wire.py carries it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from chaoskit.config import RunConfig

#: The barrier at which every member of a new generation reports how far it is.
STANDING = "standing"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


# -- who and where ------------------------------------------------------------------------------------------------


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the state of a worker can be read. ``host_id`` tells whether shared memory will do."""

    host_id: str
    address: str
    port: int
    pid: int
    arena_fd: int


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of a generation. ``shards`` are the slices of the global batch that it computes."""

    rank: int
    worker: str
    node: str
    endpoint: Endpoint
    shards: tuple[int, ...]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete copy of the state of the training, sealed: what ``endpoint`` offers counts only with this checksum.

    ``tier`` names the place it is kept in; ``node`` and ``worker`` tell whose state it was. The state of a sharded job
    is in ``pieces`` different pieces, of which this is one; all of one age belong together. One that is stored has a
    ``path``, a directory or a URL; nobody serves it, and whoever can reach it reads it there. ``store``: where that of
    the URL listens, if this does not say it.
    """

    node: str
    worker: str
    step: int  # committed steps
    generation: int  # the one that trained on it last
    size_bytes: int
    checksum: str
    endpoint: Endpoint
    tier: str = "memory"
    piece: int = 0
    pieces: int = 1
    path: str = ""
    store: str = ""

    @property
    def age(self) -> tuple[int, int]:
        """The larger, the better to restore. The step counts first: an older generation may have gone further.

        What was written last is another matter: :attr:`chaoskit.checkpoint.seal.Seal.recency`.
        """
        return self.step, self.generation


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that had a rank and is lost; why, as in :class:`WorkerLost`."""

    worker: str
    rank: int
    cause: str
    detail: str


class Plan(Message, frozen=True):
    """A membership. ``abort``: leave the current collective at once (a rank was lost); else at a step boundary.

    ``restore``: where the state can be read when no member has it, the newest first. ``leavers``: workers of the
    generation before that go at the step boundary. ``reason``: in words. ``losses``: since the last generation that was
    formed, which had ``former_world`` ranks; 0 if there was none.
    """

    generation: int
    members: tuple[Member, ...]  # by rank
    abort: bool
    restore: tuple[Snapshot, ...] = ()
    leavers: tuple[str, ...] = ()
    reason: str = ""
    losses: tuple[Loss, ...] = ()
    former_world: int = 0

    def member(self, worker: str) -> Member | None:
        """The place of ``worker`` in this membership, if it has one."""
        return next((member for member in self.members if member.worker == worker), None)

    @property
    def heaviest(self) -> int:
        """The rank with most shards; the lowest of them on a tie."""
        return max(self.members, key=lambda member: (len(member.shards), -member.rank)).rank


# -- the health of a node -----------------------------------------------------------------------------------------


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that a health probe looked at on ``node``.

    ``what`` names it with its unit, as ``disk.free_bytes`` or ``gpu0.temperature_c``. ``limit``: what ``value`` was
    compared with, "" for nothing. ``remedy``: what would help; "" where nothing is wrong.
    """

    what: str
    severity: Literal["ok", "warn", "bad"]
    value: float | str
    limit: float | str = ""
    detail: str = ""
    remedy: str = ""
    node: str = ""


class HealthReport(Message, frozen=True):
    """All that an agent has found on its node; the last report counts. ``took_ms``: how long it looked."""

    node: str
    findings: tuple[Finding, ...]
    took_ms: float


# -- faults inside a worker ---------------------------------------------------------------------------------------


class Trigger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The moment at which a rank stops and waits for its fault.

    ``rank`` and ``step`` -1 match any. ``phase``: of a step or a recovery, or ``load``. ``generation``: the least one.
    ``role`` "most_shards" matches the rank that has most of them; "healer" stops the rank that is about to pull.
    """

    fault: str
    rank: int
    step: int
    phase: str
    generation: int = 0
    role: str = ""


class Lever(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An act that a worker or a node does to itself on order, by its name.

    For workers see :mod:`chaoskit.runtime.levers`, for nodes :mod:`chaoskit.control.levers`.
    """

    act: str
    options: dict[str, Any] = {}


# -- agent or harness <-> coordinator -----------------------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """A node reports for duty: for the first time, or to a coordinator that must be told what it has missed.

    ``generation``: the newest plan that this node has seen; ``term``: the newest coordinator. ``workers``: those that
    live here; ``ended``: those that did, as far as no coordinator has said that it knows. ``started``: the number of
    the next worker here, so that no name comes twice. ``host``, ``port``: where other nodes may connect to
    this one and test the link. What else must be known follows as the messages that say it, and may have been heard
    before.
    """

    node: str
    host_id: str
    pid: int
    generation: int = 0
    workers: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    term: int = 0
    started: int = 0
    host: str = ""
    port: int = 0


class ObserverHello(Message, frozen=True):
    """The harness, or a live view: sees everything, may release triggers and stop the run."""


class Welcome(Message, frozen=True):
    """``term``: number of this coordinator, higher than that of all before it; ``pid``: its process."""

    config: RunConfig
    triggers: tuple[Trigger, ...]
    term: int
    pid: int


class Effort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the time of a worker went in all the steps that it has committed itself: sums, never reset.

    ``compute_ms`` and ``input_ms`` (the fetch of batches) were spent on ``shards`` shards, ``wait_ms`` in reductions,
    ``other_ms`` on the rest: optimizers, and the user's code between the steps. ``starved_ms``: for how long its main
    thread has waited for a CPU since it was started, in a step or not.
    """

    steps: int = 0
    shards: int = 0
    compute_ms: float = 0.0
    input_ms: float = 0.0
    wait_ms: float = 0.0
    other_ms: float = 0.0
    starved_ms: float = 0.0


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the progress board of one worker said. ``starved_ms``: of ``age_ms``, time spent waiting for a CPU.

    ``rehearsal_ms``: what one shard took in the rehearsal, compilation and all; 0 if that is not known. ``effort``:
    None where it cannot be read, or is not measured. ``clock_ms``: how far its wall clock is ahead of its agent's.
    """

    worker: str
    generation: int
    rank: int
    step: int
    phase: int
    age_ms: float
    starved_ms: float
    commits: int
    loss: float
    rehearsal_ms: float = 0.0
    effort: Effort | None = None
    clock_ms: float = 0.0


class ClockOffset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a wall clock is ahead of the coordinator's, give or take ``error_ms``."""

    ahead_ms: float
    error_ms: float


class Heartbeat(Message, frozen=True):
    """A node lives. ``sent_ns``: when it said so, by its own CLOCK_MONOTONIC. ``clock``: None before an answer."""

    node: str
    beats: tuple[Beat, ...]
    sent_ns: int = 0
    clock: ClockOffset | None = None


class Heard(Message, frozen=True):
    """Answers a :class:`Heartbeat`: the lease of the node runs from when it sent that, not from when this arrives.

    ``wall_ns``: the coordinator's wall clock as it answered; nothing is decided by it.
    """

    sent_ns: int
    wall_ns: int = 0


class TestLinks(Message, frozen=True):
    """Asks an agent to connect to other nodes: node, host and port of each."""

    number: int
    targets: tuple[tuple[str, str, int], ...]


class LinksTested(Message, frozen=True):
    """Answers :class:`TestLinks`: the nodes that could not be connected to."""

    node: str
    number: int
    unreachable: tuple[str, ...]


class PairReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A test of the way to ``address``, of ``node``. With an ``error`` the rest is what was measured before it.

    ``offset_ms``: how far the other wall clock is ahead of ours, give or take half the shortest round trip.
    ``path_ms``, ``path_sent_mb_s``, ``path_received_mb_s``: round trip and streams as the kernels of both sides have
    seen them, whether anybody had a CPU or not; 0 where they do not tell.
    """

    address: str
    node: str = ""
    error: str = ""
    connect_ms: float = 0.0
    rtt_ms: tuple[float, ...] = ()
    offset_ms: float = 0.0
    sent_mb_s: float = 0.0
    received_mb_s: float = 0.0
    intact: bool = True
    path_ms: float = 0.0
    path_sent_mb_s: float = 0.0
    path_received_mb_s: float = 0.0


class MeasureLinks(Message, frozen=True):
    """Asks a node how good its links to others are: node, host and port of each. ``joins``: it is new here."""

    number: int
    targets: tuple[tuple[str, str, int], ...]
    joins: bool = False


class LinksMeasured(Message, frozen=True):
    """Answers :class:`MeasureLinks`."""

    node: str
    number: int
    links: tuple[PairReading, ...]
    joins: bool = False


class WorkerReady(Message, frozen=True):
    """A worker has built its model, is warm, and can take a rank.

    ``fingerprint``: what its numbers depend on; the same on all who train together.
    """

    worker: str
    node: str
    endpoint: Endpoint
    fingerprint: str = ""


class Holding(Message, frozen=True):
    """A worker of a sharded job copies its piece of the state into slots of memory; for its agent alone.

    ``fds``: of the slots, in process ``pid``. ``piece`` of ``pieces`` different ones. ``groups``: ranks that hold one
    whole state together, if there are several such groups.
    """

    worker: str
    pid: int
    fds: tuple[int, ...]
    piece: int
    pieces: int
    groups: tuple[tuple[int, ...], ...] = ()


class KeepWarm(Message, frozen=True):
    """A worker reads this file again and again; for its agent alone, who keeps its pages in memory."""

    path: str


class WorkerLost(Message, frozen=True):
    """``cause``: killed, stopped, exited, raised, hung, slow, nonfinite, corrupt ... ``detail`` is for people."""

    worker: str
    node: str
    cause: str
    detail: str
    detected_ns: int


class HookReached(Message, frozen=True):
    """A worker waits at a trigger; said again until it is released. ``peer``: whom it is about to pull from."""

    worker: str
    fault: str
    rank: int
    step: int
    phase: str
    pid: int
    tid: int
    peer: str = ""


class Arm(Message, frozen=True):
    """Stop ``worker`` at a trigger that was not planned before the start.

    ``worker`` "": stop those that ``node`` starts from now on.
    """

    node: str
    worker: str
    trigger: Trigger


class Release(Message, frozen=True):
    """Let the worker that waits for ``fault`` go on, after pulling ``lever``."""

    worker: str
    fault: str
    lever: Lever


class Store(Message, frozen=True):
    """The state after ``step`` steps is to be stored, whatever multiple that is."""

    step: int


class PullNode(Message, frozen=True):
    """Let ``node`` do ``lever`` to the copies that it keeps, once however often it is told."""

    node: str
    fault: str
    lever: Lever


class LeverPulled(Message, frozen=True):
    """A worker reports what its lever did, with values read back from the target; with ``worker`` "", ``node`` does."""

    worker: str
    fault: str
    observed: str
    effective: bool
    node: str = ""


class Accuse(Message, frozen=True):
    """Ranks agreed, inside a step, that the workers ``accused`` compute wrongly."""

    worker: str
    accused: tuple[str, ...]
    generation: int
    step: int
    cause: str
    detail: str


class LinesMatched(Message, frozen=True):
    """Log rules of which ``worker`` has printed a matching line since it had its first rank: all of them so far."""

    worker: str
    rules: tuple[str, ...]


class RuleFired(Message, frozen=True):
    """A log rule fired for a worker that has a rank.

    It was seen in one of the steps ``since_step`` to ``step``. ``verdict`` and ``reason``: of
    :class:`chaoskit.rules.Fired`. ``value``, ``limit``: what was seen, and what the rule allows. ``matched``: whether
    the worker has ever printed a line that matches. ``line``: the newest that was read.
    """

    worker: str
    node: str
    rank: int
    generation: int
    since_step: int
    step: int
    rule: str
    verdict: str
    action: str
    reason: str
    value: str = ""
    limit: float | None = None
    matched: bool = False
    line: str = ""


class WorkerDone(Message, frozen=True):
    """The worker has taken the last step, in ``generation``. One of a sharded job may have to take it again."""

    worker: str
    step: int
    weights_digest: str
    generation: int = 0


class WorkerFailed(Message, frozen=True):
    """User code raised in a worker. ``fatal``: the same would happen on every rank, so the job is over.

    ``refused`` holds field, value and remedy where the error was BadInput.
    """

    worker: str
    error: str
    fatal: bool
    refused: tuple[str, str, str] | None = None


class Formed(Message, frozen=True):
    """The worker's process group of this generation can be used."""

    worker: str
    generation: int


class Healed(Message, frozen=True):
    """The worker holds the state that its generation trains on."""

    worker: str
    generation: int


class Recall(Message, frozen=True):
    """No live worker has the state of the training: asks an agent for what is left of it on its node.

    ``number``: of the question; later ones are asked when what was answered before may be too old.
    """

    number: int = 0


class Sealed(Message, frozen=True):
    """Answers :class:`Recall` ``number``: what can be read on ``node``; nothing, if every state was torn.

    ``committed``: steps that a live worker of a sharded job has committed there, whether they were copied or not.
    """

    node: str
    snapshots: tuple[Snapshot, ...]
    number: int = 0
    committed: int = 0


class SourceFailed(Message, frozen=True):
    """``snapshot`` could not be restored. ``corrupt``: it was read, and is not what was sealed."""

    worker: str
    snapshot: Snapshot
    corrupt: bool
    detail: str


class GroupBroken(Message, frozen=True):
    """A collective or the building of a group failed, and no newer plan explains it yet."""

    worker: str
    generation: int
    detail: str


# -- how large the world shall be; from whoever may observe -------------------------------------------------------


class ScaleTo(Message, frozen=True):
    """Train on ``size`` nodes from now on, as far as there are as many. Answered by :class:`Answered`.

    ``request``: a name that nobody used before; what comes twice under it is done once.
    """

    request: str
    size: int
    asked_by: str = ""


class SpotNotice(Message, frozen=True):
    """``node`` will be taken away in ``grace_s``."""

    node: str
    grace_s: float


class NoticeCancelled(Message, frozen=True):
    """``node`` stays after all. The coordinator passes it on to the node, which may still be asking to leave."""

    node: str


class LendNodes(Message, frozen=True):
    """A job of higher priority wants so many nodes within ``grace_s``. Answered by :class:`Answered`."""

    request: str
    job: str
    nodes: int
    grace_s: float


class ReturnNodes(Message, frozen=True):
    """A job of higher priority needs its nodes no more."""

    job: str


class Answered(Message, frozen=True):
    """To who asked. ``nodes``: which a job of higher priority may have, once they have left."""

    request: str
    accepted: bool
    reason: str
    nodes: tuple[str, ...] = ()


class WorldSize(Message, frozen=True):
    """The size at which the run aims, and the nodes that it will be of; said when either changes.

    ``wanted``: the size that was asked for last, 0 for none. Whoever can start nodes should, if there are fewer.
    """

    size: int
    wanted: int
    nodes: tuple[str, ...]
    reason: str


class StartWorker(Message, frozen=True):
    worker: str


class StopWorker(Message, frozen=True):
    """End this worker, if it still runs: it was given up. That is in the record; its loss need not be told again.

    ``grace_s``: so long it may take for what it wants to do before, because of ``reason``; nobody waits for it.
    """

    worker: str
    cause: str
    grace_s: float = 0.0
    reason: str = ""


class Ping(Message, frozen=True):
    """Asks the control thread of a worker for a :class:`Pong`: silence means that the GIL is held."""

    worker: str
    number: int


class Pong(Message, frozen=True):
    worker: str
    number: int


class EndJob(Message, frozen=True):
    ok: bool
    reason: str


# -- rendezvous, worker <-> coordinator ---------------------------------------------------------------------------


class RendezvousHello(Message, frozen=True):
    worker: str


class Put(Message, frozen=True):
    generation: int
    key: str
    value: bytes


class Get(Message, frozen=True):
    """Answered by :class:`Value` as soon as the key exists, or by :class:`Superseded`."""

    generation: int
    key: str


class Value(Message, frozen=True):
    value: bytes


class Exchange(Message, frozen=True):
    """A barrier that carries one small value a rank; answered by :class:`Exchanged` when the last one arrived."""

    generation: int
    name: str
    rank: int
    value: bytes


class Exchanged(Message, frozen=True):
    values: tuple[bytes, ...]


class Superseded(Message, frozen=True):
    """The generation asked for is not the current one any more."""

    generation: int


# -- authentication -----------------------------------------------------------------------------------------------


class Challenge(Message, frozen=True):
    nonce: bytes


class Proof(Message, frozen=True):
    nonce: bytes
    digest: bytes


class Accepted(Message, frozen=True):
    digest: bytes


AnyMessage = (
    Plan
    | AgentHello
    | ObserverHello
    | Welcome
    | Heartbeat
    | Heard
    | TestLinks
    | LinksTested
    | HealthReport
    | MeasureLinks
    | LinksMeasured
    | WorkerReady
    | Holding
    | KeepWarm
    | WorkerLost
    | HookReached
    | Arm
    | Release
    | Store
    | PullNode
    | LeverPulled
    | Accuse
    | LinesMatched
    | RuleFired
    | WorkerDone
    | WorkerFailed
    | Formed
    | Healed
    | Recall
    | Sealed
    | SourceFailed
    | GroupBroken
    | ScaleTo
    | SpotNotice
    | NoticeCancelled
    | LendNodes
    | ReturnNodes
    | Answered
    | WorldSize
    | StartWorker
    | StopWorker
    | Ping
    | Pong
    | EndJob
    | RendezvousHello
    | Put
    | Get
    | Value
    | Exchange
    | Exchanged
    | Superseded
    | Challenge
    | Proof
    | Accepted
)
