"""What a benchmark claims: bars with what was measured, the machine it was measured on, and the page that says so."""

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


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table.

    Args:
        topic: name of the measurement, as ``--only`` takes it.
        name: what is asked.
        measured: what was found, in words.
        limit: what is allowed, in words; empty for a number that is only reported.
        met: whether it is; None where there is no limit.
        timed: whether it is a duration, which a busy machine or a smoke run cannot show.
        samples: the numbers behind it.
    """

    topic: str
    name: str
    measured: str
    limit: str = ""
    met: bool | None = None
    timed: bool = True
    samples: dict[str, Any] = {}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when the numbers were taken. ``load``: one-minute average before the start."""

    date: str
    cores: int
    processor: str
    kernel: str
    python: str
    torch: str
    load: float
    niceness: int  # of the benchmark, and so of DistributedDataParallel's ranks; our workers add 5


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the benchmarks. ``smoke``: a quick run, whose durations mean nothing. ``notes``: paragraphs."""

    machine: Machine
    smoke: bool
    bars: list[Bar]
    notes: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether a bar that could be judged is not met."""
        return any(self.verdict(bar) is Verdict.FAILED for bar in self.bars)

    @property
    def noisy(self) -> bool:
        return self.machine.load > QUIET_LOAD

    def verdict(self, bar: Bar) -> Verdict | None:
        """``unknown`` where a duration cannot be claimed; None where nothing is asked."""
        if bar.met is None:
            return None
        if bar.timed and (self.noisy or self.smoke):
            return Verdict.UNKNOWN
        return Verdict.PASSED if bar.met else Verdict.FAILED


# -- numbers ------------------------------------------------------------------------------------------------------


def spread(seconds: Sequence[float]) -> str:
    """Median and maximum in milliseconds; from 20 values on the 95th percentile, too, which is the maximum of fewer."""
    p95 = f"{quantile(seconds, 0.95) * 1e3:.0f} ms p95, " if len(seconds) >= _P95_FROM else ""
    return f"{median(seconds) * 1e3:.0f} ms median, {p95}{max(seconds) * 1e3:.0f} ms worst of {len(seconds)}"


def intervals(times_ns: Sequence[int], drop: int) -> list[float]:
    """Seconds between successive times, without the first ``drop`` intervals."""
    return [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(times_ns)][drop:]


def compact(values: Iterable[int]) -> list[int]:
    """``values`` without immediate repetitions."""
    found: list[int] = []
    for value in values:
        if found[-1:] != [value]:
            found.append(value)
    return found


def passes_through(values: Iterable[int], stations: Sequence[int]) -> bool:
    """Whether ``stations`` occur in ``values`` in this order, others between them or not."""
    remaining = iter(values)
    return all(station in remaining for station in stations)


def choose(text: str, known: Iterable[str]) -> list[str]:
    """Those of ``known`` that are named in ``text``, in their own order. For argparse, hence its exception."""
    names = list(known)
    wanted = {word.strip() for word in text.split(",")}
    if unknown := sorted(wanted - set(names)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: use some of {', '.join(names)}")
    return [name for name in names if name in wanted]


# -- machine ------------------------------------------------------------------------------------------------------


def look_at_machine() -> Machine:
    """To be called before anything is started."""
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


# -- page ---------------------------------------------------------------------------------------------------------


def verdict_label(report: Report, bar: Bar) -> str:
    """For the last column of the table."""
    verdict = report.verdict(bar)
    if verdict is None:
        return "–"
    if verdict is Verdict.UNKNOWN:
        return "smoke" if report.smoke else "noisy"
    return "yes" if verdict is Verdict.PASSED else "NO"


def render_markdown(report: Report) -> str:
    """Render the page."""
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


# -- for people ---------------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """The table, on the terminal."""
    table = Table("bar", "measured", "limit", "met")
    for bar in report.bars:
        table.add_row(bar.name, bar.measured, bar.limit or "–", verdict_label(report, bar))
    Console().print(table)


def save(report: Report, directory: Path, name: str = "latest") -> None:
    """Write ``name.json``, with every sample, and ``name.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    (directory / f"{name}.json").write_bytes(encoded + b"\n")
    (directory / f"{name}.md").write_text(render_markdown(report), encoding="utf-8")
