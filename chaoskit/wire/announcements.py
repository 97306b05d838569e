"""Messages about workers and nodes that a new coordinator or a new observer must receive.

-> agent/coordinator_link.py repeats them to the next coordinator; coordinator/plane.py shows them
to a new observer.
"""

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
    OfferedSnapshot,
    RuleFired,
    SourceFailed,
    StartWorker,
    StopWorker,
    WorkerDone,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)

#: Kinds of messages that a worker sends once; only the last message of a kind counts. The order is
#: that of :meth:`Facts.tell`.
_KEPT_KINDS = (
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
#: Kind of a message, with the copy for a report that it cannot be restored: there may be several.
_Kind = tuple[type[messages.Message], OfferedSnapshot | None]


class Facts:
    """The last message of each kind by or about each worker, and by each node on its health.

    A pure state machine. Messages about a lost worker are kept until a coordinator has recorded the
    loss. The coordinator confirms that by :class:`StopWorker`, which it sends for every worker that
    it gives up or does not know.
    """

    def __init__(self) -> None:
        self._health: dict[str, HealthReport] = {}  # by node
        self._live_messages: dict[str, dict[_Kind, messages.Message]] = {}
        self._failures: dict[str, WorkerFailed] = {}
        self._losses: dict[str, WorkerLost] = {}
        self._open_workers: set[str] = set()  # workers that may still send messages
        self._stopped_workers: set[str] = set()  # open workers of which messages are ignored

    @property
    def ended(self) -> tuple[str, ...]:
        """The lost workers that no coordinator has confirmed."""
        return tuple(self._losses)

    def note(self, message: Any) -> None:
        """Update the facts from a message by or about a worker or a node. Others are ignored."""
        match message:
            case HealthReport(node):
                self._health[node] = message
            case StartWorker(worker):
                self._open_workers.add(worker)
            case WorkerFailed(worker):
                if worker not in self._stopped_workers:
                    self._failures[worker] = message
            case WorkerLost(worker):
                self._live_messages.pop(worker, None)
                self._losses.setdefault(worker, message)
            case StopWorker(worker):
                for table in (self._live_messages, self._failures, self._losses):
                    table.pop(worker, None)
                self._stopped_workers.update({worker} & self._open_workers)
            case Healed(worker):
                self._keep(message)
                for kind in [
                    kind for kind in self._live_messages.get(worker, ()) if kind[0] is SourceFailed
                ]:
                    del self._live_messages[worker][kind]  # it has the state now
            case SourceFailed(_, snapshot):
                self._keep(message, snapshot)
            case _ if isinstance(message, _KEPT_KINDS):
                self._keep(message)

    def _keep(self, message: Any, snapshot: OfferedSnapshot | None = None) -> None:
        """Keep a message of a live worker as the last of its kind; ignore it for other workers."""
        if message.worker not in self._losses and message.worker not in self._stopped_workers:
            self._live_messages.setdefault(message.worker, {})[type(message), snapshot] = message

    def close(self, worker: str) -> None:
        """Note that ``worker`` sends no more: its connection has ended. Its facts stay kept."""
        self._open_workers.discard(worker)
        self._stopped_workers.discard(worker)

    def tell(self) -> Iterator[messages.Message]:
        """Yield the messages that are kept, in an order that a receiver without history accepts.

        They stay kept.
        """
        yield from self._health.values()
        yield from self._failures.values()
        yield from self._losses.values()
        for kind in _KEPT_KINDS:
            for facts in self._live_messages.values():
                yield from (message for message in facts.values() if type(message) is kind)
