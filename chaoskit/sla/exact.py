"""What counting says of a share, exactly: how often runs missed a limit, and what that proves. Pure arithmetic."""

from __future__ import annotations

from math import comb, fsum

_MOST = 10**6


def shows_at_least(share: float, hits: int, trials: int, confidence: float) -> bool:
    """Whether so many hits prove that this share of all runs are hits.

    The one-sided bound of Clopper and Pearson (1934): were the share any less, as many hits would come about with a
    probability of 1 - confidence at most. It is never optimistic, whatever the number of trials.
    """
    return trials > 0 and _at_least(share, hits, trials) <= 1 - confidence


def shows_less(share: float, hits: int, trials: int, confidence: float) -> bool:
    """Whether so few hits prove that less than this share of all runs are hits."""
    return trials > 0 and _at_most(share, hits, trials) <= 1 - confidence


def runs_needed(share: float, misses: int, confidence: float) -> int:
    """How many runs it takes to prove a share, if no more than these miss: 59 for 95 % with a confidence of 95 %."""
    high = max(1, misses)
    while not shows_at_least(share, high - misses, high, confidence):
        high *= 2
        if high > _MOST:
            return high
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if middle > misses and shows_at_least(share, middle - misses, middle, confidence):
            high = middle
        else:
            low = middle
    return high


def _at_least(share: float, hits: int, trials: int) -> float:
    return fsum(_exactly(share, count, trials) for count in range(hits, trials + 1))


def _at_most(share: float, hits: int, trials: int) -> float:
    return fsum(_exactly(share, count, trials) for count in range(hits + 1))


def _exactly(share: float, hits: int, trials: int) -> float:
    """The binomial probability. Powers are taken of the larger number first, so that neither over- nor underflows."""
    from math import exp, lgamma, log

    if share in (0.0, 1.0):
        return float(hits == (trials if share else 0))
    if trials < 200:
        return comb(trials, hits) * share**hits * (1 - share) ** (trials - hits)
    chosen = lgamma(trials + 1) - lgamma(hits + 1) - lgamma(trials - hits + 1)
    return exp(chosen + hits * log(share) + (trials - hits) * log(1 - share))
