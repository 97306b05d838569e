"""What somebody who comes later must be told of the workers: a new coordinator, a new observer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chaoskit.wire import messages
from chaoskit.wire.messages import (
    Accuse,
    Formed,
    GroupBroken,
    Healed,
    HealthReport,
    LinesMatched,
    RuleFired,
    Snapshot,
    SourceFailed,
    StartWorker,
    StopWorker,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)

#: A worker says each of these once; the last of a kind is what counts.
_STANDING = (
    WorkerReady,
    Formed,
    SourceFailed,
    Healed,
    GroupBroken,
    Accuse,
    LinesMatched,
    RuleFired,
    WorkerDone,
)
#: A worker may report several copies that it cannot restore.
_Kind = tuple[type[messages.Message], Snapshot | None]


class Facts:
    """The last word of each kind by or about each worker, and of each node on its health. A pure state machine.

    What was said of a lost worker is kept until a coordinator has it in its record. It says so by :class:`StopWorker`,
    which it sends for every worker that it gives up or does not know, after it has written that down.
    """

    def __init__(self) -> None:
        self._health: dict[str, HealthReport] = {}  # by node
        self._living: dict[str, dict[_Kind, messages.Message]] = {}
        self._failed: dict[str, WorkerFailed] = {}
        self._lost: dict[str, WorkerLost] = {}
        self._open: set[str] = set()  # may still say something
        self._stopped: set[str] = set()  # of these: whatever they say is of no interest any more

    @property
    def ended(self) -> tuple[str, ...]:
        """Workers that are lost, which no coordinator may know yet."""
        return tuple(self._lost)

    def note(self, message: Any) -> None:
        """Something was said by or about a worker."""
        match message:
            case HealthReport(node):
                self._health[node] = message
            case StartWorker(worker):
                self._open.add(worker)
            case WorkerFailed(worker):
                if worker not in self._stopped:
                    self._failed[worker] = message
            case WorkerLost(worker):
                self._living.pop(worker, None)
                self._lost.setdefault(worker, message)
            case StopWorker(worker):
                for said in (self._living, self._failed, self._lost):
                    said.pop(worker, None)
                self._stopped.update({worker} & self._open)
            case Healed(worker):
                self._stand(message)
                for kind in [
                    kind for kind in self._living.get(worker, ()) if kind[0] is SourceFailed
                ]:
                    del self._living[worker][
                        kind
                    ]  # it has the state now, whatever failed it before
            case SourceFailed(_, snapshot):
                self._stand(message, snapshot)
            case _ if isinstance(message, _STANDING):
                self._stand(message)

    def _stand(self, message: Any, snapshot: Snapshot | None = None) -> None:
        if message.worker not in self._lost and message.worker not in self._stopped:
            self._living.setdefault(message.worker, {})[type(message), snapshot] = message

    def close(self, worker: str) -> None:
        """No more will come from ``worker``: its connection has ended."""
        self._open.discard(worker)
        self._stopped.discard(worker)

    def tell(self) -> Iterator[messages.Message]:
        """Everything, in an order that makes sense to somebody who knows nothing of it."""
        yield from self._health.values()
        yield from self._failed.values()
        yield from self._lost.values()
        for kind in _STANDING:
            for said in self._living.values():
                yield from (message for message in said.values() if type(message) is kind)
