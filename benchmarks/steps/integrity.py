"""Cost of the checks against silent corruption: step times with and without them, in turns."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.harness.bars import Bar
from benchmarks.harness.lab import WARM_UP, Lab, show_progress, step_seconds

LIMITS = {"gradient hash": 0.02, "state hash": 0.01}

_OFF: dict[str, Any] = {"hash_every": 0, "state_hash_steps": 0}
_KINDS: dict[str, dict[str, Any]] = {
    "no check": _OFF,
    "gradient hash": _OFF | {"hash_every": 1},
    "state hash": _OFF | {"state_hash_steps": 16},
    "no check again": _OFF,  # the difference between two equal runs is the noise of this measurement
}
_ROUNDS, _STEPS = 5, 40


def integrity(lab: Lab) -> list[Bar]:
    """Return a bar for each kind of check.

    Segments take turns in another order each round, so that other load on the machine affects all
    of them.
    """
    steps = 12 if lab.smoke else _STEPS
    segments: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for number in range(lab.repeats(_ROUNDS)):
        turn = number % len(_KINDS)
        for kind in [*_KINDS][turn:] + [*_KINDS][:turn]:
            seconds = step_seconds(lab.run(steps=steps + WARM_UP, **_KINDS[kind]))
            segments[kind].append(median(seconds))
            show_progress(
                f"    round {number + 1}, {kind}: median step {median(seconds) * 1e3:.1f} ms of {len(seconds)}"
            )
    return [_cost(kind, segments) for kind in _KINDS if kind != "no check"]


def _cost(kind: str, segments: dict[str, list[float]]) -> Bar:
    without, limit = median(segments["no check"]), LIMITS.get(kind)
    rounds = [
        checked / unchecked - 1
        for checked, unchecked in zip(segments[kind], segments["no check"], strict=True)
    ]
    return Bar(
        topic="integrity",
        name=f"{kind}: longer step than without checks, 4 ranks",
        measured=f"{median(rounds):+.1%} of {without * 1e3:.1f} ms (rounds {min(rounds):+.1%} to {max(rounds):+.1%})",
        limit="" if limit is None else f"{limit:.0%}",
        met=None if limit is None else median(rounds) <= limit,
        samples={"with": segments[kind], "without": segments["no check"]},
    )
