"""Tests of the start and end of sessions and commands: imports, streams, and the exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import LIMIT_S
from unit.report.test_report import outcome

from chaoskit.report.store import write_outcome
from chaoskit.vocabulary import Verdict


def command(
    directory: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    state = {"XDG_STATE_HOME": str(directory / "state"), "PYTHONPATH": str(directory / "modules")}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        env={**os.environ, **state, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LIMIT_S,
        check=False,
    )


SEEN = """
import sys

def pytest_collection_finish(session):
    print("seen:", *sorted(sys.modules))
"""


def test_the_plugin_slows_no_other_suite(tmp_path: Path) -> None:
    """A session that does not use chaoskit loads none of its dependencies but msgspec, and no
    harness.
    """
    (tmp_path / "test_empty.py").write_text("")
    (tmp_path / "conftest.py").write_text(SEEN)
    ended = command(
        tmp_path, "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "test_empty.py"
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("seen: ")]
    loaded = set(line.split()[1:])
    assert {"chaoskit.pytest_plugin", "msgspec"} <= loaded
    heavy = {
        "torch",
        "numpy",
        "hypothesis",
        "jinja2",
        "rich",
        "typer",
        "psutil",
        "docker",
        "pyroute2",
        "mfusepy",
    }
    assert not loaded & heavy
    assert not [
        name
        for name in loaded
        if name.startswith(
            (
                "chaoskit.experiment",
                "chaoskit.faults",
                "chaoskit.process.progress_board",
                "chaoskit.runlog",
                "chaoskit.runtime",
                "faults",
            )
        )
    ]


LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}


@pytest.mark.parametrize(
    ("arguments", "terminal"),
    [
        (("--help",), ASCII),
        (("faults",), ASCII),
        (("doctor",), ASCII),
        (("report", "."), ASCII),
        (("report", "."), LOCALE),
    ],
)
def test_a_terminal_without_unicode_gets_question_marks(
    tmp_path: Path, arguments: tuple[str, ...], terminal: dict[str, str]
) -> None:
    """No text of chaoskit ends a command on such a terminal."""
    write_outcome(outcome("α → β", injected=(4.3,)), tmp_path)
    ended = command(tmp_path, "chaoskit", *arguments, **terminal)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.isascii()


def test_an_exception_of_ours_is_no_failed_job(tmp_path: Path) -> None:
    """The exit status is 11, with the traceback; with --json the error is on standard output,
    too.
    """
    write_outcome(outcome("passes"), tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "jinja2.py").write_text("raise ZeroDivisionError('a bug')\n")
    outputs = {(): "", ("--json",): '{"error": {"harness": "ZeroDivisionError: a bug"}}\n'}
    for more, output in outputs.items():
        ended = command(tmp_path, "chaoskit", "report", ".", "--html", "page.html", *more)
        assert (ended.returncode, ended.stdout) == (11, output)
        assert ended.stderr.splitlines()[-1] == "ZeroDivisionError: a bug"


#: A suite that leaves an outcome, as a run does, and trains nothing.
SUITE = """
import shutil

def test_runs():
    shutil.copytree("prepared", "report/runs/002-new")

def test_fails():
    assert False
"""


def test_a_suite_tells_of_its_own_runs(tmp_path: Path) -> None:
    """The JSON leaves out old outcomes of the directory, and pytest's output goes to standard
    error.
    """
    write_outcome(
        outcome("old", injected=(4.3,), verdict=Verdict.FAILED),
        tmp_path / "report" / "runs" / "001-old",
    )
    write_outcome(outcome("new", injected=(4.3,)), tmp_path / "prepared")
    (tmp_path / "test_suite.py").write_text(SUITE)
    ended = command(
        tmp_path,
        "chaoskit",
        "test",
        "test_suite.py",
        "--report",
        "report",
        "--json",
        "-p",
        "no:cacheprovider",
    )
    result = json.loads(ended.stdout)
    assert ended.returncode == result["exit_code"] == 1
    assert [outcome["name"] for outcome in result["outcomes"]] == ["new"]
    assert (result["recovery"]["total"]["recovered"], result["recovery"]["total"]["tried"]) == (
        1,
        1,
    )
    assert result["directory"] == "report"
    assert "1 failed, 1 passed" in ended.stderr


@pytest.mark.parametrize(
    ("module", "arguments", "refusal"),
    [
        (
            "prometheus_client",
            ("--metrics-port", "0"),
            "--metrics-port 0: install prometheus_client: pip install 'chaoskit[observe]'",
        ),
        (
            "opentelemetry",
            ("--otlp-endpoint", "http://127.0.0.1:1"),
            "--otlp-endpoint http://127.0.0.1:1: install OpenTelemetry: pip install 'chaoskit[observe]'",
        ),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, module: str, arguments: tuple[str, ...], refusal: str
) -> None:
    """The command is refused before anything is started or created."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{module}.py").write_text("raise ImportError\n")
    ended = command(tmp_path, "chaoskit", "launch", "gpt", "--report", "run", *arguments)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"chaoskit: {refusal}\n")
    assert not (tmp_path / "run").exists()


def test_markers_of_other_projects_are_left_alone(tmp_path: Path) -> None:
    """A project may use the markers ``gpu`` and ``slow`` for its own purposes: its tests run on any
    machine.
    """
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: ours\n    slow: ours\n")
    marked = "import pytest\n\n@pytest.mark.gpu\n@pytest.mark.slow\ndef test_ours(): pass\n"
    (tmp_path / "test_ours.py").write_text(marked)
    ended = command(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers")
    assert (ended.returncode, "1 passed" in ended.stdout) == (0, True), ended.stdout
