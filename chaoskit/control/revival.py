"""When nobody has the state of the training any more: who is asked for copies, which are known, how long to wait.

A pure part of :mod:`chaoskit.control.membership`. It is idle while a live worker has the state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from chaoskit.messages import Endpoint, Plan, Snapshot

#: The nodes have this long to say what they can offer; sealing takes the time to read the state once.
RECALL_S = 2.0
#: Training may go on while the nodes answer. An answer that is older than this is not acted upon: they are asked again.
FRESH_S = 0.1
#: A world that begins with copies waits this long for the next worker to become ready.
GATHER_S = 0.25
#: So often a copy that cannot be read is taken for one that is overwritten; then older ones are better.
ATTEMPTS_MAX = 2
_ANYWHERE = Endpoint("", "", 0, 0, -1)


class Revival:
    """Collects sealed copies from the nodes, from the loss of the last holder until there is one again."""

    def __init__(self) -> None:
        self._since_s = math.inf
        self._moved_s = math.inf  # when a node last answered or was lost, or a copy failed: ticks are not remembered
        self._restoring_s = math.inf  # since the first plan that names copies
        self._number = -1  # of the last question
        self._asked_s = math.inf
        self._told_s = -math.inf  # the last answer
        self._asked_before = False  # since the last holder was lost
        self._answered: dict[str, bool] = {}  # of the nodes that were asked
        self._committed = 0  # steps, by what they answered
        self._snapshots: list[Snapshot] = []
        self._corrupt: set[Snapshot] = set()
        self._failed: Counter[Snapshot] = Counter()  # since the last holder was lost, wherever they were offered

    @property
    def active(self) -> bool:
        """Whether no live worker has the state."""
        return self._since_s < math.inf

    @property
    def number(self) -> int:
        """Of the question that the nodes were asked last."""
        return self._number

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """What can be restored, the newest first. Of a state in pieces: if every piece is there.

        Worlds of different sizes cut the same state differently. What comes from two cuts need not make up a state, so
        there is one of each age.
        """
        found: dict[tuple[tuple[int, int], int], set[int]] = {}
        for snapshot in self._snapshots:
            found.setdefault((snapshot.age, snapshot.pieces), set()).add(snapshot.piece)
        cuts = dict(sorted(cut for cut, there in found.items() if len(there) == cut[1]))
        once: dict[object, Snapshot] = {}
        for snapshot in self._snapshots:
            once.setdefault(snapshot.path or snapshot, snapshot)  # all nodes see what is stored
        whole = [one for one in once.values() if cuts.get(one.age) == one.pieces]
        return tuple(sorted(whole, key=lambda snapshot: snapshot.age, reverse=True))

    def begin(self, nodes: Sequence[str], now_s: float) -> list[str]:
        """Nobody has the state: which of the live ``nodes`` are to be asked now. To be called until :meth:`end`."""
        if not self.active:
            self._since_s = self._moved_s = now_s
        if self._asked_s == math.inf:
            self._number += 1
        fresh = [node for node in nodes if node not in self._answered]
        if fresh or self._asked_s == math.inf:
            self._asked_s = now_s
        self._answered.update((node, False) for node in fresh)
        return fresh

    def ask_again(self) -> None:
        """What the nodes have said may not hold any more."""
        self._asked_s, self._asked_before = math.inf, True
        self._answered, self._snapshots, self._committed = {}, [], 0

    def end(self) -> None:
        """Somebody has the state. Copies that are known are soon too old; corrupt ones are remembered."""
        self.ask_again()
        self._since_s = self._moved_s = self._restoring_s = math.inf
        self._asked_before = False
        self._failed.clear()

    def restore(self, now_s: float) -> tuple[Snapshot, ...]:
        """The copies for a plan that is published now."""
        self._restoring_s = min(self._restoring_s, now_s)
        return self.snapshots

    def asks(self, node: str) -> bool:
        """Whether ``node`` was asked and has not answered."""
        return self._answered.get(node) is False

    def answer(
        self, node: str, snapshots: Collection[Snapshot], now_s: float, *, number: int = 0, committed: int = 0
    ) -> None:
        """What a node can offer. Whoever was not asked is not heard, nor is an answer to an earlier question.

        A node that was asked twice, by two coordinators, offers its copies anew: then only these can be read.
        """
        if node not in self._answered or number != self._number:
            return
        self._answered[node], self._told_s = True, now_s
        self._committed = max(self._committed, committed)
        if not self._asked_before:
            self._moved_s = now_s
        others = [snapshot for snapshot in self._snapshots if snapshot.node != node]
        self._snapshots = others + [snapshot for snapshot in snapshots if self._is_worth_trying(snapshot)]

    def _is_worth_trying(self, copy: Snapshot) -> bool:
        known = _identity(copy)
        return self._corrupt.isdisjoint((copy, known)) and self._failed[known] < ATTEMPTS_MAX

    def has_heard(self, nodes: Collection[str]) -> bool:
        """Whether all these have answered."""
        return all(self._answered.get(node) for node in nodes)

    @property
    def is_virgin(self) -> bool:
        """Whether no step was committed but the first, perhaps: then one can as well begin anew."""
        return self._committed <= 1 and all(snapshot.step <= 1 for snapshot in self._snapshots)

    def lose_node(self, node: str, now_s: float) -> None:
        """What was kept on it is gone."""
        self._moved_s = now_s
        self._answered.pop(node, None)
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.node != node]

    def fail(self, snapshot: Snapshot, corrupt: bool, now_s: float) -> None:
        """A copy could not be restored; one that is corrupt is never taken again."""
        self._moved_s = now_s
        self._snapshots = [one for one in self._snapshots if one != snapshot and not _is_stored_as(one, snapshot)]
        self._corrupt.update([_identity(snapshot) if snapshot.path else snapshot] if corrupt else [])
        self._failed[_identity(snapshot)] += 1

    def waited_s(self, now_s: float) -> float:
        """Since the last holder was lost."""
        return now_s - self._since_s

    def fruitless_s(self, now_s: float) -> float:
        """Since workers were first told to take copies over; before that, since the last holder was lost."""
        return now_s - (self._restoring_s if self._restoring_s < math.inf else self._since_s)

    def is_asking(self, now_s: float) -> bool:
        """Whether an answer is worth waiting for: it may be newer than what is known."""
        return now_s - self._asked_s < RECALL_S and not all(self._answered.values())

    def is_stale(self, now_s: float) -> bool:
        """Whether the nodes may have newer copies by now than those that they told of."""
        told_s = self._told_s if all(self._answered.values()) else self._asked_s + RECALL_S
        return self.active and now_s > max(told_s, self._asked_s) + FRESH_S

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


def _identity(snapshot: Snapshot) -> Snapshot:
    """The copy, wherever it can be read at the moment; of what is stored, whoever offers it."""
    if snapshot.path:
        return msgspec.structs.replace(snapshot, endpoint=_ANYWHERE, node="", worker="")
    return msgspec.structs.replace(snapshot, endpoint=_ANYWHERE)


def _is_stored_as(one: Snapshot, other: Snapshot) -> bool:
    return bool(one.path) and one.path == other.path
