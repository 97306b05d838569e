"""The ratio of two small samples, by ranks: how many times greater one is than the other. Pure arithmetic.

Durations of recoveries have heavy tails: one slow run moves a mean or a maximum, and hardly a rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import product
from statistics import median

import msgspec

#: Values a side, beyond which the distribution is taken for a normal one. In the tails that decide it is never smaller
#: than the exact one; counting takes too long by then.
EXACT_MOST = 30


class RatioEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """How many times greater the values of ``after`` are than those of ``before``.

    Attributes:
        ratio: the median of the ratios of all pairs (Hodges and Lehmann, 1963).
        low, high: between these it lies with the confidence that was asked for; 0 and infinity where so few values
            cannot say so.
        greater, smaller: how probable ranks like these are, or more extreme ones, where nothing has changed: of
            values that are greater now, and that are smaller (Mann and Whitney, 1947).
        before, after: the number of values.
    """

    ratio: float
    low: float
    high: float
    greater: float
    smaller: float
    before: int
    after: int


def estimate_ratio(
    before: Sequence[float], after: Sequence[float], confidence: float = 0.95
) -> RatioEstimate:
    """Compare two samples of positive values.

    Args:
        confidence: of the interval, both of whose sides leave out as much.

    Raises:
        ValueError: if a sample is empty, or a value is not above 0.
    """
    if not before or not after:
        raise ValueError("a sample is empty")
    if not all(0 < value < math.inf for value in (*before, *after)):
        raise ValueError("values must be above 0, and finite")
    pairs = sorted(math.log(late / early) for early, late in product(before, after))
    wins = sum(1.0 if pair > 0 else 0.5 if pair == 0 else 0.0 for pair in pairs)
    sizes = len(before), len(after)
    outside = _outside(*sizes, (1 - confidence) / 2)
    low, high = (pairs[outside], pairs[-1 - outside]) if outside >= 0 else (-math.inf, math.inf)
    return RatioEstimate(
        ratio=math.exp(median(pairs)),
        low=math.exp(low),
        high=math.exp(high),
        greater=_tail(*sizes, wins),
        smaller=_tail(*sizes, len(pairs) - wins),
        before=len(before),
        after=len(after),
    )


def _tail(before: int, after: int, wins: float) -> float:
    """The probability of as many wins or more, of all pairs. Of a half one, as if it was none: never too small."""
    at_least = math.floor(wins)
    if max(before, after) > EXACT_MOST:
        middle, spread = _normal(before, after)
        return 0.5 * math.erfc((at_least - 0.5 - middle) / (spread * math.sqrt(2)))
    return _cumulative(before, after)[before * after - at_least]


def _outside(before: int, after: int, share: float) -> int:
    """How many of the sorted pairs lie outside of an interval on each side, less one; -1 where none can."""
    if max(before, after) > EXACT_MOST:
        middle, spread = _normal(before, after)
        quantile = next(
            z / 100 for z in range(600) if 0.5 * math.erfc(z / 100 / math.sqrt(2)) <= share
        )
        return max(-1, math.floor(middle - quantile * spread) - 1)
    return bisect_left(_cumulative(before, after), share * (1 + 1e-12)) - 1


def _normal(before: int, after: int) -> tuple[float, float]:
    pairs = before * after
    return pairs / 2, math.sqrt(pairs * (before + after + 1) / 12)


@cache
def _cumulative(before: int, after: int) -> tuple[float, ...]:
    """The probability of so many wins or fewer, of all pairs, where nothing has changed; exact."""
    counts, total, sums = _counts(before, after), math.comb(before + after, before), 0
    found = []
    for count in counts:
        sums += count
        found.append(sums / total)
    return tuple(found)


@cache
def _counts(before: int, after: int) -> tuple[int, ...]:
    """In how many orders of the values there are so many wins: the greatest of all is one of either sample."""
    if not before or not after:
        return (1,)
    found = [0] * (before * after + 1)
    for wins, count in enumerate(
        _counts(before, after - 1)
    ):  # the greatest is of the later sample: it wins all
        found[wins + before] += count
    for wins, count in enumerate(_counts(before - 1, after)):
        found[wins] += count
    return tuple(found)
