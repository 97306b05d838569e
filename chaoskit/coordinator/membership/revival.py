"""When nobody has the state of the training any more: who is asked for copies, which are known, how long to wait.

A pure part of :mod:`chaoskit.coordinator.membership.renewal`. It is idle while a live worker has the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from chaoskit.coordinator.membership.limits import LIMITS, Limits
from chaoskit.wire.messages import Endpoint, Plan, Snapshot

#: So often a copy that cannot be read is taken for one that is overwritten; then older ones are better.
ATTEMPTS_MAX = 2
_ANYWHERE = Endpoint("", "", 0, 0, -1)


@dataclass(frozen=True, slots=True)
class _Failures:
    """Of one copy: how often it could not be read, and when."""

    count: int = 0
    first_s: float = math.inf
    last_s: float = -math.inf

    def add(self, now_s: float) -> _Failures:
        return _Failures(self.count + 1, min(self.first_s, now_s), now_s)

    def is_lasting(self, limits: Limits) -> bool:
        return self.last_s - self.first_s > limits.reach_s

    def again_s(self, limits: Limits) -> float:
        """When it is worth another attempt."""
        if self.count < ATTEMPTS_MAX:
            return self.last_s
        return self.last_s + min(
            limits.retry_max_s, limits.retry_s * 2.0 ** (self.count - ATTEMPTS_MAX)
        )


def complete(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Those of ages of which every piece is there, the newest first.

    Worlds of different sizes cut the same state differently. What comes from two cuts need not make up a state, so
    there is one of each age.
    """
    found: dict[tuple[tuple[int, int], int], set[int]] = {}
    for snapshot in snapshots:
        found.setdefault((snapshot.age, snapshot.pieces), set()).add(snapshot.piece)
    cuts = dict(sorted(cut for cut, there in found.items() if len(there) == cut[1]))
    once: dict[object, Snapshot] = {}
    for snapshot in snapshots:
        once.setdefault(snapshot.path or snapshot, snapshot)  # all nodes see what is stored
    whole = [one for one in once.values() if cuts.get(one.age) == one.pieces]
    return tuple(sorted(whole, key=lambda snapshot: snapshot.age, reverse=True))


class Revival:
    """Collects sealed copies from the nodes, from the loss of the last holder until there is one again.

    Args:
        restorable: which of the copies that are known a world can begin with, the newest first.

    Attributes:
        outdated: the ranks trained on after some nodes had answered, as a node that came back or was slow to answer
            shows. What those nodes told is too old to be put beside its answer.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        restorable: Callable[[Sequence[Snapshot]], tuple[Snapshot, ...]] = complete,
    ) -> None:
        self._limits, self._restorable = limits, restorable
        self._since_s = math.inf
        self._moved_s = (
            math.inf
        )  # when a node last answered or was lost, or a copy failed: ticks are not remembered
        self._restoring_s = math.inf  # since the first plan that names copies
        self._sealed_s = -math.inf  # until when a member that has ended may have sealed a piece
        self._number = -1  # of the last question
        self._asked_s = math.inf
        self._asked_before = False  # since the last holder was lost
        self._questions_s: dict[str, float] = {}  # when the nodes were asked
        self._told_s: dict[str, float | None] = {}  # when the nodes that were asked have answered
        self._known: set[str] = set()  # nodes that were ever asked, since the last holder was lost
        self._late: set[str] = set()  # of these, who came later than others and has never answered
        self.outdated = False
        self._committed = 0  # steps, by what they answered
        self._reached = (
            0  # the newest step of which any node has told since the last holder was lost
        )
        self._snapshots: list[Snapshot] = []
        self._resting: list[Snapshot] = []  # offered, too, but lately nobody could read them
        self._corrupt: set[Snapshot] = set()
        self._convicts: set[str] = set()  # workers
        self._withheld = (
            False  # whether a node has told of a convict's copy, since the last question
        )
        self._failed: dict[
            Snapshot, _Failures
        ] = {}  # since the last holder was lost, wherever they were offered

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
        """What can be restored, the newest first. Of a state in pieces: if every piece is there."""
        return self._restorable(self._snapshots)

    @property
    def awaits_reach(self) -> bool:
        """Whether to wait for copies that could not be read, but are there: others are older, or there are none."""
        if not self._resting:
            return False
        known = self.snapshots
        failed = {one: self._failed[_identity(one)] for one in self._resting}
        hopeful = [
            one for one in self._resting if not known or not failed[one].is_lasting(self._limits)
        ]
        found = self._restorable([*self._snapshots, *hopeful])
        return bool(found) and (not known or found[0].age > known[0].age)

    def is_due(self, now_s: float) -> bool:
        """Whether some copy that could not be read is worth another attempt."""
        return any(
            now_s >= self._failed[_identity(snapshot)].again_s(self._limits)
            for snapshot in self._resting
        )

    def begin(self, nodes: Sequence[str], now_s: float) -> list[str]:
        """Nobody has the state: which of the live ``nodes`` are to be asked now. To be called until :meth:`end`."""
        if not self.active:
            self._since_s = self._moved_s = now_s
        if self._asked_s == math.inf:
            self._number += 1
        fresh = [node for node in nodes if node not in self._told_s]
        if fresh or self._asked_s == math.inf:
            self._asked_s = now_s
        self._told_s.update((node, None) for node in fresh)
        self._questions_s.update((node, now_s) for node in fresh)
        if self._known:
            self._late.update(node for node in fresh if node not in self._known)
        self._known.update(fresh)
        return fresh

    def ask_again(self) -> None:
        """What the nodes have said may not hold any more."""
        self._asked_s, self._asked_before, self.outdated = math.inf, True, False
        self._told_s, self._snapshots, self._resting, self._committed = {}, [], [], 0
        self._withheld = False

    def ask_anew(self, node: str) -> None:
        """What ``node`` has said may not hold any more: a worker there has ended that was to restore a copy."""
        self._told_s.pop(node, None)
        self._forget(node)

    def lose_member(self, now_s: float) -> None:
        """A member of a sharded job has ended. Until then it may have sealed its piece, which nodes keep."""
        self._sealed_s = now_s

    @property
    def misses_pieces(self) -> bool:
        """Return whether nothing complete is known, and some node was asked before the last member ended."""
        asked_s = [
            self._questions_s[node] for node, told_s in self._told_s.items() if told_s is not None
        ]
        return not self.snapshots and any(question_s < self._sealed_s for question_s in asked_s)

    def end(self) -> None:
        """Somebody has the state. Copies that are known are soon too old; corrupt ones are remembered."""
        self.ask_again()
        self._since_s = self._moved_s = self._restoring_s = math.inf
        self._asked_before = False
        self._reached = 0
        self._failed.clear()
        self._known.clear()
        self._late.clear()

    def restore(self, now_s: float) -> tuple[Snapshot, ...]:
        """The copies for a plan that is published now."""
        self._restoring_s = min(self._restoring_s, now_s)
        return self.snapshots

    def asks(self, node: str) -> bool:
        """Whether ``node`` was asked and has not answered."""
        return node in self._told_s and self._told_s[node] is None

    def answer(
        self,
        node: str,
        snapshots: Collection[Snapshot],
        now_s: float,
        *,
        number: int = 0,
        committed: int = 0,
    ) -> None:
        """What a node can offer. Whoever was not asked is not heard, nor is an answer to an earlier question.

        A node that was asked twice, by two coordinators, offers its copies anew: then only these can be read.
        """
        if node not in self._told_s or number != self._number:
            return
        self._told_s[node] = now_s
        if node in self._late or not self._asked_before:
            self._moved_s = now_s
        reached = max([committed, *(snapshot.step for snapshot in snapshots)])
        trained_on = node in self._late or reached > self._reached
        self.outdated |= trained_on and now_s > min(self._answers_s) + self._limits.apart_s
        self._reached = max(self._reached, reached)
        self._late.discard(node)
        self._committed = max(self._committed, committed)
        self._forget(node)
        for snapshot in snapshots:
            known = _identity(snapshot)
            if snapshot.worker in self._convicts:
                self._withheld = True
            elif known not in self._corrupt:
                rests = now_s < self._failed.get(known, _Failures()).again_s(self._limits)
                (self._resting if rests else self._snapshots).append(snapshot)

    def convict(self, workers: Collection[str]) -> None:
        """The states of ``workers`` were found corrupt, maybe some steps late: no copy of them is ever taken."""
        self._convicts.update(workers)
        kept = [snapshot for snapshot in self._snapshots if snapshot.worker not in workers]
        self._withheld |= len(kept) < len(self._snapshots)
        self._snapshots = kept
        self._resting = [snapshot for snapshot in self._resting if snapshot.worker not in workers]

    def is_convicted(self, worker: str) -> bool:
        """Whether no copy of its state is taken."""
        return worker in self._convicts

    @property
    def withheld(self) -> bool:
        """Whether there are copies that are not offered, as the state of their worker was found corrupt."""
        return self._withheld

    def _forget(self, node: str) -> None:
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.node != node]
        self._resting = [snapshot for snapshot in self._resting if snapshot.node != node]

    def has_heard(self, nodes: Collection[str]) -> bool:
        """Whether all these have answered."""
        return all(self._told_s.get(node) is not None for node in nodes)

    @property
    def is_virgin(self) -> bool:
        """Whether no step was committed but the first, perhaps: then one can as well begin anew."""
        return self._committed <= 1 and all(snapshot.step <= 1 for snapshot in self._snapshots)

    def lose_node(self, node: str, now_s: float) -> None:
        """What was kept on it is gone."""
        self._moved_s = now_s
        self._told_s.pop(node, None)
        self._known.discard(node)
        self._late.discard(node)
        self._forget(node)

    def fail(self, snapshot: Snapshot, corrupt: bool, now_s: float) -> None:
        """A copy could not be restored; one that is corrupt is never taken again."""
        if snapshot in self._snapshots:  # several workers may say so
            known = _identity(snapshot)
            self._failed[known] = self._failed.get(known, _Failures()).add(now_s)
        self._moved_s = now_s
        self._snapshots = [
            one for one in self._snapshots if one != snapshot and not _is_stored_as(one, snapshot)
        ]
        self._corrupt.update([_identity(snapshot)] if corrupt else [])

    def waited_s(self, now_s: float) -> float:
        """Since the last holder was lost."""
        return now_s - self._since_s

    def fruitless_s(self, now_s: float) -> float:
        """Since workers were first told to take copies over; before that, since it last became another matter."""
        return now_s - (self._restoring_s if self._restoring_s < math.inf else self._moved_s)

    def is_asking(self, now_s: float) -> bool:
        """Whether an answer is worth waiting for: it may be newer than what is known."""
        return now_s - self._asked_s < self._limits.recall_s and self.owed

    def is_stale(self, now_s: float, *, trains_on: bool) -> bool:
        """Return whether the nodes may have newer copies by now than those that they told of.

        Args:
            trains_on: all ranks train while the nodes are asked, and no answer that is owed is waited for.
        """
        told_s = max(self._answers_s, default=-math.inf)
        if self.owed and not trains_on:
            told_s = self._asked_s + self._limits.recall_s
        return self.active and now_s > max(told_s, self._asked_s) + self._limits.fresh_s

    @property
    def _answers_s(self) -> list[float]:
        return [told_s for told_s in self._told_s.values() if told_s is not None]

    @property
    def owed(self) -> bool:
        """Whether some node that was asked has not answered, however long ago that was."""
        return None in self._told_s.values()

    def bare_s(self, now_s: float) -> float:
        """For how long there has been nothing to restore, and no answer to wait for; 0 while there is."""
        if self.snapshots or self.is_asking(now_s):
            return 0.0
        asked_s = self._since_s + self._limits.recall_s if self.owed else self._since_s
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
