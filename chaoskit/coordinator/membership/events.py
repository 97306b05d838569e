"""Events and actions of a membership.

A message of a worker or a node is an event itself if it concerns the membership. The other
events are decided by the coordinator. All of them can be written to the log: a membership is what
the replay of its events gives.

-> coordinator/membership/apply.py: what each event changes; coordinator/effects.py: what follows
from each action. The messages are in wire/messages/.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from chaoskit.wire.messages import (
    Healed,
    LendNodes,
    NodeLost,
    NoticeCancelled,
    Plan,
    ReturnNodes,
    RuleFired,
    ScaleTo,
    Sealed,
    SourceFailed,
    SpotNotice,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)

# -- nodes -----------------------------------------------------------------------------------------


class Decided(msgspec.Struct, frozen=True, tag=True):
    """Base of the events that the coordinator decides."""


class NodeJoined(Decided, frozen=True):
    """A node takes part.

    Attributes:
        incarnation: the agent that speaks for the node; its workers live as long as that agent.
        started: workers that the node has ever started, as far as it knows: names with lower
            numbers are taken.
        proves: no rank needs the node yet, so it gets no workers before it is :class:`Fit`.
    """

    node: str
    incarnation: str = ""
    started: int = 0
    proves: bool = False

    @property
    def machine(self) -> str:
        """The boot and the network of the node, which all agents and containers there share.

        A container that is started again has another list of pids, and a pod that replaces one has
        another network.
        """
        boot, *others = self.incarnation.split("/")
        return "/".join((boot, *others[-2:-1]))


class LeftOut(Decided, frozen=True):
    """Nodes cannot reach others, so their workers are given up.

    They get no workers until :class:`Readmitted`.
    """

    nodes: tuple[str, ...]
    detail: str = ""


class Readmitted(Decided, frozen=True):
    """Nodes that were left out reach all others again."""

    nodes: tuple[str, ...]


class Unfit(Decided, frozen=True):
    """A node is not fit to train, so its workers are given up.

    It gets no workers until it was lost and has joined again with another agent.
    """

    node: str
    detail: str = ""


class Fit(Decided, frozen=True):
    """A node on probation has proved itself, or is needed at once."""

    node: str


class Evicted(Decided, frozen=True):
    """The workers of a node have not left in time: they are given up."""

    node: str
    detail: str = ""


# -- workers and generations -----------------------------------------------------------------------


class Convicted(Decided, frozen=True):
    """The numbers of workers were found corrupt.

    The loss of each of them that still lives follows.
    """

    workers: tuple[str, ...]


class Ruled(Decided, frozen=True):
    """A log rule has workers given up; the loss of each of them follows.

    The membership ignores this event. The next coordinator reads it in the log.

    Attributes:
        generation: the generation in which it was decided.
        aside: the node gets no more workers.
    """

    fired: RuleFired
    generation: int
    workers: tuple[str, ...]
    aside: bool = False


class Behind(Decided, frozen=True):
    """A leaver at the end of the job has not committed the last step, and the others are done."""

    worker: str


class Settled(Decided, frozen=True):
    """Every member of ``generation`` has built its group.

    No member commits a step in it before. A committed step may be known first, and of a generation
    that is over: then its members had the state.

    Attributes:
        ended: members that are known to have ended by now; their loss is the next event.
    """

    generation: int
    ended: tuple[str, ...] = ()


class Stalled(Decided, frozen=True):
    """The generation is to be planned again: it broke, or all its members wait for each other.

    Attributes:
        by: the worker that reported first that it broke; "" if no worker did.
    """

    generation: int
    by: str = ""


# -- the world and the job -------------------------------------------------------------------------


class Resized(Decided, frozen=True):
    """The world shall have ``size`` ranks, and none on the ``idle`` nodes.

    Ranks there leave without a loss.

    Attributes:
        swap_by_s: until then, a leaver may stay for the worker that is started in its place.
    """

    size: int
    idle: tuple[str, ...] = ()
    reason: str = ""
    swap_by_s: float | None = None


class Rebalanced(Decided, frozen=True):
    """Ranks are not equally fast: from the next step boundary on, each has so many shards.

    Ranks that go on into later generations keep their part as far as the others leave it.
    """

    shares: dict[str, int]


class PolicyTick(Decided, frozen=True):
    """A wait of the elastic policy is over.

    The membership ignores this event: see :class:`Resized`.
    """


class RunFailed(Decided, frozen=True):
    """The job cannot succeed any more, for example because its script fails on every rank."""

    reason: str


class Resumes(Decided, frozen=True):
    """The job goes on from snapshots of an earlier run, the newest of them of ``generation``."""

    generation: int


class GenerationSeen(Decided, frozen=True):
    """A node knows more than the log, which has therefore lost entries.

    Attributes:
        generation: the newest generation that the node has seen; 0 for none.
        started: number of workers that the node has ever started.
    """

    generation: int
    node: str = ""
    started: int = 0


class Tick(Decided, frozen=True):
    """Time passed."""


#: Requests for the elastic policy. The membership ignores them: see :class:`Resized`.
SizeRequest = ScaleTo | LendNodes | SpotNotice | NoticeCancelled | ReturnNodes

MembershipEvent = (
    NodeJoined
    | NodeLost
    | LeftOut
    | Readmitted
    | Unfit
    | Fit
    | Evicted
    | WorkerReady
    | WorkerLost
    | WorkerDone
    | Healed
    | Convicted
    | Ruled
    | Behind
    | Settled
    | Stalled
    | Sealed
    | SourceFailed
    | Resized
    | Rebalanced
    | SizeRequest
    | PolicyTick
    | RunFailed
    | Resumes
    | GenerationSeen
    | Tick
)


# -- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderStart:
    """Start a worker on a node."""

    node: str
    worker: str


@dataclass(frozen=True, slots=True)
class OrderStop:
    """End a worker that was given up or has left, in case that it still runs.

    ``cause``: such as "lost"; "left" for a worker that has left in order.
    """

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Send a plan to the nodes of its members and leavers, and to observers."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class AskForCopies:
    """Ask a node which copies of the state can be read there.

    ``number`` is that of the question.
    """

    node: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class FinishJob:
    """End the job.

    Attributes:
        ok: the job has succeeded.
        reason: the reason, in words.
    """

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """Write to the journal that a node is set aside: too many of its workers were lost lately.

    It gets no more workers, as long as another node can have them.
    """

    node: str


Action = OrderStart | OrderStop | Publish | AskForCopies | FinishJob | SetAside
