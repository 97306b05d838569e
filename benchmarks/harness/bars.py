"""Bars: claims of a benchmark with their measurements and limits, the machine, and the page of
results.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from chaoskit.report.statistics import quantile
from chaoskit.vocabulary import Verdict

#: One-minute load average before the start above which a duration is not claimed.
QUIET_LOAD = 0.5

_P95_FROM = 20


class Summary(msgspec.Struct, frozen=True):
    """Summary of the samples of one quantity."""

    count: int
    median: float
    max: float


class Bar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the table.

    Args:
        topic: the name of the measurement, as ``--only`` takes it.
        name: the quantity that is measured.
        measured: the measured value, in words.
        limit: the allowed value, in words; empty for a number that is only reported.
        met: True if the limit is met; None if there is no limit.
        timed: True for a duration, which cannot be judged on a busy machine or in a smoke run.
        samples: the measured numbers, by quantity; empty in a report that was read from a summary.
        summaries: summaries of those samples; empty before a report is saved.
    """

    topic: str
    name: str
    measured: str
    limit: str = ""
    met: bool | None = None
    timed: bool = True
    samples: dict[str, Any] = {}
    summaries: dict[str, Summary] = {}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the time of a measurement. ``load``: the one-minute load average before the
    start.
    """

    date: str
    cores: int
    processor: str
    kernel: str
    python: str
    torch: str
    load: float
    niceness: int  # of the benchmark, and so of DistributedDataParallel's ranks; our workers add 5


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one call of the benchmarks.

    ``smoke``: True for a quick run, in which durations mean nothing. ``notes``: paragraphs for the
    page.
    """

    machine: Machine
    smoke: bool
    bars: list[Bar]
    notes: list[str] = []

    @property
    def failed(self) -> bool:
        """True if a bar that could be judged is not met."""
        return any(self.verdict(bar) is Verdict.FAILED for bar in self.bars)

    @property
    def noisy(self) -> bool:
        return self.machine.load > QUIET_LOAD

    def verdict(self, bar: Bar) -> Verdict | None:
        """Return whether ``bar`` is met: ``unknown`` for a duration of a busy machine or a smoke
        run, None without a limit.
        """
        if bar.met is None:
            return None
        if bar.timed and (self.noisy or self.smoke):
            return Verdict.UNKNOWN
        return Verdict.PASSED if bar.met else Verdict.FAILED


# -- numbers ---------------------------------------------------------------------------------------


def spread(seconds: Sequence[float]) -> str:
    """Return the median and the maximum in milliseconds, and the 95th percentile of 20 values or
    more.

    The 95th percentile of fewer values is their maximum.
    """
    p95 = f"{quantile(seconds, 0.95) * 1e3:.0f} ms p95, " if len(seconds) >= _P95_FROM else ""
    return f"{median(seconds) * 1e3:.0f} ms median, {p95}{max(seconds) * 1e3:.0f} ms worst of {len(seconds)}"


def intervals(times_ns: Sequence[int], drop: int) -> list[float]:
    """Return the seconds between successive times, without the first ``drop`` intervals."""
    return [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(times_ns)][drop:]


def compact(values: Iterable[int]) -> list[int]:
    """Return ``values`` without immediate repetitions."""
    distinct: list[int] = []
    for number in values:
        if distinct[-1:] != [number]:
            distinct.append(number)
    return distinct


def passes_through(values: Iterable[int], stations: Sequence[int]) -> bool:
    """Return whether ``stations`` occur in ``values`` in this order; other values may lie between
    them.
    """
    remaining = iter(values)
    return all(station in remaining for station in stations)


def choose(text: str, available: Iterable[str]) -> list[str]:
    """Return the names of ``known`` that ``text`` lists, in the order of ``known``.

    An unknown name raises the exception that argparse expects from a type.
    """
    names = list(available)
    chosen = {word.strip() for word in text.split(",")}
    if unknown := sorted(chosen - set(names)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: use some of {', '.join(names)}")
    return [name for name in names if name in chosen]


# -- machine ---------------------------------------------------------------------------------------


def look_at_machine() -> Machine:
    """Return a description of this machine; called before a benchmark starts any process."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return Machine(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cores=len(os.sched_getaffinity(0)),
        processor=model[1] if model else platform.machine(),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=version("torch"),
        load=os.getloadavg()[0],
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
    )


# -- page ------------------------------------------------------------------------------------------


def verdict_label(report: Report, bar: Bar) -> str:
    """Return the text of ``bar`` in the last column of the table."""
    verdict = report.verdict(bar)
    if verdict is None:
        return "–"
    if verdict is Verdict.UNKNOWN:
        return "smoke" if report.smoke else "noisy"
    return "yes" if verdict is Verdict.PASSED else "NO"


def render_markdown(report: Report) -> str:
    """Return the section of ``report`` on the page of results, without its heading."""
    machine = report.machine
    facts = (
        f"Measured on {machine.date} with {machine.cores} cores ({machine.processor}), Linux {machine.kernel}, "
        f"Python {machine.python}, torch {machine.torch}; load average before the start {machine.load:.2f}. "
        f"Other programs (DistributedDataParallel, stress-ng) ran at nice {machine.niceness}, our workers at nice "
        f"{machine.niceness + 5}."
    )
    lines = [facts]
    if report.noisy:
        lines.append(
            f"**Noisy: the machine was busy (load above {QUIET_LOAD}), so no duration is claimed.**"
        )
    if report.smoke:
        lines.append(
            "**A smoke run: the job is tiny and repeats are few, so no duration is claimed.**"
        )
    rows = [
        (bar.name, bar.measured, bar.limit or "–", verdict_label(report, bar))
        for bar in report.bars
    ]
    lines.append(_table(("bar", "measured", "limit", "met"), rows))
    lines += report.notes
    return "\n\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in cells
    )


# -- for people ------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """Print the table of ``report`` to the terminal."""
    table = Table("bar", "measured", "limit", "met")
    for bar in report.bars:
        table.add_row(bar.name, bar.measured, bar.limit or "–", verdict_label(report, bar))
    Console().print(table)
