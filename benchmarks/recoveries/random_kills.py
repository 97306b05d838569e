"""Kill ranks with SIGKILL at random moments:
``python -m benchmarks.recoveries.random_kills [--kills 100] [--sizes 10m,tiny]``.

A rank is killed by its pid, in any phase, while the world is full and the spares are warm. The next
kill follows when the spares are warm again. The bar: the 95th percentile of kill-to-next-step stays
below twice its median. The phases of the longest recovery are printed. Writes
results/random_kills.json and .svg.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import functools
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.harness.bars import Bar, Report, choose, look_at_machine, show, spread
from benchmarks.harness.hunter import Hunter, Shot
from benchmarks.harness.lab import Lab, show_progress
from benchmarks.harness.pictures import histogram
from benchmarks.harness.results import RESULTS, save
from chaoskit.experiment.run.recovery_timeline import Incident, Timeline
from chaoskit.experiment.run.run import RawRun
from chaoskit.journal import Record
from chaoskit.report.statistics import quantile
from chaoskit.report.summary import duration
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import RECOVERY_PHASES, Event, Verdict

#: The 95th percentile may be this many times the median.
RATIO = 2.0
NODES, SPARES = 4, 2

_EMPTY_RUNS = 3  # so many runs without a single kill are an error


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one size: each kill comes within ``window_s`` of a warm world, and none in the
    last steps.
    """

    steps: int
    window_s: float
    spare_steps: int


ROUNDS = {
    "10m": Round(steps=240, window_s=1.5, spare_steps=15),
    "tiny": Round(steps=3000, window_s=0.5, spare_steps=200),
}
_QUICK = Round(steps=400, window_s=0.2, spare_steps=50)


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """A kill, and the recovery from it.

    Args:
        seconds: the time from the kill until the last rank has committed the first step of the new
            generation.
        world: the number of ranks that committed it.
        phases: the seconds of each phase until then.
        place: the phase and step of the victim.
        under_way: worker starts and membership changes that were not complete.
        starved_s: the longest time that a survivor's main thread was ready to run and had no CPU.
    """

    seconds: float
    world: int
    phases: dict[str, float]
    step_s: float
    rank: int
    place: str
    under_way: list[str]
    starved_s: float
    journals: str


def hunt(lab: Lab, size: str, kills: int, seed: int) -> tuple[list[Recovered], list[str]]:
    """Run the job until ``kills`` ranks were killed; return the recoveries, and the judge's
    findings except for kills.

    Raises:
        RuntimeError: if several runs in a row ended without a kill.
    """
    terms, chance = _QUICK if lab.smoke else ROUNDS[size], random.Random(f"{seed}/{size}")
    recoveries: list[Recovered] = []
    problems: list[str] = []
    empty = 0
    show_progress(f"    {size}: the unbroken run first, {terms.steps} steps")
    while len(recoveries) < kills and empty < _EMPTY_RUNS:
        begin_s = time.monotonic()
        hunter = Hunter(
            chance,
            nodes=NODES,
            spares=SPARES,
            window_s=terms.window_s,
            last_step=terms.steps - terms.spare_steps,
            limit=kills - len(recoveries),
        )
        limits: dict[str, Any] = {
            "max_failures": 10_000,
            "strikes_max": 0,
        }  # a hunt is no reason to give up
        run, outcome = lab.watch(
            hunter, steps=terms.steps, size=size, nodes=NODES, spares=SPARES, **limits
        )
        hunter.close()
        fresh = [way for shot in hunter.shots if (way := way_back(run, shot)) is not None]
        empty = 0 if fresh else empty + 1
        recoveries += fresh
        problems += complaints(outcome)
        if len(fresh) < len(hunter.shots):
            problems.append(
                f"no step after {len(hunter.shots) - len(fresh)} kills ({outcome.directory})"
            )
        shown = spread([way.seconds for way in fresh]) if fresh else "nothing"
        show_progress(
            f"    {size}: {len(recoveries)} of {kills} kills, {shown}, {time.monotonic() - begin_s:.0f} s"
        )
    if not recoveries:
        raise RuntimeError(
            f"{_EMPTY_RUNS} runs ended before a rank could be killed: {'; '.join(problems) or 'why?'}"
        )
    return recoveries, problems


def complaints(outcome: Outcome) -> list[str]:
    """Return the failed checks of a run, except for deaths that no planned fault explains."""
    bad = [
        check
        for check in outcome.checks
        if check.verdict is not Verdict.PASSED and check.name != "no false alarm"
    ]
    return [f"{check.name}: {check.detail} ({outcome.directory})" for check in bad]


def way_back(run: RawRun, shot: Shot) -> Recovered | None:
    """Return the recovery from a kill by the journals; None if no step came after it."""
    records = run.records
    noticed = [
        record
        for record in records
        if record.event == Event.DETECTED
        and record["worker"] == shot.worker
        and record.t_ns >= shot.t_ns
    ]
    if not noticed:
        return None
    recovery = Timeline(run, History(records)).recovery(Incident(None, noticed[0], shot.t_ns))
    if recovery is None:
        return None
    upto = RECOVERY_PHASES[: RECOVERY_PHASES.index("first good step") + 1]
    return Recovered(
        seconds=recovery.seconds,
        world=recovery.world,
        phases={span.name: span.seconds for span in recovery.spans if span.name in upto},
        step_s=recovery.step_seconds,
        rank=shot.rank,
        place=place(records, shot.worker, shot.t_ns),
        under_way=under_way(records, shot.t_ns),
        starved_s=shot.starved_s,
        journals=str(run.directory),
    )


# -- what a kill hit: pure functions of the journals -----------------------------------------------


def place(records: Sequence[Record], worker: str, t_ns: int) -> str:
    """Return the phase and step of ``worker`` at ``t_ns``, as exactly as its journal shows."""
    marks = (Event.REDUCE, Event.COMMIT)
    before = [
        record
        for record in records
        if record.source == worker and record.event in marks and record.t_ns <= t_ns
    ]
    if not before:
        return "before its first step"
    last = before[-1]
    if last.event == Event.COMMIT:
        return f"in the forward or backward pass of step {last['step'] + 1}"
    return f"in the reduction or the optimizer of step {last['step']}"


def under_way(records: Sequence[Record], t_ns: int) -> list[str]:
    """Return descriptions of the workers that were not ready and of the memberships that were not
    settled at ``t_ns``.
    """
    starting: dict[str, None] = {}
    plans: dict[int, str] = {}
    for record in records:
        if record.t_ns > t_ns:
            break
        if record.event == Event.WORKER_STARTED:
            starting[record["worker"]] = None
        elif record.event in (Event.READY, Event.DETECTED, Event.WORKER_EXITED):
            starting.pop(record["worker"], None)
        elif record.event == Event.PLAN:
            kind = "a regroup" if record["abort"] else "a growth"
            plans = {record["generation"]: f"{kind} to generation {record['generation']}"}
        elif record.event == Event.SETTLED:
            plans.pop(record["generation"], None)
    return [*(f"the start of {worker}" for worker in starting), *plans.values()]


# -- what is claimed -------------------------------------------------------------------------------


def claim(size: str, ways: Sequence[Recovered], kills: int, problems: Sequence[str]) -> list[Bar]:
    """Return the two bars of one size: the recovery times, and the equality of the training."""
    seconds = [way.seconds for way in ways]
    middle, p95 = median(seconds), quantile(seconds, 0.95)
    full = sum(way.world == NODES for way in ways)
    time_bar = Bar(
        topic="random kills",
        name=f"gpt {size}, {len(ways)} SIGKILLs at random moments, {SPARES} warm spares: every rank's next step",
        measured=f"{spread(seconds)}; p95 is {p95 / middle:.2f} x the median; {full} at full world",
        limit=f"p95 at most {RATIO:g} x the median",
        met=p95 <= RATIO * middle and len(ways) >= kills,
        samples={
            "median": middle,
            "p95": p95,
            "max": max(seconds),
            "ratio": p95 / middle,
            "kills": [msgspec.to_builtins(way) for way in ways],
        },
    )
    same = Bar(
        topic="random kills",
        name=f"gpt {size}: the same training after all kills",
        measured="; ".join(problems[:3]) or "every run bit-equal to its twin, every sample once",
        limit="bit-equal to the unbroken run",
        met=not problems,
        timed=False,
        samples={"problems": list(problems)},
    )
    return [time_bar, same]


def explain(size: str, ways: Sequence[Recovered]) -> str:
    """Return a description of the longest recovery: its victim's place, its phases, and those
    longer than usual.
    """
    longest = max(ways, key=lambda way: way.seconds)
    usual = {name: median([way.phases.get(name, 0.0) for way in ways]) for name in longest.phases}
    excess = {name: seconds - usual[name] for name, seconds in longest.phases.items()}
    phases = ", ".join(
        f"{name} {duration(s)} (median {duration(usual[name])})"
        for name, s in longest.phases.items()
    )
    worst = max(excess, key=lambda name: excess[name])
    beyond = longest.seconds - median([way.seconds for way in ways])
    return (
        f"The longest of gpt {size}: {duration(longest.seconds)}, {duration(beyond)} beyond the median. Rank "
        f"{longest.rank} was killed {longest.place}; under way: {', '.join(longest.under_way) or 'nothing else'}. "
        f'Phases: {phases}. Most of the excess is in "{worst}" ({duration(excess[worst])}). '
        f"Meanwhile a survivor's main thread had to wait for a CPU for up to {duration(longest.starved_s)}; a step "
        f"took {duration(longest.step_s)} before."
    )


def measure(
    sizes: Sequence[str], kills: int, seed: int, journals: Path | None, *, smoke: bool
) -> tuple[Report, dict[str, list[float]]]:
    """Kill ranks in each size; return the report, and the seconds of each size for the picture."""
    machine = look_at_machine()
    bars: list[Bar] = []
    notes: list[str] = []
    seconds: dict[str, list[float]] = {}
    with Lab(smoke=smoke, directory=journals) as lab:
        for size in sizes:
            ways, problems = hunt(lab, size, kills, seed)
            bars += claim(size, ways, kills, problems)
            notes.append(explain(size, ways))
            seconds[f"gpt {size}"] = [way.seconds for way in ways]
    notes.append("![time from a kill to the next step](results/random_kills.svg)")
    return Report(machine=machine, smoke=smoke, bars=bars, notes=notes), seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="of each size")
    sizes_of = functools.partial(choose, available=ROUNDS)
    parser.add_argument(
        "--sizes", type=sizes_of, default=list(ROUNDS), metavar="SIZES", help=", ".join(ROUNDS)
    )
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: the tiny job, a few kills, no claims"
    )
    parser.add_argument(
        "--journals", type=Path, metavar="DIRECTORY", help="keep the journals of all runs there"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    sizes, kills = (
        (["tiny"], min(options.kills, 5)) if options.quick else (options.sizes, options.kills)
    )
    report, seconds = measure(sizes, kills, options.seed, options.journals, smoke=options.quick)
    save(report, options.results, "random_kills")
    title = "Time from a SIGKILL at a random moment to every rank's next step"
    (options.results / "random_kills.svg").write_text(
        histogram(title, seconds, RATIO), encoding="utf-8"
    )
    show(report)
    for note in report.notes[:-1]:
        show_progress(note)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
