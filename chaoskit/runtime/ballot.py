"""What the ranks of a sharded job tell each other at the end of every step, and what they all conclude from it.

A gradient that is spread over ranks was summed by collectives of its own; here every rank says whether its part can be
committed. All see the same rows, so all decide alike: commit, compute the step again, or have somebody replaced.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from chaoskit.runtime.collective import Group


class Row(NamedTuple):
    """What one rank says.

    Args:
        healthy: its weights are finite.
        finite: so is its part of the gradient.
        protected: the newest step of which its part of the state has all its copies; -1 for none.
        digest: 32 bits of a checksum over its part of the gradient.
        losses: by shard; None for those that it did not compute.
    """

    healthy: bool
    finite: bool
    protected: int
    digest: int
    losses: Sequence[float | None]


_BEHIND_MAX = 4  # then two newer copies of every piece are worth more than an old one
_ATTEMPTS_MAX = 6  # at one step; what comes and goes as often is called the batch's
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
    if len(set(protected)) == 1 and (named in (before, step) or (before == -1 and named == step - 1)):
        return named
    return before if named >= 0 and step - before <= _BEHIND_MAX else -1


def share(group: Group | None, row: Row) -> list[Row]:
    """The row of every rank, by rank. Raises RuntimeError if a rank is lost meanwhile."""
    size, rank = (group.size, group.rank) if group is not None else (1, 0)
    words = torch.zeros(size, 4 + len(row.losses), dtype=torch.float64)
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
    sizes = [int.from_bytes(size, "big") for size in gather(group, len(value).to_bytes(8, "big"), device)]
    padded = gather(group, value.ljust(max(sizes), b"\0"), device)
    return [row[:size] for row, size in zip(padded, sizes, strict=True)]


def _row(line: list[float]) -> Row:
    healthy, finite, protected, digest, *losses = line
    found = [None if loss == _MISSING else loss for loss in losses]
    return Row(bool(healthy), bool(finite), int(protected), int(digest), found)


@dataclass(frozen=True, slots=True)
class Decision:
    """``repeat``: compute the step again, every rank with the shards of the rank ``shift`` places further.

    ``rank``: ``ranks`` compute wrongly. ``batch``: ``shards`` give numbers that are not finite, whoever computes them.
    """

    verdict: Literal["commit", "repeat", "rank", "batch"]
    shift: int = 0
    ranks: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()


class Suspicion:
    """Tells a bad rank from a bad batch: the step is computed again with every shard on another rank.

    What stays with the rank is the rank's fault, what goes with the shard is the batch's. A pure state machine, and the
    same on all ranks of one membership, as it sees the same rows. Each membership begins with a new one.
    """

    def __init__(self) -> None:
        self._step = -1
        self._before: frozenset[int] = frozenset()  # shards that were not finite, when every rank had its own
        self._attempts = 0

    def decide(self, step: int, owners: Sequence[Sequence[int]], rows: Sequence[Row]) -> Decision:
        """What follows from one attempt at ``step``.

        Args:
            owners: by rank, the shards that it computed in this attempt.
        """
        if step != self._step:
            self._step, self._attempts, self._before = step, 0, frozenset()
        if ranks := tuple(rank for rank, row in enumerate(rows) if not row.healthy):
            return Decision("rank", ranks=ranks)
        if all(row.finite for row in rows):
            if self._attempts % 2:  # on other ranks than usual: the bits of the sum would be others, too
                self._attempts += 1
                return Decision("repeat")
            return Decision("commit")
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
