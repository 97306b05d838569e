"""One run through several world sizes, and experiments an hour."""

from __future__ import annotations

import time
from statistics import median

from bars import Bar, compact, passes_through
from lab import Lab

from chaoskit.experiment.outcome import Outcome
from chaoskit.vocabulary import Verdict
from faults import Kill

STATIONS = (4, 3, 2, 4)


def resize(lab: Lab) -> list[Bar]:
    """Two ranks die within one step's time, without spares; replacements join while the others train."""
    faults = Kill(rank=3, at_step=10), Kill(rank=2, at_step=11)
    steps = 200 if lab.smoke else 60  # a tiny step is over before a new process is warm
    outcomes = [lab.run(*faults, steps=steps, twin=True, spares=0) for _ in range(lab.repeats(3))]
    worlds = [worlds_of(outcome) for outcome in outcomes]
    good = [
        outcome.verdict == Verdict.PASSED
        and outcome.weights_digest == outcome.twin_weights_digest
        and passes_through(sizes, STATIONS)
        for outcome, sizes in zip(outcomes, worlds, strict=True)
    ]
    shown = "; ".join(" -> ".join(map(str, sizes)) for sizes in worlds)
    return [
        Bar(
            topic="resize",
            name="weights after the world goes 4 -> 3 -> 2 -> 4 in one run",
            measured=f"bit-equal in {sum(good)} of {len(good)} runs: {shown}",
            limit="bit-equal to the unbroken run's",
            met=all(good),
            timed=False,
            samples={"worlds": worlds, "digests": [outcome.weights_digest for outcome in outcomes]},
        )
    ]


def worlds_of(outcome: Outcome) -> list[int]:
    """The world sizes that committed steps, one after the other."""
    return compact(point.world for point in outcome.steps)


def throughput(lab: Lab) -> list[Bar]:
    """A whole experiment with the tiny job, judged against its twin, from a warm nursery."""
    fault = Kill(rank=2, at_step=10)
    lab.run(fault, steps=20, size="tiny", twin=True)  # runs the twin, which later experiments find in the cache
    seconds = []
    for _ in range(lab.repeats(10)):
        begin_s = time.monotonic()
        lab.run(fault, steps=20, size="tiny", twin=True)
        seconds.append(time.monotonic() - begin_s)
    each = median(seconds)
    return [
        Bar(
            topic="throughput",
            name="an experiment with the tiny job: 4 ranks, 20 steps, a kill, judged against its twin",
            measured=f"{each:.2f} s each, {3600 / each:.0f} an hour",
            samples={"seconds": seconds},
        )
    ]
