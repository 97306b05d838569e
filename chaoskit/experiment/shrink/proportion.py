"""Estimates of a failure rate from few repeats. Pure arithmetic."""

from __future__ import annotations

import math

_Z_95 = 1.959963984540054  # 95 % of a normal distribution lie within so many standard deviations


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion.

    It also holds for few trials and for proportions of 0 and 1, where the textbook interval ``p ±
    z·s`` has no width (E. B. Wilson, "Probable inference, the law of succession, and statistical
    inference", 1927). Without trials it is all from 0 to 1.

    Args:
        hits: the number of trials that count.
        trials: the number of all trials.
    """
    if trials == 0:
        return 0.0, 1.0
    proportion, z_squared = hits / trials, _Z_95**2
    center = (proportion + z_squared / (2 * trials)) / (1 + z_squared / trials)
    half_width = (
        _Z_95
        / (1 + z_squared / trials)
        * math.sqrt(proportion * (1 - proportion) / trials + z_squared / (4 * trials**2))
    )
    # exactly 0 or 1, which rounding would miss
    low = 0.0 if hits == 0 else max(0.0, center - half_width)
    high = 1.0 if hits == trials else min(1.0, center + half_width)
    return low, high


def repeats_for(
    hits: int, trials: int, *, miss_probability: float = 0.05, repeats_max: int = 12
) -> int:
    """Return how often to repeat a run before it counts as never failing.

    The run failed ``hits`` times in ``trials`` before. With ``k`` repeats a failure stays unseen
    with probability ``(1 - p)^k``. ``p`` is estimated by the rule of succession, ``(hits + 1) /
    (trials + 2)``, because three failures out of three do not prove certainty.

    Args:
        hits: the number of failures.
        trials: the number of runs.
        miss_probability: the largest acceptable probability, from 0 to 1, that a failure stays
            unseen.
        repeats_max: the limit of the result, which is at least 1.
    """
    failure_probability = (hits + 1) / (trials + 2)
    return min(
        repeats_max,
        max(1, math.ceil(math.log(miss_probability) / math.log(1 - failure_probability))),
    )
