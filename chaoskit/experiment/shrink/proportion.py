"""How often something happens: what a few repeats can say about it. Pure arithmetic."""

from __future__ import annotations

import math

_Z_95 = 1.959963984540054  # of the normal distribution: 95 % lie within as many standard deviations


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion.

    It keeps its promise for few trials and for proportions of 0 and 1, where the textbook's ``p ± z·s`` has no width
    (E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927).
    """
    if trials == 0:
        return 0.0, 1.0
    share, square = hits / trials, _Z_95**2
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = (
        _Z_95
        / (1 + square / trials)
        * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    )
    low = (
        0.0 if hits == 0 else max(0.0, middle - half)
    )  # exactly, where rounding would leave a trace
    high = 1.0 if hits == trials else min(1.0, middle + half)
    return low, high


def repeats_for(hits: int, trials: int, *, miss: float = 0.05, most: int = 12) -> int:
    """How often to try something that was seen ``hits`` times in ``trials``, before one believes that it never happens.

    With ``k`` tries it stays unseen with probability ``(1 - p)^k``. ``p`` is estimated by the rule of succession,
    ``(hits + 1) / (trials + 2)``, because three failures out of three are no proof of certainty.

    Args:
        miss: largest acceptable probability that it stays unseen.
        most: limit of the result.
    """
    rate = (hits + 1) / (trials + 2)
    return min(most, max(1, math.ceil(math.log(miss) / math.log(1 - rate))))
