"""Ratio of two small samples by ranks: by how much one is greater than the other.

This module is pure arithmetic. Durations of recoveries have heavy tails: one slow run moves a mean
or a maximum, but hardly a rank.

-> history/compare.py: ``judge``, which calls a ratio regressed, better or unchanged.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import product
from statistics import median

import msgspec

#: The sample size beyond which the distribution is approximated by a normal one. Its tails are
#: never smaller than the exact ones there, and exact counting takes too long.
EXACT_MOST = 30


class RatioEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The factor by which the values of ``after`` exceed those of ``before``.

    Attributes:
        ratio: the median of the ratios of all pairs (Hodges and Lehmann, 1963).
        low: the lower end of the confidence interval; 0 if there are too few values.
        high: the upper end of the confidence interval; infinity if there are too few values.
        greater: the probability of ranks at least this extreme towards greater values, if nothing
            has changed (Mann and Whitney, 1947).
        smaller: the same probability towards smaller values.
        before: the number of earlier values.
        after: the number of later values.
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
    """Estimate the factor by which the values of one sample exceed those of another.

    Args:
        confidence: the confidence of the interval as a fraction. Its two sides leave out equal
            shares.

    Raises:
        ValueError: if a sample is empty, or a value is not above 0 or is infinite.
    """
    if not before or not after:
        raise ValueError("a sample is empty")
    if not all(0 < number < math.inf for number in (*before, *after)):
        raise ValueError("values must be above 0, and finite")
    pairs = sorted(math.log(late / early) for early, late in product(before, after))
    wins = sum(1.0 if pair > 0 else 0.5 if pair == 0 else 0.0 for pair in pairs)
    sizes = len(before), len(after)
    margin = _interval_margin(*sizes, (1 - confidence) / 2)
    low, high = (pairs[margin], pairs[-1 - margin]) if margin >= 0 else (-math.inf, math.inf)
    return RatioEstimate(
        ratio=math.exp(median(pairs)),
        low=math.exp(low),
        high=math.exp(high),
        greater=_tail_probability(*sizes, wins),
        smaller=_tail_probability(*sizes, len(pairs) - wins),
        before=len(before),
        after=len(after),
    )


def _tail_probability(size_before: int, size_after: int, wins: float) -> float:
    """Return the probability of at least so many wins among all pairs, if nothing has changed.

    A later value wins against an earlier one if it is greater; equal values win by half. A half
    win is rounded down, towards caution.
    """
    at_least = math.floor(wins)
    if max(size_before, size_after) > EXACT_MOST:
        middle, spread = _normal_moments(size_before, size_after)
        return 0.5 * math.erfc((at_least - 0.5 - middle) / (spread * math.sqrt(2)))
    return _cumulative_probabilities(size_before, size_after)[size_before * size_after - at_least]


def _interval_margin(size_before: int, size_after: int, probability: float) -> int:
    """Return the number of sorted pairs that lie outside the interval on each side.

    It is -1 if no interval exists.

    Args:
        probability: the probability that each side of the interval leaves out.
    """
    if max(size_before, size_after) > EXACT_MOST:
        middle, spread = _normal_moments(size_before, size_after)
        quantile = next(
            z / 100 for z in range(600) if 0.5 * math.erfc(z / 100 / math.sqrt(2)) <= probability
        )
        return max(-1, math.floor(middle - quantile * spread) - 1)
    return (
        bisect_left(_cumulative_probabilities(size_before, size_after), probability * (1 + 1e-12))
        - 1
    )


def _normal_moments(size_before: int, size_after: int) -> tuple[float, float]:
    """Return the mean and the standard deviation of the number of wins, if nothing has changed."""
    pairs = size_before * size_after
    return pairs / 2, math.sqrt(pairs * (size_before + size_after + 1) / 12)


@cache
def _cumulative_probabilities(size_before: int, size_after: int) -> tuple[float, ...]:
    """Return the exact cumulative probabilities of 0, 1, 2, ... wins among all pairs.

    They apply if nothing has changed.
    """
    total = math.comb(size_before + size_after, size_before)
    cumulative_count = 0
    probabilities = []
    for count in _win_counts(size_before, size_after):
        cumulative_count += count
        probabilities.append(cumulative_count / total)
    return tuple(probabilities)


@cache
def _win_counts(size_before: int, size_after: int) -> tuple[int, ...]:
    """Return the number of orders of the values for each number of wins.

    The recursion distinguishes which sample the greatest value belongs to.
    """
    if not size_before or not size_after:
        return (1,)
    counts = [0] * (size_before * size_after + 1)
    for wins, count in enumerate(
        _win_counts(size_before, size_after - 1)
    ):  # the greatest value is in the later sample and wins every pair
        counts[wins + size_before] += count
    for wins, count in enumerate(_win_counts(size_before - 1, size_after)):
        counts[wins] += count
    return tuple(counts)
