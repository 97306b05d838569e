"""What resilience costs while nothing breaks: step times beside plain DistributedDataParallel's."""

from __future__ import annotations

from statistics import median
from typing import Any

import baseline_ddp
from bars import Bar
from lab import WARM_UP, Lab, say, step_seconds

LIMITS = {"exact": 1.05, "fast": 1.02}
#: glibc returns freed gradients to the system by default, and page faults bring them back in the next step. Our workers
#: free and allocate in another order and meet few of them, so part of a gain over DDP may be the allocator's.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}

_ROUNDS, _STEPS = 5, 40


def overhead(lab: Lab) -> list[Bar]:
    """Segments take turns, in another order each round, so that what else happens on the machine meets all of them."""
    kinds = ["ddp", "exact", "fast", "ddp, memory kept"]
    steps = 12 if lab.smoke else _STEPS
    segments: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(lab.repeats(_ROUNDS)):
        for kind in (*kinds[number % len(kinds) :], *kinds[: number % len(kinds)]):
            seconds = _segment(lab, kind, steps)
            segments[kind].append(median(seconds))
            say(f"    round {number + 1}, {kind}: median step {median(seconds) * 1e3:.1f} ms of {len(seconds)}")
    return [*(_ratio(kind, segments) for kind in LIMITS), _kept(segments)]


def _segment(lab: Lab, kind: str, steps: int) -> list[float]:
    if kind.startswith("ddp"):
        return baseline_ddp.run(4, steps, lab.size, KEEP_MEMORY if kind != "ddp" else None)
    reduction: Any = kind
    return step_seconds(lab.run(steps=steps + WARM_UP, reduction=reduction))


def _ratio(kind: str, segments: dict[str, list[float]]) -> Bar:
    ours, theirs = median(segments[kind]), median(segments["ddp"])
    rounds = [mine / other for mine, other in zip(segments[kind], segments["ddp"], strict=True)]
    return Bar(
        topic="overhead",
        name=f"no fault, {kind}: step time beside plain DDP, 4 ranks",
        measured=f"{ours / theirs:.3f} ({ours * 1e3:.1f} ms to {theirs * 1e3:.1f} ms; "
        f"rounds {min(rounds):.2f} to {max(rounds):.2f})",
        limit=f"{LIMITS[kind]:.2f}",
        met=ours / theirs <= LIMITS[kind],
        samples={"ours": segments[kind], "ddp": segments["ddp"]},
    )


def _kept(segments: dict[str, list[float]]) -> Bar:
    theirs = median(segments["ddp, memory kept"])
    ratios = {kind: median(segments[kind]) / theirs for kind in LIMITS}
    return Bar(
        topic="overhead",
        name="no fault: the same beside DDP whose allocator returns no memory to the system",
        measured=", ".join(f"{kind} {ratio:.3f}" for kind, ratio in ratios.items()) + f" (DDP {theirs * 1e3:.1f} ms)",
        samples={"ddp": segments["ddp, memory kept"]},
    )
