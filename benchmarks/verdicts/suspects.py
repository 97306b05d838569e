"""Measure false alarms on uneven jobs and the time until a hidden hang is detected:
``python -m benchmarks.verdicts.suspects``.

The jobs of ``uneven_jobs.py`` are trained one after the other, on 3 ranks and a spare. Some of them
share the CPUs with bursts of other programs. Past the middle of each run, one rank hangs silently.
Every other rank that is ended as hung, or with its node, is a false alarm. Writes
results/suspects.json. Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.bars import Bar, Report, choose, look_at_machine, show
from benchmarks.harness.lab import Lab, show_progress
from benchmarks.harness.results import RESULTS, save
from benchmarks.harness.weather import LOADS, Weather, bursts, require_load
from chaoskit.errors import BadInput
from chaoskit.experiment.run.run import RawRun
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Heartbeat, WorkerLost
from faults import Hang

JOBS_FILE = Path(__file__).with_name("uneven_jobs.py")
#: Minutes of each job by default.
MINUTES = {"sequences": 30.0, "stalling_loader": 10.0, "adversarial": 10.0, "recompiling": 10.0}
#: Beside these other programs run.
LOADED = frozenset({"sequences", "adversarial"})
FALSE_ALARMS_MAX = 2
#: Of a run's time, when the hang is planted.
PLANTED_AT = 0.6
_TELL_S = 30.0


class Suspects(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run.

    ``ended``: descriptions of ranks that were ended although no fault was injected into them.
    """

    job: str
    minutes: float
    steps: int
    step_s: float
    ended: list[str]
    repeated: list[str]
    found_s: float | None
    bound_s: float
    longest_s: float
    allowance_s: float
    verdict: str


class Clock:
    """A watch callback that ends an open-ended run when its time is over, and prints progress."""

    def __init__(self, job: str, minutes: float, flag: Path) -> None:
        self._job, self._flag = job, flag
        self._end_s = time.monotonic() + minutes * 60
        self._told_s = time.monotonic()
        self._step = 0

    def __call__(self, message: Any) -> None:
        now_s = time.monotonic()
        match message:
            case Heartbeat(_, beats):
                self._step = max([self._step, *(beat.step for beat in beats)])
            case WorkerLost(worker, _, cause, detail):
                show_progress(
                    f"    {self._job}, step {self._step}: {worker} ended: {cause} ({detail})"
                )
        if now_s > self._end_s and not self._flag.exists():
            self._flag.touch()
        if now_s - self._told_s > _TELL_S:
            self._told_s = now_s
            show_progress(
                f"    {self._job}: step {self._step}, {max(0.0, self._end_s - now_s) / 60:.1f} minutes left"
            )


def look(job: str, minutes: float, run: RawRun, step_s: float, verdict: str) -> Suspects:
    """Return the results of a run from its journals."""
    injected = next(record for record in run.records if record.event == Event.INJECTED)
    ended, repeated, detected_s = [], [], None
    limits: dict[str, Any] = {"longest_ms": {"none": 0}, "allowance_ms": 0}
    before = limits
    for record in sorted(run.records, key=lambda record: record.t_ns):
        if record.event == Event.HANG_LIMITS:
            limits = record.fields
            before = limits if record.t_ns < injected.t_ns else before
        if record.event != Event.DETECTED or record["rank"] is None:
            continue
        if record["worker"] == injected["worker"] and record.t_ns > injected.t_ns:
            detected_s = (record.t_ns - injected.t_ns) / 1e9
            continue
        ended.append(
            f"step {record.get('step', '?')}: rank {record['rank']}: {record['cause']}: {record['detail']}"
        )
        if _was_seen(str(record["detail"]), limits["longest_ms"]):
            repeated.append(ended[-1])
    longest_s, allowance_s = (
        max(before["longest_ms"].values()) / 1000,
        before["allowance_ms"] / 1000,
    )
    return Suspects(
        job=job,
        minutes=minutes,
        steps=len({record["step"] for record in run.records if record.event == Event.COMMIT}),
        step_s=step_s,
        ended=ended,
        repeated=repeated,
        found_s=detected_s,
        bound_s=longest_s + 2 * allowance_s + 1,
        longest_s=longest_s,
        allowance_s=allowance_s,
        verdict=verdict,
    )


def _was_seen(detail: str, longest_ms: dict[str, int]) -> bool:
    """Return whether a phase as long as the one for which a rank was ended had ended by itself
    before.
    """
    phase, _, rest = detail.partition(" for ")
    age = rest.partition(" ms")[0]
    return age.isdigit() and int(age) <= longest_ms.get(phase, 0)


def claim(runs: Sequence[Suspects]) -> list[Bar]:
    """Return three bars for each job."""
    bars = []
    for run in runs:
        name = (
            f"{run.job}, {run.minutes:g} minutes, {run.steps} steps of {run.step_s:.2f} s (median)"
        )
        bars.append(
            Bar(
                topic="suspects",
                name=f"healthy ranks ended: {name}",
                measured="; ".join(
                    [f"{len(run.ended)} ended, {len(run.repeated)} of them again", *run.ended]
                ),
                limit=f"at most {FALSE_ALARMS_MAX} ended, none for a pause whose like was seen before",
                met=len(run.ended) <= FALSE_ALARMS_MAX and not run.repeated,
                timed=False,
                samples={"run": msgspec.to_builtins(run)},
            )
        )
        detection = "never" if run.found_s is None else f"after {run.found_s:.2f} s"
        bars.append(
            Bar(
                topic="suspects",
                name=f"a hidden hang in {run.job}",
                measured=f"found {detection}; longest phase {run.longest_s:.2f} s, a recovery {run.allowance_s:.2f} s",
                limit=f"longest phase + 2 recoveries + 1 s = {run.bound_s:.2f} s",
                met=run.found_s is not None and run.found_s <= run.bound_s,
                timed=False,
            )
        )
    return bars


def measure(minutes: dict[str, float], load: str, seed: int, journals: Path | None) -> Report:
    """Train each job for the minutes given, and return the report."""
    machine = look_at_machine()
    results = []
    with Lab(smoke=False, directory=journals) as lab:
        for job, its_minutes in minutes.items():
            with Weather(load, bursts(seed, machine.cores)) if job in LOADED else nullcontext():
                results.append(_train(lab, job, its_minutes))
            show_progress(f"    {results[-1]}")
    return Report(machine=machine, smoke=False, bars=claim(results))


def _train(lab: Lab, job: str, minutes: float) -> Suspects:
    flag = lab.scratch / f"{job}-over"
    hang = Hang(rank=1, after_s=minutes * 60 * PLANTED_AT, how="gil")
    run, outcome = lab.watch(
        Clock(job, minutes, flag),
        job=f"{JOBS_FILE}:{job}",
        options={},
        steps=20,
        until={"file": str(flag)},
        faults=[hang],
        nodes=3,
        spares=1,
        shards=6,
        twin=False,
        deadline_s=minutes * 60 + 600,
    )
    seconds = sorted(point.seconds for point in outcome.steps[1:])
    return look(
        job, minutes, run, seconds[len(seconds) // 2] if seconds else 0.0, outcome.verdict.value
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", default=list(MINUTES), type=lambda text: choose(text, MINUTES), metavar="JOBS"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="of each job; by default 30 of the first one, 10 of the others",
    )
    parser.add_argument(
        "--load", choices=LOADS, default="stress-ng", help="beside two of them; own: busy Python"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bursts")
    parser.add_argument(
        "--journals", type=Path, metavar="DIRECTORY", help="keep the journals of all runs there"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    try:
        require_load(options.load)
        minutes = {job: options.minutes or MINUTES[job] for job in options.jobs}
        report = measure(minutes, options.load, options.seed, options.journals)
    except BadInput as error:
        parser.error(str(error))
    save(report, options.results, "suspects")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
