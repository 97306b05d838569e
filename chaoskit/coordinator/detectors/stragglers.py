"""The detectors of stragglers: pure state machines over the paces of all ranks.

A rank may compute slowly, its input may come late, or all ranks may wait for the network while none
computes. Only slow computation can be the node's own fault. It is the only reason to replace a
rank, and only if the user has set a limit.

-> coordinator/detectors/pace.py: the paces; coordinator/detectors/workload.py turns the findings
into decisions. A rank that makes no progress at all: coordinator/detectors/hang.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Literal, NamedTuple

from chaoskit.coordinator.detectors.balance import Cost, exchange_s, slowest_s
from chaoskit.coordinator.detectors.pace import RankPace, Round

Kind = Literal["compute", "input", "network"]

#: A rank is reported when its shards take ``SCORE`` times as long as those of the others. It is
#: slow until that factor is below ``SCORE_OVER``.
SCORE = 1.5
SCORE_OVER = 1.2
#: The network is slow when the exchange takes this many times as long as at best, and longer than
#: the shards.
NETWORK_SCORE = 3.0
NETWORK_S = 0.02  # a shorter wait may be that of a busy machine
#: Rounds in a row after which a rank counts as a straggler, or no longer as one.
SUSTAINED = 3


class Straggler(NamedTuple):
    """A rank that is slow, or a slow network.

    Attributes:
        worker: the worker of the rank; "" if all wait for the network.
        kind: the part of the step that is slow.
        score: how many times slower it is than the others, or than the network was at best.
        detail: the measurements, in words.
    """

    worker: str
    kind: Kind
    score: float
    detail: str


def diagnose(
    paces: Mapping[str, RankPace], shares: Mapping[str, int], best_exchange_s: float = math.inf
) -> list[Straggler]:
    """Return the ranks that are slower than the others, or the network if all wait for it.

    Args:
        shares: worker -> shards.
        best_exchange_s: shortest exchange that was ever seen, in seconds; infinity before the
            first.
    """
    stragglers = [
        candidate for worker in paces if (candidate := _compare(worker, paces)) is not None
    ]
    exchanged_s = exchange_s(paces)
    busy_s = slowest_s(
        {worker: Cost(pace.shard_s, pace.other_s) for worker, pace in paces.items()}, shares
    )
    if not stragglers and exchanged_s > max(busy_s, NETWORK_SCORE * best_exchange_s, NETWORK_S):
        score = exchanged_s / best_exchange_s
        usual = f"{_ms(best_exchange_s)} at best"
        detail = (
            f"a step takes {_ms(busy_s)} of work, and {_ms(exchanged_s)} in which all wait, {usual}"
        )
        stragglers.append(Straggler("", "network", score, detail))
    return stragglers


def _compare(worker: str, paces: Mapping[str, RankPace]) -> Straggler | None:
    """Return ``worker`` as a straggler by its usual pace, or None if it is none."""
    others = [pace for other, pace in paces.items() if other != worker]
    if not others:
        return None
    pace, usual_s = paces[worker], median(other.shard_s for other in others)
    if usual_s <= 0 or pace.shard_s < SCORE_OVER * usual_s:
        return None
    compute_s, input_s = (
        median(other.compute_s for other in others),
        median(other.input_s for other in others),
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
    """Stragglers of a job: each is reported once, until it has kept up for a while."""

    def __init__(self) -> None:
        self._best_exchange_s = math.inf
        self._members: frozenset[str] = frozenset()
        self._streaks: dict[tuple[str, Kind], int] = {}
        self._quiet_rounds: dict[tuple[str, Kind], int] = {}  # -> rounds in which it has kept up

    def look(self, round_: Round, shares: Mapping[str, int]) -> list[Straggler]:
        """Return the stragglers that have been slow for long enough and were not reported yet."""
        if frozenset(round_.paces) != self._members:  # a larger world takes longer to exchange
            self._members, self._best_exchange_s = frozenset(round_.paces), math.inf
        stragglers = {
            (straggler.worker, straggler.kind): straggler
            for straggler in diagnose(round_.paces, shares, self._best_exchange_s)
        }
        self._best_exchange_s = min(self._best_exchange_s, exchange_s(round_.paces))
        clearly_slow = {key for key, straggler in stragglers.items() if straggler.score >= SCORE}
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in clearly_slow}
        self._quiet_rounds = {
            key: 0 if key in stragglers else rounds + 1
            for key, rounds in self._quiet_rounds.items()
        }
        self._quiet_rounds = {
            key: rounds for key, rounds in self._quiet_rounds.items() if rounds < SUSTAINED
        }
        unreported = [
            key
            for key, rounds in self._streaks.items()
            if rounds >= SUSTAINED and key not in self._quiet_rounds
        ]
        self._quiet_rounds |= dict.fromkeys(unreported, 0)
        return [stragglers[key] for key in unreported]


class SlowRanks:
    """Detector of ranks that are so slow for so long that another node should take their place.

    The score compares the computation of the rank, without the time in which other processes had
    the CPU, to the whole computation of the others. A rank that keeps up in a single step keeps its
    place.

    Args:
        limit: factor over the median of the others above which a rank is slow; 0 for no limit.
        steps: number of slow steps in a row, or of heartbeats if steps are shorter than these.
    """

    def __init__(self, limit: float, steps: int) -> None:
        self._limit, self._steps = limit, steps
        self._slow: dict[str, int] = {}  # worker -> slow steps in a row

    def look(self, round_: Round) -> list[Straggler]:
        """Return the ranks over the limit, the slowest first.

        A rank is returned again until it keeps up or is gone. There are none among fewer than three
        ranks.
        """
        # of two ranks, neither is the norm
        judged_paces = round_.paces if self._limit and len(round_.paces) > 2 else {}
        scores = {worker: _own_score(worker, round_) for worker in judged_paces}
        self._slow = {
            worker: self._slow.get(worker, 0) + 1
            for worker, score in scores.items()
            if score > self._limit
        }
        slow_workers = [worker for worker, steps in self._slow.items() if steps >= self._steps]
        return sorted(
            (self._straggler(worker, scores[worker], round_) for worker in slow_workers),
            key=lambda straggler: -straggler.score,
        )

    def _straggler(self, worker: str, score: float, round_: Round) -> Straggler:
        own_s = round_.latest[worker].own_s
        sentence = f"a shard takes {_ms(own_s)}, {score:.1f} times as long as those of others"
        return Straggler(
            worker, "compute", score, f"{sentence}, for {self._slow[worker]} steps on end"
        )


def _own_score(worker: str, round_: Round) -> float:
    others_s = median(pace.compute_s for other, pace in round_.paces.items() if other != worker)
    return round_.latest[worker].own_s / others_s if others_s > 0 else 0.0
