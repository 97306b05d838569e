"""How probable it is that one of two shares is greater by chance alone. Pure arithmetic."""

from __future__ import annotations

from math import comb


def more_by_chance(before: int, runs_before: int, after: int, runs_after: int) -> float:
    """The probability that so many of the later runs miss, or more, where all runs miss as often (Fisher, 1922).

    ``before`` of ``runs_before`` and ``after`` of ``runs_after`` runs missed. Exact, for the misses that there are.
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
