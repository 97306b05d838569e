"""Which rank is slow, and why: pure state machines over the paces of all ranks.

A rank computes slowly, or its input comes late, or all wait for the network while nobody computes. Only the first can
be the node's own fault, and only that is a reason to replace a rank, where the user has set a limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Literal, NamedTuple

from chaoskit.coordinator.detectors.balance import Cost, exchange_s, slowest_s
from chaoskit.coordinator.detectors.pace import Pace, Round

Kind = Literal["compute", "input", "network"]

#: A rank is told of when its shards take so many times longer than those of the others; it is slow until that is less
#: than the second.
SCORE = 1.5
SCORE_OVER = 1.2
#: The network is slow when the exchange takes so many times longer than it did at best, and longer than the shards.
NETWORK_SCORE = 3.0
NETWORK_S = 0.02  # what is shorter may be a busy machine
#: Rounds on end in which it must be so, or not any more.
SUSTAINED = 3


class Straggler(NamedTuple):
    """``score``: how many times slower than the others, or than the network was at best. ``worker``: "" for all."""

    worker: str
    kind: Kind
    score: float
    detail: str


def diagnose(
    paces: Mapping[str, Pace], shares: Mapping[str, int], best_exchange_s: float = math.inf
) -> list[Straggler]:
    """Whoever is slower than the others by now, or else what all wait for.

    Args:
        shares: worker -> shards.
        best_exchange_s: shortest time that was ever seen for what a step takes besides its shards.
    """
    found = [one for worker in paces if (one := _compare(worker, paces)) is not None]
    exchanged_s = exchange_s(paces)
    busy_s = slowest_s(
        {worker: Cost(pace.shard_s, pace.other_s) for worker, pace in paces.items()}, shares
    )
    if not found and exchanged_s > max(busy_s, NETWORK_SCORE * best_exchange_s, NETWORK_S):
        score = exchanged_s / best_exchange_s
        usual = f"{_ms(best_exchange_s)} at best"
        detail = (
            f"a step takes {_ms(busy_s)} of work, and {_ms(exchanged_s)} in which all wait, {usual}"
        )
        found.append(Straggler("", "network", score, detail))
    return found


def _compare(worker: str, paces: Mapping[str, Pace]) -> Straggler | None:
    others = [pace for other, pace in paces.items() if other != worker]
    if not others:
        return None
    pace, usual_s = paces[worker], median(other.shard_s for other in others)
    if usual_s <= 0 or pace.shard_s < SCORE_OVER * usual_s:
        return None
    compute_s, input_s = (
        median(one.compute_s for one in others),
        median(one.input_s for one in others),
    )
    kind: Kind = "input" if pace.input_s - input_s > pace.compute_s - compute_s else "compute"
    detail = f"a shard takes {_ms(pace.compute_s)} of computation and {_ms(pace.input_s)} of input"
    detail += f", those of others {_ms(compute_s)} and {_ms(input_s)}"
    if pace.starved_s > 0.1 * pace.compute_s:
        detail += f"; without a CPU for {_ms(min(pace.starved_s, pace.compute_s))} of it"
    return Straggler(worker, kind, pace.shard_s / usual_s, detail)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


class Stragglers:
    """Tells of each straggler once, until it has kept up with the others for a while."""

    def __init__(self) -> None:
        self._best_exchange_s = math.inf
        self._members: frozenset[str] = frozenset()
        self._streaks: dict[tuple[str, Kind], int] = {}
        self._told: dict[tuple[str, Kind], int] = {}  # -> rounds without it

    def look(self, round_: Round, shares: Mapping[str, int]) -> list[Straggler]:
        """Those of whom nothing was said yet."""
        if (
            frozenset(round_.paces) != self._members
        ):  # a larger world takes longer to exchange as much
            self._members, self._best_exchange_s = frozenset(round_.paces), math.inf
        found = {
            (one.worker, one.kind): one
            for one in diagnose(round_.paces, shares, self._best_exchange_s)
        }
        self._best_exchange_s = min(self._best_exchange_s, exchange_s(round_.paces))
        clear = {key for key, one in found.items() if one.score >= SCORE}
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in clear}
        self._told = {key: 0 if key in found else quiet + 1 for key, quiet in self._told.items()}
        self._told = {key: quiet for key, quiet in self._told.items() if quiet < SUSTAINED}
        fresh = [
            key
            for key, rounds in self._streaks.items()
            if rounds >= SUSTAINED and key not in self._told
        ]
        self._told |= dict.fromkeys(fresh, 0)
        return [found[key] for key in fresh]


class SlowRanks:
    """Who is so slow for so long that another node should have its rank.

    Its own computation counts, without the time in which others had the CPU, against all that others need to compute.
    A single step in which it keeps up is enough to stay.

    Args:
        limit: how many times slower than the median of the others; 0: nobody ever is.
        steps: for so many on end; where they are shorter than a heartbeat, for so many of these.
    """

    def __init__(self, limit: float, steps: int) -> None:
        self._limit, self._steps = limit, steps
        self._slow: dict[str, int] = {}  # steps on end

    def look(self, round_: Round) -> list[Straggler]:
        """Those who are over the limit, the slowest first. They stay so until they are not slow, or gone."""
        judged = (
            round_.paces if self._limit and len(round_.paces) > 2 else {}
        )  # of two nobody knows which one is odd
        scores = {worker: _own_score(worker, round_) for worker in judged}
        self._slow = {
            worker: self._slow.get(worker, 0) + 1
            for worker, score in scores.items()
            if score > self._limit
        }
        over = [worker for worker, steps in self._slow.items() if steps >= self._steps]
        return sorted(
            (self._tell(worker, scores[worker], round_) for worker in over),
            key=lambda one: -one.score,
        )

    def _tell(self, worker: str, score: float, round_: Round) -> Straggler:
        own_s = round_.latest[worker].own_s
        took = f"a shard takes {_ms(own_s)}, {score:.1f} times as long as those of others"
        return Straggler(worker, "compute", score, f"{took}, for {self._slow[worker]} steps on end")


def _own_score(worker: str, round_: Round) -> float:
    others_s = median(pace.compute_s for other, pace in round_.paces.items() if other != worker)
    return round_.latest[worker].own_s / others_s if others_s > 0 else 0.0
