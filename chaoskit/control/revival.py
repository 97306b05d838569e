"""When nobody has the state of the training any more: who is asked for copies, which are known, how long to wait.

A pure part of :mod:`chaoskit.control.membership`. It is idle while a live worker has the state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from chaoskit.messages import Plan, Snapshot

#: The nodes have this long to say what they can offer; sealing takes the time to read the state once.
RECALL_S = 2.0
#: A world that begins with copies waits this long for the next worker to become ready.
GATHER_S = 0.25


class Revival:
    """Collects sealed copies from the nodes, from the loss of the last holder until there is one again."""

    def __init__(self) -> None:
        self._since_s = math.inf
        self._moved_s = math.inf  # when a node last answered or was lost, or a copy failed: ticks are not remembered
        self._answered: dict[str, bool] = {}  # of the nodes that were asked
        self._snapshots: list[Snapshot] = []
        self._corrupt: set[Snapshot] = set()

    @property
    def active(self) -> bool:
        """Whether no live worker has the state."""
        return self._since_s < math.inf

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """What can be restored, the newest first. Of a state in pieces: if every piece is there.

        A state that was taken over by a world of another size may be there in two cuts: one of them is as good.
        """
        found: dict[tuple[tuple[int, int], int], set[int]] = {}
        for snapshot in self._snapshots:
            found.setdefault((snapshot.age, snapshot.pieces), set()).add(snapshot.piece)
        cuts = {age: pieces for (age, pieces), there in sorted(found.items()) if len(there) == pieces}
        once: dict[object, Snapshot] = {}
        for snapshot in self._snapshots:
            once.setdefault(snapshot.path or snapshot, snapshot)  # all nodes see what is stored
        whole = [one for one in once.values() if cuts.get(one.age) == one.pieces]
        return tuple(sorted(whole, key=lambda snapshot: snapshot.age, reverse=True))

    def begin(self, nodes: Sequence[str], now_s: float) -> list[str]:
        """Nobody has the state: which of the live ``nodes`` are to be asked now. To be called until :meth:`end`."""
        if not self.active:
            self._since_s = self._moved_s = now_s
        fresh = [node for node in nodes if node not in self._answered]
        self._answered.update((node, False) for node in fresh)
        return fresh

    def end(self) -> None:
        """Somebody has the state. Copies that are known are soon too old; corrupt ones are remembered."""
        self._since_s = self._moved_s = math.inf
        self._answered, self._snapshots = {}, []

    def asks(self, node: str) -> bool:
        """Whether ``node`` was asked and has not answered."""
        return self._answered.get(node) is False

    def answer(self, node: str, snapshots: Collection[Snapshot], now_s: float) -> None:
        """What a node can offer. Whoever was not asked is not heard."""
        if self.asks(node):
            self._answered[node], self._moved_s = True, now_s
            self._snapshots += [one for one in snapshots if not any(_same(one, other) for other in self._corrupt)]

    def lose_node(self, node: str, now_s: float) -> None:
        """What was kept on it is gone."""
        self._moved_s = now_s
        self._answered.pop(node, None)
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.node != node]

    def fail(self, snapshot: Snapshot, corrupt: bool, now_s: float) -> None:
        """A copy could not be restored; one that is corrupt is never taken again."""
        self._moved_s = now_s
        self._snapshots = [other for other in self._snapshots if not _same(other, snapshot)]
        self._corrupt.update([snapshot] if corrupt else [])

    def waited_s(self, now_s: float) -> float:
        """Since the last holder was lost."""
        return now_s - self._since_s

    def is_asking(self, now_s: float) -> bool:
        """Whether an answer is worth waiting for: it may be newer than what is known."""
        return self.waited_s(now_s) < RECALL_S and not all(self._answered.values())

    @property
    def owed(self) -> bool:
        """Whether some node that was asked has not answered, however long ago that was."""
        return not all(self._answered.values())

    def bare_s(self, now_s: float) -> float:
        """For how long there has been nothing to restore, and no answer to wait for; 0 while there is."""
        if self.snapshots or self.is_asking(now_s):
            return 0.0
        asked_s = self._since_s if all(self._answered.values()) else self._since_s + RECALL_S
        return now_s - max(self._moved_s, asked_s)

    def serves(self, plan: Plan) -> bool:
        """Whether the copies that ``plan`` tells its members to begin with can still be read: one of each piece."""
        newest = [snapshot for snapshot in plan.restore if snapshot.age == plan.restore[0].age]
        left = {snapshot.piece for snapshot in newest if snapshot in self._snapshots}
        return left == {snapshot.piece for snapshot in newest}


def _same(one: Snapshot, other: Snapshot) -> bool:
    """Whether two offers are of the same bytes: whatever is stored, every node may offer."""
    return one == other or bool(one.path and one.path == other.path)
