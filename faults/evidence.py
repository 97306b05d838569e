"""Evidence that a fault took effect: one struct for each kind of proof.

Each names its subject and its source. The source is never the act itself: a signal was sent, and
the parent of the process saw it end. The judge compares the subject with the target of the fault;
people read the words of ``str``.

-> experiment/judge/fault_audit.py compares it with records of other processes.
-> runlog/injected.py reads it back from the journal of the run.
"""

from __future__ import annotations

import time

import msgspec

#: The rank of a process that has none, or whose rank is not known.
NO_RANK = -1

# -- subjects of evidence --------------------------------------------------------------------------


class RankProcess(msgspec.Struct, frozen=True, tag="rank"):
    """The process of a rank. ``rank`` is -1 while it has none, such as before it is ready.

    ``pid`` is its process id on its node.
    """

    worker: str
    rank: int
    pid: int


class WholeNode(msgspec.Struct, frozen=True, tag="node"):
    """All processes of a node, or the copies that the node keeps."""

    node: str


class NetworkPath(msgspec.Struct, frozen=True, tag="path"):
    """A path between nodes. ``nodes`` are its ends, to which the coordinator may belong."""

    nodes: tuple[str, ...]


class CoordinatorProcess(msgspec.Struct, frozen=True, tag="coordinator"):
    """The process of the coordinator, which decides membership."""

    pid: int


class SizeRequest(msgspec.Struct, frozen=True, tag="request"):
    """A request for another size of the run, by the name of the fault that made it."""

    fault: str


class SharedStore(msgspec.Struct, frozen=True, tag="store"):
    """The store that all nodes share: a directory or an object store."""

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

# -- kinds of proof --------------------------------------------------------------------------------


class Evidence(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all kinds of proof.

    Attributes:
        subject: the process, node, path or store that the proof is about.
        source: the process, or part of the kernel, that it comes from, in words.
        observed_ns: CLOCK_MONOTONIC time at which it was seen; the time of its creation by default.
    """

    subject: Subject
    source: str
    observed_ns: int = msgspec.field(default_factory=time.monotonic_ns)


class InWords(Evidence, frozen=True, kw_only=True):
    """Base of proof that is described in words. ``seen`` has them, with the numbers."""

    seen: str

    def __str__(self) -> str:
        return self.seen


class ProcessEnded(Evidence, frozen=True, kw_only=True):
    """A process has ended, by a signal or with a status.

    Attributes:
        how: ``killed``, ``dumped`` or ``exited``; ``gone`` if no more is known.
        status: ``SIGKILL``, ``status 1``; "" if it is unknown.
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
    """All processes of one or several nodes are gone.

    Attributes:
        first: name of the first process, such as ``the agent``.
        pids: process ids, that of the first process first.
        more: text that follows, such as other nodes that are gone; "" for none.
    """

    subject: WholeNode
    first: str
    pids: tuple[int, ...]
    more: str = ""

    def __str__(self) -> str:
        first = f"{self.first} of {self.subject.node} (pid {self.pids[0]})"
        return f"{first} and its {len(self.pids) - 1} other processes are gone{self.more}"


class ProcessStopped(InWords, frozen=True, kw_only=True):
    """A process is stopped, according to the kernel or its parent."""

    subject: RankProcess


class NodeFrozen(Evidence, frozen=True, kw_only=True):
    """All processes of a node stand still at the same time.

    Attributes:
        processes: number of the processes.
        still_s: seconds for which none of them had a CPU; 0 if they are stopped by a signal.
    """

    subject: WholeNode
    processes: int
    still_s: float = 0.0

    def __str__(self) -> str:
        subject = f"all {self.processes} processes of {self.subject.node} are"
        return (
            f"{subject} frozen: none has run for {self.still_s * 1000:.0f} ms"
            if self.still_s
            else f"{subject} in state T (stopped)"
        )


class MachineSilent(InWords, frozen=True, kw_only=True):
    """The machine of a node does not answer any more: no supervisor of the run, or no kubelet."""

    subject: WholeNode


class ServerSilent(InWords, frozen=True, kw_only=True):
    """A server answers no request."""

    subject: ApiServer


class ThreadStuck(InWords, frozen=True, kw_only=True):
    """A thread of a rank makes no progress, though its process is alive.

    ``tid`` is the id of the thread in the kernel.
    """

    subject: RankProcess
    tid: int


class Counted(InWords, frozen=True, kw_only=True):
    """A count, by the kernel or a process, of how often something met the fault.

    Attributes:
        count: number of times.
    """

    count: int


class ReadBack(Evidence, frozen=True, kw_only=True):
    """A changed value that was read again differs from before. ``value`` has it in words."""

    value: str

    def __str__(self) -> str:
        return self.value


class RoundTrip(InWords, frozen=True, kw_only=True):
    """Echoes between two nodes take longer than before, or are lost.

    Attributes:
        before_ms: round trip before the act, in milliseconds.
        after_ms: round trip after the act, in milliseconds; None for a lost echo.
    """

    before_ms: float
    after_ms: float | None


class LossReported(InWords, frozen=True, kw_only=True):
    """A report of the agent or the coordinator that a worker is given up, or was seen to end.

    ``cause`` is the cause of the report; ``seen`` has its words.
    """

    subject: RankProcess | WholeNode
    cause: str


class AgentHeard(InWords, frozen=True, kw_only=True):
    """The agent that was started on a node has reached the coordinator."""

    subject: WholeNode | SizeRequest


class WorldFormed(InWords, frozen=True, kw_only=True):
    """All ranks of a world have built their group. ``size`` is the number of ranks."""

    subject: SizeRequest
    size: int
