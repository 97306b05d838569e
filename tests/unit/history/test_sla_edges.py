"""SLAs at their limits: the last accepted value, the first refused value, and the given reason."""

from __future__ import annotations

from math import comb
from pathlib import Path
from typing import Any

import pytest
from support.runs import run
from unit.history.test_sla import (
    P95,
    PLAN,
    _on_a_terminal,
    _spread,
    at,
    changed,
    judged_by,
    nights,
    promise,
    states,
    write,
)

from chaoskit.errors import BadInput
from chaoskit.history.record import Metric, SeriesRecord
from chaoskit.sla.exact import runs_needed, shows_at_least, shows_less
from chaoskit.sla.export import prometheus_rules
from chaoskit.sla.judge import Judged, State
from chaoskit.sla.language import parse
from chaoskit.sla.promises import Sla, SlaWindow, load, parse_marker, sla_of_lines
from chaoskit.sla.rendering import sla_markdown, sla_sentence, worst_first
from chaoskit.vocabulary import Verdict

# -- numbers of runs -------------------------------------------------------------------------------


def test_an_objective_is_met_with_the_last_run_that_it_needs() -> None:
    runs = nights(10, 6)
    assert states(promise(P95), runs[:59]) == [State.MET]
    assert states(promise(P95), runs[:58]) == [State.NOT_SHOWN]


def test_at_least_so_many_runs_are_needed_whatever_they_show() -> None:
    runs = nights(10, 6)
    (judgement,) = judged_by(promise(P95, at_least=61), runs)
    assert (judgement.state, judgement.reason) == (
        State.NOT_SHOWN,
        "61 runs needed with 0 misses, 60 so far",
    )
    assert states(promise(P95, at_least=60), runs) == [State.MET]
    slow = nights(10, 2, recovery_s=9.0)
    assert states(promise(P95, at_least=20), slow) == [State.BROKEN]
    assert states(promise(P95, at_least=21), slow) == [State.NOT_SHOWN]


def test_what_holds_always_needs_at_least_so_many_runs() -> None:
    line = "lost_steps == 0"
    (judgement,) = judged_by(promise(line, at_least=3), nights(2, 1))
    assert (judgement.state, judgement.reason) == (State.NOT_SHOWN, "3 runs needed, 2 so far")
    assert states(promise(line, at_least=2), nights(2, 1)) == [State.MET]
    assert states(promise(line, at_least=3), [at(0, lost_steps=1)]) == [State.BROKEN], (
        "one miss is enough"
    )
    (unmeasured,) = judged_by(promise("exposure <= 1 s"), nights(2, 1))
    assert (unmeasured.state, unmeasured.reason) == (State.NOT_SHOWN, "no run has exposure")


def test_a_tenth_of_the_runs_may_be_unknown() -> None:
    decided = nights(10, 9)
    unknown = [at(3, verdict=Verdict.UNKNOWN) for _ in range(11)]
    assert states(promise(P95), [*decided, *unknown[:10]]) == [State.MET]
    assert states(promise(P95), [*decided, *unknown]) == [State.NOT_SHOWN]


def test_an_older_definition_is_left_out_also_where_it_ran_later() -> None:
    runs = [at(1, definition=2), at(2, lost_steps=1)]
    (judgement,) = judged_by(promise("lost_steps == 0"), runs)
    assert (judgement.state, judgement.runs) == (State.MET, 1)
    other = at(3, series="two", lost_steps=1)
    assert states(promise("lost_steps == 0"), [*runs, other]) == [State.BROKEN], (
        "each series has its own"
    )


def test_a_line_counts_runs_misses_and_nights() -> None:
    runs = [at(0), at(0, recovery_s=9.0), at(1, recovery_s=None), at(2, verdict=Verdict.UNKNOWN)]
    (judgement,) = judged_by(promise("recovery <= 1 s"), runs)
    assert (judgement.state, judgement.runs, judgement.misses, judgement.nights) == (
        State.BROKEN,
        2,
        1,
        1,
    )
    assert (judgement.lacking, judgement.unknown, judgement.missed) == (1, 1, [runs[1].run_id])
    many = [at(0, lost_steps=1) for _ in range(7)]
    (judgement,) = judged_by(promise("lost_steps == 0"), many)
    assert judgement.missed == [record.run_id for record in many[-5:]], "the latest ones"


def test_the_runs_that_lack_a_quotient_are_named_with_both_numbers() -> None:
    lacking = at(1)
    del lacking.metrics["bound"]
    (judgement,) = judged_by(promise("recovery / bound <= 99"), [at(0), lacking])
    assert (judgement.state, judgement.reason) == (
        State.NOT_SHOWN,
        "1 of 2 runs have no recovery or bound",
    )


def test_a_window_that_is_not_full_says_how_many_there_are() -> None:
    slow = [at(night, recovery_s=0.2) for night in (3, 5, 7)]
    (judgement,) = judged_by(promise(P95, window="200 runs"), [*nights(10, 6), *slow])
    assert judgement.reason == "153 runs needed with 3 misses, 63 so far"
    lacking = [at(night, recovery_s=None) for night in (3, 5, 7)]
    (judgement,) = judged_by(promise(P95, window="60 runs"), [*nights(10, 6), *slow, *lacking])
    assert judgement.reason.endswith("and the window is full"), (
        "also with runs that lack the number"
    )


# -- regressions -----------------------------------------------------------------------------------


def regression(**more: str) -> Sla:
    return sla_of_lines(
        "test_kill", [], regression={name.replace("__", "."): text for name, text in more.items()}
    )


def test_a_regression_gives_its_reason() -> None:
    sla = regression(recovery="10 %", recovery__restored="12.5 %")
    now, before = _spread(8, 1.5, 1), _spread(8, 1.0, 2)
    judgements = [
        (judgement.line, judgement.state, judgement.reason)
        for judgement in judged_by(sla, now, before=before)
    ]
    assert judgements == [
        ("regression of recovery within 10 %", State.BROKEN, "test_kill: regressed"),
        (
            "regression of recovery.restored within 12.5 %",
            State.NOT_SHOWN,
            "no run has recovery.restored",
        ),
    ]
    alone = judged_by(sla, now, before=now)
    assert {judgement.reason for judgement in alone} == {
        "no reference: name earlier runs with --against"
    }
    assert {judgement.runs for judgement in alone} == {8}
    (few, _) = judged_by(sla, _spread(3, 1.0, 1), before=_spread(3, 1.0, 2))
    assert few.state is State.NOT_SHOWN
    assert few.reason == "test_kill: undecided, runs now: 3; before: 3; needed: at least 5 of each"


def test_a_regression_is_judged_with_the_last_run_that_it_needs() -> None:
    now, before = _spread(8, 1.0, 1), _spread(8, 1.0, 2)
    sla = sla_of_lines("test_kill", [], regression={"recovery": "10 %"}, at_least=8)
    assert states(sla, now, before=before) == [State.MET]
    sla = sla_of_lines("test_kill", [], regression={"recovery": "10 %"}, at_least=9)
    (judgement,) = judged_by(sla, now, before=before)
    assert (judgement.state, judgement.reason) == (State.NOT_SHOWN, "9 runs needed, 8 so far")


def test_every_line_is_named_where_no_run_says_anything() -> None:
    lines = ["lost_steps == 0", "recovery.p95 <= 2 s", "regression of recovery within 10 %"]
    sla = sla_of_lines("test_kill", lines[:2], regression={"recovery": "10 %"})
    unknown = judged_by(sla, [at(0, verdict=Verdict.UNKNOWN), at(1, verdict=Verdict.ERROR)])
    assert [judgement.line for judgement in unknown] == lines
    assert {(judgement.state, judgement.unknown, judgement.reason) for judgement in unknown} == {
        (State.UNKNOWN, 2, "of all runs: 1 unknown, 1 error")
    }
    gone = judged_by(
        sla_of_lines("test_kill", lines[:1], regression={"recovery": "10 %"}, window="1 night"),
        [at(0)],
    )
    assert [judgement.line for judgement in gone] == [lines[0], lines[2]]
    assert {judgement.reason for judgement in gone} == {
        "no run in 1 night; the latest run was on 2026-11-01"
    }


# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "value", "holds"),
    [
        ("recovery <= 50 ms", 0.05, True),
        ("recovery <= 49 ms", 0.05, False),
        ("recovery / step <= 5", 0.05, True),
        ("recovery / step <= 4.9", 0.05, False),
        ("goodput >= 97 %", 0.97, True),
        ("goodput >= 97 %", 0.96, False),
        ("goodput >= 100 %", 1.0, True),
        ("lost_steps == 2", 2.0, True),
        ("lost_steps == 2", 1.0, False),
        ("lost_steps <= 2 steps", 2.0, True),
        ("lost_steps <= 2 steps", 3.0, False),
    ],
)
def test_a_line_holds_up_to_its_limit(line: str, value: float, holds: bool) -> None:
    condition = parse(line, "x")
    record = run()
    record.metrics[condition.number] = Metric(value, "s", "lower")
    assert condition.holds(record) is holds


def test_a_line_says_nothing_of_a_run_without_its_number() -> None:
    record = run()
    assert parse("exposure <= 1 s", "x").holds(record) is None
    del record.metrics["step"]
    assert parse("recovery / step <= 5", "x").holds(record) is None
    lost = run(verdict=Verdict.FAILED)
    assert parse("lost_steps == 0", "x").holds(lost) is True, "it is no number of a recovery"
    assert parse("recovery.restored <= 9 s", "x").holds(lost) is False
    assert parse("full_strength <= 9 s", "x").holds(lost) is False


# -- counting --------------------------------------------------------------------------------------


def test_no_runs_prove_nothing() -> None:
    assert not shows_at_least(0.5, 0, 0, 0.95)
    assert not shows_less(0.5, 0, 0, 0.95)


@pytest.mark.parametrize("trials", [10, 300])
def test_a_share_of_all_is_refuted_by_one_miss_and_never_proved(trials: int) -> None:
    assert shows_less(1.0, trials - 1, trials, 0.95)
    assert not shows_less(1.0, trials, trials, 0.95)
    assert not shows_at_least(1.0, trials, trials, 0.95)
    assert not shows_less(0.0, 0, trials, 0.95)


def test_large_numbers_agree_with_small_ones() -> None:
    """Another formula is used for 200 trials and more."""
    assert runs_needed(0.99, 0, 0.95) == 299
    assert not shows_at_least(0.98, 199 - 1, 199, 0.95)
    assert shows_less(0.9, 150, 201, 0.95)
    assert not shows_less(0.9, 180, 201, 0.95)
    assert runs_needed(1.0, 0, 0.95) > 10**6, "it can never be shown"


def test_large_numbers_of_runs_are_counted_without_an_overflow() -> None:
    """Whole numbers do not overflow: so many of 2,000 throws of a coin have exactly this
    probability.
    """
    trials = 2_000
    for hits in (1_037, 1_038):
        as_many = sum(comb(trials, count) for count in range(hits, trials + 1))
        is_rare = 20 * as_many <= 2**trials
        assert is_rare is (hits == 1_038)
        assert shows_at_least(0.5, hits, trials, 0.95) is is_rare
        assert shows_less(0.5, trials - hits, trials, 0.95) is is_rare


# -- which runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "plan", "is_meant"),
    [
        ({"nodes": "<=3"}, {}, False),
        ({"nodes": "<=4"}, {}, True),
        ({"nodes": ">=5"}, {}, False),
        ({"nodes": "==4"}, {}, True),
        ({"nodes": "== 5"}, {}, False),
        ({"nodes": 5}, {}, False),
        ({"spares": 2}, {}, False),
        ({"spares": 0}, {"settings": {"nodes": 4}}, False),
        ({"job": "torchrun x.py"}, {"job": "", "command": ["torchrun", "x.py"]}, True),
        ({"job": "torchrun y.py"}, {"job": "", "command": ["torchrun", "x.py"]}, False),
        ({"machine": "a processor"}, {}, True),
        ({"machine": "another processor"}, {}, False),
        ({"test": "test_hang"}, {}, False),
        ({"substrate": "ocal"}, {}, False),
        ({"stack": "chaos"}, {}, False),
    ],
)
def test_a_selector_takes_what_it_says(
    where: dict[str, Any], plan: dict[str, Any], is_meant: bool
) -> None:
    sla = sla_of_lines("x", ["recovered"], where=where)
    shared = SeriesRecord(series="one", plan={**PLAN.plan, **plan})
    assert sla.where.selects(run(), shared) is is_meant


def test_a_selector_of_faults_takes_runs_with_one_of_them() -> None:
    def selects(fault: object, kinds: list[str]) -> bool:
        return sla_of_lines("x", ["recovered"], where={"fault": fault}).where.selects(
            run(faults=kinds), None
        )

    assert selects(["Kill", "Hang"], ["Cut", "Hang"])
    assert not selects(["Kill", "Hang"], ["Cut"])
    assert selects([], [])
    assert not selects("Kill", [])
    assert selects("my_faults:Slow", ["my_faults:Slow"])


# -- files and markers -----------------------------------------------------------------------------


def test_a_window_says_its_number() -> None:
    assert [
        str(SlaWindow(*window)) for window in ((1, "night"), (2, "night"), (1, "run"), (2, "run"))
    ] == [
        "1 night",
        "2 nights",
        "1 run",
        "2 runs",
    ]
    assert promise("recovered", window="1 night").window == SlaWindow(1, "night")
    assert promise("recovered", window="1 run").window == SlaWindow(1, "run")


@pytest.mark.parametrize(
    "change",
    [
        ("window: 30 nights", "window: 59 runs"),
        ("window: 30 nights", "window: 5 nights"),
        ("confidence: 95 %", "confidence: 50 %"),
        ("confidence: 95 %", "confidence: 0.9"),
        ("recovery: 10 %", "recovery: 999 %"),
        ("recovery: 10 %", "recovery.restored / bound: 10 %"),
        ("window: 200 runs", "window: 200 runs\n    at_least: 200"),
        ("fault: [Kill, Exit]", "fault: my_faults:Slow"),
        ("fault: []", "fault: Kill"),
        ('">=4"', "4"),
        ("version: 1\n", "version: 1\n# a comment\n"),
    ],
    ids=lambda change: change[1].strip(),
)
def test_the_last_value_that_is_accepted(tmp_path: Path, change: tuple[str, str]) -> None:
    assert len(load(write(tmp_path, changed(*change)))) == 2


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (
            ("window: 30 nights", "window: 58 runs"),
            "59 runs without a miss show it with 95% confidence",
        ),
        (("window: 30 nights", "window: 4 nights"), "5 nights at least, and the window has 4"),
        (("confidence: 95 %", "confidence: 49.9 %"), "from 50 %"),
        (("confidence: 95 %", "confidence: 100 %"), "below 100 %"),
        (("confidence: 95 %", "confidence: 1"), "below 100 %"),
        (("recovery: 10 %", "recovery: 1000 %"), "such as 10 %"),
        (("recovery: 10 %", "recovery / goodput: 10 %"), "divided by step or bound"),
        (("recovery: 10 %", "bound: 10 %"), "name one of recovery"),
        (
            ("window: 200 runs", "window: 200 runs\n    at_least: 201"),
            "widen its window, which has 200 runs",
        ),
        (("fault: []", "fault: Kil"), "write Kill"),
        (("fault: []", "fault: Quark"), "name a kind of fault, or module:Class"),
        (("no rank is restarted for nothing", "'  '"), "give each SLA a name"),
        (('nodes: ">=4"', "spares: some"), "write a number"),
    ],
    ids=lambda value: value[1].strip() if isinstance(value, tuple) else "",
)
def test_the_first_value_that_is_refused(
    tmp_path: Path, change: tuple[str, str], remedy: str
) -> None:
    with pytest.raises(BadInput) as refused:
        load(write(tmp_path, changed(*change)))
    assert remedy in refused.value.remedy


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"name a file that can be read \(No such file or directory\)"
    ) as refused:
        load(tmp_path / "sla.yaml")
    assert (refused.value.field, refused.value.value) == ("file", str(tmp_path / "sla.yaml"))


def test_an_sla_takes_what_it_leaves_out_from_the_defaults(tmp_path: Path) -> None:
    text = changed("window: 30 nights}", "window: 40 nights, at_least: 7}").replace(
        "confidence: 95 %", "confidence: 0.9"
    )
    first, second = load(write(tmp_path, text))
    assert (first.confidence, str(first.window), first.at_least) == (0.9, "40 nights", 7)
    assert (second.confidence, str(second.window), second.at_least) == (0.9, "200 runs", 7)
    overridden = text.replace("window: 200 runs", "at_least: 2\n    confidence: 60 %")
    assert [(sla.at_least, sla.confidence) for sla in load(write(tmp_path, overridden))] == [
        (7, 0.9),
        (2, 0.6),
    ]
    assert first.needs(first.objectives[1]) == 7, "more than the 4 that the share takes"


def test_a_marker_states_an_sla() -> None:
    sla = parse_marker("test_kill", ["lost_steps == 0", P95], {"window": "100 runs", "at_least": 3})
    assert [line.text for line in sla.always] == ["lost_steps == 0"]
    assert [line.text for line in sla.objectives] == [P95]
    assert (sla.name, str(sla.window), sla.at_least, sla.confidence) == (
        "test_kill",
        "100 runs",
        3,
        0.95,
    )


@pytest.mark.parametrize(
    ("lines", "options", "field", "remedy"),
    [
        ([5], {}, "sla", "write lines as text"),
        (["recovered"], {"where": {}}, "sla.where", "use window, confidence, at_least"),
        (["recovered"], {"at_least": "many"}, "sla", "correct its marker"),
        (["recovry <= 1 s"], {}, "sla", "there is no number recovry"),
        ([], {}, "slas[test_kill]", "it promises nothing"),
    ],
)
def test_a_marker_that_says_nothing_is_refused(
    lines: list[object], options: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(BadInput) as refused:
        parse_marker("test_kill", lines, options)
    assert refused.value.field == field
    assert remedy in refused.value.remedy


# -- alerts and rendering --------------------------------------------------------------------------


def test_what_no_metric_says_is_left_out_with_its_reason() -> None:
    def left_out(line: str, **more: str) -> str:
        rule, lines = prometheus_rules([sla_of_lines("x", [line], **more)])
        assert rule["spec"]["groups"][0]["rules"] == []
        return lines[0].rpartition("left out: ")[2]

    assert (
        left_out("recovery.p95 / step <= 5")
        == "a launch serves no metric with this number for each recovery"
    )
    assert left_out("lost_steps == 0") == (
        "a launch serves no metric with this number for each recovery"
    )
    assert (
        left_out("recovery.p95 <= 5 s", window="100 runs")
        == "a window of runs has no length in time"
    )
    assert left_out("recovery.p95 <= 6 s").startswith(
        "the limit is not a bound of the metric's buckets: 0.001, 0.005"
    )


def test_an_alert_fires_at_any_miss_of_what_holds_always() -> None:
    rule, left_out = prometheus_rules([sla_of_lines("x", ["recovery <= 5 s"], window="7 nights")])
    (alert,) = rule["spec"]["groups"][0]["rules"]
    metric = "chaoskit_time_to_recover_seconds"
    total = f"sum(increase({metric}_count{{}}[7d]))"
    assert alert["expr"] == f'{total} - sum(increase({metric}_bucket{{le="5.0"}}[7d])) > 0.5'
    assert alert["labels"] == {"severity": "page", "sla": "x", "line": "recovery <= 5 s"}
    assert alert["annotations"]["summary"] == "x: recovery <= 5 s", "it selects no runs"
    assert left_out == []
    ticket, _ = prometheus_rules([sla_of_lines("x", ["recovery.p95 <= 5 s"])])
    assert ticket["spec"]["groups"][0]["rules"][0]["labels"]["severity"] == "ticket"
    names = {
        prometheus_rules([], labels)[0]["metadata"]["name"]
        for labels in ("", 'job="a"', 'job="a", pod=~"b.*"')
    }
    assert len(names) == 3, "rules of two trainings do not replace each other"


@pytest.mark.parametrize(
    "labels", ["job", 'job="a" or up', 'job="a",', 'job="a"} or vector(1', '\u00e4="a"']
)
def test_labels_that_are_no_matchers_are_refused(labels: str) -> None:
    with pytest.raises(BadInput, match="write matchers of Prometheus") as refused:
        prometheus_rules([], labels)
    assert refused.value.field == "labels"


JUDGED = [
    Judged(sla="a", line="met", state=State.MET, runs=7, missed=["r0"]),
    Judged(
        sla="b",
        line="open",
        state=State.NOT_SHOWN,
        runs=2,
        unknown=3,
        reason="5 runs needed, 2 so far",
    ),
    Judged(
        sla="c",
        line="bad",
        state=State.BROKEN,
        runs=9,
        misses=4,
        reason="4 of 9 runs missed it",
        missed=["r1"],
    ),
    Judged(sla="d", line="silent", state=State.UNKNOWN, unknown=6),
]


def test_lines_are_sorted_and_counted_by_state() -> None:
    assert [judgement.sla for judgement in worst_first(JUDGED)] == ["c", "d", "b", "a"]
    assert sla_sentence(JUDGED) == "1 broken, 1 unknown, 1 not shown, 1 met"
    assert sla_sentence([]) == "nothing is promised"


def test_a_table_names_the_latest_runs_that_missed_a_broken_line() -> None:
    text = _on_a_terminal(JUDGED)
    assert "the latest: r1" in text
    assert "r0" not in text
    assert "5 runs needed, 2 so far" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["broken", "c:", "bad", "9", "4", "0"] in rows
    assert ["unknown", "d:", "silent", "0", "0", "6"] in rows


def test_markdown_has_a_row_for_each_line() -> None:
    lines = sla_markdown(JUDGED).splitlines()
    assert lines[0] == "### SLAs: 1 broken, 1 unknown, 1 not shown, 1 met"
    assert lines[4:] == [
        "| ❌ | c | bad | 9 | 4 | 0 | broken: 4 of 9 runs missed it |",
        "| ❔ | d | silent | 0 | 0 | 6 | unknown |",
        "| ❔ | b | open | 2 | 0 | 3 | not shown: 5 runs needed, 2 so far |",
        "| ✅ | a | met | 7 | 0 | 0 | met |",
    ]
