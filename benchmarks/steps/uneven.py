"""Measure the cost of one rank at half speed among four:
``python -m benchmarks.steps.uneven [--quick] [--results DIRECTORY]``.

The job runs unbroken, with a rank that is slow from one step to the end, and with such a rank and
balancing of shards. Writes results/uneven.json. Exit status 1 if the bar is not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import sys
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.harness.bars import Bar, Report, look_at_machine, show, spread
from benchmarks.harness.lab import Lab, records, show_progress
from benchmarks.harness.results import RESULTS, save
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event
from faults import Straggle

RANKS, SLOW_RANK, AT, STEPS = 4, 1, 10, 60
#: A step of equal ranks and equal shares.
STEP_S = 0.16
#: Of the best possible split: so much must be reached, within so many steps of the change.
SHARE, WITHIN = 0.8, 10
#: A throughput is the mean over as many steps.
WINDOW = 5

JOB_NOTE = """The job is `fixtures/jobs/paced.py`: a shard sleeps for its time, so that four ranks do not share two
cores. The slow rank begins both phases of each shard late (`Straggle`), by as much as a shard takes; it also begins its
reduction and its optimizer late, once a step, which no split can help against and which counts here."""
SPLIT_NOTE = """The best possible split is that of a batch which can be cut anywhere: 3.5 of 4 ranks' work, 0.875 of the
throughput of the unbroken run that was measured beside it. Shards are whole, so no split of V shards reaches it. A run
is there after so many steps when from then on five steps take no longer than that allows."""


class Setting(NamedTuple):
    """The settings of one of the three runs."""

    name: str
    is_slow: bool
    balance: bool


UNBROKEN = Setting("unbroken", False, False)
FIXED = Setting("shards stay", True, False)
BALANCED = Setting("balanced", True, True)


def train(lab: Lab, setting: Setting, shards: int) -> Outcome:
    """Run the job with ``setting`` and judge it against its twin."""
    shard_s = STEP_S * RANKS / shards
    slow = Straggle(rank=SLOW_RANK, at_step=AT, delay_ms=shard_s / 2 * 1000, steps=10 * STEPS)
    return lab.run(
        *([slow] if setting.is_slow else []),
        steps=AT + 2 * WITHIN if lab.smoke else STEPS,
        job="paced",
        options={"shard_s": shard_s},
        twin=True,
        nodes=RANKS,
        spares=0,
        shards=shards,
        balance=setting.balance,
    )


def step_seconds(outcome: Outcome) -> list[float]:
    """Return the seconds of each step after the change, between two commits of rank 0."""
    commits = {
        record["step"]: record.t_ns
        for record in records(outcome)
        if record.event == Event.COMMIT and record["rank"] == 0
    }
    times = [
        commits[step] for step in sorted(commits) if step >= AT
    ]  # step AT itself waits for the fault
    return [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(times)]


def steps_until(seconds: list[float], limit_s: float) -> int | None:
    """Return the number of steps before ``WINDOW`` successive ones take at most ``limit_s`` in the
    mean; None if never.
    """
    means = [
        sum(seconds[first : first + WINDOW]) / WINDOW for first in range(len(seconds) - WINDOW + 1)
    ]
    return next((first for first, mean_s in enumerate(means) if mean_s <= limit_s), None)


def measure(lab: Lab, shards: int) -> list[Bar]:
    """Run the three settings in turns, several times each, and return the bars."""
    runs: dict[str, list[list[float]]] = {}
    verdicts: list[str] = []
    for _ in range(lab.repeats(3)):
        for setting in (UNBROKEN, FIXED, BALANCED):
            outcome = train(lab, setting, shards)
            verdicts.append(outcome.verdict.value)
            runs.setdefault(setting.name, []).append(step_seconds(outcome))
    whole_s = median(itertools.chain(*runs[UNBROKEN.name]))
    best_s = whole_s * RANKS / (RANKS - 0.5)
    share = {
        name: best_s / mean(itertools.chain(*(times[WITHIN:] for times in step_times)))
        for name, step_times in runs.items()
    }
    within = [steps_until(seconds, best_s / SHARE) for seconds in runs[BALANCED.name]]
    reached = all(count is not None and count <= WITHIN for count in within)
    counted = ", ".join("never" if count is None else str(count) for count in within)
    balanced, fixed = share[BALANCED.name], share[FIXED.name]
    samples = {"steps_s": runs, "within": within, "verdicts": verdicts, "best_s": best_s}
    return [
        Bar(
            topic="uneven",
            name=f"V={shards}: throughput with a rank at half speed among {RANKS}, of the best possible split",
            measured=f"{balanced:.2f} balanced, {fixed:.2f} where shards stay; {SHARE:g} within {counted} steps",
            limit=f"at least {SHARE:g} within {WITHIN} steps",
            met=balanced >= SHARE and reached,
            samples=samples,
        ),
        Bar(
            topic="uneven",
            name=f"V={shards}: a step: unbroken; shards stay; balanced, after {WITHIN} steps",
            measured="; ".join(
                spread(list(itertools.chain(*(times[WITHIN:] for times in runs[s.name]))))
                for s in ALL
            ),
        ),
        Bar(
            topic="uneven",
            name=f"V={shards}: runs that passed, with the bits of their twin",
            measured=f"{verdicts.count('passed')} of {len(verdicts)}",
            limit="all",
            met=set(verdicts) == {"passed"},
            timed=False,
        ),
    ]


ALL = (UNBROKEN, FIXED, BALANCED)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: few steps, no claims")
    parser.add_argument("--shards", type=int, nargs="+", default=[16, 32], metavar="V")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    machine, bars = look_at_machine(), []
    with Lab(smoke=options.quick) as lab:
        for shards in options.shards:
            show_progress(f"V={shards}")
            bars += measure(lab, shards)
    report = Report(machine=machine, smoke=options.quick, bars=bars, notes=[JOB_NOTE, SPLIT_NOTE])
    save(report, options.results, "uneven")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
