"""A run through several world sizes, and the number of experiments a minute."""

from __future__ import annotations

import itertools
import os
import time
from statistics import median

from benchmarks.harness.bars import Bar, compact, passes_through
from benchmarks.harness.lab import Lab
from benchmarks.recoveries.recovery import PLACES
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Verdict
from faults import Kill

STATIONS = (4, 3, 2, 4)
#: Verified experiments a minute that two cores must manage.
RATE = 20


def resize(lab: Lab) -> list[Bar]:
    """Lose two ranks within the time of a step, without spares; replacements join while the others
    train.
    """
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
    """Return the successive world sizes that committed steps."""
    return compact(point.world for point in outcome.steps)


def throughput(lab: Lab) -> list[Bar]:
    """Measure whole experiments with the tiny job, judged against its twin, from a warm
    supervisor.
    """
    fault = Kill(rank=2, at_step=10)
    lab.run(
        fault, steps=20, size="tiny", twin=True
    )  # runs the twin, which later experiments take from the cache
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


def experiments(lab: Lab) -> list[Bar]:
    """Run kills in all phases, each judged against the twin, back to back for a minute."""
    limit_s = 6.0 if lab.smoke else 60.0
    lab.run(Kill(rank=2, at_step=10), steps=20, size="tiny", twin=True)  # runs the twin
    verdicts: list[Verdict] = []
    begin_s = time.monotonic()
    for rank, phase in itertools.cycle(PLACES):
        if time.monotonic() - begin_s >= limit_s:
            break
        outcome = lab.run(
            Kill(rank=rank, at_step=10, phase=phase), steps=20, size="tiny", twin=True
        )
        verdicts.append(outcome.verdict)
    return [rate_bar(verdicts, time.monotonic() - begin_s, len(os.sched_getaffinity(0)))]


def rate_bar(verdicts: list[Verdict], elapsed_s: float, cores: int) -> Bar:
    """Return the bar on passed experiments a minute; an experiment that did not pass is not
    verified.
    """
    passed = verdicts.count(Verdict.PASSED)
    rate = passed * 60 / elapsed_s
    return Bar(
        topic="experiments",
        name=f"verified experiments a minute on {cores} cores: gpt tiny, 4 ranks, 20 steps, a kill, judged by its twin",
        measured=f"{rate:.1f} ({passed} of {len(verdicts)} passed in {elapsed_s:.1f} s)",
        limit=f"at least {RATE}",
        met=rate >= RATE,
        samples={"verdicts": [verdict.value for verdict in verdicts], "elapsed_s": elapsed_s},
    )
