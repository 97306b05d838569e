"""Counts of the connections that a server has refused: a flood costs one line a minute.

-> coordinator/server.py refuses them: without the token, or for an invalid message. Refusal of
older generations: coordinator/rendezvous.py, coordinator/membership/apply.py,
runtime/group/generations.py, runtime/step/commit.py. Workers that the log lacks are ended in
coordinator/handlers/on_node.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Shortest time between two summaries.
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
    """Refused connections that are not reported yet: due at once, or a minute after a report.

    It only counts. The server closes the connections, and writes the summaries.
    """

    def __init__(self) -> None:
        self._count, self._reason, self._due_s = 0, "", -math.inf

    def add(self, reason: str) -> None:
        """Count a refused connection. The reason is kept as one line of limited length."""
        self._count += 1
        self._reason = " ".join(reason.split())[:_REASON_CHARS]

    def take_due_summary(self, now_s: float) -> RefusedConnections | None:
        """Return the next summary, and begin a new count.

        None if it is not time for one yet, or no connection was refused.
        """
        return self.take_summary(now_s) if now_s >= self._due_s else None

    def take_summary(self, now_s: float) -> RefusedConnections | None:
        """Return the summary of all connections since the last one, and begin a new count.

        None if there are none.
        """
        if not self._count:
            return None
        summary = RefusedConnections(self._count, self._reason)
        self._count, self._due_s = 0, now_s + INTERVAL_S
        return summary
