"""How many shards each rank gets, so that all are ready at the same time: a pure state machine that counts steps.

Shards are moved only when that promises a good part of the step time, again and again; when the ranks are alike again
everybody gets as many as before. Each move makes the next one wait, ever longer while they follow each other, so that
a machine whose pace changes all the time is not rearranged all the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from chaoskit.coordinator.detectors.pace import Pace

#: The part of the step time that a move must save.
LEAST_GAIN = 0.15
#: Rounds in which one and the same move must promise enough, one after the other.
SUSTAINED = 3
#: The same where it would promise nothing if all had the CPUs to themselves: as a rule that passes.
SUSTAINED_STARVED = 30
#: Ranks count as alike only when from equal shares no move promises more than this part of what is enough.
ALIKE = 0.7
#: Rounds in which they must be so for the way back, which nobody waits for.
SUSTAINED_ALIKE = 6
#: Rounds after a move in which there is no other; twice as many after each that follows soon.
PAUSE = 10
PAUSE_MAX = 640
#: So many pauses without a move, and the next pause is a short one again.
_CALM = 10


@dataclass(frozen=True, slots=True)
class Proposal:
    """``shares``: worker -> number of shards. ``gain``: the part of the step time that is saved; 0 for equal shares."""

    shares: dict[str, int]
    gain: float
    step_s: float


class Cost(NamedTuple):
    """What a rank needs for a step, in seconds: ``shard_s`` for each shard, ``fixed_s`` whatever it has."""

    shard_s: float
    fixed_s: float = 0.0

    def takes_s(self, count: int) -> float:
        """With so many shards."""
        return self.fixed_s + self.shard_s * count


Costs = Mapping[str, Cost]


def split(costs: Costs, current: Mapping[str, int]) -> dict[str, int]:
    """The split whose slowest rank is done first; of several, one that moves few shards.

    Everybody keeps a shard: who has none could never show that it is faster again.

    Args:
        costs: by worker; ``shard_s`` is above 0.
        current: worker -> shards; together at least as many as workers.
    """
    total = sum(current.values())
    limit_s = slowest_s(costs, _fill(costs, dict.fromkeys(costs, 1), total))
    kept = {worker: min(current[worker], _within(cost, limit_s)) for worker, cost in costs.items()}
    return _fill(costs, kept, total)


def _within(cost: Cost, limit_s: float) -> int:
    """Shards that are done in time; what is equal but for rounding counts as equal."""
    return max(1, int((limit_s - cost.fixed_s) / cost.shard_s + 1e-9))


def _fill(costs: Costs, counts: dict[str, int], total: int) -> dict[str, int]:
    """Give the remaining shards, one by one, to whoever is done with one more first."""
    queue = [
        (costs[worker].takes_s(count + 1), place, worker)
        for place, (worker, count) in enumerate(counts.items())
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(counts.values())):
        _, place, worker = queue[0]
        counts[worker] += 1
        heapq.heapreplace(queue, (costs[worker].takes_s(counts[worker] + 1), place, worker))
    return counts


def slowest_s(costs: Costs, shares: Mapping[str, int]) -> float:
    """When the last rank is done with its shards."""
    return max(costs[worker].takes_s(count) for worker, count in shares.items())


def gain(costs: Costs, now: Mapping[str, int], then: Mapping[str, int], rest_s: float) -> float:
    """The part of the step time that other shares save. ``rest_s``: what a step takes besides."""
    return 1 - (slowest_s(costs, then) + rest_s) / (slowest_s(costs, now) + rest_s)


class Balancer:
    """Proposes other shares."""

    def __init__(self) -> None:
        self._candidate: dict[str, int] | None = None  # a move that promises enough
        self._streak = 0  # rounds on end in which it has done so
        self._alike = 0  # rounds on end in which the ranks were alike, and their shares not
        self._rest, self._pause, self._calm = 0, PAUSE, 0

    def look(self, shares: Mapping[str, int], paces: Mapping[str, Pace]) -> Proposal | None:
        """After each round.

        Args:
            shares: worker -> shards, as they are.
            paces: of the same workers.
        """
        self._calm += 1
        if self._calm > _CALM * self._pause:
            self._pause = PAUSE
        if self._rest:
            self._rest -= 1
            return None
        found = self._move(shares, paces) or self._return(shares, paces)
        if found is not None:
            self._candidate, self._streak, self._alike = None, 0, 0
            self._rest, self._calm = self._pause, 0
            self._pause = min(PAUSE_MAX, 2 * self._pause)
        return found

    def _move(self, shares: Mapping[str, int], paces: Mapping[str, Pace]) -> Proposal | None:
        costs, rest_s = (
            {worker: Cost(pace.shard_s, pace.other_s) for worker, pace in paces.items()},
            exchange_s(paces),
        )
        if min(cost.shard_s for cost in costs.values()) <= 0:
            return None
        if self._candidate is not None and self._candidate.keys() != costs.keys():
            self._candidate = None
        if self._candidate is None or gain(costs, shares, self._candidate, rest_s) < LEAST_GAIN:
            self._candidate, self._streak = split(costs, shares), 0
        if gain(costs, shares, self._candidate, rest_s) < LEAST_GAIN:
            self._candidate = None
            return None
        self._streak += 1
        own = {
            worker: Cost(pace.own_s + pace.input_s, pace.other_s) for worker, pace in paces.items()
        }
        is_own = gain(own, shares, self._candidate, rest_s) >= LEAST_GAIN
        if self._streak < (SUSTAINED if is_own else SUSTAINED_STARVED):
            return None
        best = split(costs, shares)
        return Proposal(best, gain(costs, shares, best, rest_s), slowest_s(costs, shares) + rest_s)

    def _return(self, shares: Mapping[str, int], paces: Mapping[str, Pace]) -> Proposal | None:
        """The way back, when all are equally fast. A move from there must not promise enough to be made again."""
        costs, rest_s = (
            {worker: Cost(pace.shard_s, pace.other_s) for worker, pace in paces.items()},
            exchange_s(paces),
        )
        even = split(dict.fromkeys(costs, Cost(1.0)), shares)
        if (
            min(cost.shard_s for cost in costs.values()) <= 0
            or even == shares
            or not _is_uneven(shares)
        ):
            self._alike = 0
            return None
        shards_s = [cost.shard_s for cost in costs.values()]
        are_alike = (1 - LEAST_GAIN) * max(shards_s) < min(shards_s)
        are_alike &= gain(costs, even, split(costs, even), rest_s) < ALIKE * LEAST_GAIN
        self._alike = self._alike + 1 if are_alike else 0
        if self._alike < SUSTAINED_ALIKE:
            return None
        return Proposal(even, 0.0, slowest_s(costs, shares) + rest_s)


def exchange_s(paces: Mapping[str, Pace]) -> float:
    """What a step takes besides the work of its ranks: the last one to come waits for nobody."""
    return min(pace.wait_s for pace in paces.values())


def _is_uneven(shares: Mapping[str, int]) -> bool:
    return max(shares.values()) - min(shares.values()) > 1
