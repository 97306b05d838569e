"""A pattern that backtracks without end is interrupted, switched off and reported, and harms no
process.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaoskit.errors import BadInput
from chaoskit.experiment.injection.command_rules import CommandLogs
from chaoskit.journal import Journal, read_journals
from chaoskit.logs.process import LogLine, NodeLogs, start_log_process
from chaoskit.logs.watcher import RankStanding
from chaoskit.process.progress_board import Board
from chaoskit.pytest_plugin import Chaos
from chaoskit.rules import check_log_rules, parse_rules, read_rules, replay_log
from chaoskit.rules.budget import LINE_CHARS_MAX, Budget, PatternTooSlow
from chaoskit.rules.patterns import nests_repeats
from chaoskit.suites.goals import happened
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import LinesMatched, Message, RuleFired

ENDLESS = r"(a+)+$"
RIDDLE = "a" * 64 + "!"
SLOW = {"name": "riddle", "logPattern": ENDLESS, "expectedStartCutOffInSeconds": 1}
LOSS = {"name": "loss", "logPattern": r"loss (\S+)", "faultOnMatch": True}
LIMIT_S = 30.0


def test_a_pattern_is_interrupted_and_the_next_one_is_not() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with Budget() as budget:
        for _ in range(2):
            with pytest.raises(PatternTooSlow):
                budget.match(re.compile(ENDLESS), RIDDLE)
            assert budget.match(re.compile("a+"), RIDDLE)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_in_another_thread_there_is_no_limit_and_nothing_is_harmed() -> None:
    matches = []

    def match() -> None:
        with Budget(1e-6) as budget:
            matches.append(budget.match(re.compile(r"(a+)+$"), "a" * 22 + "!"))

    thread = threading.Thread(target=match)
    thread.start()
    thread.join()
    assert matches == [None]


def logs_of(directory: Path, *rules: dict[str, Any]) -> NodeLogs:
    return NodeLogs("a", parse_rules(list(rules)), directory, Budget())


def test_a_rule_is_switched_off_once_on_all_logs_of_the_node(tmp_path: Path) -> None:
    """The other rules go on, even on the line that took too long."""
    logs = logs_of(tmp_path, SLOW, LOSS)
    standings = {
        worker: RankStanding(1, rank, 0, waits=False) for rank, worker in enumerate(("a.0", "a.1"))
    }
    for worker in standings:
        (tmp_path / f"{worker}.log").write_text(f"{RIDDLE}\nloss 1\n{RIDDLE}\n")
    reports: list[Message] = []
    with logs._budget:
        for look in range(1, 100):
            reports += logs.look(standings, look * 0.05)
    fired = [
        (report.worker, report.rule, report.verdict, report.action)
        for report in reports
        if isinstance(report, RuleFired)
    ]
    assert fired == [
        ("a.0", "riddle", "switched-off", "alert"),
        ("a.0", "loss", "faulted", "restart-process"),
        ("a.1", "loss", "faulted", "restart-process"),
    ], "and nobody is called hanging for what is not looked for"
    (off, *_) = [report for report in reports if isinstance(report, RuleFired)]
    assert off.line == RIDDLE
    assert off.reason == "its pattern takes more than 0.1 s of CPU time for a line"
    assert LinesMatched("a.1", ("loss",)) in reports


def test_long_lines_are_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"loss 1{' ' * LINE_CHARS_MAX}end\n")
    ends, begins = LOSS | {"logPattern": r"loss (\d).*end"}, LOSS
    assert check_log_rules(parse_rules([ends]), log, period_s=1) == []
    assert len(check_log_rules(parse_rules([begins]), log, period_s=1)) == 1


# -- the process -----------------------------------------------------------------------------------


def test_it_answers_from_a_process_of_its_own_and_its_end_is_told(tmp_path: Path) -> None:
    board = Board.create()
    board.place(1, 0)
    board.enter(Phase.FORWARD)
    (tmp_path / "a.0.log").write_text(f"{RIDDLE}\nloss 1\n")
    rules = parse_rules([SLOW, LOSS])
    line, pid = start_log_process("a", rules, tmp_path, ())
    reports: list[RuleFired] = []

    def send(message: Message) -> None:
        if isinstance(message, RuleFired):
            reports.append(message)
            if message.rule == "loss":
                os.kill(pid, signal.SIGKILL)

    asyncio.run(
        asyncio.wait_for(LogLine("a", rules, line, lambda: [("a.0", board)], send).run(), LIMIT_S)
    )
    os.waitpid(pid, 0)
    assert [(report.worker, report.rule, report.verdict) for report in reports] == [
        ("a.0", "riddle", "switched-off"),
        ("a.0", "loss", "faulted"),
        ("", "riddle, loss", "switched-off"),
    ]
    assert reports[-1].action == "alert"
    assert "the process that matches patterns on a has ended" in reports[-1].reason


def test_it_ends_with_its_agent(tmp_path: Path) -> None:
    line, pid = start_log_process("a", parse_rules([SLOW]), tmp_path, ())
    line.close()
    assert os.waitpid(pid, 0) == (pid, 0)


@pytest.mark.promise("is interrupted, and its rule is off on that node until the agent ends")
def test_a_pattern_without_end_costs_a_run_nothing(chaos: Chaos) -> None:
    """Every rank prints a line that the pattern cannot be matched with; no node is lost, and
    another rule still works.
    """
    rules = [
        SLOW,
        {"name": "bad", "logPattern": r"step 9 (loss)", "faultOnMatch": True, "action": "alert"},
    ]
    goal = happened(chaos, Event.RULE_FIRED, 4)
    plan: dict[str, Any] = {
        "nodes": 2,
        "steps": 20,
        "until": goal.until,
        "watch": goal,
        "twin": False,
    }
    outcome = chaos.run(
        "../../jobs/logs/printing.py", options={"riddle_at": 5}, rules=rules, **plan
    )
    journal = read_journals(Path(outcome.directory) / "journal")
    assert [record for record in journal if record.event in (Event.DETECTED, Event.NODE_LOST)] == []
    fired = [
        (record["rule"], record["verdict"], record["rank"])
        for record in journal
        if record.event == Event.RULE_FIRED
    ]
    assert sorted(fired) == sorted((rule, what, rank) for rank in (0, 1) for rule, what in (
        ("riddle", "switched-off"), ("bad", "faulted"),
    ))  # fmt: skip
    assert {(record.rule, record.action) for record in outcome.rules_fired} == {
        ("riddle", "alert"),
        ("bad", "alert"),
    }


def test_the_log_of_a_command_cannot_hold_up_the_harness(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "harness")
    logs = CommandLogs(parse_rules([SLOW, LOSS]), ["node0"], journal, 0.0)
    logs.feed("node0", f"{RIDDLE}\nloss 1\n{RIDDLE}\n".encode(), 0.1, None)
    journal.close()
    fired = [
        (record["rule"], record["verdict"], record["action"]) for record in read_journals(tmp_path)
    ]
    assert fired == [("riddle", "switched-off", "alert"), ("loss", "faulted", "alert")]


# -- offline ---------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    lines = ["loss 1", RIDDLE, "loss 2", RIDDLE]
    path.write_text(
        "\n".join(f"2026-03-01 12:00:{number:02} {line}" for number, line in enumerate(lines))
    )
    return path


BEHIND = SLOW | {"logPattern": rf"\S+ \S+ {ENDLESS}"}


def test_a_replay_says_which_line_is_too_slow(log: Path) -> None:
    (finding,) = check_log_rules(parse_rules([BEHIND]), log, tail_s=900)
    assert (finding.verdict, finding.action) == ("switched-off", "alert")
    assert finding.reason == "its pattern takes more than 0.1 s of CPU time for a line: line 2"


@pytest.mark.parametrize("place", [0, 2])
def test_also_of_a_line_without_a_time(tmp_path: Path, place: int) -> None:
    path, lines = tmp_path / "log", ["2026-03-01 12:00:00 x", "2026-03-01 12:00:01 loss 2"]
    path.write_text("\n".join([*lines[:place], RIDDLE, *lines[place:]]))
    (replay,) = replay_log(parse_rules([SLOW]), path)
    assert [finding.reason.rpartition(": ")[2] for finding in replay.fired] == [f"line {place + 1}"]
    path.write_text("\n".join([*lines[:place], "loss 1", *lines[place:]]))
    with pytest.raises(BadInput, match="record it with a timestamp"):
        replay_log(parse_rules([LOSS]), path)


def test_the_command_line_fails_and_names_the_line(log: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        f"- name: riddle\n  logPattern: '{BEHIND['logPattern']}'\n  expectedStartCutOffInSeconds: 1\n"
    )
    command = [sys.executable, "-m", "chaoskit", "rules", "test", str(rules), str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1, done.stderr
    output = " ".join(done.stdout.split())
    assert (
        "riddle: switched-off, its pattern takes more than 0.1 s of CPU time for a line: line 2 -> alert"
        in output
    )
    expected = [*command, "--expect", "riddle:switched-off"]
    assert (
        subprocess.run(expected, capture_output=True, check=False, timeout=LIMIT_S).returncode == 0
    )


@pytest.mark.parametrize(
    "pattern", [ENDLESS, r"(?:a*)*", r"(\w+\s?)*x", r"((a+))+", r"([a-z]+)*?b", r"x(?=(b+)+)"]
)
def test_a_repeat_within_a_repeat_is_warned_of(tmp_path: Path, pattern: str) -> None:
    rules, log = tmp_path / "rules.json", tmp_path / "train.log"
    rules.write_bytes(
        msgspec.json.encode([{"name": "one", "logPattern": "x", "stopPattern": pattern}])
    )
    log.write_text("2026-03-01 12:00:00 x\n")
    (replay,) = replay_log(read_rules(rules), log)
    assert [
        warning.partition(" has ")[0] for warning in replay.warnings if "repeat" in warning
    ] == ["stopPattern"]


@pytest.mark.parametrize(
    "pattern", [r"(\w+\s)*", r".*'loss': (\d+(\.\d+)?).*", r"(?:(?:ab)+c)*", r"(a+){3}", "a++b", ""]
)
def test_patterns_that_are_well_are_not_warned_of(pattern: str) -> None:
    assert not nests_repeats(pattern)
