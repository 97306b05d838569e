"""What somebody who comes later must be told of the workers: a new coordinator, a new observer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chaoskit import messages
from chaoskit.messages import (
    Accuse,
    Formed,
    GroupBroken,
    Healed,
    HookReached,
    LeverPulled,
    Release,
    StopWorker,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)

#: A worker says each of these once; the last of a kind is what counts.
_STANDING = (WorkerReady, Formed, Healed, GroupBroken, Accuse, HookReached, LeverPulled, WorkerDone)


class Facts:
    """The last word of each kind by or about each worker. A pure state machine."""

    def __init__(self) -> None:
        self._living: dict[str, dict[type, messages.Message]] = {}
        self._lost: dict[str, WorkerLost] = {}
        self._stopped: set[str] = set()  # by order: their loss was decided, and is not reported

    @property
    def ended(self) -> tuple[str, ...]:
        """Workers that were reported lost."""
        return tuple(self._lost)

    def note(self, message: Any) -> None:
        """Something was said by or about a worker."""
        if isinstance(message, WorkerLost):
            self._living.pop(message.worker, None)
            self._lost.setdefault(message.worker, message)
        elif isinstance(message, Release):
            self._living.get(message.worker, {}).pop(HookReached, None)
        elif isinstance(message, StopWorker):
            self._living.pop(message.worker, None)
            self._stopped.add(message.worker)
        elif isinstance(message, _STANDING) and message.worker not in {*self._lost, *self._stopped}:
            self._living.setdefault(message.worker, {})[type(message)] = message

    def tell(self) -> Iterator[messages.Message]:
        """Everything, in an order that makes sense to somebody who knows nothing of it."""
        yield from self._lost.values()
        for kind in _STANDING:
            yield from (said[kind] for said in self._living.values() if kind in said)
