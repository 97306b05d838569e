"""Log rules: HyperPod's files are read unchanged, and a watch fires at the right moment and at no
other.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.errors import BadInput
from chaoskit.rules import (
    Fired,
    LogRule,
    RuleVerdict,
    RuleWatch,
    check_log_rules,
    parse_rules,
    read_rules,
    replay_log,
)
from chaoskit.rules.patterns import non_finite, outer_groups
from chaoskit.rules.replay import suggest
from chaoskit.rules.timestamps import read_time_s

#: A file shaped like the example in HyperPod's documentation: no group, a group in a group,
#: comments, deep in a job.
JOB = r"""
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
spec:
  nprocPerNode: "8"
  runPolicy:
    jobMaxRetryCount: 50
    logMonitoringConfiguration:
      - name: "JobStart"
        logPattern: ".*Experiment configuration.*"
        expectedStartCutOffInSeconds: 120  # two minutes
      - name: "JobHangingDetection"
        logPattern: ".*\\[Epoch 0 Batch \\d+.*'loss': (\\d+(\\.\\d+)?).*"
        expectedRecurringFrequencyInSeconds: 300
        expectedStartCutOffInSeconds: 600
      - name: "LowThroughputDetection"
        logPattern: ".*'samples\\/sec': (\\d+(\\.\\d+)?).*"
        metricThreshold: 80
        operator: "lteq"
        metricEvaluationDataPoints: 3
        action: replace-node
"""
START_S = 1_700_000_000.0


def rule(**settings: Any) -> LogRule:
    return LogRule(**{"name": "loss", "pattern": r".*loss: (\S+)", **settings})


def verdicts(fired: list[Fired]) -> list[tuple[str, float]]:
    return [(firing.verdict.value, firing.time_s) for firing in fired]


# -- reading ---------------------------------------------------------------------------------------


def test_a_job_of_hyperpod_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    start, hang, slow = read_rules(file)
    assert (start.name, start.start_cutoff_s, start.frequency_s) == ("JobStart", 120, None)
    assert (hang.start_cutoff_s, hang.frequency_s, hang.action) == (600, 300, "restart-process")
    assert (slow.threshold, slow.operator, slow.data_points, slow.action) == (
        80,
        "lteq",
        3,
        "replace-node",
    )
    watch = RuleWatch(slow, 0)
    assert watch.matcher.read("x {'samples/sec': 81.5}").value == 81.5


@pytest.mark.parametrize("name", ["rules.json", "rules.yaml"])
def test_a_bare_list_in_json_is_read_too(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(
        json.dumps(
            [{"name": "a", "logPattern": ".*", "expectedRecurringFrequencyInSeconds": "2.5"}]
        )
    )
    assert read_rules(file)[0].frequency_s == 2.5


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"logPattern": ".*"}, "rule 0: name"),
        ({"name": "a"}, "rule 'a': logPattern"),
        ({"name": "a", "logPattern": "("}, "rule 'a': logPattern"),
        ({"name": "a", "logPattern": ".*", "stopPattern": "["}, "rule 'a': stopPattern"),
        ({"name": "a", "logPattern": "(.*)", "metricThreshold": 1}, "rule 'a': operator"),
        ({"name": "a", "logPattern": "(.*)", "operator": "gt"}, "rule 'a': metricThreshold"),
        (
            {"name": "a", "logPattern": ".*", "metricThreshold": 1, "operator": "gt"},
            "rule 'a': logPattern",
        ),
        (
            {"name": "a", "logPattern": "(.)(.)", "metricThreshold": 1, "operator": "gt"},
            "rule 'a': logPattern",
        ),
        (
            {"name": "a", "logPattern": "(.*)", "metricThreshold": "nan", "operator": "gt"},
            "rule 'a': metricThreshold",
        ),
        (
            {"name": "a", "logPattern": "(.*)", "metricThreshold": 1, "operator": ">"},
            "rule 'a': operator",
        ),
        ({"name": "a", "logPattern": ".*", "action": "reboot"}, "rule 'a': action"),
        (
            {"name": "a", "logPattern": ".*", "expectedStartCutOffInSeconds": 0},
            "rule 'a': expectedStartCutOffInSeconds",
        ),
        (
            {"name": "a", "logPattern": ".*", "expectedStartCutoff": 1},
            "rule 'a': expectedStartCutoff",
        ),
        (
            {"name": "a", "logPattern": ".*", "metricEvaluationDataPoints": 0},
            "rule 'a': metricEvaluationDataPoints",
        ),
        ("loss", "rule 0"),
    ],
)
def test_bad_rules_are_refused_by_name_and_field(entry: Any, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_rules([entry])
    assert caught.value.field == field


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(BadInput, match="name of its own"):
        parse_rules([{"name": "a", "logPattern": "x"}, {"name": "a", "logPattern": "y"}])


@pytest.mark.parametrize("text", ["a: [", "rules: 3", ""])
def test_a_file_without_rules_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match="rules"):
        read_rules(file)


def test_groups_are_counted_outside_of_classes_and_other_groups() -> None:
    assert len(outer_groups(r"[(] \( (?:a) (?P<x>b(c)) (?=d)")) == 1
    assert len(outer_groups(r"[]()](a)(b)")) == 2
    assert len(outer_groups(r"(?:(a)|(b))")) == 2
    assert non_finite(r"((a)b)\2") is None  # group 2 is gone


# -- the watch -------------------------------------------------------------------------------------


def test_silence_is_hanging_once_and_again_after_a_match() -> None:
    watch = RuleWatch(rule(start_cutoff_s=10, frequency_s=5), START_S)
    assert watch.tick(START_S + 10) == []
    assert verdicts(watch.tick(START_S + 10.001)) == [("hanging", START_S + 10)]
    assert watch.tick(START_S + 1000) == []
    assert watch.feed(START_S + 1000, "loss: 1") == []
    assert watch.deadline_s == START_S + 1005
    assert verdicts(watch.feed(START_S + 1006, "loss: 1")) == [("hanging", START_S + 1005)]


def test_slow_needs_so_many_points_in_a_row() -> None:
    watch = RuleWatch(rule(threshold=2.5, operator="gteq", data_points=3), 0)
    fired = [
        watch.feed(time, f"loss: {value}")
        for time, value in enumerate([3, 2.5, 2.4, 3, 3, 3, 9, 1, 3, 3, 3])
    ]
    assert [place for place, firings in enumerate(fired) if firings] == [5, 10]
    assert fired[5][0].reason == "3 >= 2.5, 3 times in a row"


@pytest.mark.parametrize(
    ("operator", "slow"),
    [("gt", [3]), ("gteq", [2, 3]), ("lt", [1]), ("lteq", [1, 2]), ("eq", [2])],
)
def test_operators(operator: Any, slow: list[int]) -> None:
    slow_values = [
        value
        for value in (1, 2, 3)
        if RuleWatch(rule(threshold=2, operator=operator), 0).feed(0, f"loss: {value}")
    ]
    assert slow_values == slow


@pytest.mark.parametrize("text", ["nan", "NaN", "-inf", "Infinity"])
@pytest.mark.parametrize("pattern", [r".*loss: (\S+)", r".*loss: (\d+(\.\d+)?).*"])
def test_nan_is_a_verdict_even_of_a_pattern_that_wants_digits(pattern: str, text: str) -> None:
    watch = RuleWatch(rule(pattern=pattern, frequency_s=5), 0)
    assert verdicts(watch.feed(1, f"step 3 loss: {text} lr: 1")) == [("not-a-number", 1)]
    assert watch.feed(2, f"step 4 loss: {text} lr: 1") == []
    assert watch.feed(3, "step 5 loss: 1.5 lr: 1") == []
    assert verdicts(watch.feed(4, f"step 6 loss: {text}")) == [("not-a-number", 4)]
    assert watch.feed(5, "step 7 loss: nanometre") == [] or pattern.endswith(r"(\S+)")


def test_words_are_no_numbers_where_one_is_compared() -> None:
    assert RuleWatch(rule(), 0).feed(0, "loss: none") == []
    assert verdicts(RuleWatch(rule(threshold=1, operator="gt"), 0).feed(0, "loss: none")) == [
        ("not-a-number", 0)
    ]


def test_a_pattern_is_matched_from_the_start_of_the_line() -> None:
    assert not RuleWatch(rule(pattern="loss"), 0).matcher.read("the loss").matched


def test_the_stop_line_ends_the_watch() -> None:
    watch = RuleWatch(rule(frequency_s=5, stop_pattern=".*done"), 0)
    assert watch.feed(1, "loss: 1") == []
    assert verdicts(watch.feed(2, "loss: nan done")) == [("stopped", 2)]
    assert watch.feed(1e9, "loss: nan") == []


def test_fault_on_match() -> None:
    watch = RuleWatch(rule(pattern=".*OutOfMemoryError.*", fault_on_match=True, action="alert"), 0)
    assert watch.feed(1, "all well") == []
    fired = watch.feed(2, "torch.OutOfMemoryError: x")
    assert (fired[0].verdict, fired[0].action) == (RuleVerdict.FAULTED, "alert")


gaps = st.lists(st.floats(0.001, 100), max_size=40)


@given(gaps, st.floats(0.001, 50))
def test_never_fires_while_points_come_in_time_and_on_the_right_side(
    waits: list[float], value: float
) -> None:
    watch = RuleWatch(
        rule(start_cutoff_s=100, frequency_s=100, threshold=50, operator="gt"), START_S
    )
    now = START_S
    for wait in waits:
        now += wait * 0.999  # the sum of floats may be a little longer than its parts
        assert watch.tick(now) == []
        assert watch.feed(now, f"loss: {value!r}") == []
        assert watch.feed(now, "other") == []


@given(gaps, st.integers(1, 30), st.floats(0.001, 1e6))
def test_fires_when_the_wait_is_over_however_it_is_asked(
    waits: list[float], limit: int, late: float
) -> None:
    watch = RuleWatch(rule(frequency_s=limit), 0)
    watch.feed(0, "loss: 1")
    ticks = [time for time in _times(waits) if time <= limit]
    assert [firing for time in ticks for firing in watch.tick(time)] == []
    assert verdicts(watch.tick(limit + late)) == [("hanging", limit)]
    assert watch.tick(limit + late) == []
    assert math.isinf(watch.deadline_s)


lines = st.sampled_from(["loss: 1", "loss: 9", "loss: nan", "other", ""])
events = st.lists(st.tuples(st.floats(0, 20), lines), max_size=30)


@given(events, st.integers(1, 4))
def test_ticks_in_between_and_earlier_times_change_nothing(
    told: list[tuple[float, str]], points: int
) -> None:
    settings = {
        "start_cutoff_s": 12,
        "frequency_s": 7,
        "threshold": 5,
        "operator": "gt",
        "data_points": points,
    }
    plain, ticked, late = (RuleWatch(rule(**settings), 0) for _ in range(3))
    now, fired, fired_ticked, fired_late = 0.0, [], [], []
    for wait, line in told:
        fired_ticked += ticked.tick(now + wait / 2)
        now += wait
        fired += plain.feed(now, line)
        fired_ticked += ticked.tick(now) + ticked.feed(now, line) + ticked.tick(now)
        fired_late += late.tick(now) + late.feed(now - 5, line)
    assert fired == fired_ticked == fired_late
    assert [firing.time_s for firing in fired] == sorted(firing.time_s for firing in fired)


@given(events, events)
def test_nothing_is_said_after_the_stop(
    before: list[tuple[float, str]], after: list[tuple[float, str]]
) -> None:
    watch = RuleWatch(rule(start_cutoff_s=5, frequency_s=5, stop_pattern="end"), 0)
    now = 0.0
    for wait, line in before:
        now += wait
        watch.feed(now, line)
    assert watch.feed(now, "end")[-1].verdict == RuleVerdict.STOPPED
    for wait, line in after:
        now += wait
        assert watch.feed(now, line) == watch.tick(now + 100) == []


def _times(waits: list[float]) -> list[float]:
    return [sum(waits[:count]) for count in range(1, len(waits) + 1)]


# -- recorded logs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "2023-11-14T22:13:20.25Z loss: 1",
        "2023-11-14 22:13:20,250 [INFO] loss: 1",
        "[2023/11/14 22:13:20.250] loss: 1",
        "2023-11-14T23:13:20.250000000+01:00 stdout F loss: 1",
        "[rank0]: 2023-11-14 22:13:20,250 loss: 1",
        "1700000000.25 loss: 1",
        "1700000000250 loss: 1",
        '{"time": "2023-11-14T22:13:20.25+0000", "loss": 1}',
    ],
)
def test_timestamps(line: str) -> None:
    assert read_time_s(line) == START_S + 0.25


@pytest.mark.parametrize(
    "line", ["loss: 1", "2023-13-44 22:13:20 x", "12345 x", "", "epoch 1700000000"]
)
def test_lines_without_timestamps(line: str) -> None:
    assert read_time_s(line) is None


def write_log(directory: Path, seconds: list[float], text: str = "loss: 1.5") -> Path:
    file = directory / "train.log"
    file.write_text("".join(f"{START_S + second:.3f} {text}\n" for second in seconds))
    return file


def test_a_recorded_log_is_checked(tmp_path: Path) -> None:
    log = write_log(tmp_path, [0, 1, 2, 3, 30, 31])
    assert verdicts(check_log_rules([rule(frequency_s=10)], log)) == [("hanging", START_S + 13)]
    assert not check_log_rules([rule(frequency_s=27)], log)
    assert verdicts(check_log_rules([rule(frequency_s=27)], log, tail_s=30)) == [
        ("hanging", START_S + 58)
    ]


def test_a_log_without_timestamps_needs_a_period(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("loss: 1\nother\nother\nloss: 1\n")
    with pytest.raises(BadInput, match=r"line 1.*period_s"):
        check_log_rules([rule(frequency_s=1)], log)
    assert verdicts(check_log_rules([rule(frequency_s=1)], log, period_s=0.5)) == [("hanging", 1)]


def test_a_line_that_matters_and_has_no_timestamp_is_named(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("starting\n1700000000 loss: 1\nTraceback\nloss: 1\n")
    with pytest.raises(BadInput, match="line 4"):
        check_log_rules([rule(frequency_s=1)], log)


def test_waits_suggest_a_frequency(tmp_path: Path) -> None:
    log = write_log(tmp_path, [0, 1, 2, 4, 5, 6, 7])
    fit = {limit: suggest(replay_log([rule(frequency_s=limit)], log)[0]) for limit in (2.1, 4, 300)}
    assert fit[4] == []
    assert [suggestion.suggested_s for suggestion in fit[2.1] + fit[300]] == [4, 4]
    assert fit[300][0].reason == "2 x the longest of 6 gaps that were not called hanging, 2 s"


def test_a_rule_that_never_matched_is_warned_of(tmp_path: Path) -> None:
    replayed = replay_log([rule(pattern="loss", frequency_s=5)], write_log(tmp_path, [0, 1]))[0]
    assert "begin with .*" in replayed.warnings[0]
    assert "never fire" in replayed.warnings[1]


@pytest.mark.parametrize(("start_cutoff_s", "warned"), [(None, True), (60.0, False)])
def test_a_frequency_without_a_limit_for_the_start_is_warned_of(
    tmp_path: Path, start_cutoff_s: float | None, warned: bool
) -> None:
    """The frequency counts from the first match, so a rank that never prints needs a limit for the
    start.
    """
    (replayed,) = replay_log(
        [rule(frequency_s=30, start_cutoff_s=start_cutoff_s)], write_log(tmp_path, [0, 1])
    )
    assert any("before its first match" in warning for warning in replayed.warnings) == warned


def test_waits_that_were_hangs_suggest_nothing(tmp_path: Path) -> None:
    replayed = replay_log([rule(frequency_s=30)], write_log(tmp_path, [0, 1, 2, 3, 4, 5, 60]))[0]
    assert [alarm.verdict for alarm in replayed.alarms] == ["hanging"]
    assert [suggestion.suggested_s for suggestion in suggest(replayed)] == [2]


def test_time_that_goes_back_is_held_and_warned_of(tmp_path: Path) -> None:
    replayed = replay_log(
        [rule(frequency_s=30, start_cutoff_s=30)], write_log(tmp_path, [100, 3, 101])
    )[0]
    assert replayed.gaps_s == [0, 1]
    assert replayed.fired == []
    assert replayed.warnings == ["time goes back by 97 s at line 2: it was held there"]
