"""What the ranks of a sharded job tell each other at the end of every step, and what they all conclude from it.

A gradient that is spread over ranks was summed by collectives of its own; here every rank says whether its part can be
committed. All see the same rows, so all decide alike: commit, compute the step again, or have a rank replaced. Ranks
that hold the same piece of the state (HSDP) also show digests of it and of its gradient, which must be equal.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from chaoskit.runtime.group.collective import Group
from chaoskit.runtime.integrity import voting
from chaoskit.runtime.integrity.mistakes import Mistakes

#: Digests go through a sum of float64 words, which have as many bits for a whole number.
DIGEST = 2**53
#: Name of the state that replicas of a piece compare.
PIECE_STATE = "weights or optimizer state"


class Row(NamedTuple):
    """What one rank says.

    Args:
        healthy: its weights are finite.
        finite: so is its part of the gradient.
        protected: the newest step of which its part of the state has all its copies; -1 for none.
        digest: of its part of the gradient, below ``DIGEST``.
        state, torn, heir: as in :class:`~chaoskit.runtime.integrity.voting.Seal`, ``state`` below ``DIGEST``; 0 where
            no other rank holds the same piece.
        written: what its script wrote since the last commit, below ``DIGEST``; see
            :class:`~chaoskit.runtime.state.script_writes.ScriptWrites`.
        halts: it was ordered to end after this step, or an earlier one.
        losses: by shard; None for those that it did not compute.
    """

    healthy: bool
    finite: bool
    protected: int
    digest: int
    state: int
    torn: bool
    heir: bool
    written: int
    halts: bool
    losses: Sequence[float | None]


_BEHIND_MAX = 4  # then two newer copies of every piece are worth more than an old one
_ATTEMPTS_MAX = 6  # at one step; what comes and goes as often is called the batch's
_DAMAGED_MAX = 3  # a rank that has received so many damaged gradients is replaced; without a majority the job ends
_MISSING = sys.float_info.max  # no loss is just that
_CPU = torch.device("cpu")


def whole_step(before: int, step: int, protected: Sequence[int]) -> int:
    """The newest step of which every piece is known to have all its copies, and still has them; -1 for none. Pure.

    Not the lowest that a rank names: whoever names a later one may have let that one out, as copies are when a machine
    is busy. Nor one that all name, if it may be overwritten by now: beside the step that is kept there is room for one.

    Args:
        before: the same as of the last step.
        step: at which the ranks are.
        protected: the newest step of which the piece of each rank has all its copies.
    """
    named = min(protected)
    if len(set(protected)) == 1 and (
        named in (before, step) or (before == -1 and named == step - 1)
    ):
        return named
    return before if named >= 0 and step - before <= _BEHIND_MAX else -1


def share(group: Group | None, row: Row) -> list[Row]:
    """The row of every rank, by rank. Raises RuntimeError if a rank is lost meanwhile."""
    size, rank = (group.size, group.rank) if group is not None else (1, 0)
    words = torch.zeros(size, len(row) - 1 + len(row.losses), dtype=torch.float64)
    losses = [_MISSING if loss is None else loss for loss in row.losses]
    words[rank] = torch.tensor([*row[:-1], *losses], dtype=torch.float64)
    if group is not None:
        group.all_reduce(words).wait()  # each number meets zeros only: the sum has its bits
    return [_row(line) for line in words.tolist()]


def gather(group: Group | None, value: bytes, device: torch.device = _CPU) -> list[bytes]:
    """The ``value`` of every rank; of the same length on all. Raises RuntimeError if a rank is lost meanwhile."""
    if group is None:
        return [value]
    words = torch.zeros(group.size, len(value), dtype=torch.uint8)
    words[group.rank] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    words = words.to(device)
    group.all_reduce(words).wait()
    return [bytes(line.numpy()) for line in words.cpu()]


def gather_unequal(group: Group | None, value: bytes, device: torch.device = _CPU) -> list[bytes]:
    """The ``value`` of every rank, each of its own length. Raises RuntimeError if a rank is lost meanwhile."""
    sizes = [
        int.from_bytes(size, "big") for size in gather(group, len(value).to_bytes(8, "big"), device)
    ]
    padded = gather(group, value.ljust(max(sizes), b"\0"), device)
    return [row[:size] for row, size in zip(padded, sizes, strict=True)]


def _row(line: list[float]) -> Row:
    healthy, finite, protected, digest, state, torn, heir, written, halts, *losses = line
    return Row(
        healthy=bool(healthy),
        finite=bool(finite),
        protected=int(protected),
        digest=int(digest),
        state=int(state),
        torn=bool(torn),
        heir=bool(heir),
        written=int(written),
        halts=bool(halts),
        losses=[None if loss == _MISSING else loss for loss in losses],
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """``repeat``: compute the step again, every rank with the shards of the rank ``shift`` places further.

    ``rank``: ``ranks`` compute wrongly. ``batch``: ``shards`` give numbers that are not finite, whoever computes them.
    ``undecided``: replicas of a piece differ, and no vote decides between them.

    Attributes:
        found: the difference between replicas that has led to this decision; its ``ranks`` are outvoted.
    """

    verdict: Literal["commit", "repeat", "rank", "batch", "undecided"]
    shift: int = 0
    ranks: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    found: voting.Suspicion | None = None


class Suspicion:
    """Tells a bad rank from a bad batch: the step is computed again with every shard on another rank.

    What stays with the rank is the rank's fault, what goes with the shard is the batch's. A pure state machine, and the
    same on all ranks of one membership, as it sees the same rows. Each membership begins with a new one.

    Replicas of a piece whose states differ cannot go on: the minority is replaced. Gradients that differ were damaged
    on their way: the step is computed again.

    Args:
        pieces: by rank, the piece that it holds; those of ranks with the same number are replicas.
        hash_every: steps between comparisons of their gradients; 0: never.
    """

    def __init__(self, pieces: Sequence[int] = (), hash_every: int = 1) -> None:
        holders = [
            tuple(rank for rank, other in enumerate(pieces) if other == piece)
            for piece in sorted({*pieces})
        ]
        self._replicas = [ranks for ranks in holders if len(ranks) > 1]
        self._hash_every = hash_every
        self._step = -1
        self._before: frozenset[int] = (
            frozenset()
        )  # shards that were not finite, when every rank had its own
        self._attempts = 0
        self._split = 0  # attempts at this step in which gradients differed, and no majority said which is wrong
        self._damaged = Mistakes()

    def decide(self, step: int, owners: Sequence[Sequence[int]], rows: Sequence[Row]) -> Decision:
        """What follows from one attempt at ``step``.

        Args:
            owners: by rank, the shards that it computed in this attempt.
        """
        if step != self._step:
            self._step, self._attempts, self._before, self._split = step, 0, frozenset(), 0
        if ranks := tuple(rank for rank, row in enumerate(rows) if not row.healthy):
            return Decision("rank", ranks=ranks)
        seals = [
            voting.Seal(state=row.state, torn=int(row.torn), heir=int(row.heir)) for row in rows
        ]
        if found := self._compare(PIECE_STATE, seals):
            return Decision("rank" if found.ranks else "undecided", ranks=found.ranks, found=found)
        if all(row.finite for row in rows):
            if (
                self._attempts % 2
            ):  # on other ranks than usual: the bits of the sum would be others, too
                self._attempts += 1
                return Decision("repeat")
            return self._compare_gradients(step, rows) or Decision("commit")
        bad = frozenset(
            shard
            for row in rows
            for shard, loss in enumerate(row.losses)
            if loss is not None and not math.isfinite(loss)
        )
        self._attempts += 1
        if self._attempts % 2 and self._attempts < _ATTEMPTS_MAX:
            self._before = bad
            return Decision("repeat", shift=1, shards=tuple(sorted(bad)))
        return self._judge(owners, bad)

    def _judge(self, owners: Sequence[Sequence[int]], bad: frozenset[int]) -> Decision:
        """After the second attempt, in which rank r computed what is else computed by the rank after it."""
        shards = tuple(sorted(bad or self._before))
        if bad == self._before or not bad:
            return Decision("batch", shards=shards)
        usual = [owners[(rank - 1) % len(owners)] for rank in range(len(owners))]
        before = {rank for rank, shards in enumerate(usual) if self._before.intersection(shards)}
        now = {rank for rank, shards in enumerate(owners) if bad.intersection(shards)}
        guilty = tuple(sorted(before & now))
        return Decision("rank", ranks=guilty) if guilty else Decision("batch", shards=shards)

    # -- replicas of a piece --------------------------------------------------------------------------------------

    def _compare_gradients(self, step: int, rows: Sequence[Row]) -> Decision | None:
        """What to do about gradients that differ; None if none do, or if this step does not compare them."""
        if not self._hash_every or step % self._hash_every:
            return None
        found = self._compare(
            "reduced gradient", [voting.Seal(gradient=row.digest + 1) for row in rows]
        )
        if found is None:
            return None
        if not found.ranks:
            self._split += 1
            return Decision("repeat" if self._split < _DAMAGED_MAX else "undecided", found=found)
        self._damaged.add(found.ranks, step)
        if worst := tuple(
            rank for rank in found.ranks if self._damaged.count(rank, step) >= _DAMAGED_MAX
        ):
            return Decision("rank", ranks=worst, found=voting.Suspicion(found.what, worst, worst))
        return Decision("repeat", found=found)

    def _compare(self, what: str, seals: Sequence[voting.Seal]) -> voting.Suspicion | None:
        """What follows from the seals of all pieces; None if all replicas agree.

        Of a piece of which no vote decides every replica may be wrong: then no rank of any piece is named.
        """
        guilty, split = set[int](), set[int]()
        for ranks in self._replicas:
            if found := voting.examine([seals[rank] for rank in ranks]):
                (guilty if found.ranks else split).update(ranks[place] for place in found.involved)
        if not guilty | split:
            return None
        return voting.Suspicion(
            what, () if split else tuple(sorted(guilty)), tuple(sorted(split or guilty))
        )
