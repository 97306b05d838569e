"""What resilience costs while nothing breaks: step times beside DistributedDataParallel's, in pairs."""

from __future__ import annotations

from statistics import median
from typing import Any

import baseline_ddp
from bars import Bar
from lab import WARM_UP, Lab, say, step_seconds

LIMITS = {"exact": 1.05, "fast": 1.02}
#: glibc returns freed gradients to the system by default, and page faults bring them back in the next step. chaoskit's
#: workers keep freed memory (osprocess.py), so DDP is measured with the same setting.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
#: Reduction and ranks -> pairs. The speed of a shared machine changes by a tenth within a minute, hence ten.
PAIRS = {("exact", 2): 10, ("fast", 2): 10, ("exact", 4): 5}

_STEPS = 30


def overhead(lab: Lab) -> list[Bar]:
    """Each pair is one run of ours and one of DDP, one right after the other, and every other pair in turned order."""
    bars = []
    for (kind, world), pairs in PAIRS.items():
        found = [_pair(lab, world, kind, number) for number in range(lab.repeats(pairs))]
        bars.append(_bar(world, kind, found))
    return bars


def _pair(lab: Lab, world: int, kind: str, number: int) -> tuple[float, float]:
    """Median seconds of a step: ours, DDP's."""
    names = ("ours", "ddp") if number % 2 else ("ddp", "ours")
    steps = 12 if lab.smoke else _STEPS
    found = {name: _segment(lab, world, kind if name == "ours" else name, steps) for name in names}
    ratio = found["ours"] / found["ddp"]
    say(f"    {world} ranks, {kind}, pair {number + 1}: {ratio:.2f} x ({found['ddp'] * 1e3:.0f} ms)")
    return found["ours"], found["ddp"]


def _segment(lab: Lab, world: int, kind: str, steps: int) -> float:
    if kind == "ddp":
        return median(baseline_ddp.run(world, steps, lab.size, KEEP_MEMORY))
    reduction: Any = kind
    return median(step_seconds(lab.run(steps=steps + WARM_UP, reduction=reduction, nodes=world)))


def _bar(world: int, kind: str, pairs: list[tuple[float, float]]) -> Bar:
    ratios = [ours / ddp for ours, ddp in pairs]
    ddp_s = median(ddp for _, ddp in pairs)
    return Bar(
        topic="overhead",
        name=f"no fault, {kind}, {world} ranks: step time beside DDP with the same allocator",
        measured=f"{median(ratios):.2f} x median, {max(ratios):.2f} x worst of {len(pairs)} pairs "
        f"(DDP {ddp_s * 1e3:.0f} ms)",
        limit=f"{LIMITS[kind]:.2f} x",
        met=median(ratios) <= LIMITS[kind],
        samples={"ratios": ratios, "ours": [ours for ours, _ in pairs], "ddp": [ddp for _, ddp in pairs]},
    )
