"""Exact binomial bounds: the share of all runs that a count of misses proves. Pure arithmetic.

-> sla/promises.py: ``Sla.needs``, the runs that an objective takes; sla/judge.py: its state.
-> history/shares.py: comparison of two shares.
"""

from __future__ import annotations

from math import comb, fsum

_RUNS_MOST = 10**6


def shows_at_least(share: float, hits: int, trials: int, confidence: float) -> bool:
    """Return True if so many hits prove that at least this share of all runs are hits.

    The one-sided bound of Clopper and Pearson (1934) is used. If the share were any less, as many
    hits would occur with a probability of at most 1 - confidence. The bound is never optimistic,
    whatever the number of trials. The result is False without trials.

    Args:
        share: a share of all runs, from 0 to 1; so is ``confidence``.
    """
    return trials > 0 and _probability_of_at_least(share, hits, trials) <= 1 - confidence


def shows_less(share: float, hits: int, trials: int, confidence: float) -> bool:
    """Return True if so few hits prove that less than this share of all runs are hits.

    The result is False without trials.
    """
    return trials > 0 and _probability_of_at_most(share, hits, trials) <= 1 - confidence


def runs_needed(share: float, misses: int, confidence: float) -> int:
    """Return the number of runs that prove a share if at most ``misses`` of them miss.

    It is 59 for a share of 95 % without a miss, with a confidence of 95 %. The search ends above a
    million: such a result is not checked, and may be too small.
    """
    high = max(1, misses)
    while not shows_at_least(share, high - misses, high, confidence):
        high *= 2
        if high > _RUNS_MOST:
            return high
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if middle > misses and shows_at_least(share, middle - misses, middle, confidence):
            high = middle
        else:
            low = middle
    return high


def _probability_of_at_least(hit_probability: float, hits: int, trials: int) -> float:
    """Return the binomial probability of at least so many hits."""
    return fsum(
        _probability_of_exactly(hit_probability, count, trials) for count in range(hits, trials + 1)
    )


def _probability_of_at_most(hit_probability: float, hits: int, trials: int) -> float:
    """Return the binomial probability of at most so many hits."""
    return fsum(
        _probability_of_exactly(hit_probability, count, trials) for count in range(hits + 1)
    )


def _probability_of_exactly(hit_probability: float, hits: int, trials: int) -> float:
    """Return the binomial probability of exactly so many hits.

    Logarithms are used for 200 trials or more, because the powers would underflow.

    Args:
        hit_probability: the probability of a hit in one trial.
    """
    from math import exp, lgamma, log

    if hit_probability in (0.0, 1.0):
        return float(hits == (trials if hit_probability else 0))
    if trials < 200:
        return comb(trials, hits) * hit_probability**hits * (1 - hit_probability) ** (trials - hits)
    log_combinations = lgamma(trials + 1) - lgamma(hits + 1) - lgamma(trials - hits + 1)
    return exp(
        log_combinations + hits * log(hit_probability) + (trials - hits) * log(1 - hit_probability)
    )
