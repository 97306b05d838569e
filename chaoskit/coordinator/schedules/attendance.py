"""Which nodes are connected, and which of them wait for the others before the run begins: a pure state machine."""

from __future__ import annotations

from chaoskit.errors import Refused


class Attendance:
    """The first nodes are admitted together, so that ranks follow their names, not the accident of who came first.

    Args:
        full: as many nodes need not wait any longer.
        until_s: nor does anybody after this time.
    """

    def __init__(self, full: int, until_s: float) -> None:
        self._full, self._until_s = full, until_s
        self._from_s: float | None = None
        self._attached: set[str] = set()
        self._met: set[str] = set()
        self._waiting: list[str] | None = []  # None: whoever comes is admitted at once

    @property
    def attached(self) -> frozenset[str]:
        """Nodes that are connected."""
        return frozenset(self._attached)

    @property
    def met(self) -> frozenset[str]:
        """Nodes that have ever connected."""
        return frozenset(self._met)

    def connect(self, node: str) -> None:
        """A node has connected.

        Raises:
            Refused: if one of that name is connected already.
        """
        if node in self._attached:
            raise Refused(f"a node named {node} is connected already")
        self._attached.add(node)
        self._met.add(node)

    def reconnect(self, node: str) -> None:
        """The same node has connected again, whether the end of its last connection was noticed or not."""
        self._attached.add(node)
        self._met.add(node)

    def disconnect(self, node: str) -> None:
        """Its connection has ended."""
        self._attached.discard(node)
        if self._waiting and node in self._waiting:
            self._waiting.remove(node)

    def begin(self) -> None:
        """The first nodes were admitted before: nobody waits."""
        self._waiting = None

    def hurry(self, until_s: float) -> None:
        """Wait no longer than this."""
        self._until_s = min(self._until_s, until_s)

    def linger(self, from_s: float) -> None:
        """Admit nobody before this: more than make a full world may come. The first word on it counts."""
        self._from_s = from_s if self._from_s is None else self._from_s

    def arrive(self, node: str, now_s: float) -> list[str]:
        """A connected node wants to take part: who is admitted now."""
        if self._waiting is None:
            return [node]
        if node not in self._waiting:
            self._waiting.append(node)
        return self.due(now_s)

    def due(self, now_s: float) -> list[str]:
        """Who is admitted because all are there, or those who are missing were waited for long enough."""
        if not self._waiting or (self._from_s is not None and now_s < self._from_s):
            return []
        return self._admit() if len(self._waiting) >= self._full or now_s > self._until_s else []

    def _admit(self) -> list[str]:
        admitted, self._waiting = sorted(self._waiting or []), None
        return admitted
