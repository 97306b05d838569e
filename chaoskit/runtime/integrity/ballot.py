"""The ballot of a sharded job: reports that ranks exchange after every step, and a decision.

A sharded gradient was summed by the model's own collectives. Here every rank reports whether its
part can be committed. All ranks see the same rows, so all decide alike: commit, compute the step
again, or have a rank replaced. Ranks that hold the same piece of the state (HSDP) also show digests
of it and of its gradient, which must be equal.

-> step/sharded_trainer.py acts on the decision. integrity/voting.py: the vote between replicas.
step/inquiry.py does the same for replicated jobs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from chaoskit.runtime.group.collective import CollectiveGroup
from chaoskit.runtime.integrity import voting
from chaoskit.runtime.integrity.mistakes import Mistakes

#: Digests are summed as float64 words, which are exact for integers below this.
DIGEST = 2**53
#: The name of the state that replicas of a piece compare.
PIECE_STATE = "weights or optimizer state"


class Row(NamedTuple):
    """The report of one rank on a step.

    Args:
        healthy: its weights are finite.
        finite: its part of the gradient is finite.
        protected_step: the newest step of which its part of the state has all its copies; -1 for
            none.
        digest: digest of its part of the gradient, below ``DIGEST``.
        state, torn, heir: as in :class:`~chaoskit.runtime.integrity.voting.RankSeal`, ``state``
        below ``DIGEST``; 0 if no other rank holds the same piece.
        written: the changes by its script since the last commit, below ``DIGEST``; see
            :class:`~chaoskit.runtime.state.script_writes.ScriptWrites`.
        halts: it was ordered to end after this step, or an earlier one.
        losses: by shard; None for shards that it did not compute.
    """

    healthy: bool
    finite: bool
    protected_step: int
    digest: int
    state: int
    torn: bool
    heir: bool
    written: int
    halts: bool
    losses: Sequence[float | None]


_BEHIND_MAX = 4  # beyond it, two newer copies of every piece are worth more than an old one
_ATTEMPTS_MAX = 6  # at one step; then a changing result is blamed on the batch
_DAMAGED_MAX = 3  # a rank with so many damaged gradients is replaced, or the job ends
_MISSING = sys.float_info.max  # not the value of a loss
_CPU = torch.device("cpu")


def whole_step(before: int, step: int, protected_steps: Sequence[int]) -> int:
    """Return the newest step of which every piece certainly has all its copies; -1 for none.

    The copies must exist at the time of the call. If no step is certain, return ``before`` while it
    is at most four steps old and every rank names a step, else -1. Pure.

    This is not the lowest step that a rank names. A rank that names a later step may have skipped
    that one, as copies are skipped when a machine is busy. Nor is it any step that all name, as it
    may be overwritten by now: besides the kept step there is room for one.

    Args:
        before: the result at the last step.
        step: the current step of the ranks.
        protected_steps: by rank, the newest step of which its piece has all its copies.
    """
    lowest_step = min(protected_steps)
    if len(set(protected_steps)) == 1 and (
        lowest_step in (before, step) or (before == -1 and lowest_step == step - 1)
    ):
        return lowest_step
    return before if lowest_step >= 0 and step - before <= _BEHIND_MAX else -1


def exchange_rows(group: CollectiveGroup | None, row: Row) -> list[Row]:
    """Return the rows of all ranks, by rank. Raise RuntimeError if a rank is lost meanwhile.

    Args:
        group: the ranks; None for a world of one.
        row: the report of this rank.
    """
    size, rank = (group.size, group.rank) if group is not None else (1, 0)
    words = torch.zeros(size, len(row) - 1 + len(row.losses), dtype=torch.float64)
    losses = [_MISSING if loss is None else loss for loss in row.losses]
    words[rank] = torch.tensor([*row[:-1], *losses], dtype=torch.float64)
    if group is not None:
        group.all_reduce(words).wait()  # each number is added to zeros: its bits stay
    return [_row(line) for line in words.tolist()]


def gather(group: CollectiveGroup | None, value: bytes, device: torch.device = _CPU) -> list[bytes]:
    """Return the ``value`` of every rank, which has the same length on all.

    Raise RuntimeError if a rank is lost meanwhile. ``group`` is None for a world of one.
    """
    if group is None:
        return [value]
    words = torch.zeros(group.size, len(value), dtype=torch.uint8)
    words[group.rank] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    words = words.to(device)
    group.all_reduce(words).wait()
    return [bytes(line.numpy()) for line in words.cpu()]


def gather_unequal(
    group: CollectiveGroup | None, value: bytes, device: torch.device = _CPU
) -> list[bytes]:
    """Return the ``value`` of every rank, which may differ in length.

    Raise RuntimeError if a rank is lost meanwhile. ``group`` is None for a world of one.
    """
    sizes = [
        int.from_bytes(size, "big") for size in gather(group, len(value).to_bytes(8, "big"), device)
    ]
    padded = gather(group, value.ljust(max(sizes), b"\0"), device)
    return [row[:size] for row, size in zip(padded, sizes, strict=True)]


def _row(line: list[float]) -> Row:
    """Return the row that a rank has sent as float64 words."""
    healthy, finite, protected_step, digest, state, torn, heir, written, halts, *losses = line
    return Row(
        healthy=bool(healthy),
        finite=bool(finite),
        protected_step=int(protected_step),
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
    """The decision of all ranks about one attempt at a step.

    Attributes:
        verdict: ``commit``; ``repeat``: compute the step again; ``rank``: ``ranks`` compute
            wrongly; ``batch``: ``shards`` give non-finite numbers on any rank; ``undecided``:
            replicas of a piece differ, and no vote decides.
        shift: in the repetition, every rank computes the shards of the rank ``shift`` places
            further.
        shards: also in a repetition with a shift: the shards that were not finite.
        mismatch: the difference between replicas that has led to this decision; its ``ranks`` are
            outvoted.
    """

    verdict: Literal["commit", "repeat", "rank", "batch", "undecided"]
    shift: int = 0
    ranks: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    mismatch: voting.SuspectRanks | None = None


class RankOrBatch:
    """Tells a bad rank from a bad batch by computing a step with every shard on another rank.

    An error that stays with the rank is the rank's fault, and one that goes with the shard is the
    batch's. This is a pure state machine, and the same on all ranks of one membership, as it sees
    the same rows. Each membership begins with a new one.

    If replicas of a piece have different states, the minority is replaced. If their gradients
    differ, these were damaged in a transfer, and the step is computed again.

    Args:
        pieces: by rank, the piece that it holds; ranks with the same number are replicas.
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
        self._bad_before: frozenset[int] = frozenset()  # non-finite shards of the first attempt
        self._attempts = 0
        # attempts at this step in which gradients differed without a majority
        self._split_attempts = 0
        self._damaged = Mistakes()

    def decide(self, step: int, owners: Sequence[Sequence[int]], rows: Sequence[Row]) -> Decision:
        """Return the decision about one attempt at ``step``. Call this once for each attempt.

        Args:
            owners: by rank, the shards that it computed in this attempt.
            rows: the reports of all ranks, by rank, on that attempt.
        """
        if step != self._step:
            self._step, self._attempts, self._split_attempts = step, 0, 0
            self._bad_before = frozenset()
        if ranks := tuple(rank for rank, row in enumerate(rows) if not row.healthy):
            return Decision("rank", ranks=ranks)
        seals = [
            voting.RankSeal(state=row.state, torn=int(row.torn), heir=int(row.heir)) for row in rows
        ]
        if mismatch := self._compare(PIECE_STATE, seals):
            return Decision(
                "rank" if mismatch.ranks else "undecided", ranks=mismatch.ranks, mismatch=mismatch
            )
        if all(row.finite for row in rows):
            if self._attempts % 2:  # shifted: the bits of the sum would differ
                self._attempts += 1
                return Decision("repeat")
            return self._compare_gradients(step, rows) or Decision("commit")
        bad_shards = frozenset(
            shard
            for row in rows
            for shard, loss in enumerate(row.losses)
            if loss is not None and not math.isfinite(loss)
        )
        self._attempts += 1
        if self._attempts % 2 and self._attempts < _ATTEMPTS_MAX:
            self._bad_before = bad_shards
            return Decision("repeat", shift=1, shards=tuple(sorted(bad_shards)))
        return self._judge(owners, bad_shards)

    def _judge(self, owners: Sequence[Sequence[int]], bad_shards: frozenset[int]) -> Decision:
        """Return the decision after a second attempt, in which ranks had each other's shards.

        Args:
            owners: the shards of each rank in that attempt: those of the rank after it.
            bad_shards: the shards that were not finite in it.
        """
        shards = tuple(sorted(bad_shards or self._bad_before))
        if bad_shards == self._bad_before or not bad_shards:
            return Decision("batch", shards=shards)
        usual_owners = [owners[(rank - 1) % len(owners)] for rank in range(len(owners))]
        ranks_before = {
            rank
            for rank, shards in enumerate(usual_owners)
            if self._bad_before.intersection(shards)
        }
        ranks_now = {rank for rank, shards in enumerate(owners) if bad_shards.intersection(shards)}
        guilty = tuple(sorted(ranks_before & ranks_now))
        return Decision("rank", ranks=guilty) if guilty else Decision("batch", shards=shards)

    # -- replicas of a piece -----------------------------------------------------------------------

    def _compare_gradients(self, step: int, rows: Sequence[Row]) -> Decision | None:
        """Return the decision about differing gradients.

        Return None if none differ, or if this step does not compare them.
        """
        if not self._hash_every or step % self._hash_every:
            return None
        mismatch = self._compare(
            "reduced gradient", [voting.RankSeal(gradient=row.digest + 1) for row in rows]
        )
        if mismatch is None:
            return None
        if not mismatch.ranks:
            self._split_attempts += 1
            return Decision(
                "repeat" if self._split_attempts < _DAMAGED_MAX else "undecided", mismatch=mismatch
            )
        self._damaged.add(mismatch.ranks, step)
        if repeated_ranks := tuple(
            rank for rank in mismatch.ranks if self._damaged.count(rank, step) >= _DAMAGED_MAX
        ):
            return Decision(
                "rank",
                ranks=repeated_ranks,
                mismatch=voting.SuspectRanks(mismatch.what, repeated_ranks, repeated_ranks),
            )
        return Decision("repeat", mismatch=mismatch)

    def _compare(self, what: str, seals: Sequence[voting.RankSeal]) -> voting.SuspectRanks | None:
        """Return the difference that the seals of all pieces show; None if all replicas agree.

        If no vote decides for a piece, any of its replicas may be wrong: then no rank of any piece
        is named.
        """
        guilty, split = set[int](), set[int]()
        for ranks in self._replicas:
            if mismatch := voting.examine([seals[rank] for rank in ranks]):
                (guilty if mismatch.ranks else split).update(
                    ranks[place] for place in mismatch.involved
                )
        if not guilty | split:
            return None
        return voting.SuspectRanks(
            what, () if split else tuple(sorted(guilty)), tuple(sorted(split or guilty))
        )
