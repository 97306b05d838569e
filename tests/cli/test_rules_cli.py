"""Tests of ``chaoskit rules`` as a user starts it: a process, files, and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaoskit.cli.app import run

RULES = """
- name: hang
  logPattern: '.*loss: (\\d+(\\.\\d+)?)'
  expectedRecurringFrequencyInSeconds: 5
- name: speed
  logPattern: '.*speed: (\\S+)'
  metricThreshold: 0.5
  operator: lt
  metricEvaluationDataPoints: 2
  action: replace-node
"""


class Command:
    """A runner of the command line in this process, which saves the start of a Python; it checks
    the exit code.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: object, code: int) -> str:
        assert run(["rules", *map(str, arguments)]) == code
        printed = self._capsys.readouterr()
        return printed.out or printed.err

    def run_json(self, *arguments: object, code: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.run(*arguments, "--json", code=code))
        return content


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return Command(capsys)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "rules.yaml"
    file.write_text(RULES)
    return file


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a log with ten steps a second apart; the speed drops for the last three."""
    file = tmp_path / "train.log"
    lines = [
        f"2026-01-01 00:00:{s:02},000 loss: {9 - s} speed: {0.9 if s < 7 else 0.25}"
        for s in range(10)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_what_would_have_fired(command: Command, rules: Path, log: Path) -> None:
    report = command.run_json("test", rules, log, code=1)
    hang, speed = report["rules"]
    assert (hang["points"], hang["gap_s"], hang["fired"]) == (
        10,
        {"min": 1.0, "median": 1.0, "max": 1.0},
        [],
    )
    assert [
        (firing["verdict"], firing["time_s"], firing["action"]) for firing in speed["fired"]
    ] == [("slow", 1767225608.0, "replace-node")]
    assert speed["value"] == {"min": 0.25, "median": 0.9, "max": 0.9}
    text = command.run("test", rules, log, code=1)
    assert (
        "2026-01-01 00:00:08  speed: slow, 0.25 < 0.5, 2 times in a row -> replace-node"
        in text.replace("\n", "")
    )


def test_expectations_decide_the_exit_code(command: Command, rules: Path, log: Path) -> None:
    command.run("test", rules, log, "--expect", "speed:slow", code=0)
    assert "expected, and did not fire: hang: hanging" in command.run(
        "test", rules, log, "--expect=hang:hanging", code=1
    )
    both = ("--expect=hang:hanging", "--expect=speed:slow")
    command.run("test", rules, log, *both, code=1)
    command.run("test", rules, log, *both, "--tail-s", "60", code=0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--expect", "speed:fast"), "NAME:VERDICT"),
        (("--expect", "other:slow"), "NAME:VERDICT"),
        (("--period-s", "-1"), "0 or more"),
    ],
)
def test_bad_input_is_refused(
    command: Command, rules: Path, log: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in command.run("test", rules, log, *arguments, code=2)


def test_files_that_cannot_be_used_are_named(
    command: Command, rules: Path, log: Path, tmp_path: Path
) -> None:
    assert "no.log" in command.run("test", rules, tmp_path / "no.log", code=2)
    assert "train.log" in command.run("test", log, log, code=2)


def test_as_a_process(rules: Path, log: Path) -> None:
    command = [sys.executable, "-m", "chaoskit", "rules", "test", str(rules), str(log), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert json.loads(ended.stdout)["ok"] is False
