"""Messages about the life of a worker: orders to start and to end it, and reports about it.

-> runtime/worker/process.py and agent/agent.py send the reports, and obey the orders.
coordinator/handlers/on_worker_ready.py, on_worker_lost.py, on_end.py and on_rule_fired.py act on
the reports.
"""

from __future__ import annotations

import msgspec

from chaoskit.vocabulary import Phase
from chaoskit.wire.messages.base import Message
from chaoskit.wire.messages.worlds import Endpoint


class StartWorker(Message, frozen=True):
    """Order to an agent to start a worker of this name."""

    worker: str


class WorkerReady(Message, frozen=True):
    """Report that a worker has built its model, is warm, and can take a rank.

    ``fingerprint``: digest of all that its numbers depend on; workers that train together have the
    same.
    """

    worker: str
    node: str
    endpoint: Endpoint
    fingerprint: str = ""


class Holding(Message, frozen=True):
    """Notice to the agent that a worker of a sharded job copies its piece into slots of memory.

    ``fds``: descriptors of the slots, in process ``pid``. ``piece``: number of the piece, from 0,
    of ``pieces`` different ones. ``groups``: the ranks of each group that holds a whole state, if
    there are several groups.
    """

    worker: str
    pid: int
    fds: tuple[int, ...]
    piece: int
    pieces: int
    groups: tuple[tuple[int, ...], ...] = ()


class Suspicion(msgspec.Struct, frozen=True):
    """The reason why a rank was ended that may have been healthy.

    Attributes:
        phase: the phase of the step in which it was.
        age_s: how long it had been in that phase, in seconds.
        limit_s: the limit of that time, in seconds.
    """

    phase: Phase
    age_s: float
    limit_s: float


class WorkerLost(Message, frozen=True):
    """A worker is lost: an agent reports the end of its process, or the coordinator gives it up.

    Attributes:
        cause: killed, stopped, exited, raised, hung, slow, nonfinite, corrupt ...
        detail: the cause in words, for people.
        detected_ns: by the run's clock.
        trained_in: the generation in which the worker last committed a step, as its progress board
            shows; 0 for none. All members of that generation had the state of the training.
        aside: no other worker is started on the node, if there is another node.
        suspicion: the phase in which it hung, where it may have been healthy.
    """

    worker: str
    node: str = ""
    cause: str = ""
    detail: str = ""
    detected_ns: int = 0
    trained_in: int = 0
    aside: bool = False
    suspicion: Suspicion | None = None


class WorkerFailed(Message, frozen=True):
    """Report that user code raised in a worker.

    ``error``: the exception in words. ``fatal``: the same would happen on every rank, so the job is
    over. ``refused`` holds field, value and remedy if the error was BadInput.
    """

    worker: str
    error: str
    fatal: bool
    refused: tuple[str, str, str] | None = None


class WorkerDone(Message, frozen=True):
    """Report that the worker has taken the last step, in ``generation``.

    A worker of a sharded job may have to take it again. ``weights_digest``: digest of its final
    weights. ``cut_short_by``: the worker that returned from its train function although this worker
    would have taken another step.
    """

    worker: str
    step: int
    weights_digest: str = ""
    generation: int = 0
    cut_short_by: str = ""


class Halt(Message, frozen=True):
    """Request to train until ``step`` steps are committed, and to end as if the script returned.

    The launcher sends it with step -1, and the coordinator chooses a step that all ranks can still
    reach together. A rank that is past it ends at its next transaction. ``reason``: for people,
    such as the name of a signal.
    """

    reason: str
    step: int = -1

    @property
    def reason_without_ranks(self) -> str:
        """The reason for the end of a job that has no ranks yet."""
        return f"{self.reason} came before the first step"


class StopWorker(Message, frozen=True):
    """Order to end this worker, if it still runs: it was given up.

    The coordinator's log has the loss, so it need not be reported again. ``cause``: as in
    :class:`WorkerLost`. ``grace_s``: seconds that the worker has for its own preparations, because
    of ``reason``; the run does not wait for it.
    """

    worker: str
    cause: str
    grace_s: float = 0.0
    reason: str = ""


class Accuse(Message, frozen=True):
    """Report of ``worker`` that the ranks agreed, inside a step, that ``accused`` compute wrongly.

    ``cause``: "nonfinite" or "corrupt".
    """

    worker: str
    accused: tuple[str, ...]
    generation: int
    step: int
    cause: str
    detail: str


class LinesMatched(Message, frozen=True):
    """Report of the log rules that lines of ``worker`` have matched since it had its first rank."""

    worker: str
    rules: tuple[str, ...]


class RuleFired(Message, frozen=True):
    """Report that a log rule fired for a worker that has a rank.

    The cause was seen in one of the steps ``since_step`` to ``step``. ``verdict`` and ``reason``:
    those of :class:`chaoskit.rules.Fired`. ``value``, ``limit``: the metric, and the limit of the
    rule. ``matched``: the worker has printed a matching line before. ``line``: the newest line that
    was read.
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
