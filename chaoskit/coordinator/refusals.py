"""Counts the connections that a server has refused: a port scan or a flood may cost one line a minute, not a disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: From one summary to the next.
INTERVAL_S = 60.0
_REASON_CHARS = 200  # a stranger may send any text


@dataclass(frozen=True, slots=True)
class RefusedConnections:
    """Connections that were refused since the last summary, and the reason of the last one."""

    count: int
    reason: str

    def __str__(self) -> str:
        if self.count == 1:
            return f"refused a connection: {self.reason}"
        return f"refused {self.count} connections, the last one: {self.reason}"


class Refusals:
    """Refused connections that are still to be written down: the first at once, the others together each minute."""

    def __init__(self) -> None:
        self._count, self._reason, self._due_s = 0, "", -math.inf

    def add(self, reason: str) -> None:
        """Count a connection."""
        self._count += 1
        self._reason = " ".join(reason.split())[:_REASON_CHARS]

    def due(self, now_s: float) -> RefusedConnections | None:
        """Return the next summary, if it is time for one."""
        return self.rest(now_s) if now_s >= self._due_s else None

    def rest(self, now_s: float) -> RefusedConnections | None:
        """Return what is not written down yet; None if that is nothing."""
        if not self._count:
            return None
        summary = RefusedConnections(self._count, self._reason)
        self._count, self._due_s = 0, now_s + INTERVAL_S
        return summary
