"""Search for copies of the state once no live worker has it: questions to the nodes, and answers.

-> coordinator/membership/restart_from_copies.py decides when to ask, and when a generation begins
with the copies. daemon/replica_keeper.py and daemon/piece_keeper.py: which copies a node keeps
and offers. runtime/step/restore.py: which of the copies a rank reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from chaoskit.coordinator.membership.limits import LIMITS, Limits
from chaoskit.wire.messages import Endpoint, OfferedSnapshot, Plan

#: Failed reads of a copy that may be due to its being overwritten; after more, a retry is delayed.
ATTEMPTS_MAX = 2
_ANYWHERE = Endpoint("", "", 0, 0, -1)

Restorable = Callable[[Sequence[OfferedSnapshot]], tuple[OfferedSnapshot, ...]]


def complete_snapshots(snapshots: Sequence[OfferedSnapshot]) -> tuple[OfferedSnapshot, ...]:
    """Return the snapshots of each age of which every piece is offered, the newest first.

    Worlds of different sizes cut the same state differently. Pieces of two cuts need not make up a
    state, so one cut of each age is returned: the complete one with the most pieces. A stored
    snapshot that several nodes offer is returned once.
    """
    pieces: dict[tuple[tuple[int, int], int], set[int]] = {}
    for snapshot in snapshots:
        pieces.setdefault((snapshot.age, snapshot.pieces), set()).add(snapshot.piece)
    cuts = dict(
        sorted(cut for cut, offered_pieces in pieces.items() if len(offered_pieces) == cut[1])
    )
    distinct_snapshots: dict[object, OfferedSnapshot] = {}
    for snapshot in snapshots:
        # all nodes see the same disk
        distinct_snapshots.setdefault(snapshot.path or snapshot, snapshot)
    complete = [
        snapshot
        for snapshot in distinct_snapshots.values()
        if cuts.get(snapshot.age) == snapshot.pieces
    ]
    return tuple(sorted(complete, key=lambda snapshot: snapshot.age, reverse=True))


@dataclass(frozen=True, slots=True)
class _Failures:
    """Failed reads of one copy."""

    count: int = 0
    first_s: float = math.inf
    last_s: float = -math.inf

    def add(self, now_s: float) -> _Failures:
        return _Failures(self.count + 1, min(self.first_s, now_s), now_s)

    def is_lasting(self, limits: Limits) -> bool:
        """Return whether reads have failed for so long that older copies are better."""
        return self.last_s - self.first_s > limits.reach_s

    def retry_s(self, limits: Limits) -> float:
        """Return the time of the next attempt, which is later after each failure."""
        if self.count < ATTEMPTS_MAX:
            return self.last_s
        return self.last_s + min(
            limits.retry_max_s, limits.retry_s * 2.0 ** (self.count - ATTEMPTS_MAX)
        )


class KnownCopies:
    """The copies that nodes offer, without those that are corrupt or cannot be read at the moment.

    Args:
        limits: times of retries, and the time after which older copies are better.
        restorable: returns which of the offered copies a world can begin with, the newest first.
    """

    def __init__(self, limits: Limits, restorable: Restorable) -> None:
        self._limits, self._restorable = limits, restorable
        self._offered_copies: list[OfferedSnapshot] = []
        self._delayed_copies: list[OfferedSnapshot] = []  # offered, but not read before their retry
        # failed reads since the last worker with the state was lost, by identity of the copy
        self._failures: dict[OfferedSnapshot, _Failures] = {}
        self._corrupt_copies: set[OfferedSnapshot] = set()
        self._convicts: set[str] = set()  # workers with corrupt numbers
        self._withheld = False

    @property
    def restorable(self) -> tuple[OfferedSnapshot, ...]:
        """The copies that a world can begin with, the newest first; all pieces of a sharded job."""
        return self._restorable(self._offered_copies)

    @property
    def withheld(self) -> bool:
        """True if copies are not taken because the state of their worker was found corrupt."""
        return self._withheld

    @property
    def are_of_first_step(self) -> bool:
        """True if no copy is newer than the first step; also without copies."""
        return all(snapshot.step <= 1 for snapshot in self._offered_copies)

    @property
    def awaits_retry(self) -> bool:
        """True if a retry of copies that could not be read is worth the wait.

        The other copies are older, or there are none.
        """
        if not self._delayed_copies:
            return False
        readable_copies = self.restorable
        failures = {
            snapshot: self._failures[_identity(snapshot)] for snapshot in self._delayed_copies
        }
        worth_a_retry = [
            copy
            for copy in self._delayed_copies
            if not readable_copies or not failures[copy].is_lasting(self._limits)
        ]
        after_retry = self._restorable([*self._offered_copies, *worth_a_retry])
        return bool(after_retry) and (
            not readable_copies or after_retry[0].age > readable_copies[0].age
        )

    def is_retry_due(self, now_s: float) -> bool:
        """Return whether it is time for another attempt to read a copy that could not be read."""
        return any(
            now_s >= self._failures[_identity(snapshot)].retry_s(self._limits)
            for snapshot in self._delayed_copies
        )

    def serves(self, plan: Plan) -> bool:
        """Return whether each piece of the newest copy that ``plan`` names is still offered.

        True for a plan that names no copies.
        """
        newest = [snapshot for snapshot in plan.restore if snapshot.age == plan.restore[0].age]
        offered_pieces = {snapshot.piece for snapshot in newest if snapshot in self._offered_copies}
        return offered_pieces == {snapshot.piece for snapshot in newest}

    def is_convicted(self, worker: str) -> bool:
        """Return whether the numbers of ``worker`` were found corrupt: its copies are not taken."""
        return worker in self._convicts

    def offer(self, node: str, snapshots: Collection[OfferedSnapshot], now_s: float) -> None:
        """Replace the offer of ``node`` by ``snapshots``.

        Corrupt copies and those of convicts are ignored. Copies that could not be read are kept for
        their retry.
        """
        self.forget_node(node)
        for snapshot in snapshots:
            identity = _identity(snapshot)
            if snapshot.worker in self._convicts:
                self._withheld = True
            elif identity not in self._corrupt_copies:
                retry_s = self._failures.get(identity, _Failures()).retry_s(self._limits)
                (self._delayed_copies if now_s < retry_s else self._offered_copies).append(snapshot)

    def fail(self, snapshot: OfferedSnapshot, corrupt: bool, now_s: float) -> None:
        """Note that a copy could not be restored, and drop it until its node offers it again.

        Offers of the same file by other nodes are dropped, too. A corrupt copy is never taken
        again.
        """
        identity = _identity(snapshot)
        if snapshot in self._offered_copies:  # several workers may report it
            self._failures[identity] = self._failures.get(identity, _Failures()).add(now_s)
        self._offered_copies = [
            other
            for other in self._offered_copies
            if other != snapshot and not _is_same_file(other, snapshot)
        ]
        if corrupt:
            self._corrupt_copies.add(identity)

    def convict(self, workers: Collection[str]) -> None:
        """Never take a copy of these workers: their states were found corrupt.

        The states may have been corrupt some steps before that.
        """
        self._convicts.update(workers)
        kept_copies = [
            snapshot for snapshot in self._offered_copies if snapshot.worker not in workers
        ]
        self._withheld |= len(kept_copies) < len(self._offered_copies)
        self._offered_copies = kept_copies
        self._delayed_copies = [copy for copy in self._delayed_copies if copy.worker not in workers]

    def forget_node(self, node: str) -> None:
        """Drop the copies that ``node`` has offered."""
        self._offered_copies = [copy for copy in self._offered_copies if copy.node != node]
        self._delayed_copies = [copy for copy in self._delayed_copies if copy.node != node]

    def forget_offers(self) -> None:
        """Drop the copies that all nodes have offered."""
        self._offered_copies, self._delayed_copies, self._withheld = [], [], False

    def forget_failures(self) -> None:
        """Forget which copies could not be read, but not which are corrupt."""
        self._failures.clear()


@dataclass(slots=True)
class _Question:
    """A question to a node, and its answer."""

    asked_s: float
    answered_s: float | None = None


class CopySearch:
    """Search for sealed copies on the nodes, while no live worker has the state.

    Attributes:
        copies: the copies that the nodes have offered.
        outdated: ranks trained on after some nodes had answered, as a late answer shows. The
            earlier answers are too old to be combined with it.
    """

    def __init__(
        self, limits: Limits = LIMITS, restorable: Restorable = complete_snapshots
    ) -> None:
        self._limits = limits
        self.copies = KnownCopies(limits, restorable)
        self._state_lost_s = math.inf
        # time of the last answer, lost node or failed copy; never of a tick, as the log has none
        self._changed_s = math.inf
        self._restoring_s = math.inf  # time of the first plan that names copies
        self._last_member_ended_s = (
            -math.inf
        )  # end of the last member, which may have sealed its piece then
        self._number = -1  # number of the last question
        self._asked_s = math.inf
        self._was_asked_before = False  # since the last worker with the state was lost
        self._questions: dict[str, _Question] = {}  # by node
        self._asked_nodes: set[str] = set()  # since the last worker with the state was lost
        # those of the asked nodes that joined later than others and have not answered
        self._late_nodes: set[str] = set()
        self.outdated = False
        self._committed_steps = 0  # the most steps that a node has reported
        self._reached_step = (
            0  # the newest step reported since the last worker with the state was lost
        )

    @property
    def active(self) -> bool:
        """True if no live worker has the state."""
        return self._state_lost_s < math.inf

    @property
    def number(self) -> int:
        """The number of the last question to the nodes; -1 before the first one."""
        return self._number

    # -- questions and answers ---------------------------------------------------------------------

    def begin(self, nodes: Sequence[str], now_s: float) -> list[str]:
        """Begin or continue the search, and return the live ``nodes`` that are to be asked now.

        Each node is returned once for each question number. Called with every event until
        :meth:`end`.
        """
        if not self.active:
            self._state_lost_s = self._changed_s = now_s
        if self._asked_s == math.inf:
            self._number += 1
        nodes_to_ask = [node for node in nodes if node not in self._questions]
        if nodes_to_ask or self._asked_s == math.inf:
            self._asked_s = now_s
        self._questions.update((node, _Question(now_s)) for node in nodes_to_ask)
        if self._asked_nodes:
            self._late_nodes.update(node for node in nodes_to_ask if node not in self._asked_nodes)
        self._asked_nodes.update(nodes_to_ask)
        return nodes_to_ask

    def answer(
        self,
        node: str,
        snapshots: Collection[OfferedSnapshot],
        now_s: float,
        *,
        number: int = 0,
        committed: int = 0,
    ) -> None:
        """Take in the copies that a node offers.

        An answer to another question, or of a node that was not asked, is ignored. A node that was
        asked twice, by two coordinators, replaces its first offer: only the copies of the second
        one can be read.

        Args:
            number: number of the question.
            committed: steps that a live worker of a sharded job has committed on the node.
        """
        if node not in self._questions or number != self._number:
            return
        self._questions[node].answered_s = now_s
        is_late = node in self._late_nodes
        if is_late or not self._was_asked_before:
            self._changed_s = now_s
        reached = max([committed, *(snapshot.step for snapshot in snapshots)])
        trained_on = is_late or reached > self._reached_step
        self.outdated |= trained_on and now_s > min(self._answers_s) + self._limits.apart_s
        self._reached_step = max(self._reached_step, reached)
        self._late_nodes.discard(node)
        self._committed_steps = max(self._committed_steps, committed)
        self.copies.offer(node, snapshots, now_s)

    def forget_answers(self) -> None:
        """Forget all answers, which may be too old. All nodes are asked again."""
        self._asked_s, self._was_asked_before, self.outdated = math.inf, True, False
        self._questions, self._committed_steps = {}, 0
        self.copies.forget_offers()

    def forget_answer(self, node: str) -> None:
        """Forget the answer of ``node``, which is asked again.

        A member there may have left a newer copy.
        """
        self._questions.pop(node, None)
        self.copies.forget_node(node)

    def end(self) -> None:
        """End the search, as a worker has the state. All copies are forgotten: they get too old."""
        self.forget_answers()
        self._state_lost_s = self._changed_s = self._restoring_s = math.inf
        self._was_asked_before = False
        self._reached_step = 0
        self.copies.forget_failures()
        self._asked_nodes.clear()
        self._late_nodes.clear()

    def restore(self, now_s: float) -> tuple[OfferedSnapshot, ...]:
        """Return the copies for a plan that is published now. The time of the first plan counts."""
        self._restoring_s = min(self._restoring_s, now_s)
        return self.copies.restorable

    def fail(self, snapshot: OfferedSnapshot, corrupt: bool, now_s: float) -> None:
        """Note that a copy could not be restored. A corrupt copy is never taken again."""
        self.copies.fail(snapshot, corrupt, now_s)
        self._changed_s = now_s

    def lose_node(self, node: str, now_s: float) -> None:
        """Forget a lost node and the copies that it kept."""
        self._changed_s = now_s
        self._questions.pop(node, None)
        self._asked_nodes.discard(node)
        self._late_nodes.discard(node)
        self.copies.forget_node(node)

    def lose_member(self, now_s: float) -> None:
        """Note that a member of a sharded job has ended.

        Its node keeps the piece that it may have sealed just before.
        """
        self._last_member_ended_s = now_s

    # -- what is known -----------------------------------------------------------------------------

    def awaits_answer_of(self, node: str) -> bool:
        """Return whether ``node`` was asked and has not answered."""
        return node in self._questions and self._questions[node].answered_s is None

    def has_answers_of(self, nodes: Collection[str]) -> bool:
        """Return whether all of ``nodes`` have answered; False for a node that was not asked."""
        questions = [self._questions.get(node) for node in nodes]
        return all(
            question is not None and question.answered_s is not None for question in questions
        )

    @property
    def has_open_questions(self) -> bool:
        """True if a node that was asked has not answered, however long ago that was."""
        return any(question.answered_s is None for question in self._questions.values())

    @property
    def misses_pieces(self) -> bool:
        """True if no complete copy is known, and an answer may lack a piece that was sealed later.

        It may if its node was asked before the last member ended.
        """
        asked_s = [
            question.asked_s
            for question in self._questions.values()
            if question.answered_s is not None
        ]
        return not self.copies.restorable and any(
            question_s < self._last_member_ended_s for question_s in asked_s
        )

    @property
    def is_at_first_step(self) -> bool:
        """True if at most the first step was committed, so that the job can begin anew."""
        return self._committed_steps <= 1 and self.copies.are_of_first_step

    @property
    def _answers_s(self) -> list[float]:
        return [
            question.answered_s
            for question in self._questions.values()
            if question.answered_s is not None
        ]

    # -- time --------------------------------------------------------------------------------------

    def is_asking(self, now_s: float) -> bool:
        """Return whether a node has yet to answer, and its time to answer is not over."""
        return now_s - self._asked_s < self._limits.recall_s and self.has_open_questions

    def is_stale(self, now_s: float, *, trains_on: bool) -> bool:
        """Return whether the nodes may have newer copies by now than those that they have offered.

        They may once the time ``fresh_s`` of the limits has passed since the last question and the
        last answer. Nodes that have not answered do not count, but their time to answer is awaited
        first. False while no search is under way.

        Args:
            trains_on: all ranks train while the nodes are asked, so missing answers do not extend
                the time.
        """
        answered_s = max(self._answers_s, default=-math.inf)
        if self.has_open_questions and not trains_on:
            answered_s = self._asked_s + self._limits.recall_s
        return self.active and now_s > max(answered_s, self._asked_s) + self._limits.fresh_s

    def waited_s(self, now_s: float) -> float:
        """Return the seconds since the last worker with the state was lost.

        Return minus infinity while no search is under way.
        """
        return now_s - self._state_lost_s

    def restoring_s(self, now_s: float) -> float:
        """Return the seconds since the first plan that names copies.

        Before that plan, return the seconds since the last answer, lost node or failed copy, or
        since the search began.
        """
        return now_s - (self._restoring_s if self._restoring_s < math.inf else self._changed_s)

    def without_copies_s(self, now_s: float) -> float:
        """Return the seconds without a copy to restore and without an answer to wait for, or 0."""
        if self.copies.restorable or self.is_asking(now_s):
            return 0.0
        recall_s = self._limits.recall_s if self.has_open_questions else 0.0
        return now_s - max(self._changed_s, self._state_lost_s + recall_s)


def _identity(snapshot: OfferedSnapshot) -> OfferedSnapshot:
    """Return a copy without its endpoint, and a stored one also without its node and worker.

    Two offers of the same copy are then equal.
    """
    if snapshot.path:
        return msgspec.structs.replace(snapshot, endpoint=_ANYWHERE, node="", worker="")
    return msgspec.structs.replace(snapshot, endpoint=_ANYWHERE)


def _is_same_file(snapshot: OfferedSnapshot, other: OfferedSnapshot) -> bool:
    return bool(snapshot.path) and snapshot.path == other.path
