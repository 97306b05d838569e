"""SLAs: the meaning of lines, the evidence of records, and nonsensical files."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from math import comb, inf
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from support.runs import MACHINE, run

from chaoskit.errors import BadInput
from chaoskit.history.record import KNOWN, Metric, RunRecord, SeriesRecord
from chaoskit.observe.histograms import RecoveryTimes
from chaoskit.report.terminal import Terminal
from chaoskit.sla.exact import runs_needed, shows_at_least, shows_less
from chaoskit.sla.export import BOUNDS_S, prometheus_rules
from chaoskit.sla.judge import Judged, State, exit_code, judge
from chaoskit.sla.language import parse
from chaoskit.sla.promises import Sla, load, sla_of_lines
from chaoskit.sla.rendering import render_sla, sla_markdown, sla_sentence
from chaoskit.vocabulary import Verdict

# -- counting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "misses", "runs"),
    [
        *((0.90, misses, runs) for misses, runs in enumerate((29, 46, 61, 76))),
        *((0.95, misses, runs) for misses, runs in enumerate((59, 93, 124, 153))),
        *((0.99, misses, runs) for misses, runs in enumerate((299, 473, 628, 773))),
        (0.5, 0, 5),
    ],
)
def test_how_many_runs_a_share_takes(share: float, misses: int, runs: int) -> None:
    """The numbers are those of the published table for a confidence of 95 %."""
    assert runs_needed(share, misses, 0.95) == runs
    assert shows_at_least(share, runs - misses, runs, 0.95)
    assert not shows_at_least(share, runs - 1 - misses, runs - 1, 0.95)


@pytest.mark.parametrize("trials", [5, 20, 60, 250])
def test_a_proof_is_wrong_in_one_of_twenty_at_most(trials: int) -> None:
    """The bound holds for every true share: it is summed over all outcomes, not sampled."""
    for promised in (0.5, 0.9, 0.95):
        for true in (promised - 1e-9, promised - 0.01, promised - 0.1):
            wrong = sum(
                _chance(true, hits, trials)
                for hits in range(trials + 1)
                if shows_at_least(promised, hits, trials, 0.95)
            )
            assert wrong <= 0.05
        for true in (promised + 1e-9, promised + 0.01):
            wrong = sum(
                _chance(true, hits, trials)
                for hits in range(trials + 1)
                if shows_less(promised, hits, trials, 0.95)
            )
            assert wrong <= 0.05


def _chance(share: float, hits: int, trials: int) -> float:
    return comb(trials, hits) * share**hits * (1 - share) ** (trials - hits)


# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "number", "below", "limit", "share"),
    [
        ("recovery.p95 <= 2 s", "recovery", "", 2.0, 0.95),
        ("recovery.restored.p50 <= 250 ms", "recovery.restored", "", 0.25, 0.5),
        ("recovery.max <= 1 min", "recovery", "", 60.0, 1.0),
        ("recovery.p50 / step <= 2.5", "recovery", "step", 2.5, 0.5),
        ("recovery/step<=2.5 x", "recovery", "step", 2.5, 1.0),
        ("lost_steps == 0", "lost_steps", "", 0.0, 1.0),
        ("goodput.p90 >= 97 %", "goodput", "", 0.97, 0.9),
        ("recovered", "recovered", "", 1.0, 1.0),
        ("losses == twin", "losses_equal", "", 1.0, 1.0),
        ("losses==twin", "losses_equal", "", 1.0, 1.0),
    ],
)
def test_lines_are_read(line: str, number: str, below: str, limit: float, share: float) -> None:
    parsed = parse(line, "x")
    assert (parsed.number, parsed.divisor, parsed.share) == (number, below, share)
    assert parsed.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("", "write it as"),
        ("recovery is quick", "write it as"),
        ("recovery.p95 <= 2 s and recovery.p50 <= 1 s", "write it as"),
        ("__import__('os').system('true') <= 1", "write it as"),
        ("recovry.p95 <= 2 s", "no number recovry"),
        ("recovery.p95 <= 2", "in s or ms or min"),
        ("recovery.p95 <= 2 %", "in s or ms or min"),
        ("lost_steps == 0 s", "no unit or steps"),
        ("goodput.p50 >= 0.97", "in %"),
        ("recovery.p95 >= 2 s", "use <=: lower is better"),
        ("recovery.p95 < 2 s", "use <="),
        ("recovery.p95 == 2 s", "use <="),
        ("goodput.p50 <= 97 %", "use >="),
        ("goodput.p50 >= 400 %", "100 % or less"),
        ("recovered == 0", "use 1, or leave it out"),
        ("losses_equal == 0", "use 1, or leave it out"),
        ("lost_steps >= 1", "use <= or ==: lower is better"),
        ("step / step <= 1", "divide a duration by one of step, bound"),
        ("recovery / lost_steps <= 1", "divide a duration by one of step, bound"),
        ("recovery <= 9999999999 s", "write it as"),
        ("recovery <= \u0665 s", "write it as"),
        ("recovery.mean <= 2 s", "use p50: one slow run moves a mean"),
        ("recovery.median <= 2 s", "use p50"),
        ("recovery.p99.9 <= 2 s", "p50, p90, p95, p99; max"),
        ("recovery.p96 <= 2 s", "p50, p90, p95, p99; max"),
        ("recovery.min <= 2 s", "p50, p90, p95, p99; max"),
        ("recovery / goodput <= 2", "divide a duration by one of step, bound"),
        ("recovery.p95 <= -2 s", "write it as"),
        ("recovery.p95 <= 1e3 s", "write it as"),
    ],
)
def test_a_line_that_says_nothing_is_refused_with_the_remedy(line: str, remedy: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse(line, "objectives")
    assert remedy in refused.value.remedy


# -- what records show -----------------------------------------------------------------------------


def at(night: int, **more: Any) -> RunRecord:
    """Return a run of a session that began ``night`` nights after the first of November."""
    began = datetime(2026, 11, 1, 2, tzinfo=UTC) + timedelta(days=night)
    session = str(UUID(int=int(began.timestamp() * 1000) << 80 | 0x7 << 76 | 0x2 << 62))
    return run(session=session, **more)


def nights(count: int, a_night: int, **more: Any) -> list[RunRecord]:
    return [at(night, **more) for night in range(count) for _ in range(a_night)]


TODAY = date(2026, 11, 30)


def judged_by(sla: Sla, runs: Sequence[RunRecord], **more: Any) -> list[Judged]:
    return judge(sla, runs, **{"plans": {}, "today": TODAY, **more})


def states(sla: Sla, runs: Sequence[RunRecord], **more: Any) -> list[State]:
    return [judgement.state for judgement in judged_by(sla, runs, **more)]


P95 = "recovery.p95 <= 100 ms"


def promise(*lines: str, **more: Any) -> Sla:
    return sla_of_lines("test_kill", lines, **more)


def test_an_objective_is_met_broken_or_not_shown() -> None:
    assert states(promise(P95), nights(10, 6)) == [State.MET]
    (early,) = judged_by(promise(P95), nights(10, 2))
    assert early.state is State.NOT_SHOWN
    assert early.reason == "59 runs needed with 0 misses, 20 so far"
    assert states(promise(P95), nights(10, 1) + nights(10, 1, recovery_s=0.2)) == [State.BROKEN]


def test_a_few_misses_are_allowed_and_take_more_runs() -> None:
    slow = [at(night, recovery_s=0.2) for night in (3, 7)]
    (judgement,) = judged_by(promise(P95), [*nights(10, 6), *slow])
    assert (judgement.state, judgement.misses) == (State.NOT_SHOWN, 2)
    assert judgement.reason == "124 runs needed with 2 misses, 62 so far"
    assert states(promise(P95), [*nights(13, 10), *slow]) == [State.MET]


def test_runs_of_a_few_nights_show_nothing() -> None:
    """The runs have their night in common, in any number."""
    (judgement,) = judged_by(promise(P95), nights(4, 100))
    assert (judgement.state, judgement.reason) == (State.NOT_SHOWN, "5 nights needed, 4 so far")
    assert states(promise(P95, window="400 runs"), nights(4, 100)) == [State.NOT_SHOWN]
    assert states(promise(P95), nights(1, 60, recovery_s=9.0)) == [State.NOT_SHOWN]
    assert states(promise(P95), nights(5, 12, recovery_s=9.0)) == [State.BROKEN]


def test_one_miss_breaks_what_holds_always() -> None:
    assert states(promise("lost_steps == 0"), [at(0), at(1)]) == [State.MET]
    (judgement,) = judged_by(promise("lost_steps == 0"), [at(0), at(1, lost_steps=1), at(2)])
    assert (judgement.state, judgement.reason) == (State.BROKEN, "1 of 3 runs missed it")
    assert len(judgement.missed) == 1


def test_a_run_that_did_not_recover_missed_every_limit_of_its_recovery() -> None:
    lost = at(0, recovery_s=None, verdict=Verdict.FAILED)
    assert states(promise("recovery.max <= 9 s"), [at(0), lost]) == [State.BROKEN]


def test_one_that_came_back_from_one_fault_and_not_from_the_next_missed_it_too() -> None:
    lost = [at(night, verdict=Verdict.FAILED) for night in range(20) for _ in range(3)]
    assert states(promise(P95, "recovery.max <= 1 s"), lost) == [State.BROKEN] * 2


def test_old_nights_leave_the_window() -> None:
    """A window ends today: older runs show nothing."""
    old = at(0, lost_steps=3)
    line = "lost_steps == 0"
    assert states(promise(line, window="30 nights"), [old, *nights(4, 1)]) == [State.BROKEN]
    assert states(promise(line, window="29 nights"), [old, *nights(4, 1)]) == [State.MET]
    assert states(promise(line, window="2 runs"), [old, *nights(2, 1)]) == [State.MET]
    (gone,) = judged_by(promise(line), nights(4, 1), today=date(2027, 6, 1))
    assert (gone.state, gone.reason) == (
        State.NOT_SHOWN,
        "no run in 30 nights; the latest run was on 2026-11-04",
    )


def test_only_the_newest_definition_counts() -> None:
    old = [at(night, lost_steps=1) for night in range(9)]
    assert states(promise("lost_steps == 0"), [*old, at(9, definition=2)]) == [State.MET]


def test_what_does_not_have_the_number_proves_nothing() -> None:
    """A run that never got back to full strength has no such number, and is no proof of a quick
    recovery.
    """
    (judgement,) = judged_by(
        promise("recovery.p95 <= 1 s"), [*nights(10, 6), at(3, recovery_s=None)]
    )
    assert (judgement.state, judgement.reason) == (State.NOT_SHOWN, "1 of 61 runs have no recovery")
    (judgement,) = judged_by(promise("recovery <= 1 s"), [at(0), at(0, recovery_s=None)])
    assert judgement.state is State.NOT_SHOWN


def test_if_many_are_unknown_the_others_prove_nothing() -> None:
    unknown = [at(3, verdict=Verdict.UNKNOWN) for _ in range(7)]
    (judgement,) = judged_by(promise(P95), [*nights(10, 6), *unknown])
    assert (judgement.state, judgement.unknown, judgement.reason) == (
        State.NOT_SHOWN,
        7,
        "7 of 67 runs are unknown",
    )
    assert states(promise(P95), [*nights(10, 6), *unknown[:6]]) == [State.MET]


def test_a_window_that_is_full_says_so() -> None:
    slow = [at(night, recovery_s=0.2) for night in (3, 5, 7)]
    (judgement,) = judged_by(promise(P95, window="60 runs"), [*nights(10, 6), *slow])
    assert judgement.reason == "153 runs needed with 3 misses, and the window is full"


def test_a_number_that_no_run_has_is_not_shown() -> None:
    (judgement,) = judged_by(promise("exposure.p50 <= 1 s"), nights(10, 6))
    assert (judgement.state, judgement.reason) == (State.NOT_SHOWN, "no run has exposure")


def test_an_sla_about_no_run_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"none of them matches"):
        judged_by(sla_of_lines("x", ["lost_steps == 0"], where={"test": "test_other"}), [at(0)])


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.ERROR])
def test_if_every_run_is_unknown_so_is_the_sla(verdict: Verdict) -> None:
    judged = judged_by(promise("recovered", P95), [at(0, verdict=verdict)])
    assert [judgement.state for judgement in judged] == [State.UNKNOWN] * 2
    assert exit_code(judged, is_strict=False) == 10


def test_what_its_test_judges_by_itself_is_not_meant() -> None:
    runs = [at(0), at(0, claimed=False, lost_steps=5)]
    assert states(promise("lost_steps == 0"), runs) == [State.MET]


def test_a_regression_needs_earlier_runs() -> None:
    sla = sla_of_lines("test_kill", [], regression={"recovery": "10 %", "recovery / step": "10 %"})
    now, before = _spread(8, 1.0, 1), _spread(8, 1.0, 2)
    assert states(sla, now) == states(sla, now, before=now) == [State.NOT_SHOWN] * 2
    assert states(sla, now, before=before) == [State.MET] * 2
    assert states(sla, _spread(8, 1.5, 1), before=before) == [State.BROKEN] * 2
    few = sla_of_lines("test_kill", [], regression={"recovery": "10 %"}, at_least=20)
    assert states(few, now, before=before) == [State.NOT_SHOWN]


def _spread(count: int, by: float, seed: int) -> list[RunRecord]:
    chance = random.Random(seed)
    return [at(0, recovery_s=0.05 * by * chance.uniform(0.97, 1.03)) for _ in range(count)]


@pytest.mark.parametrize(
    ("states", "loose", "strict"),
    [
        ([State.MET], 0, 0),
        ([State.MET, State.NOT_SHOWN], 0, 10),
        ([State.UNKNOWN], 10, 10),
        ([State.UNKNOWN, State.BROKEN], 1, 1),
    ],
)
def test_exit_codes(states: list[State], loose: int, strict: int) -> None:
    judged = [Judged(sla="x", line="y", state=state) for state in states]
    assert (exit_code(judged, is_strict=False), exit_code(judged, is_strict=True)) == (
        loose,
        strict,
    )


# -- which runs are meant --------------------------------------------------------------------------

PLAN = SeriesRecord(
    series="one", plan={"job": "jobs/train.py", "settings": {"nodes": 4, "spares": 1}}
)


@pytest.mark.parametrize(
    ("where", "is_meant"),
    [
        ({}, True),
        ({"fault": "Kill"}, True),
        ({"fault": ["Hang", "Kill"]}, True),
        ({"fault": ["Hang"]}, False),
        ({"fault": []}, False),
        ({"nodes": 4}, True),
        ({"nodes": ">=4", "spares": "<=1"}, True),
        ({"nodes": ">= 5"}, False),
        ({"job": "train.py"}, True),
        ({"job": "other.py"}, False),
        ({"stack": "chaoskit", "substrate": "local", "machine": "2 cores", "test": "kill"}, True),
        ({"substrate": "netns"}, False),
        ({"stack": "torchft"}, False),
    ],
)
def test_runs_are_selected(where: dict[str, Any], is_meant: bool) -> None:
    sla = sla_of_lines("x", ["recovered"], where=where)
    runs = [run(machine=MACHINE)]
    if is_meant:
        assert judged_by(sla, runs, plans={"one": PLAN})[0].state is State.MET
    else:
        with pytest.raises(BadInput, match=r"none of them matches"):
            judged_by(sla, runs, plans={"one": PLAN})


# -- files -----------------------------------------------------------------------------------------

GOOD = """
version: 1
defaults: {confidence: 95 %, window: 30 nights}
slas:
  - name: a lost rank costs a step
    where: {fault: [Kill, Exit], nodes: ">=4"}
    always: [lost_steps == 0, losses == twin, recovered]
    objectives: [recovery.p95 <= 5 s, recovery.p50 / step <= 2.5, goodput.p50 >= 97 %]
    regression: {recovery: 10 %}
  - name: no rank is restarted for nothing
    where: {fault: []}
    always: [false_alarms == 0]
    window: 200 runs
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "sla.yaml"
    path.write_text(text, errors="surrogateescape")
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    first, second = load(write(tmp_path, GOOD))
    assert [line.text for line in first.always] == [
        "lost_steps == 0",
        "losses == twin",
        "recovered",
    ]
    assert [line.share for line in first.objectives] == [0.95, 0.5, 0.5]
    assert first.regression == {"recovery": 0.1}
    assert (first.confidence, str(first.window), str(second.window)) == (
        0.95,
        "30 nights",
        "200 runs",
    )


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


WRONG: dict[str, tuple[str, str]] = {
    "nothing": ("", "mend it"),
    "no YAML": ("slas: [", "mend it"),
    "a list": ("- 1", "correct the file"),
    "no text": ("\udcff", "mend it"),
    "another version": (changed("version: 1", "version: 2"), "use version 1"),
    "no SLA": ("version: 1\nslas: []", "write at least one SLA"),
    "two of one name": (
        changed("no rank is restarted for nothing", "a lost rank costs a step"),
        "give each SLA a different name",
    ),
    "an unknown field": (changed("regression:", "regresion:"), "correct the file"),
    "an unknown default": (changed("confidence: 95 %", "confidnce: 95 %"), "correct the file"),
    "an unknown selector": (changed("fault: []", "falt: []"), "correct the file"),
    "an SLA that promises nothing": (
        changed("    always: [false_alarms == 0]\n", ""),
        "promises nothing",
    ),
    "a statistic that holds always": (
        changed("[false_alarms == 0]", "[recovery.p95 <= 1 s]"),
        "below objectives",
    ),
    "an objective without one": (changed("goodput.p50", "goodput"), "below always"),
    "max as an objective": (changed("recovery.p95", "recovery.max"), "below always"),
    "a confidence above 1": (changed("confidence: 95 %", "confidence: 195 %"), "from 50 %"),
    "a confidence in words": (changed("confidence: 95 %", "confidence: high"), "from 50 %"),
    "a window of weeks": (changed("window: 30 nights", "window: 3 weeks"), "30 nights or 200 runs"),
    "a window of nothing": (
        changed("window: 30 nights", "window: 0 nights"),
        "30 nights or 200 runs",
    ),
    "a window that is too short": (
        changed("window: 30 nights", "window: 20 runs"),
        "59 runs without a miss",
    ),
    "a window of a few nights": (
        changed("window: 30 nights", "window: 3 nights"),
        "5 nights at least",
    ),
    "nodes in words": (changed('">=4"', "many"), "write a number"),
    "a regression of a count": (
        changed("recovery: 10 %", "lost_steps: 10 %"),
        "name one of recovery",
    ),
    "a regression without a share": (changed("recovery: 10 %", "recovery: slow"), "such as 10 %"),
    "a regression of a step": (changed("recovery: 10 %", "step: 10 %"), "name one of recovery"),
    "a regression of nonsense": (
        changed("recovery: 10 %", "recovery / : 10 %"),
        "name one of recovery",
    ),
    "a regression of everything": (changed("recovery: 10 %", "recovery: 0 %"), "such as 10 %"),
    "a kind of fault that there is not": (changed("Exit]", "Exti]"), "write Exit"),
    "one key twice": (
        changed("    window: 200 runs", "    always: [recovered]"),
        "'always' is there twice",
    ),
    "a date": (changed("window: 30 nights", "window: 2026-13-01"), "mend it"),
    "no name": (changed("no rank is restarted for nothing", "''"), "give each SLA a name"),
    "more runs than its window": (
        changed("window: 200 runs", "window: 20 runs, at_least: 50").replace(
            "window: 20 runs, at", "window: 20 runs\n    at"
        ),
        "widen its window",
    ),
    "at_least 0": (changed("window: 200 runs", "at_least: 0"), "1 or more"),
}


@pytest.mark.parametrize(("text", "remedy"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, remedy: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(BadInput) as refused:
        load(path)
    assert remedy in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


# -- rendering -------------------------------------------------------------------------------------


def _on_a_terminal(judged: Sequence[Judged]) -> str:
    terminal = Terminal(record=True, width=100)
    terminal.print(render_sla(judged))
    return terminal.export_text()


@pytest.mark.parametrize("show", [sla_markdown, _on_a_terminal])
def test_faces_say_what_is_broken_first(show: Callable[[Sequence[Judged]], str]) -> None:
    judged = judged_by(promise("recovered", "lost_steps == 0"), [at(0, lost_steps=1)])
    text = show(judged)
    assert sla_sentence(judged) == "1 broken, 1 met"
    assert text.index("lost_steps == 0") < text.index("recovered")
    assert "1 of 1 runs missed it" in text


def test_lines_become_alerts(tmp_path: Path) -> None:
    """A line becomes an alert if its limit is a bound of the metric's buckets; between two bounds
    no alert is exact.
    """
    file = write(
        tmp_path, changed("recovery.p95 <= 5 s", "recovery.p95 <= 5 s, recovery.p99 <= 2 s")
    )
    rule, left_out = prometheus_rules(load(file), 'job="a"')
    (alert,) = rule["spec"]["groups"][0]["rules"]
    within = 'sum(increase(chaoskit_time_to_recover_seconds_bucket{job="a",le="5.0"}[30d]))'
    assert (
        alert["expr"]
        == f'{within} / sum(increase(chaoskit_time_to_recover_seconds_count{{job="a"}}[30d])) < 0.95'
    )
    assert alert["labels"]["line"] == "recovery.p95 <= 5 s"
    assert "ignores `where`" in alert["annotations"]["summary"]
    assert len(left_out) == 8
    assert any("regression" in line for line in left_out)
    assert msgspec.yaml.encode(rule)
    with pytest.raises(BadInput, match=r"matchers of Prometheus"):
        prometheus_rules(load(file), "job=a} or vector(1")


def test_the_page_says_what_it_says(tmp_path: Path) -> None:
    """The page's example is read, one of its lines becomes an alert, and its table has every
    number.
    """
    page = (Path(__file__).parents[3] / "docs" / "sla.md").read_text()
    example = page.partition("```yaml\n")[2].partition("```")[0]
    rule, _ = prometheus_rules(load(write(tmp_path, example)))
    assert len(rule["spec"]["groups"][0]["rules"]) == 1
    table = page.partition("| number | unit")[2].partition("\n\n")[0]
    assert [name for name in KNOWN if f"`{name}`" not in table] == []


def test_two_promises_are_two_alerts() -> None:
    slas = [
        sla_of_lines(name, ["recovery.p95 <= 5 s", "recovery <= 10 s"])
        for name in ("lost-rank", "lost rank", "\u6062")
    ]
    rule, _ = prometheus_rules(slas)
    names = [alert["alert"] for alert in rule["spec"]["groups"][0]["rules"]]
    assert len(set(names)) == 6
    assert all(name.isascii() and name.isalnum() for name in names)


def test_bounds_of_alerts_are_those_of_the_metric_that_is_served() -> None:
    bounds = [float(bound) for bound, _ in RecoveryTimes().total.buckets()]
    assert [*BOUNDS_S, inf] == bounds


def test_a_value_of_zero_divides_nothing() -> None:
    record = at(0)
    record.metrics["step"] = Metric(0.0, "s", "lower")
    (judgement,) = judged_by(promise("recovery / step <= 9"), [record])
    assert judgement.state is State.NOT_SHOWN
