"""Tests of the pure parts of the benchmarks: the numbers, the bars, and the page."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import psutil
import pytest

from chaoskit.errors import BadInput
from chaoskit.journal import Record
from chaoskit.process.host_checks import on_thread
from chaoskit.process.linux import is_ending
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Beat, Endpoint, Heartbeat, Member, Plan, WorkerReady

LIMIT_S = 60.0  # limit of waits that must end
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bars() -> Any:
    return importlib.import_module("benchmarks.harness.bars")


def report(bars: Any, *lines: Any, load: float = 0.1, smoke: bool = False) -> Any:
    machine = msgspec.structs.replace(bars.look_at_machine(), load=load)
    return bars.Report(machine=machine, smoke=smoke, bars=list(lines))


def test_a_quantile_is_a_measured_value(bars: Any) -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [bars.quantile(values, share) for share in (0.0, 0.2, 0.5, 0.81, 1.0)] == [
        1.0,
        1.0,
        3.0,
        5.0,
        5.0,
    ]
    assert bars.quantile([float(number) for number in range(1, 101)], 0.95) == 95.0
    with pytest.raises(ValueError, match="no values"):
        bars.quantile([], 0.5)


def test_figures_of_hands_stand_beside_those_of_the_prototype() -> None:
    hands = importlib.import_module("benchmarks.pods.hands")
    bar = hands.bar_of("stopped", [0.01, 0.02, 0.03])
    assert bar.measured.startswith("20.0 ms median, 30.0 ms worst of 3 (prototype: 13 ms")
    assert (bar.limit, bar.met) == ("1 s", True)
    assert hands.bar_of("stopped", [0.01, 2.0]).met is False
    assert hands.bar_of("trip", [0.001]).met is None


def test_spread_shows_milliseconds(bars: Any) -> None:
    assert bars.spread([0.1, 0.3, 0.2]) == "200 ms median, 300 ms worst of 3"
    many = bars.spread([number / 100 for number in range(1, 21)])
    assert many == "105 ms median, 190 ms p95, 200 ms worst of 20"


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
def test_the_way_through_world_sizes(
    bars: Any, worlds: list[int], sizes: list[int], reached: bool
) -> None:
    assert bars.compact(worlds) == sizes
    assert bars.passes_through(sizes, (4, 3, 2, 4)) is reached


def test_a_busy_machine_claims_no_duration_but_equality(bars: Any) -> None:
    duration = bars.Bar(topic="kill", name="time", measured="90 ms", limit="100 ms", met=True)
    missed = msgspec.structs.replace(duration, met=False)
    equality = bars.Bar(
        topic="kill", name="equality", measured="all", limit="all", met=False, timed=False
    )
    number = bars.Bar(topic="throughput", name="number", measured="1 s")
    lines = duration, missed, equality, number
    for load, smoke, expected in (
        (0.1, False, ["yes", "NO", "NO", "–"]),
        (0.51, False, ["noisy", "noisy", "NO", "–"]),
        (0.1, True, ["smoke", "smoke", "NO", "–"]),
    ):
        judged = report(bars, *lines, load=load, smoke=smoke)
        assert [bars.verdict_label(judged, line) for line in lines] == expected


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
    assert "no duration is claimed" not in bars.render_markdown(report(bars, line))


def test_a_report_is_saved_as_a_summary_and_with_its_samples_apart(
    bars: Any, tmp_path: Path
) -> None:
    """The summary keeps all that the page shows; lists of numbers become their count, median and
    maximum.
    """
    samples = {
        "seconds": [0.5, 0.25, 1.0],
        "p95": 1.0,
        "worlds": [4, 3],
        "pairs": [{"ddp": [0.1]}],
        "limits": [],
    }
    bar = bars.Bar(
        topic="kill", name="kill", measured="500 ms", limit="1 s", met=True, samples=samples
    )
    complete = report(
        bars, bar, bars.Bar(topic="kill", name="equality", measured="all", timed=False)
    )
    importlib.import_module("benchmarks.harness.results").save(complete, tmp_path, "kill")
    text = (tmp_path / "kill.json").read_text()
    summary = msgspec.json.decode(text, type=bars.Report)
    assert (
        msgspec.json.decode((tmp_path / "samples" / "kill.json").read_bytes(), type=bars.Report)
        == complete
    )
    assert summary.bars[0].summaries == {"seconds": bars.Summary(3, 0.5, 1.0)}
    assert "samples" not in text
    assert len(text.splitlines()) == 9  # a line for each bar
    assert bars.render_markdown(summary) == bars.render_markdown(complete)


def test_the_page_of_results_is_that_of_the_summaries() -> None:
    """The page is that of the summaries; `python -m benchmarks.results_page >
    benchmarks/results.md` updates it.
    """
    page = (BENCHMARKS / "results.md").read_text(encoding="utf-8")
    assert page == importlib.import_module("benchmarks.results_page").render_page()


def test_results_that_git_tracks_are_small() -> None:
    """Samples belong in the folder `samples`, which git ignores."""
    files = [file for file in (BENCHMARKS / "results").iterdir() if file.is_file()]
    assert 15 <= len(files) <= 20
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert [
        name for name, text in texts.items() if len(text.splitlines()) >= 100 or len(text) > 20_000
    ] == []
    assert [name for name, text in texts.items() if '"samples"' in text] == []


def test_links_to_results_name_a_section_of_the_page() -> None:
    sections = {
        line.removeprefix("## ") for line in (BENCHMARKS / "results.md").read_text().splitlines()
    }
    pages = [BENCHMARKS.parent / "README.md", *(BENCHMARKS.parent / "docs").rglob("*.md")]
    links = [
        link
        for page in pages
        for link in re.findall(r"benchmarks/results\b([^)\s`]*)\)", page.read_text())
    ]
    assert len(links) >= 9
    assert [
        link for link in links if link != ".md" and link.removeprefix(".md#") not in sections
    ] == []


def test_topics_run_in_their_own_order_and_unknown_ones_are_refused() -> None:
    run = importlib.import_module("benchmarks.run")
    assert run.choose_topics("throughput, kill") == ["kill", "throughput"]
    with pytest.raises(argparse.ArgumentTypeError, match="speed: use some of kill, hang"):
        run.choose_topics("speed,kill")


@pytest.mark.parametrize(
    ("pairs", "met"),
    [
        ([(0.2, 0.3), (0.29, 0.3), (0.5, 0.3)], True),  # the medians count, the maximum is shown
        ([(0.2, 0.3), (0.31, 0.3), (0.5, 0.3)], False),
        (
            [(0.4, 0.5), (0.4, 0.5), (0.2, 0.1)],
            True,
        ),  # each is held against the limit of its own run
    ],
)
def test_recoveries_are_judged_by_the_median(pairs: list[tuple[float, float]], met: bool) -> None:
    recovery = importlib.import_module("benchmarks.recoveries.recovery")
    bar = recovery.durations("kill", "kill", pairs, "a step + 100 ms")
    assert bar.met is met
    assert f"{sum(seconds <= limit for seconds, limit in pairs)} of 3 runs within" in bar.measured


def test_only_verified_experiments_count() -> None:
    elastic = importlib.import_module("benchmarks.recoveries.elastic")
    passed, unknown = Verdict.PASSED, Verdict.UNKNOWN
    assert elastic.rate_bar([passed] * 21, 60.0, 2).met
    slow = elastic.rate_bar([passed] * 19 + [unknown] * 9, 60.0, 2)
    assert (slow.met, slow.measured) == (False, "19.0 (19 of 28 passed in 60.0 s)")


# -- kills at random moments -----------------------------------------------------------------------


def record(t_ns: int, source: str, event: Event, **fields: Any) -> Record:
    return Record(t_ns, source, event.value, fields)


def way(seconds: float, step_s: float = 0.25, **changes: Any) -> Any:
    kills = importlib.import_module("benchmarks.recoveries.random_kills")
    facts = {
        "seconds": seconds,
        "world": 4,
        "phases": {"detected": 0.001, "regrouped": 0.02, "first good step": seconds - 0.021},
        "step_s": step_s,
        "rank": 2,
        "place": "in the reduction or the optimizer of step 7",
        "under_way": [],
        "starved_s": 0.1,
        "journals": "run",
    }
    return kills.Recovered(**facts | changes)


def test_what_a_kill_hit_is_read_from_the_journals() -> None:
    kills = importlib.import_module("benchmarks.recoveries.random_kills")
    journals = [
        record(5, "node2", Event.WORKER_STARTED, worker="node2.1"),
        record(10, "node2.1", Event.READY, worker="node2.1"),
        record(11, "coordinator", Event.PLAN, generation=1, members=[], abort=False),
        record(12, "coordinator", Event.SETTLED, generation=1),
        record(20, "node2.1", Event.REDUCE, step=0),
        record(22, "node1.1", Event.COMMIT, step=0),
        record(23, "node2.1", Event.COMMIT, step=0),
        record(24, "node3", Event.WORKER_STARTED, worker="node3.2"),
        record(26, "coordinator", Event.PLAN, generation=2, members=[], abort=True),
    ]
    places = {t: kills.place(journals, "node2.1", t) for t in (15, 21, 23)}
    assert places == {
        15: "before its first step",
        21: "in the reduction or the optimizer of step 0",
        23: "in the forward or backward pass of step 1",
    }
    assert [kills.under_way(journals, t) for t in (7, 11, 12, 25, 30)] == [
        ["the start of node2.1"],
        ["a growth to generation 1"],
        [],
        ["the start of node3.2"],
        ["the start of node3.2", "a regroup to generation 2"],
    ]


def test_the_95th_percentile_is_held_against_the_median() -> None:
    kills = importlib.import_module("benchmarks.recoveries.random_kills")
    ways = [way(0.3)] * 94 + [way(0.6)] + [way(5.0)] * 5
    bar, same = kills.claim("10m", ways, 100, [])
    assert (bar.met, bar.samples["ratio"], bar.samples["max"]) == (True, 2.0, 5.0)
    assert same.met
    assert not kills.claim("10m", [way(0.3)] * 94 + [way(0.61)] * 6, 100, [])[0].met
    assert not kills.claim("10m", ways[:99], 100, [])[0].met  # fewer kills than asked for
    assert not kills.claim("10m", ways, 100, ["losses equal the twin's: step 3: first difference"])[
        1
    ].met


def test_the_longest_is_explained_by_what_took_longer_than_usual() -> None:
    kills = importlib.import_module("benchmarks.recoveries.random_kills")
    slow = way(
        0.9, phases={"detected": 0.001, "regrouped": 0.62, "first good step": 0.279}, starved_s=0.55
    )
    text = kills.explain("10m", [way(0.3), way(0.3), slow])
    assert 'Most of the excess is in "regrouped" (600 ms)' in text
    assert "900 ms, 600 ms beyond the median" in text
    assert "regrouped 620 ms (median 20 ms)" in text
    assert "wait for a CPU for up to 550 ms" in text


def test_a_hunter_kills_only_in_a_full_and_warm_world() -> None:
    """A real process dies, once the world is full, has trained in this membership, and the spare is
    ready.
    """
    hunter_of = importlib.import_module("benchmarks.harness.hunter").Hunter
    with contextlib.ExitStack() as stack:
        idle = [sys.executable, "-c", "import time; time.sleep(60)"]
        workers = {
            name: stack.enter_context(subprocess.Popen(idle)) for name in ("a", "b", "spare")
        }
        for process in workers.values():
            stack.callback(process.kill)
        ends = {
            name: Endpoint("host", "127.0.0.1", 1, process.pid, 0)
            for name, process in workers.items()
        }
        hunter = hunter_of(random.Random(0), nodes=2, spares=1, window_s=0.0, last_step=50, limit=5)
        stack.callback(hunter.close)
        members = tuple(
            Member(rank, name, "node", ends[name], (rank,)) for rank, name in enumerate("ab")
        )

        def beat(step: int, generation: int = 1) -> None:
            beats = tuple(
                Beat(name, generation, rank, step, 2, 1.0, 0.0, step, 1.0)
                for rank, name in enumerate("ab")
            )
            hunter(Heartbeat("node", beats))

        for name in "ab":
            hunter(WorkerReady(name, "node", ends[name]))
        hunter(Plan(1, members, True))
        for step in (4, 9):
            beat(step)
        assert hunter._timer is None  # warm, but no spare
        hunter(WorkerReady("spare", "node", ends["spare"]))
        deadline_s = time.monotonic() + 20
        while not hunter.shots and time.monotonic() < deadline_s:
            time.sleep(0.01)
        (shot,) = hunter.shots
        assert workers[shot.worker].wait(20) == -signal.SIGKILL
        assert {name for name, process in workers.items() if process.poll() is None} == {
            "a",
            "b",
            "spare",
        } - {shot.worker}
        beat(12)
        assert hunter._timer is None  # the same membership: one of its members is dead


def test_a_histogram_counts_every_value(bars: Any) -> None:
    pictures = importlib.import_module("benchmarks.harness.pictures")
    assert pictures.bins([0.0, 0.1, 0.5, 0.99, 1.0], 1.0, 2) == [2, 3]
    drawn = ET.fromstring(pictures.histogram("kills & times", {"gpt 10m": [0.3, 0.31, 0.9]}, 2.0))
    words = [element.text for element in drawn.iter() if element.text]
    assert {"kills & times", "gpt 10m", "median 310 ms", "p95 900 ms", "2 × median 620 ms"} <= set(
        words
    )
    counts = [int(word) for word in words if word.isdigit()]
    assert sum(counts) == 3


# -- false alarms ----------------------------------------------------------------------------------


def test_bursts_are_seeded_and_vary() -> None:
    weather = importlib.import_module("benchmarks.harness.weather")
    first = list(itertools.islice(weather.bursts(1, 2), 200))
    assert first == list(itertools.islice(weather.bursts(1, 2), 200))
    assert first != list(itertools.islice(weather.bursts(2, 2), 200))
    assert {burst.cpus for burst in first} == set(range(7))  # from a pause to three times two cores
    assert weather.commands("own", weather.Burst(1.0, 0, 0)) == []
    *spins, touch = weather.commands("stress-ng", weather.Burst(2.0, 3, 1))  # a session each
    assert [command[:4] for command in spins] == [["stress-ng", "--quiet", "--cpu", "1"]] * 3
    assert touch[:4] == ["stress-ng", "--quiet", "--vm", "1"]
    assert len(weather.commands("own", weather.Burst(2.0, 3, 1))) == 4


def test_a_load_that_cannot_be_made_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weather = importlib.import_module("benchmarks.harness.weather")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="apt-get install stress-ng"):
        weather.require_load("stress-ng")
    weather.require_load("own")


def test_the_load_is_there_and_then_it_is_gone() -> None:
    """Two busy processes run, one of which touches memory; none of them is left afterwards."""
    weather = importlib.import_module("benchmarks.harness.weather")
    me = psutil.Process()
    before = {child.pid for child in me.children()}
    with weather.Weather("own", iter([weather.Burst(60.0, 1, 1)] * 9)) as wind:
        deadline_s = time.monotonic() + 20
        started: set[int] = set()
        while len(started) < 2 and time.monotonic() < deadline_s:
            new = {child.pid for child in me.children()} - before
            started = {
                pid for pid in new if os.getsid(pid) == pid
            }  # before setsid it is a fork of this process
            time.sleep(0.01)
        assert len(started) == 2
    assert all(is_ending(pid) for pid in started)
    assert (wind.bursts, wind.problem) == (1, "")


def test_the_load_ends_with_a_benchmark_that_is_killed() -> None:
    script = f"""if True:
        import sys, time
        sys.path.insert(0, {str(BENCHMARKS.parent)!r})
        from benchmarks.harness.weather import Burst, Weather
        with Weather("own", iter([Burst(600.0, 1, 1)])):
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", script]) as benchmark:
        deadline_s = time.monotonic() + 30
        load: list[psutil.Process] = []
        while len(load) < 2 and time.monotonic() < deadline_s:
            load = psutil.Process(benchmark.pid).children()
            time.sleep(0.05)
        benchmark.kill()
    assert len(load) == 2
    assert psutil.wait_procs(load, timeout=20)[1] == []


def test_a_load_that_ends_by_itself_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    weather = importlib.import_module("benchmarks.harness.weather")
    monkeypatch.setattr(weather, "_SPIN", "import sys; sys.exit('no more')")
    with weather.Weather("own", iter([weather.Burst(3.0, 1, 0)])) as wind:
        wind._thread.join(20)
    assert wind.problem == "the load ended by itself with status 1: no more"


def test_any_detection_plan_or_verdict_is_a_false_alarm() -> None:
    alarms = importlib.import_module("benchmarks.verdicts.false_alarms")
    calm = alarms.Calm(
        size="tiny",
        trained_s=90.0,
        steps=100,
        step_s=0.02,
        longest_s=1.5,
        detections=[],
        plans=1,
        verdict=Verdict.PASSED,
        reasons=[],
        weights="abc",
    )
    bar, effect = alarms.claim([calm, calm], {"tiny": 0.01}, "stress-ng", 170.0, 31)
    assert (bar.met, bar.name[:4]) == (True, "3.0 ")
    assert (
        effect.measured == "31 bursts, 2.8 minutes in all; gpt tiny: 200 steps, 10 ms, 20 ms, 1.5 s"
    )
    for change in (
        {"detections": ["node1.1: hung (step 7)"]},
        {"plans": 2},
        {"verdict": Verdict.FAILED},
        {"weights": "def"},
    ):
        changed = msgspec.structs.replace(calm, **change)
        assert not alarms.claim([calm, changed], {"tiny": 0.01}, "own", 1.0, 1)[0].met
    assert not alarms.claim([], {}, "own", 1.0, 1)[0].met


def test_what_counts_as_an_alarm() -> None:
    alarms = importlib.import_module("benchmarks.verdicts.false_alarms")
    lost = {"worker": "node1.1", "cause": "hung", "detail": "step 7"}
    records = [
        record(1, "coordinator", Event.PLAN, generation=1),
        record(2, "coordinator", Event.DETECTED, **lost),
        record(3, "coordinator", Event.PLAN, generation=2),
        record(3, "node1.1", Event.NONFINITE, worker="node1.1", step=8),
        record(4, "coordinator", Event.JOB_ENDED, ok=True),
        record(5, "coordinator", Event.DETECTED, **lost),  # ended with the job
    ]
    assert alarms.alarms(records) == (
        ["node1.1: hung (step 7)", "node1.1: nonfinite (see the journals)"],
        2,
    )


# -- the cost of a setting -------------------------------------------------------------------------


def test_any_field_of_the_configuration_can_be_varied() -> None:
    vary = importlib.import_module("benchmarks.steps.vary")
    assert vary.parse("buckets=1,4") == ("buckets", 1, 4)
    assert vary.parse("reduction=exact,fast") == ("reduction", "exact", "fast")
    assert vary.parse("fork=true,false") == ("fork", True, False)
    for text in (
        "speed=1,2",
        "job=a,b",
        "buckets=1",
        "buckets=1,2,3",
        "buckets=1,many",
        "reduction=exact,slow",
    ):
        with pytest.raises(BadInput, match="vary="):
            vary.parse(text)


def test_a_cost_is_a_ratio_of_medians() -> None:
    vary = importlib.import_module("benchmarks.steps.vary")
    variation = vary.parse("buckets=1,4")
    bar = vary.cost(variation, [0.2, 0.3, 0.2], [0.204, 0.2, 0.9], "10m", 1.02)
    assert bar.met
    assert bar.measured == "1.020 (204.0 ms to 200.0 ms; rounds 0.67 to 4.50)"
    assert vary.cost(variation, [0.2, 0.2], [0.205, 0.205], "10m", 1.02).met is False
    assert vary.cost(variation, [0.2, 0.2], [0.205, 0.205], "10m", None).met is None


# -- two jobs in turns -----------------------------------------------------------------------------


def turn(side: str, *seconds: float, other_cpus: float = 0.0) -> Any:
    referee = importlib.import_module("benchmarks.harness.referee")
    return referee.Turn(side, list(seconds), sum(seconds), 2 * max(seconds), 0.0, other_cpus)


def pair(ddp_s: float, ours_s: float, **more: Any) -> Any:
    overhead = importlib.import_module("benchmarks.steps.overhead")
    return overhead.Pair(
        turn("ddp", ddp_s, ddp_s, ddp_s), turn("ours", ours_s, ours_s, 2 * ours_s, **more)
    )


def test_the_cost_is_the_median_of_pairs_and_the_mean_beside_it() -> None:
    overhead = importlib.import_module("benchmarks.steps.overhead")
    case = overhead.Case("all", 2, False)
    bar = overhead.bar_of(case, [pair(0.1, 0.1), pair(0.1, 0.102), pair(0.1, 0.2)])
    assert bar.met
    assert bar.name.startswith("no fault, exact, 2 ranks: ")
    assert bar.measured == (
        "1.02 x median, 1.79 x mean, 2.00 x worst of 3 pairs (DDP 100 ms median, 100 ms mean, "
        "ours 200 ms median, 179 ms mean; CPU of all processes 200 and 408 ms a step; "
        "longest 400 ms: ours, pair 3, step 5)"
    )
    assert [round(ratio, 3) for ratio in bar.samples["ratios"]] == [1.0, 1.02, 2.0]
    assert len(bar.samples["pairs"]) == 3


def test_pairs_beside_other_load_are_listed_and_do_not_count() -> None:
    overhead = importlib.import_module("benchmarks.steps.overhead")
    case = overhead.Case("copies", 4, True)
    pairs = [pair(0.1, 0.1), pair(0.1, 0.102), pair(0.1, 0.4, other_cpus=0.5)]
    bar = overhead.bar_of(case, pairs)
    assert bar.met
    assert bar.name.startswith("protection copies alone, 4 ranks, input fetched ahead: ")
    assert "worst of 2 pairs" in bar.measured
    assert bar.measured.endswith("; 1 of 3 pairs had other load)")
    assert [measured["ours"]["marked"] for measured in bar.samples["pairs"]] == [False, False, True]
    assert overhead.bar_of(case, pairs[1:]).met is None  # half of them: nothing can be claimed


def test_the_sides_take_turns_in_beginning() -> None:
    referee = importlib.import_module("benchmarks.harness.referee")
    assert referee.order(3) == [("ddp", "ours"), ("ours", "ddp"), ("ddp", "ours")]


class Players:
    """A rank of each side, on threads, with steps of a length that a test chooses."""

    def __init__(self, directory: Path, step_s: float) -> None:
        self._turns, self._referee = (
            importlib.import_module("benchmarks.harness.turns"),
            importlib.import_module("benchmarks.harness.referee"),
        )
        self.referee, self._step_s = self._referee.Referee(directory, 1), step_s
        self._threads = [
            threading.Thread(target=self._play, args=(side,)) for side in self._referee.SIDES
        ]

    def _play(self, side: str) -> None:
        turns = self._turns.Turns(self.referee.path, side, 0, 5)
        with turns, contextlib.suppress(ConnectionError):
            while True:
                turns.wait()
                while not turns.note(self._step_s):
                    time.sleep(self._step_s)
                turns.hand_over()

    def __enter__(self) -> Any:
        for thread in self._threads:
            thread.start()
        self.referee.gather()
        return self.referee

    def __exit__(self, *error: object) -> None:
        self.referee.close()
        for thread in self._threads:
            thread.join()


def test_a_turn_beside_other_load_is_marked(tmp_path: Path) -> None:
    """The load comes from an orphan, a process of another tree."""
    begin = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    done = subprocess.run(["sh", "-c", begin], capture_output=True, text=True, check=True)
    try:
        with Players(tmp_path, step_s=0.3) as referee:
            played = referee.play("ours", os.getpid())
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)
    assert played.seconds == [0.3, 0.3, 0.3]  # without the first two
    assert played.is_marked


def test_the_end_of_a_rank_ends_the_comparison(tmp_path: Path) -> None:
    """The other ranks must not wait for a turn that never comes."""
    turns, referee = (
        importlib.import_module("benchmarks.harness.turns"),
        importlib.import_module("benchmarks.harness.referee"),
    )
    with referee.refereed(tmp_path, 1) as judge:
        ddp, ours = (turns.Turns(judge.path, side, 0, 5) for side in referee.SIDES)
        judge.gather()
        ours.__exit__(None, None, None)
        with pytest.raises(ConnectionError):
            judge.play("ours", os.getpid())
    with pytest.raises(ConnectionError):
        ddp.wait()


def test_a_referee_of_a_job_that_fails_does_not_wait_for_its_ranks(tmp_path: Path) -> None:
    """The referee stops waiting both before the ranks have come and in a turn."""
    turns, referee = (
        importlib.import_module("benchmarks.harness.turns"),
        importlib.import_module("benchmarks.harness.referee"),
    )
    coming = referee.Referee(tmp_path, 1)
    gathering = on_thread(coming.gather)
    ddp = turns.Turns(coming.path, "ddp", 0, 5)
    coming.close()
    with pytest.raises(OSError):
        gathering.result(LIMIT_S)
    ddp.__exit__(None, None, None)
    (tmp_path / "referee").unlink()
    playing = referee.Referee(tmp_path, 1)
    ranks = [turns.Turns(playing.path, side, 0, 5) for side in referee.SIDES]
    playing.gather()
    turn = on_thread(lambda: playing.play("ours", os.getpid()))
    ranks[1].wait()
    playing.close()
    with pytest.raises(OSError):
        turn.result(LIMIT_S)


@pytest.mark.costly
def test_both_jobs_train_in_turns(tmp_path: Path) -> None:
    """A smoke run of the real jobs; each pair is in the file, step by step."""
    options = ["--quick", "--only", "all", "--results", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.steps.overhead", *options]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bars = msgspec.json.decode((tmp_path / "samples" / "overhead.json").read_bytes())["bars"]
    assert [bar["name"].partition(":")[0] for bar in bars] == [
        "no fault, exact, 2 ranks",
        "no fault, exact, 2 ranks, input fetched ahead",
    ]
    for bar in bars:
        (only,) = bar["samples"]["pairs"]
        assert len(only["ddp"]["seconds"]) == len(only["ours"]["seconds"]) == 3
        assert min(only["ddp"]["seconds"] + only["ours"]["seconds"]) > 0
