"""The pure parts of the benchmarks: the numbers, what is claimed, and the page."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Iterator[None]:
    """Benchmarks are scripts: they find each other in their own folder."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def bars() -> Any:
    return importlib.import_module("bars")


def report(bars: Any, *lines: Any, load: float = 0.1, smoke: bool = False) -> Any:
    machine = msgspec.structs.replace(bars.look_at_machine(), load=load)
    return bars.Report(machine=machine, smoke=smoke, bars=list(lines))


def test_a_quantile_is_a_measured_value(bars: Any) -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [bars.quantile(values, share) for share in (0.0, 0.2, 0.5, 0.81, 1.0)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert bars.quantile([float(value) for value in range(1, 101)], 0.95) == 95.0
    with pytest.raises(ValueError, match="no values"):
        bars.quantile([], 0.5)


def test_spread_shows_milliseconds(bars: Any) -> None:
    assert bars.spread([0.1, 0.3, 0.2]) == "200 / 300 / 300 ms"


def test_intervals_leave_out_the_warm_up(bars: Any) -> None:
    assert bars.intervals([0, 5_000_000_000, 6_000_000_000, 8_000_000_000], 1) == [1.0, 2.0]
    assert bars.intervals([7], 0) == []


@pytest.mark.parametrize(
    ("worlds", "sizes", "reached"),
    [
        ([4, 4, 3, 2, 2, 3, 4], [4, 3, 2, 3, 4], True),
        ([4, 3, 2, 4], [4, 3, 2, 4], True),
        ([4, 3, 4, 3, 4], [4, 3, 4, 3, 4], False),
        ([4, 2, 3, 4], [4, 2, 3, 4], False),
        ([], [], False),
    ],
)
def test_the_way_through_world_sizes(bars: Any, worlds: list[int], sizes: list[int], reached: bool) -> None:
    assert bars.compact(worlds) == sizes
    assert bars.passes_through(sizes, (4, 3, 2, 4)) is reached


def test_a_busy_machine_claims_no_duration_but_equality(bars: Any) -> None:
    duration = bars.Bar(topic="kill", name="time", measured="90 ms", limit="100 ms", met=True)
    missed = msgspec.structs.replace(duration, met=False)
    equality = bars.Bar(topic="kill", name="equality", measured="all", limit="all", met=False, timed=False)
    number = bars.Bar(topic="throughput", name="number", measured="1 s")
    lines = duration, missed, equality, number
    for load, smoke, expected in (
        (0.1, False, ["yes", "NO", "NO", "–"]),
        (0.51, False, ["noisy", "noisy", "NO", "–"]),
        (0.1, True, ["smoke", "smoke", "NO", "–"]),
    ):
        found = report(bars, *lines, load=load, smoke=smoke)
        assert [bars.verdict_label(found, line) for line in lines] == expected


def test_the_page_says_when_and_where_and_how_busy(bars: Any) -> None:
    line = bars.Bar(topic="kill", name="kill | spare", measured="90 ms", limit="100 ms", met=True)
    noisy = report(bars, line, load=3.25)
    page = bars.render_markdown(noisy)
    assert r"| kill \| spare | 90 ms | 100 ms | noisy |" in page
    for fact in (
        noisy.machine.date,
        noisy.machine.torch,
        "load average before the start 3.25",
        "no duration is claimed",
    ):
        assert fact in page
    assert "torch 2.13" in page
    assert all(peer.name in page for peer in bars.PEERS)
    assert "no duration is claimed" not in bars.render_markdown(report(bars, line))


def test_a_report_can_be_read_back(bars: Any) -> None:
    written = report(bars, bars.Bar(topic="nan", name="named", measured="3 of 3", met=True, samples={"seconds": [0.5]}))
    assert msgspec.json.decode(msgspec.json.encode(written), type=bars.Report) == written


def test_topics_run_in_their_own_order_and_unknown_ones_are_refused() -> None:
    run = importlib.import_module("run")
    assert run.choose_topics("throughput, kill") == ["kill", "throughput"]
    with pytest.raises(argparse.ArgumentTypeError, match="speed: use some of kill, hang"):
        run.choose_topics("speed,kill")


@pytest.mark.parametrize(
    ("pairs", "met"),
    [
        ([(0.2, 0.3), (0.29, 0.3), (0.5, 0.3)], True),  # the medians count, the maximum is shown
        ([(0.2, 0.3), (0.31, 0.3), (0.5, 0.3)], False),
        ([(0.4, 0.5), (0.4, 0.5), (0.2, 0.1)], True),  # each is held against the limit of its own run
    ],
)
def test_recoveries_are_judged_by_the_median(pairs: list[tuple[float, float]], met: bool) -> None:
    recovery = importlib.import_module("recovery")
    bar = recovery._durations("kill", "kill", pairs, "a step + 100 ms")
    assert bar.met is met
    assert f"{sum(seconds <= limit for seconds, limit in pairs)} of 3 runs within" in bar.measured
