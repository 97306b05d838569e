"""Goals of open-ended jobs that a test reaches when it observes a message of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaoskit.wire.messages import Heartbeat, WorkerLost


class Flag:
    """The goal of an open-ended job: a file that appears when a message of the run meets a
    condition.

        flag = Flag(tmp_path / "seen", lambda message: isinstance(message, WorkerLost))
        chaos.run(STEADY, steps=20, until=flag.until, watch=flag)

    Args:
        path: of the file, in a directory of the test.
        condition: is shown every message of the coordinator, in order, until it is true.
    """

    def __init__(self, path: Path, condition: Callable[[Any], bool]) -> None:
        self._path, self._condition = path, condition

    @property
    def until(self) -> dict[str, Any]:
        """Return the argument for ``chaos.run(until=...)``."""
        return {"file": str(self._path)}

    @property
    def is_up(self) -> bool:
        """True if the condition was met."""
        return self._path.exists()

    def __call__(self, message: Any) -> None:
        if not self.is_up and self._condition(message):
            self._path.touch()


def workers_lost(path: Path, count: int = 1) -> Flag:
    """Return the goal that ``count`` workers were lost."""
    lost: set[str] = set()

    def enough(message: Any) -> bool:
        lost.update([message.worker] if isinstance(message, WorkerLost) else [])
        return len(lost) >= count

    return Flag(path, enough)


def node_returns(path: Path) -> Flag:
    """Return the goal that a node which lost a worker reports again without that worker."""
    lost: dict[str, str] = {}

    def is_back(message: Any) -> bool:
        lost.update({message.node: message.worker} if isinstance(message, WorkerLost) else {})
        if not isinstance(message, Heartbeat) or message.node not in lost:
            return False
        return lost[message.node] not in {beat.worker for beat in message.beats}

    return Flag(path, is_back)
