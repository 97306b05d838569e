"""Nodes that are connected, and those that wait for others before the run begins. Pure.

-> coordinator/handlers/on_node.py has the admitted nodes join the membership.
coordinator/membership/worker_placement.py: the first start of workers;
coordinator/membership/decide.py: the first plan, and the end of a start that takes too long.
"""

from __future__ import annotations

from chaoskit.errors import Refused


class Attendance:
    """Attendance of the nodes of a run.

    The first nodes are admitted together, so that ranks follow their names, not the accident of
    their arrival.

    Args:
        full_count: number of nodes that need not wait any longer.
        until_s: no node waits after this time, on CLOCK_MONOTONIC.
    """

    def __init__(self, full_count: int, until_s: float) -> None:
        self._full_count, self._until_s = full_count, until_s
        self._from_s: float | None = None
        self._attached: set[str] = set()
        self._met: set[str] = set()
        self._waiting: list[str] | None = []  # None: nodes are admitted at once

    @property
    def attached(self) -> frozenset[str]:
        """Nodes that are connected."""
        return frozenset(self._attached)

    @property
    def met(self) -> frozenset[str]:
        """Nodes that have ever connected."""
        return frozenset(self._met)

    def connect(self, node: str) -> None:
        """Note that a node has connected.

        Raises:
            Refused: if a node of that name is connected already.
        """
        if node in self._attached:
            raise Refused(f"a node named {node} is connected already")
        self._attached.add(node)
        self._met.add(node)

    def reconnect(self, node: str) -> None:
        """Note that a node has connected again. The end of its last connection may be unnoticed."""
        self._attached.add(node)
        self._met.add(node)

    def disconnect(self, node: str) -> None:
        """Note that the connection of a node has ended. It does not wait for admission any more."""
        self._attached.discard(node)
        if self._waiting and node in self._waiting:
            self._waiting.remove(node)

    def begin(self) -> None:
        """Let no node wait: the first nodes were admitted before."""
        self._waiting = None

    def admit_all_by(self, until_s: float) -> None:
        """Let no node wait for others after ``until_s``."""
        self._until_s = min(self._until_s, until_s)

    def admit_none_before(self, from_s: float) -> None:
        """Hold the first nodes until ``from_s``, as more than a full world needs may reconnect.

        Further calls change nothing. Nodes that come after the first ones are admitted at once.
        """
        self._from_s = from_s if self._from_s is None else self._from_s

    def arrive(self, node: str, now_s: float) -> list[str]:
        """Note that a connected node can join, and return the nodes that are admitted now.

        The node itself is returned at once if the first nodes were admitted before.
        """
        if self._waiting is None:
            return [node]
        if node not in self._waiting:
            self._waiting.append(node)
        return self.due(now_s)

    def due(self, now_s: float) -> list[str]:
        """Return the nodes that are admitted now, by name; each node is returned once.

        They are admitted when all have come, or when the time to wait for the others is over. None
        is admitted before the time of :meth:`admit_none_before`.
        """
        if not self._waiting or (self._from_s is not None and now_s < self._from_s):
            return []
        return (
            self._admit() if len(self._waiting) >= self._full_count or now_s > self._until_s else []
        )

    def _admit(self) -> list[str]:
        admitted, self._waiting = sorted(self._waiting or []), None
        return admitted
