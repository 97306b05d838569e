"""The balancer of shards: it sizes the shares of the ranks so that all finish a step together.

It is a pure state machine that counts steps. Shards are moved only when a move promises a good
part of the step time, in several rounds in a row. When the ranks are equally fast again, all get
equal shares again. Each move is followed by a pause, which doubles while moves follow each other:
a machine with an unsteady pace must not cause moves all the time.

-> coordinator/detectors/workload.py turns a proposal into an event;
coordinator/membership/assignment.py: which shards move. stragglers.py: a slow rank is given up.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from chaoskit.coordinator.detectors.pace import RankPace

#: The part of the step time that a move must save.
LEAST_GAIN = 0.15
#: Rounds in which one and the same move must promise enough, one after the other.
SUSTAINED = 3
#: Such rounds for a move that would promise nothing if all ranks had the CPUs to themselves. Such
#: a shortage usually passes by itself.
SUSTAINED_STARVED = 30
#: Ranks are alike only if no move from equal shares promises more than this part of LEAST_GAIN.
ALIKE = 0.7
#: Rounds in a row in which the ranks must be alike before the move back to equal shares.
SUSTAINED_ALIKE = 6
#: Rounds without a move after each move; twice as many after each move that follows soon.
PAUSE = 10
PAUSE_MAX = 640
#: Rounds without a move, as a multiple of the pause, after which the next pause is short again.
_CALM = 10


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposal to change the shares.

    Attributes:
        shares: worker -> number of shards.
        gain: the part of the step time that is saved, from 0 to 1; 0 for the return to equal
            shares.
        step_s: the step time with the present shares, in seconds.
    """

    shares: dict[str, int]
    gain: float
    step_s: float


class Cost(NamedTuple):
    """The time in seconds that a rank needs for a step.

    Attributes:
        shard_s: time for each shard.
        fixed_s: time for the rest of the step, whatever the number of shards.
    """

    shard_s: float
    fixed_s: float = 0.0

    def takes_s(self, count: int) -> float:
        """Return the duration of a step with ``count`` shards."""
        return self.fixed_s + self.shard_s * count


Costs = Mapping[str, Cost]


def split(costs: Costs, current: Mapping[str, int]) -> dict[str, int]:
    """Return the shares with the shortest step; among equals, those that move few shards.

    Every rank keeps a shard: a rank without one could never show that it is faster again.

    Args:
        costs: by worker; ``shard_s`` is above 0.
        current: worker -> shards; together at least as many as workers.
    """
    total = sum(current.values())
    limit_s = slowest_s(costs, _fill(costs, dict.fromkeys(costs, 1), total))
    kept = {worker: min(current[worker], _within(cost, limit_s)) for worker, cost in costs.items()}
    return _fill(costs, kept, total)


def _within(cost: Cost, limit_s: float) -> int:
    """Return the number of shards that a rank finishes within ``limit_s``."""
    return max(1, int((limit_s - cost.fixed_s) / cost.shard_s + 1e-9))


def _fill(costs: Costs, counts: dict[str, int], total: int) -> dict[str, int]:
    """Add the shards that are missing to ``total`` to ``counts``, and return it.

    Each goes to the rank that finishes first with one more.
    """
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
    """Return the duration of a step on the slowest rank, with these shares."""
    return max(costs[worker].takes_s(count) for worker, count in shares.items())


def gain(
    costs: Costs, shares_before: Mapping[str, int], shares_after: Mapping[str, int], rest_s: float
) -> float:
    """Return the part of the step time that ``shares_after`` saves over ``shares_before``.

    It is below 0 if a step takes longer with ``shares_after``.

    Args:
        rest_s: the part of a step that does not depend on the shares.
    """
    return 1 - (slowest_s(costs, shares_after) + rest_s) / (
        slowest_s(costs, shares_before) + rest_s
    )


class Balancer:
    """Balancer that proposes other shares once they have promised a gain for long enough."""

    def __init__(self) -> None:
        self._candidate: dict[str, int] | None = None  # shares that promise enough
        self._streak = 0  # rounds in a row in which the candidate has promised enough
        self._alike_rounds = 0  # rounds in a row with equally fast ranks and unequal shares
        self._pause_left, self._pause, self._rounds_since_move = 0, PAUSE, 0

    def look(self, shares: Mapping[str, int], paces: Mapping[str, RankPace]) -> Proposal | None:
        """Return the move that is due after this round, or None. Called once a round.

        A returned move counts as made. A move is followed by a pause, in which None is returned.

        Args:
            shares: worker -> the shards that it has now.
            paces: the paces of the same workers.
        """
        self._rounds_since_move += 1
        if self._rounds_since_move > _CALM * self._pause:
            self._pause = PAUSE
        if self._pause_left:
            self._pause_left -= 1
            return None
        proposal = self._move(shares, paces) or self._return(shares, paces)
        if proposal is not None:
            self._candidate, self._streak, self._alike_rounds = None, 0, 0
            self._pause_left, self._rounds_since_move = self._pause, 0
            self._pause = min(PAUSE_MAX, 2 * self._pause)
        return proposal

    def _move(self, shares: Mapping[str, int], paces: Mapping[str, RankPace]) -> Proposal | None:
        """Return a move to the best shares; None until a candidate has promised enough for long."""
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
        costs_unstarved = {
            worker: Cost(pace.own_s + pace.input_s, pace.other_s) for worker, pace in paces.items()
        }
        pays_unstarved = gain(costs_unstarved, shares, self._candidate, rest_s) >= LEAST_GAIN
        if self._streak < (SUSTAINED if pays_unstarved else SUSTAINED_STARVED):
            return None
        best_shares = split(costs, shares)
        return Proposal(
            best_shares, gain(costs, shares, best_shares, rest_s), slowest_s(costs, shares) + rest_s
        )

    def _return(self, shares: Mapping[str, int], paces: Mapping[str, RankPace]) -> Proposal | None:
        """Return the move back to equal shares, once all ranks have been equally fast for long.

        None is returned if a move away from equal shares would soon promise enough again.
        """
        costs, rest_s = (
            {worker: Cost(pace.shard_s, pace.other_s) for worker, pace in paces.items()},
            exchange_s(paces),
        )
        equal_shares = split(dict.fromkeys(costs, Cost(1.0)), shares)
        if (
            min(cost.shard_s for cost in costs.values()) <= 0
            or equal_shares == shares
            or not _is_uneven(shares)
        ):
            self._alike_rounds = 0
            return None
        shards_s = [cost.shard_s for cost in costs.values()]
        are_alike = (1 - LEAST_GAIN) * max(shards_s) < min(shards_s)
        are_alike &= (
            gain(costs, equal_shares, split(costs, equal_shares), rest_s) < ALIKE * LEAST_GAIN
        )
        self._alike_rounds = self._alike_rounds + 1 if are_alike else 0
        if self._alike_rounds < SUSTAINED_ALIKE:
            return None
        return Proposal(equal_shares, 0.0, slowest_s(costs, shares) + rest_s)


def exchange_s(paces: Mapping[str, RankPace]) -> float:
    """Return the duration of the exchange in a step: the wait of the rank that came last to it."""
    return min(pace.wait_s for pace in paces.values())


def _is_uneven(shares: Mapping[str, int]) -> bool:
    return max(shares.values()) - min(shares.values()) > 1
