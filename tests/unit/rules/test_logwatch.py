"""Rules on growing logs, without processes: the time that counts, and the consequences of a rule
that fires.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.coordinator.detectors.rulings import Excused, GiveUpByRule, Hopeless, Rulings
from chaoskit.coordinator.membership.events import Ruled
from chaoskit.logs.watcher import LOOK_BYTES, LOOK_S, REMIND_S, RankStanding, WatchedLog
from chaoskit.rules import RuleWatch, parse_rules
from chaoskit.rules.log_file import LineSplitter, LogFile
from chaoskit.wire.messages import LinesMatched, RuleFired

RULE = {"name": "loss", "logPattern": r"loss (\S+)", "expectedRecurringFrequencyInSeconds": 1}
START = RULE | {"expectedStartCutOffInSeconds": 2}
HIGH = RULE | {"metricThreshold": 10, "operator": "gt", "metricEvaluationDataPoints": 2}


class Bench:
    """A worker, its log, and a clock."""

    def __init__(self, directory: Path, *rules: dict[str, Any]) -> None:
        self.path = directory / "a.0.log"
        self.log = WatchedLog("a.0", "a", parse_rules(list(rules)), self.path, 0.0)
        self.now_s = 0.0
        self.standing = RankStanding(generation=1, rank=0, step=0, waits=False)

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def stand(self, **changes: Any) -> None:
        self.standing = RankStanding(
            **{name: getattr(self.standing, name) for name in RankStanding.__slots__} | changes
        )

    def go_on(self, seconds: float) -> list[tuple[str, float]]:
        """Look repeatedly for ``seconds``.

        Return the verdicts of the rules that fire, with their times.
        """
        fired = []
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            messages = self.log.look(self.now_s, self.standing)
            fired += [
                (message.verdict, round(self.now_s, 2))
                for message in messages
                if isinstance(message, RuleFired)
            ]
        return fired


def hanging(at_s: float) -> list[tuple[str, Any]]:
    """Return a single verdict, within two looks."""
    return [("hanging", pytest.approx(at_s, abs=2 * LOOK_S))]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, START)


def test_a_rank_that_prints_nothing_is_hanging_once(bench: Bench) -> None:
    assert bench.go_on(5) == hanging(2.05)


def test_a_limit_counts_from_the_last_match(bench: Bench) -> None:
    bench.go_on(1)
    bench.write("loss 1\n")
    assert bench.go_on(3) == hanging(2.05)
    bench.write("nothing of interest\nloss 2\n")
    assert bench.go_on(3) == hanging(5.05)


@pytest.mark.parametrize("standing", [{"rank": -1}, {"waits": True}])
def test_the_clock_stands_where_nothing_can_be_expected(
    bench: Bench, standing: dict[str, Any]
) -> None:
    """The worker is a spare, waits for others, takes over a state, or is in a declared long
    phase.
    """
    bench.stand(**standing)
    assert bench.go_on(60) == []
    bench.stand(rank=0, waits=False)
    assert bench.go_on(5) == hanging(62.05)


def test_what_a_worker_prints_before_its_first_rank_does_not_count(tmp_path: Path) -> None:
    bench = Bench(tmp_path, HIGH)
    bench.stand(rank=-1)
    bench.write("loss 99\nloss nan\n")
    assert bench.go_on(1) == []
    bench.stand(rank=2)
    bench.write("loss 99\nloss 1\n")
    assert bench.go_on(0.5) == []


def test_a_new_generation_begins_anew(tmp_path: Path) -> None:
    """The first step of a generation is a repeated one: neither the time since the last match nor
    bad metrics are kept.
    """
    bench = Bench(tmp_path, HIGH)
    bench.write("loss 1\n")
    assert bench.go_on(0.9) == []
    bench.stand(generation=2)
    assert bench.go_on(0.9) == []
    bench.write("loss 99\n")
    assert bench.go_on(0.5) == []
    bench.stand(generation=3)
    bench.write("loss 99\n")
    assert bench.go_on(0.5) == []
    bench.write("loss 99\n")
    assert [verdict for verdict, _ in bench.go_on(0.5)] == ["slow"]


def test_time_in_which_nobody_looked_does_not_count(bench: Bench) -> None:
    """A rule does not count time in which the whole node was frozen."""
    bench.write("loss 1\n")
    bench.go_on(0.1)
    bench.now_s += 30.0
    assert bench.go_on(0.3) == []
    assert [verdict for verdict, _ in bench.go_on(1)] == ["hanging"]


def test_a_chatty_log_is_read_in_parts_and_nobody_is_blamed_meanwhile(bench: Bench) -> None:
    bench.write("x\n" * (LOOK_BYTES * 15) + "loss 1\n")  # enough for 30 looks
    assert bench.go_on(2) == []
    assert bench.go_on(2) == hanging(2.6)


def test_a_metric_that_stays_bad_is_told_of_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, HIGH)
    fired = []
    for _ in range(round(3 * REMIND_S / 0.5)):
        bench.write("loss 99\n")
        fired += bench.go_on(0.5)
    assert [verdict for verdict, _ in fired] == ["slow"] * 3
    bench.write("loss 1\n")
    assert bench.go_on(0.9) == []


def test_it_is_told_which_rules_have_matched(bench: Bench) -> None:
    bench.write("loss 1\nloss 2\n")
    bench.now_s += LOOK_S
    assert bench.log.look(bench.now_s, bench.standing) == [LinesMatched("a.0", ("loss",))]
    bench.write("loss 3\n")
    assert bench.log.look(bench.now_s, bench.standing) == []


@given(st.lists(st.floats(0.01, 3), max_size=20), st.integers(0, 20))
def test_a_watch_that_begins_anew_is_a_new_one(gaps_s: list[float], place: int) -> None:
    """A restarted watch keeps only its end, and the limit that counts."""
    (rule,) = parse_rules([START])
    old, now_s = RuleWatch(rule, 0.0), 0.0
    for gap_s in gaps_s[:place]:
        now_s += gap_s
        old.feed(now_s, "loss 1")
    old.restart(now_s)
    new = RuleWatch(rule, now_s)
    if old.matched:
        new.feed(now_s, "loss 1")
    for gap_s in gaps_s[place:]:
        now_s += gap_s
        assert old.feed(now_s, "loss 1") == new.feed(now_s, "loss 1")
        assert old.deadline_s == new.deadline_s


# -- files -----------------------------------------------------------------------------------------


def lines(file: LogFile, splitter: LineSplitter) -> list[str]:
    return splitter.feed(file.read())


def test_a_log_may_be_truncated_or_replaced(tmp_path: Path) -> None:
    path, splitter = tmp_path / "log", LineSplitter()
    file = LogFile(path)
    assert lines(file, splitter) == []
    path.write_text("one\ntwo\ntor")
    assert lines(file, splitter) == ["one", "two"]
    path.write_text("new\n")
    assert lines(file, splitter) == ["tor", "new"]
    path.rename(tmp_path / "log.1")
    with (tmp_path / "log.1").open("a") as old:
        old.write("late\n")
    assert lines(file, splitter) == ["late"]
    assert lines(file, splitter) == []
    path.write_text("fresh\n")
    assert lines(file, splitter) == ["fresh"]
    assert lines(file, splitter) == []
    before = len(os.listdir("/proc/self/fd"))
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


# -- what comes of it ------------------------------------------------------------------------------


def rule_fired(worker: str = "a.0", generation: int = 1, **changes: Any) -> RuleFired:
    values: dict[str, Any] = {
        "rank": 0,
        "since_step": 5,
        "step": 6,
        "rule": "loss",
        "verdict": "hanging",
    }
    values |= {"action": "restart-process", "reason": "no match for 1 s", "matched": True}
    return RuleFired(worker=worker, node=worker[0], generation=generation, **(values | changes))


MEMBERS = ("a.0", "b.0", "c.0")


def judged(rulings: Rulings, fired: RuleFired, generation: int = 1, now_s: float = 0.0) -> str:
    """Return the reaction of the rulings to a rule that fired; they take it into account."""
    ruling = rulings.judge(fired, generation, MEMBERS, now_s)
    if isinstance(ruling, GiveUpByRule):
        rulings.take_in(Ruled(fired, generation, (fired.worker,)), now_s)
    return type(ruling).__name__


def test_one_restart_a_rule_and_generation() -> None:
    rulings = Rulings(3, 60.0)
    assert rulings.judge(rule_fired(), 1, MEMBERS, 0.0) == GiveUpByRule()
    assert judged(rulings, rule_fired()) == "GiveUpByRule"
    assert judged(rulings, rule_fired("b.0")) == "Excused"
    assert judged(rulings, rule_fired("b.0", rule="other")) == "GiveUpByRule"
    assert judged(rulings, rule_fired("b.0", 2), 2) == "GiveUpByRule"


@pytest.mark.parametrize(
    "fired", [rule_fired(generation=2), rule_fired(generation=4), rule_fired("d.0", 3)]
)
def test_who_has_no_rank_now_is_let_be(fired: RuleFired) -> None:
    assert judged(Rulings(3, 60.0), fired, 3) == "Excused"


@pytest.mark.parametrize("action", ["alert", "none"])
def test_what_asks_for_nothing_gets_nothing(action: str) -> None:
    assert Rulings(3, 60.0).judge(rule_fired(action=action), 1, MEMBERS, 0.0) == Excused()


def test_a_step_that_brings_it_back_is_bad_and_not_the_rank() -> None:
    rulings = Rulings(3, 60.0)
    bad = {"verdict": "not-a-number"}
    assert judged(rulings, rule_fired(**bad)) == "GiveUpByRule"
    assert judged(rulings, rule_fired("b.0", 2, **bad), 2) == "Excused"
    assert judged(rulings, rule_fired("b.0", 2, since_step=4, step=5, **bad), 2) == "Excused"
    assert judged(rulings, rule_fired("b.0", 2, since_step=7, step=7, **bad), 2) == "GiveUpByRule"


def test_restarts_that_do_not_help_end_the_job() -> None:
    rulings = Rulings(2, 60.0)
    assert [
        judged(rulings, rule_fired("b.0", number), number, 50.0 * number) for number in (1, 2)
    ] == ["GiveUpByRule"] * 2
    assert (
        judged(rulings, rule_fired("b.0", 3, verdict="slow", step=9, since_step=9), 3, 150.0)
        == "GiveUpByRule"
    )
    end = rulings.judge(rule_fired("b.0", 4), 4, MEMBERS, 150.0)
    assert end == Hopeless("log rule loss: no match for 1 s, again after 2 restarts in a row")
    assert judged(Rulings(2, 60.0), rule_fired()) == "GiveUpByRule"


def test_restarts_that_are_far_apart_are_not_in_a_row() -> None:
    rulings = Rulings(1, 60.0)
    for number in range(1, 20):
        assert (
            judged(rulings, rule_fired(generation=number), number, 61.0 * number) == "GiveUpByRule"
        )


def test_who_never_printed_is_excused_while_a_live_member_prints() -> None:
    rulings = Rulings(3, 60.0)
    rulings.note_matches("z.0", ["loss"])  # the member is lost
    rulings.note_matches("b.0", ["other"])
    assert judged(rulings, rule_fired(matched=False)) == "GiveUpByRule"
    rulings.note_matches("b.0", ["other", "loss"])
    assert judged(rulings, rule_fired("c.0", 2, matched=False), 2) == "Excused"
    assert judged(rulings, rule_fired("c.0", 2), 2) == "GiveUpByRule"
