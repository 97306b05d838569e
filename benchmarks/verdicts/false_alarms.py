"""Count false alarms while healthy training runs on a busy machine:
``python -m benchmarks.verdicts.false_alarms [--minutes 30] [--load own]``.

The sizes 10m and tiny of gpt are trained in turns, without faults, while other programs use the
CPUs in bursts. Every detection, every change of the membership and every verdict other than
"passed" is a false alarm. Writes results/false_alarms.json. Exit status 1 if there was a false
alarm.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.harness.bars import Bar, Report, choose, look_at_machine, show
from benchmarks.harness.lab import Lab, show_progress
from benchmarks.harness.results import RESULTS, save
from benchmarks.harness.weather import LOADS, Weather, bursts, require_load
from chaoskit.errors import BadInput
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Record
from chaoskit.report.summary import duration
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Heartbeat, WorkerLost

STEPS = {"10m": 120, "tiny": 1500}
NODES, SPARES = 4, 1
#: Nothing of this belongs into healthy training.
NOTICES = frozenset(
    {Event.DETECTED, Event.NONFINITE, Event.CORRUPT, Event.SET_ASIDE, Event.RECORD_LOST}
)
DEADLINE_S = 1800.0  # of one run: on a machine this busy only a run that stands still needs it

_TELL_S = 15.0


class Calm(msgspec.Struct, frozen=True, kw_only=True):
    """An unbroken run. ``detections``: must be empty. ``plans``: the number of memberships, which
    must be 1.
    """

    size: str
    trained_s: float
    steps: int
    step_s: float
    longest_s: float
    detections: list[str]
    plans: int
    verdict: Verdict
    reasons: list[str]
    weights: str | None


class Progress:
    """A watch callback that prints progress from time to time."""

    def __init__(self, text: str, weather: Weather) -> None:
        self._text, self._weather = text, weather
        self._step, self._lost = 0, 0
        self._told_s = time.monotonic()

    def __call__(self, message: Any) -> None:
        match message:
            case Heartbeat(_, beats):
                self._step = max([self._step, *(beat.step for beat in beats)])
            case WorkerLost(worker, _, cause, detail):
                self._lost += 1
                show_progress(f"    {worker}: {cause} ({detail})")
        if time.monotonic() - self._told_s >= _TELL_S:
            self._told_s = time.monotonic()
            show_progress(
                f"    {self._text}, step {self._step}; beside it: {self._weather.now}; {self._lost} workers given up"
            )


def look(size: str, run: RawRun, outcome: Outcome) -> Calm:
    """Return the results of an unbroken run."""
    seconds = [point.seconds for point in outcome.steps[1:]]
    detections, plans = alarms(run.records)
    return Calm(
        size=size,
        trained_s=sum(seconds),
        steps=len(outcome.steps),
        step_s=median(seconds) if seconds else 0.0,
        longest_s=max(seconds, default=0.0),
        detections=detections,
        plans=plans,
        verdict=outcome.verdict,
        reasons=outcome.reasons,
        weights=outcome.weights_digest,
    )


def alarms(records: Sequence[Record]) -> tuple[list[str], int]:
    """Return descriptions of all detections before the end of the job, spares included, and the
    number of memberships.
    """
    end_ns = min((r.t_ns for r in records if r.event == Event.JOB_ENDED), default=None)
    during = [record for record in records if end_ns is None or record.t_ns <= end_ns]
    detections = [
        f"{record.get('worker', record.source)}: {record.get('cause', record.event)} "
        f"({record.get('detail', 'see the journals')})"
        for record in during
        if record.event in NOTICES
    ]
    return detections, sum(record.event == Event.PLAN for record in during)


def claim(
    runs: Sequence[Calm], alone: Mapping[str, float], load: str, loaded_s: float, burst_count: int
) -> list[Bar]:
    """Return the bar on false alarms, and one on how the load slowed the training.

    ``alone``: the seconds of a step without load, by size.
    """
    detections = [text for run in runs for text in run.detections]
    extra = sum(max(0, run.plans - 1) for run in runs)
    bad = [
        reason
        for run in runs
        if run.verdict is not Verdict.PASSED
        for reason in run.reasons or ["no reason given"]
    ]
    digests = {
        size: len({run.weights for run in runs if run.size == size})
        for size in {run.size for run in runs}
    }
    different = sorted(size for size, count in digests.items() if count > 1)
    trained_s = sum(run.trained_s for run in runs)
    passed = sum(run.verdict is Verdict.PASSED for run in runs)
    problems = [
        *detections,
        *bad,
        *(f"gpt {size}: runs ended with different weights" for size in different),
    ]
    quiet = Bar(
        topic="false alarms",
        name=f"{trained_s / 60:.1f} minutes of healthy training, 4 ranks, beside {load}",
        measured="; ".join(
            [
                f"{len(detections)} detections, {extra} plans beyond the first, {passed} of {len(runs)} runs passed",
                *problems[:3],
            ]
        ),
        limit="0 detections, 0 plans, all passed",
        met=bool(runs) and not problems and not extra,
        timed=False,
        samples={"runs": [msgspec.to_builtins(run) for run in runs], "problems": problems},
    )
    effects = [
        _effect([run for run in runs if run.size == size], alone[size])
        for size in STEPS
        if size in digests
    ]
    pressure = Bar(
        topic="false alarms",
        name="what the load did to the steps (median alone, median beside it, and the longest)",
        measured="; ".join([f"{burst_count} bursts, {loaded_s / 60:.1f} minutes in all", *effects]),
        samples={"loaded_s": loaded_s, "bursts": burst_count},
    )
    return [quiet, pressure]


def _effect(runs: Sequence[Calm], alone_s: float) -> str:
    beside_s, longest_s = median(run.step_s for run in runs), max(run.longest_s for run in runs)
    durations = ", ".join(map(duration, (alone_s, beside_s, longest_s)))
    return f"gpt {runs[0].size}: {sum(run.steps for run in runs)} steps, {durations}"


def measure(
    minutes: float, sizes: Sequence[str], load: str, seed: int, journals: Path | None
) -> Report:
    """Train until the steps add up to ``minutes``, and return the report."""
    machine = look_at_machine()
    runs: list[Calm] = []
    with Lab(smoke=False, directory=journals) as lab:
        alone = {size: _train(lab, size, lambda message: None).step_s for size in sizes}
        with Weather(load, bursts(seed, machine.cores)) as weather:
            for number, size in enumerate(itertools.cycle(sizes), 1):
                trained_s = sum(run.trained_s for run in runs)
                if trained_s >= minutes * 60:
                    break
                text = f"{trained_s / 60:.1f} of {minutes:g} minutes; run {number}, gpt {size}"
                last = _train(lab, size, Progress(text, weather))
                runs.append(last)
                result = f"{last.verdict.value}, {last.steps} steps in {last.trained_s:.0f} s, {last.plans} plans"
                show_progress(f"    {text}: {result}")
                if weather.problem:
                    raise BadInput("load", load, f"mend it, or use another one: {weather.problem}")
    return Report(
        machine=machine,
        smoke=False,
        bars=claim(runs, alone, load, weather.loaded_s, weather.bursts),
    )


def _train(lab: Lab, size: str, watch: Callable[[Any], None]) -> Calm:
    fixed: dict[str, Any] = {"nodes": NODES, "spares": SPARES, "deadline_s": DEADLINE_S}
    return look(size, *lab.watch(watch, steps=STEPS[size], size=size, twin=False, **fixed))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of training, start-up not counted"
    )
    sizes_of = functools.partial(choose, available=STEPS)
    parser.add_argument(
        "--sizes", type=sizes_of, default=list(STEPS), metavar="SIZES", help="trained by turns"
    )
    parser.add_argument(
        "--load", choices=LOADS, default="stress-ng", help="own: busy processes of Python"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bursts")
    parser.add_argument(
        "--journals", type=Path, metavar="DIRECTORY", help="keep the journals of all runs there"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    try:
        require_load(options.load)
        report = measure(
            options.minutes, options.sizes, options.load, options.seed, options.journals
        )
    except BadInput as error:
        parser.error(str(error))
    save(report, options.results, "false_alarms")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
