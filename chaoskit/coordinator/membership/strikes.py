"""Budgets of failures: lost workers of a node, and the same exception on rank after rank.

Pure state machines.

-> coordinator/membership/failure_budget.py: lost workers of the whole run (``max_failures``). The
repeats of an exception are counted in coordinator/handlers/on_end.py, of a hang in on_suspicion.py,
and of a generation that stalls in on_generation.py.
"""

from __future__ import annotations

from collections import deque

#: Time for which the loss of a worker counts against its node.
STRIKE_WINDOW_S = 60.0


class Strikes:
    """Counter of the lost workers of each node.

    A node with ``limit`` strikes within ``window_s`` seconds is set aside: it gets no more workers,
    as long as it is the same machine.

    Args:
        limit: number of strikes that sets a node aside; 0 for never.
        window_s: how long a strike counts, in seconds.
    """

    def __init__(self, limit: int, window_s: float = STRIKE_WINDOW_S) -> None:
        self._limit, self._window_s = limit, window_s
        self._struck_s: dict[str, deque[float]] = {}
        self._aside: set[str] = set()
        self._machines: dict[str, str] = {}

    def note_machine(self, node: str, machine: str) -> None:
        """Note that ``node`` is on ``machine``.

        If another machine had that name, its strikes end, and the node is set aside no more.
        """
        if self._machines.get(node, machine) != machine:
            self._struck_s.pop(node, None)
            self._aside.discard(node)
        self._machines[node] = machine

    def strike(self, node: str, now_s: float) -> bool:
        """Count the loss of a worker of ``node``.

        Return True if the node is set aside because of this loss. Return False otherwise, also if
        it was set aside before.
        """
        if not self._limit or node in self._aside:
            return False
        struck_s = self._struck_s.setdefault(node, deque(maxlen=self._limit))
        struck_s.append(now_s)
        if len(struck_s) < self._limit or now_s - struck_s[0] > self._window_s:
            return False
        self._aside.add(node)
        return True

    def set_aside(self, node: str) -> None:
        """Set ``node`` aside, whatever its number of strikes."""
        self._aside.add(node)

    def trusted(self, nodes: list[str]) -> list[str]:
        """Return the nodes of ``nodes`` that are not set aside; all if none would be left."""
        return [node for node in nodes if node not in self._aside] or nodes


class Repeats:
    """Counter of equal failures on rank after rank without a committed step in between.

    Such a failure is in the job, not in a rank. The failure of a worker counts once, however often
    it is reported. The caller ends the job.

    Args:
        tolerated: number of failures of one kind without progress; one more is too many.
    """

    def __init__(self, tolerated: int) -> None:
        self._tolerated = tolerated
        self._step = -1
        self._count = 0
        self._error = ""
        self._counted_workers: set[str] = set()

    def note(self, error: str, step: int, worker: str = "") -> bool:
        """Count that ``worker`` failed with ``error`` when ``step`` steps were committed.

        Another error or step restarts the count. Without a ``worker`` each call counts.

        Returns:
            True if more failures than tolerated were counted, so that the job should end. False for
            a failure that was counted before.
        """
        if (error, step) != (self._error, self._step):
            self._error, self._step, self._count, self._counted_workers = error, step, 0, set()
        if worker in self._counted_workers:
            return False
        self._counted_workers.update([worker] if worker else [])
        self._count += 1
        return self._count > self._tolerated
