"""What shows that a fault took effect: one struct for each kind of proof. Each names what it is about, and its source.

The source is never the act itself: a signal was sent, and the parent of the process saw it end. The judge compares the
subject with what the fault was to strike; people read the words of ``str``.
"""

from __future__ import annotations

import time

import msgspec

# -- what evidence is about -----------------------------------------------------------------------------------------


class RankProcess(msgspec.Struct, frozen=True, tag="rank"):
    """The process of a rank. ``rank``: -1 where it has none, as a worker that is not ready yet."""

    worker: str
    rank: int
    pid: int


class WholeNode(msgspec.Struct, frozen=True, tag="node"):
    """Everything that runs on a node, or what the node keeps."""

    node: str


class NetworkPath(msgspec.Struct, frozen=True, tag="path"):
    """What goes between nodes. ``nodes``: those at its ends, and perhaps the coordinator."""

    nodes: tuple[str, ...]


class CoordinatorProcess(msgspec.Struct, frozen=True, tag="coordinator"):
    """The process that decides membership."""

    pid: int


class SizeRequest(msgspec.Struct, frozen=True, tag="request"):
    """A request that was made of the run, by the name of its fault."""

    fault: str


class SharedStore(msgspec.Struct, frozen=True, tag="store"):
    """What all nodes store in: a directory or an object store."""

    place: str


class ApiServer(msgspec.Struct, frozen=True, tag="api"):
    """The API server of the cluster in which the run takes place."""


Subject = (
    ApiServer
    | RankProcess
    | WholeNode
    | NetworkPath
    | CoordinatorProcess
    | SizeRequest
    | SharedStore
)

# -- kinds of proof -------------------------------------------------------------------------------------------------


class Evidence(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all kinds of proof.

    Attributes:
        subject: what it is about.
        source: which process, or part of the kernel, says so.
        observed_ns: since when it was seen, CLOCK_MONOTONIC.
    """

    subject: Subject
    source: str
    observed_ns: int = msgspec.field(default_factory=time.monotonic_ns)


class InWords(Evidence, frozen=True, kw_only=True):
    """Base of proof that is told in words. ``seen``: them, with the numbers."""

    seen: str

    def __str__(self) -> str:
        return self.seen


class ProcessEnded(Evidence, frozen=True, kw_only=True):
    """A process has ended, by a signal or with a status.

    Attributes:
        how: ``killed``, ``dumped`` or ``exited``; ``gone`` where nothing tells more.
        status: ``SIGKILL``, ``status 1``; "" where nothing tells.
    """

    subject: RankProcess | CoordinatorProcess
    how: str
    status: str

    def __str__(self) -> str:
        process = f"pid {self.subject.pid}"
        if isinstance(self.subject, CoordinatorProcess):
            process = f"the coordinator ({process})"
        if self.how == "gone":
            return f"{process} is gone"
        return (
            f"{process} exited with {self.status}"
            if self.how == "exited"
            else f"{process} was {self.how} by {self.status}"
        )


class NodeGone(Evidence, frozen=True, kw_only=True):
    """Every process of a node, or of several, is gone. ``more``: what belongs to it, in words."""

    subject: WholeNode
    first: str
    pids: tuple[int, ...]
    more: str = ""

    def __str__(self) -> str:
        first = f"{self.first} of {self.subject.node} (pid {self.pids[0]})"
        return f"{first} and its {len(self.pids) - 1} other processes are gone{self.more}"


class ProcessStopped(InWords, frozen=True, kw_only=True):
    """A process stands still, as the kernel or its parent says."""

    subject: RankProcess


class NodeFrozen(Evidence, frozen=True, kw_only=True):
    """Every process of a node stands still at the same time. ``still_s``: for how long none had a CPU; 0: stopped."""

    subject: WholeNode
    processes: int
    still_s: float = 0.0

    def __str__(self) -> str:
        them = f"all {self.processes} processes of {self.subject.node} are"
        return (
            f"{them} frozen: none has run for {self.still_s * 1000:.0f} ms"
            if self.still_s
            else f"{them} in state T (stopped)"
        )


class MachineSilent(InWords, frozen=True, kw_only=True):
    """No supervisor on the machine of a node answers any more."""

    subject: WholeNode


class ServerSilent(InWords, frozen=True, kw_only=True):
    """A server answers nothing that it is asked."""

    subject: ApiServer


class ThreadStuck(InWords, frozen=True, kw_only=True):
    """A thread of a rank makes no progress, though its process lives."""

    subject: RankProcess
    tid: int


class Counted(InWords, frozen=True, kw_only=True):
    """The kernel, or a process, has counted how often something met the fault.

    Attributes:
        count: how often.
    """

    count: int


class ReadBack(Evidence, frozen=True, kw_only=True):
    """What was changed was read again afterwards, and is not what it was. ``value``: in words."""

    value: str

    def __str__(self) -> str:
        return self.value


class RoundTrip(InWords, frozen=True, kw_only=True):
    """Echoes between two nodes take longer than before, or are lost. In milliseconds; None: lost."""

    before_ms: float
    after_ms: float | None


class LossReported(InWords, frozen=True, kw_only=True):
    """The agent or the coordinator has given a worker up, or seen it end. ``cause``, ``detail``: in its words."""

    subject: RankProcess | WholeNode
    cause: str


class AgentHeard(InWords, frozen=True, kw_only=True):
    """The coordinator hears the agent that was started on a node."""

    subject: WholeNode | SizeRequest


class WorldFormed(InWords, frozen=True, kw_only=True):
    """Every rank of a world has built its group. ``size``: how many ranks it has."""

    subject: SizeRequest
    size: int
