"""Fisher's exact test: the probability that one of two shares is greater by chance alone.

-> sla/exact.py: bounds on one share.
"""

from __future__ import annotations

from math import comb


def more_by_chance(before: int, runs_before: int, after: int, runs_after: int) -> float:
    """Return the probability that ``after`` or more later runs miss if all miss equally often.

    This is Fisher's exact test (1922). ``before`` of ``runs_before`` and ``after`` of
    ``runs_after`` runs missed. The total number of misses is taken as given.
    """
    runs, misses = runs_before + runs_after, before + after
    orders = comb(runs, misses)
    return (
        sum(
            comb(runs_after, count) * comb(runs_before, misses - count)
            for count in range(after, misses + 1)
        )
        / orders
    )
