"""Which nodes have failed too often lately to be trusted with another worker: a pure state machine."""

from __future__ import annotations

from collections import deque

#: How long the loss of a worker counts against its node.
STRIKE_WINDOW_S = 60.0


class Strikes:
    """A node with ``limit`` strikes within ``window_s`` seconds is set aside, as long as it is the same machine.

    Args:
        limit: strikes that set a node aside; 0: none ever.
        window_s: how long a strike counts.
    """

    def __init__(self, limit: int, window_s: float = STRIKE_WINDOW_S) -> None:
        self._limit, self._window_s = limit, window_s
        self._struck_s: dict[str, deque[float]] = {}
        self._aside: set[str] = set()
        self._machines: dict[str, str] = {}

    def meet(self, node: str, machine: str) -> None:
        """``machine`` bears the name of ``node`` from now on: what another one did under that name does not count."""
        if self._machines.get(node, machine) != machine:
            self._struck_s.pop(node, None)
            self._aside.discard(node)
        self._machines[node] = machine

    def strike(self, node: str, now_s: float) -> bool:
        """A worker of ``node`` was lost. True if the node is set aside because of this one."""
        if not self._limit or node in self._aside:
            return False
        struck_s = self._struck_s.setdefault(node, deque(maxlen=self._limit))
        struck_s.append(now_s)
        if len(struck_s) < self._limit or now_s - struck_s[0] > self._window_s:
            return False
        self._aside.add(node)
        return True

    def condemn(self, node: str) -> None:
        """Set ``node`` aside, whatever its strikes."""
        self._aside.add(node)

    def trusted(self, nodes: list[str]) -> list[str]:
        """Those of ``nodes`` that may be given workers; all of them, if none would be left."""
        return [node for node in nodes if node not in self._aside] or nodes
