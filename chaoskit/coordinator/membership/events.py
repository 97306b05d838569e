"""What happens to a run, and what is to be done about it: the events and actions of the membership."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from chaoskit.elastic import events as elastic
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import Endpoint, Plan, RuleFired, Snapshot

# -- what happens -------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events. They can be written down: a membership is what the replay of its events gives."""


class NodeJoined(Event, frozen=True):
    """``incarnation``: which agent speaks for the node; its workers live as long as it does.

    ``started``: workers that it has ever started, as far as it knows: names with lower numbers are taken.
    ``proves``: it gets no workers before it is :class:`Fit`, as nobody needs it yet.
    """

    node: str
    incarnation: str = ""
    started: int = 0
    proves: bool = False

    @property
    def machine(self) -> str:
        """One boot of one kernel and one network: the same for each agent that is started there, and each container.

        A container that is started again has another list of pids, and a pod that replaces one has another network.
        """
        boot, *others = self.incarnation.split("/")
        return "/".join((boot, *others[-2:-1]))


class NodeLost(Event, frozen=True):
    """A node and all its workers are gone.

    ``met``: the members of some plan have met each other, or may have: then they may have trained unseen. ``silent``:
    it is not known to have ended, and may come back with the copies that it keeps.
    """

    node: str
    detail: str = ""
    met: bool = True
    silent: bool = False


class WorkerReady(Event, frozen=True):
    """A started worker can take a rank."""

    worker: str
    node: str
    endpoint: Endpoint
    fingerprint: str = ""


class Suspicion(msgspec.Struct, frozen=True):
    """Why a rank was ended that may have been healthy: it was in ``phase`` for ``age_s``; the limit was ``limit_s``."""

    phase: Phase
    age_s: float
    limit_s: float


class WorkerLost(Event, frozen=True):
    """``cause`` and the rest are no business of the membership: the next coordinator may have to tell them.

    But ``aside`` is: nothing is started on its node any more, if there is another one. So is ``trained_in``, the
    generation in which it last committed a step, 0 for none: all members of that one had the state of the training.
    """

    worker: str
    cause: str = ""
    detail: str = ""
    detected_ns: int = 0
    aside: bool = False
    trained_in: int = 0
    suspicion: Suspicion | None = None


class Settled(Event, frozen=True):
    """Every member of ``generation`` has built its group. They do so before any of them commits a step in it.

    That a step was committed may be known first, and of a generation that is over: then its members had the state.

    ``ended``: members that are known to have ended by now, and whose loss is the next event.
    """

    generation: int
    ended: tuple[str, ...] = ()


class Healed(Event, frozen=True):
    """A member has the state of the training: it pulled it, or committed a step with it.

    ``generation``: in which it stands; 0 for the last one.
    """

    worker: str
    generation: int = 0


class Sealed(Event, frozen=True):
    """What can be read on a node, after it was asked by :class:`Recall` ``number``."""

    node: str
    snapshots: tuple[Snapshot, ...]
    number: int = 0
    committed: int = 0


class SourceFailed(Event, frozen=True):
    """A copy could not be restored; one that is corrupt is never taken again."""

    snapshot: Snapshot
    corrupt: bool


class Convicted(Event, frozen=True):
    """The numbers of these workers were found corrupt. Each of them that is still there is lost after this."""

    workers: tuple[str, ...]


class Stalled(Event, frozen=True):
    """All members of ``generation`` wait for each other. ``by``: the worker that reported that first, if one did."""

    generation: int
    by: str = ""


class WorkerDone(Event, frozen=True):
    """A member committed ``step``, the last one."""

    worker: str
    step: int


class JobFailed(Event, frozen=True):
    """The user's code failed in a way that would repeat on every rank."""

    reason: str


class Tick(Event, frozen=True):
    """Time passed."""


class GenerationSeen(Event, frozen=True):
    """A node has seen ``generation`` and started so many workers, more than is known: a part of the record was lost."""

    generation: int
    node: str = ""
    started: int = 0


class Resumes(Event, frozen=True):
    """The job goes on from what an earlier run has stored, the newest of it in ``generation``."""

    generation: int


class LeftOut(Event, frozen=True):
    """These nodes cannot reach others: their workers are given up, and they get none until :class:`Returned`."""

    nodes: tuple[str, ...]
    detail: str = ""


class Returned(Event, frozen=True):
    """Nodes that were left out reach all others again."""

    nodes: tuple[str, ...]


class Unfit(Event, frozen=True):
    """A node is not fit to train: its workers are given up, and it gets none until another agent speaks for it."""

    node: str
    detail: str = ""


class Behind(Event, frozen=True):
    """A rank that leaves at the end of the job has not committed the last step, and the others are done."""

    worker: str


class Fit(Event, frozen=True):
    """A node on probation has proved itself."""

    node: str


class Rebalanced(Event, frozen=True):
    """Ranks are not equally fast: from the next step boundary on each has so many shards.

    Whoever of them goes on into later generations keeps its part as far as the others leave it.
    """

    shares: dict[str, int]


class Resized(Event, frozen=True):
    """The world shall have ``size`` ranks, and none on the ``idle`` nodes: who has one there leaves without a loss.

    ``swap_by_s``: until then it may stay for who is being started in its place.
    """

    size: int
    idle: tuple[str, ...] = ()
    reason: str = ""
    swap_by_s: float | None = None


class Evicted(Event, frozen=True):
    """The workers of a node have not left in time: they are given up."""

    node: str
    detail: str = ""


class Elastic(Event, frozen=True):
    """What the size of the world follows from. No business of the membership: see :class:`Resized`."""

    what: elastic.Event


class Ruled(Event, frozen=True):
    """A log rule has ``workers`` given up; the loss of each of them follows. No business of the membership.

    ``generation``: in which it was decided. ``aside``: the node gets no more workers.
    """

    fired: RuleFired
    generation: int
    workers: tuple[str, ...]
    aside: bool = False


AnyEvent = (
    NodeJoined
    | NodeLost
    | WorkerReady
    | WorkerLost
    | Settled
    | Healed
    | Sealed
    | SourceFailed
    | Convicted
    | Stalled
    | WorkerDone
    | JobFailed
    | Tick
    | GenerationSeen
    | Resumes
    | LeftOut
    | Returned
    | Unfit
    | Behind
    | Fit
    | Rebalanced
    | Resized
    | Evicted
    | Elastic
    | Ruled
)


# -- what to do about it ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorker:
    node: str
    worker: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker that was given up, in case that it still runs."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class Publish:
    plan: Plan


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask a node which copies of the state can be read there."""

    node: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """Nothing is started on ``node`` any more: too many of its workers were lost lately."""

    node: str


Action = StartWorker | StopWorker | Publish | Recall | Finish | SetAside
