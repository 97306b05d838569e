"""Measure the cost of protection in unbroken training:
``python -m benchmarks.steps.overhead [--only all,copies] [--quick]``.

Each row of the table is a comparison of chaoskit's job with DistributedDataParallel's. Both run
together, train the same model, and take turns by a token, in blocks of 20 steps. A pair is a block
of each side, so that other load affects both: the machine's speed changes by a tenth within a
minute. The first 2 steps of a block are dropped. A pair during which other processes used more than
0.2 CPUs is marked, and does not count.

Each protection is measured alone, and all of them together, on 2 and 4 ranks. The input is read in
the step or fetched ahead (prefetch=True; a DataLoader with one worker). Writes
results/overhead.json and, with every step of every pair, results/samples/overhead.json. Exit status
1 if a limit is not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.harness.bars import Bar, Report, choose, look_at_machine, show
from benchmarks.harness.lab import Lab, show_progress
from benchmarks.harness.referee import (
    DROPPED,
    OTHER_CPUS_MAX,
    Referee,
    Turn,
    order,
    plain,
    refereed,
)
from benchmarks.harness.results import RESULTS, save
from benchmarks.harness.turns import steps_of
from benchmarks.steps import baseline_ddp
from chaoskit.vocabulary import Verdict
from chaoskit.wire.messages import WorkerReady

LIMITS = {"exact": 1.05, "fast": 1.02}
#: glibc returns freed gradients to the system by default, and page faults bring them back in the next step. chaoskit's
#: workers keep freed memory (process/linux.py), so DDP is measured with the same setting.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}

PAIRS, BLOCK = 10, 20
_QUICK_BLOCK = 5
_WARM_PAIRS = 1  # excluded from the measurement
_SPARES_S = 300.0
_DEADLINE_S = 3600.0
_NOTE = (
    "Both jobs are alive together: while one trains, the other waits, and so do its control processes, which use some "
    "CPU all the same (`waiting_cpus` in the samples). A pair is marked if others used more than "
    f"{OTHER_CPUS_MAX:g} CPUs in one of its blocks; its first {DROPPED} steps in each block are dropped."
)

_NOTHING: dict[str, Any] = {
    "hash_every": 0,
    "state_hash_steps": 0,
    "memory_copies": 0,
    "spares": 0,
    "health": "off",
    "balance": False,
}
#: What is switched on -> settings. All together are the defaults.
PROTECTIONS: dict[str, dict[str, Any]] = {
    "nothing": _NOTHING,
    "gradient hash": _NOTHING | {"hash_every": 1},
    "state hash": _NOTHING | {"state_hash_steps": 16},
    "copies": _NOTHING | {"memory_copies": 1},
    "spare": _NOTHING | {"spares": 1},
    "health": _NOTHING | {"health": "enforce"},
    "balance": _NOTHING | {"balance": True},
    "all": {},
    "all, fast": {"reduction": "fast"},
}


class Case(NamedTuple):
    """A comparison. ``protection``: a key of :data:`PROTECTIONS`. ``loader``: the input is fetched
    ahead.
    """

    protection: str
    world: int
    loader: bool

    @property
    def reduction(self) -> str:
        """The method by which gradients are summed."""
        return str(PROTECTIONS[self.protection].get("reduction", "exact"))

    def __str__(self) -> str:
        ahead = ", input fetched ahead" if self.loader else ""
        if self.protection.startswith("all"):
            return f"no fault, {self.reduction}, {self.world} ranks{ahead}"
        return f"protection {self.protection} alone, {self.world} ranks{ahead}"


class Pair(NamedTuple):
    """A turn of each side."""

    ddp: Turn
    ours: Turn

    @property
    def is_marked(self) -> bool:
        """True if other load makes the comparison worthless."""
        return self.ddp.is_marked or self.ours.is_marked

    @property
    def ratio(self) -> float:
        """The ratio of the median steps, ours to DDP's."""
        return median(self.ours.seconds) / median(self.ddp.seconds)


#: What ``run.py`` measures: the rows of the README.
USUAL = (Case("all", 2, False), Case("all, fast", 2, False), Case("all", 4, False))


def overhead(lab: Lab) -> list[Bar]:
    """Return the bars of the protections that are on by default, all of them together."""
    return [bar_of(case, compare(lab, case, lab.repeats(PAIRS))) for case in USUAL]


def compare(lab: Lab, case: Case, pairs: int) -> list[Pair]:
    """Run both jobs together; the warm-up is left out.

    Raises:
        ConnectionError: if a rank of one of them ended early, or was replaced.
    """
    block, ready = _QUICK_BLOCK if lab.smoke else BLOCK, threading.Event()
    settings = PROTECTIONS[case.protection]
    steps = steps_of(_WARM_PAIRS + pairs, block)
    worker_count = case.world + settings.get("spares", 1)

    def watch(message: Any, ready_workers: set[str] = set()) -> None:  # noqa: B006 - of this one run
        ready_workers.update([message.worker] if isinstance(message, WorkerReady) else [])
        if len(ready_workers) >= worker_count:
            ready.set()

    with (
        tempfile.TemporaryDirectory() as directory,
        refereed(Path(directory), case.world) as referee,
        baseline_ddp.in_turns(
            *(case.world, steps, lab.size, referee.path, block),
            loader=case.loader,
            environment=KEEP_MEMORY,
        ) as ddp,
        ThreadPoolExecutor(1) as pool,
    ):
        playing = pool.submit(_play, referee, pairs, ddp.pid, ready)
        options = {"size": lab.size, "referee": referee.path, "block": block, "loader": case.loader}
        job = f"{Path(__file__).parents[1] / 'harness' / 'turns.py'}:train"
        plan = {
            "steps": steps,
            "options": options,
            "deadline_s": _DEADLINE_S,
            "nodes": case.world,
            **settings,
        }
        outcome = lab.run(job=job, watch=watch, **plan)
        if outcome.verdict is not Verdict.PASSED:
            referee.close()
            raise ConnectionError(f"{case}: {'; '.join(outcome.reasons)}")
        return playing.result()


def _play(referee: Referee, pairs: int, ddp_pid: int, ready: threading.Event) -> list[Pair]:
    """Play all turns and return the counted pairs.

    If the referee fails, it closes its connections, so that the ranks fail, too.
    """
    counted = []
    try:
        referee.gather()
        if not ready.wait(_SPARES_S):
            raise TimeoutError("a worker did not become ready")
        for number, sides in enumerate(order(_WARM_PAIRS + pairs)):
            turns = {side: referee.play(side, ddp_pid) for side in sides}
            pair = Pair(turns["ddp"], turns["ours"])
            if number >= _WARM_PAIRS:
                counted.append(pair)
                mark = ", other load" if pair.is_marked else ""
                ddp_ms = median(pair.ddp.seconds) * 1e3
                spent = pair.ours.cpu_s / (
                    pair.ddp.cpu_s or math.inf
                )  # turns may be shorter than a tick
                show_progress(
                    f"    pair {len(counted)}: {pair.ratio:.2f} x ({ddp_ms:.0f} ms), CPU {spent:.2f} x{mark}"
                )
    except BaseException:
        referee.close()
        raise
    return counted


def bar_of(case: Case, pairs: Sequence[Pair]) -> Bar:
    """Return a row of the table.

    Marked pairs are listed and do not count. The row claims nothing if most pairs are marked.
    """
    counted = [pair for pair in pairs if not pair.is_marked]
    enough = 2 * len(counted) > len(pairs)
    shown = counted if enough else list(pairs)
    ours, ddp = (
        [step_s for pair in shown for step_s in getattr(pair, side).seconds]
        for side in ("ours", "ddp")
    )
    cpu_ms = [median(getattr(pair, side).cpu_s for pair in shown) * 1e3 for side in ("ddp", "ours")]
    ratio, limit = median(pair.ratio for pair in shown), LIMITS[case.reduction]
    marked = (
        f"; {len(pairs) - len(counted)} of {len(pairs)} pairs had other load"
        if len(counted) < len(pairs)
        else ""
    )
    return Bar(
        topic="overhead",
        name=f"{case}: step time beside DDP with the same allocator, in turns",
        measured=f"{ratio:.2f} x median, {fmean(ours) / fmean(ddp):.2f} x mean, "
        f"{max(pair.ratio for pair in shown):.2f} x worst of {len(shown)} pairs "
        f"(DDP {_times(ddp)}, ours {_times(ours)}; CPU of all processes {cpu_ms[0]:.0f} and {cpu_ms[1]:.0f} ms a step; "
        f"{longest(pairs)}{marked})",
        limit=f"{limit:.2f} x",
        met=ratio <= limit if enough else None,
        samples={
            "ratios": [pair.ratio for pair in shown],
            "pairs": [{"ddp": plain(pair.ddp), "ours": plain(pair.ours)} for pair in pairs],
        },
    )


def _times(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.0f} ms median, {fmean(seconds) * 1e3:.0f} ms mean"


def longest(pairs: Sequence[Pair]) -> str:
    """Return a description of the longest step of all, with its place."""
    steps = (
        (seconds, side, number, place)
        for number, pair in enumerate(pairs, 1)
        for side, turn in (("DDP", pair.ddp), ("ours", pair.ours))
        for place, seconds in enumerate(turn.seconds, DROPPED + 1)
    )
    seconds, side, number, place = max(steps)
    return f"longest {seconds * 1e3:.0f} ms: {side}, pair {number}, step {place}"


def row(lab: Lab, case: Case, pairs: int) -> Bar:
    """Return a row of the table; a comparison that fails gives a row with the reason, and the
    others follow.
    """
    try:
        return bar_of(case, compare(lab, case, pairs))
    except (ConnectionError, TimeoutError) as error:
        return Bar(
            topic="overhead",
            name=str(case),
            measured=f"not measured: {error}",
            met=False,
            timed=False,
        )


def cases(protections: Sequence[str], worlds: Sequence[int]) -> list[Case]:
    """Return all comparisons of a table."""
    return [
        Case(name, world, loader)
        for world in worlds
        for loader in (False, True)
        for name in protections
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # "all, fast" has a comma in its name
    protections = {name.replace(", ", "-").replace(" ", "-"): name for name in PROTECTIONS}
    parser.add_argument(
        "--only",
        type=lambda text: choose(text, protections),
        default=list(protections),
        metavar="PROTECTIONS",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", metavar="N", help="default: 2 4; of a smoke run: 2"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: the tiny job, one pair, no claims"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    worlds = options.ranks or ([2] if options.quick else [2, 4])
    report = Report(machine=look_at_machine(), smoke=options.quick, bars=[], notes=[_NOTE])
    with Lab(smoke=options.quick) as lab:
        for case in cases([protections[name] for name in options.only], worlds):
            show_progress(f"  {case}")
            report.bars.append(row(lab, case, lab.repeats(options.pairs)))
            save(report, options.results, "overhead")  # a table takes an hour: keep the rows so far
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
