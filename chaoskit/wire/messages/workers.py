"""The life of a worker, as its node tells of it; and orders to start and to end one."""

from __future__ import annotations

from chaoskit.wire.messages.base import Message
from chaoskit.wire.messages.worlds import Endpoint


class StartWorker(Message, frozen=True):
    worker: str


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


class WorkerLost(Message, frozen=True):
    """``cause``: killed, stopped, exited, raised, hung, slow, nonfinite, corrupt ... ``detail`` is for people.

    ``detected_ns``: of the run's clock. ``trained_in``: the generation in which the worker last committed a step; 0 for
    none. Its board outlives it.
    """

    worker: str
    node: str
    cause: str
    detail: str
    detected_ns: int
    trained_in: int = 0


class WorkerFailed(Message, frozen=True):
    """User code raised in a worker. ``fatal``: the same would happen on every rank, so the job is over.

    ``refused`` holds field, value and remedy where the error was BadInput.
    """

    worker: str
    error: str
    fatal: bool
    refused: tuple[str, str, str] | None = None


class WorkerDone(Message, frozen=True):
    """The worker has taken the last step, in ``generation``. One of a sharded job may have to take it again.

    ``cut_short_by``: the worker that returned from its train function where this one would have taken another step.
    """

    worker: str
    step: int
    weights_digest: str
    generation: int = 0
    cut_short_by: str = ""


class Halt(Message, frozen=True):
    """Train until ``step`` steps are committed, and end there as if the script had returned.

    The launcher asks for it without a step, and the coordinator chooses one that all ranks can still reach together.
    A rank that is past it ends at its next transaction. ``reason``: for people, such as the name of a signal.
    """

    reason: str
    step: int = -1

    @property
    def reason_without_ranks(self) -> str:
        """The reason for which a job ends that has no ranks yet."""
        return f"{self.reason} came before the first step"


class StopWorker(Message, frozen=True):
    """End this worker, if it still runs: it was given up. That is in the record; its loss need not be told again.

    ``grace_s``: so long it may take for what it wants to do before, because of ``reason``; nobody waits for it.
    """

    worker: str
    cause: str
    grace_s: float = 0.0
    reason: str = ""


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
