"""Tests of nightly runs: real ones that are killed, refused and aborted; their plans, logs, reports
and webhooks.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import msgspec
import pytest
from support.repository import CALM, KILLS, Project
from support.runs import run
from support.waiting import wait_until

from chaoskit.errors import BadInput
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.history.ratio_estimate import estimate_ratio
from chaoskit.history.record import AcceptedRecord, NightRecord, NightUnit, SeriesRecord, new_id
from chaoskit.history.session import read
from chaoskit.history.store import RunContents
from chaoskit.nightly.log import (
    NightBegan,
    NightEnded,
    NightLog,
    NightStopped,
    UnitDone,
    folders_beyond,
    read_log,
)
from chaoskit.nightly.outcome import NO_GOOD_NIGHT, exit_code_of, night_sentence
from chaoskit.nightly.plan import NightWindow, Webhook, load
from chaoskit.nightly.rendering import MARKDOWN_BYTES, report_html, report_markdown
from chaoskit.nightly.report import build_report, removed_tests
from chaoskit.nightly.watch import AbortCondition, NightAborted, abort_reason, watched
from chaoskit.nightly.webhook import post
from chaoskit.process.linux import descendants
from chaoskit.report import words
from chaoskit.settings_file import read_document
from chaoskit.sla.judge import Judged, State
from chaoskit.vocabulary import Verdict

PLAN = """
version: 1
name: small
tests: [test_it.py]
control: [test_calm.py]
repeats: 2
history: history
sla: sla.yaml
"""
SLAS = """
version: 1
slas:
  - {name: a lost rank, where: {fault: [Kill]}, always: [recovered, lost_steps == 0], objectives: [recovery.p95 <= 5 s]}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    made.write(
        **{"nightly.yaml": PLAN, "sla.yaml": SLAS, "test_calm.py": CALM, "test_it.py": KILLS}
    )
    made.write(**{".gitignore": "__pycache__\nhistory\nchaoskit-nights\nabort\n"})
    made.commit()
    return made


def start(project: Project, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "chaoskit", "nightly", "run", "nightly.yaml", *options]
    pipe = subprocess.PIPE
    own = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=project.path, stdout=pipe, stderr=pipe, text=True, env=own)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


def nights(project: Project) -> list[NightRecord]:
    return read(str(project.path / "history")).nights


def folders(project: Project) -> list[Path]:
    return sorted((project.path / "chaoskit-nights").glob("*-small-*"))


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"it ended, and never said: {text}")


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("A night that was killed goes on where it was")
@pytest.mark.promise("The report names **what did not run**")
def test_a_night_that_is_killed_goes_on_where_it_was(project: Project) -> None:
    first = start(project)
    wait_for_line(first, "experiments 1 of 3")
    below = descendants(first.pid)
    first.send_signal(signal.SIGKILL)
    finish(first)
    wait_until(lambda: not any(map(is_alive, below)), "all that it has started has ended")
    assert nights(project) == []

    status, out, errors = finish(start(project))
    assert status == 0, errors
    assert "resuming" in errors
    assert "which was killed: 2 tests complete" in errors
    assert "experiments 1 of 3" not in errors
    assert "experiments 2 of 3" in errors
    (night,) = nights(project)
    (folder,) = folders(project)
    assert [(unit.part, unit.test.partition("[")[2], unit.runs) for unit in night.units] == [
        ("control", "", 2),
        ("experiments", "4]", 2),
        ("experiments", "6]", 2),
        ("experiments", "7]", 2),
    ]
    assert night.missing == []
    assert [sla["state"] for sla in night.slas] == ["met", "met", "not shown"]
    assert "report.html" in out
    assert {"report.html", "report.md", "report.json", "night.jsonl"} <= {
        path.name for path in folder.iterdir()
    }
    assert [*(folder / "report").rglob("outcome.json")]
    runs = read(str(project.path / "history")).runs
    assert len(runs) == 8
    assert all(
        len({run_record.session for run_record in runs if run_record.title == title}) == 1
        for title in {run_record.title for run_record in runs}
    )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("compares it with the commit of the last night in which nothing was wrong")
def test_a_regression_since_the_last_good_night_is_reported(project: Project) -> None:
    project.write(
        **{
            "nightly.yaml": f"{PLAN}compare: {{tests: ['test_it.py::test_kill[4]'], numbers: [recovery]}}\n"
        }
    )
    project.write(
        **{
            "train.py": (project.path / "train.py")
            .read_text()
            .replace("trainer.step == 6", "trainer.step == 4")
        }
    )
    good = project.commit()
    status, _, errors = finish(start(project))
    assert status == 0, errors
    assert nights(project)[0].missing == [NO_GOOD_NIGHT]
    project.write(**{"pauses.py": "IN_FIRST_STEP_S = 0.15\n"})
    bad = project.commit()
    status, _, errors = finish(start(project))
    assert status == 1, errors
    night = nights(project)[-1]
    (regression,) = [
        finding for finding in night.findings if finding.change is NumberChange.REGRESSED
    ]
    assert (regression.metric, regression.phase) == ("recovery", "first_good_step")
    page = (folders(project)[-1] / "report.md").read_text()
    assert f"{good[:10]} .. {bad[:10]}" in page
    assert "### Regressions" in page


@pytest.mark.costly
@pytest.mark.slow
def test_a_night_without_a_new_commit_is_no_failure(project: Project) -> None:
    """The commit to compare with may be that of the last good night itself, as on a quiet
    weekend.
    """
    project.write(
        **{
            "nightly.yaml": f"{PLAN}compare: {{tests: ['test_it.py::test_kill[4]'], numbers: [recovery]}}\n"
        }
    )
    project.write(**{"test_it.py": KILLS.replace("[4, 6, 7]", "[4]")})
    project.commit()
    assert finish(start(project))[0] == 0
    status, _, errors = finish(start(project))
    assert status == 0, errors
    assert any(
        "nothing is new since the last good night" in line for line in nights(project)[-1].lines
    )


@pytest.mark.costly
@pytest.mark.promise("One night at a time runs in a directory")
def test_a_second_night_is_refused(project: Project) -> None:
    first = start(project)
    wait_for_line(first, "control: ")
    status, _, errors = finish(start(project))
    assert status == 2
    assert "wait: another night runs there (pid " in errors
    first.send_signal(signal.SIGTERM)
    finish(first)
    assert len(folders(project)) == 1


@pytest.mark.costly
@pytest.mark.promise(
    "`abort_if` is asked every ten seconds, and ends the night when it ends with 0"
)
def test_a_night_is_aborted_in_the_middle_of_a_run(project: Project) -> None:
    guard = "guard: {abort_if: [test, -e, abort], every: 0.2s}"
    project.write(**{"nightly.yaml": f"{PLAN}{guard}\n"})
    process = start(project)
    wait_for_line(process, "experiments: 3 tests")
    (project.path / "abort").touch()
    began = time.monotonic()
    status, _, errors = finish(process)
    assert time.monotonic() - began < 30  # measured: 2 s; a run is ended at once, not awaited
    assert status == 11, errors
    (night,) = nights(project)
    assert night.reason.startswith("the abort condition holds: ")
    assert not [line for line in night.lines if line.startswith("left behind")]
    assert "the night ended early" in (folders(project)[0] / "report.md").read_text()


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("a control that fails ends the night")
def test_a_control_that_fails_ends_the_night(project: Project) -> None:
    project.write(**{"test_calm.py": CALM.replace("steps=6", "steps=6, deadline_s=0.01")})
    status, _, errors = finish(start(project))
    assert status == 11, errors
    (night,) = nights(project)
    assert night.reason.startswith(
        "the control arm failed without a fault: test_calm.py::test_calm: "
    )
    assert {unit.part for unit in night.units} == {"control"}


@pytest.mark.parametrize(
    ("guard", "told"),
    [
        ("{require: ['false']}", "guard.require='false': wait until this command ends with 0: 1"),
        (
            "{require: [sh, -c, 'echo an incident; exit 3']}",
            "wait until this command ends with 0: an incident",
        ),
        ("{require: [not-there]}", "No such file or directory"),
        ("{window: {from: 'NEVER', to: 'NOW'}}", "start the night within"),
    ],
)
@pytest.mark.promise("Before that holds nothing is started")
def test_a_guard_that_does_not_hold_refuses_the_night(
    project: Project, guard: str, told: str
) -> None:
    now = datetime.now(UTC)
    closed = f"{now + timedelta(hours=2):%H:%M}", f"{now + timedelta(hours=3):%H:%M}"
    guard = guard.replace("NEVER", closed[0]).replace("NOW", closed[1])
    project.write(**{"nightly.yaml": f"{PLAN}guard: {guard}\n"})
    status, _, errors = finish(start(project))
    assert status == 2
    assert told in errors
    assert not folders(project)
    assert not (project.path / "history").exists()


def test_a_preview_runs_nothing(project: Project) -> None:
    status, out, errors = finish(start(project, "--preview", "--json"))
    assert status == 0, errors
    assert {part: len(tests) for part, tests in json.loads(out).items()} == {
        "control": 1,
        "experiments": 3,
    }
    assert not folders(project)


def test_a_selection_of_nothing_is_refused(project: Project) -> None:
    project.write(**{"test_it.py": "def test_plain():\n    pass\n"})
    status, _, errors = finish(start(project, "--preview"))
    assert status == 2
    assert "no test uses the fixture chaos" in errors


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "mend it"),
        ("[]", "correct the file"),
        ("{", "mend it"),
        ("\x00", "mend it"),
        ("version: 1\nname: a", "missing required field `tests`"),
        ("version: 2\nname: a\ntests: [a]", "use version 1"),
        ("version: 1\nname: ../a\ntests: [a]", "use letters, digits, dots and dashes"),
        ("version: 1\nname: a\ntests: []", "a night without tests has no result"),
        ("version: 1\nname: a\ntests: [a]\nrepeats: 0", "use 1 to 1000"),
        ("version: 1\nname: a\ntests: [a]\nrepeats: many", "Expected `int`"),
        ("version: 1\nname: a\ntests: [a]\nspeed: 3", "unknown field `speed`"),
        ("version: 1\nname: a\nname: b\ntests: [a]", "'name' is there twice"),
        ("version: 1\nname: a\ntests: [a]\nsla: nowhere.yaml", "name a file that can be read"),
        ("version: 1\nname: a\ntests: [a]\nsla: nightly.yaml", "correct the file"),
        (
            "version: 1\nname: a\ntests: [a]\nhistory: h\ncompare: {tests: [b], numbers: [speed]}",
            "name a duration, or a quotient of two",
        ),
        (
            "version: 1\nname: a\ntests: [a]\nkeep: -1",
            "use the number of nights whose folders stay",
        ),
        ("version: 1\nname: a\ntests: [a]\nbudget: soon", "give a time above 0"),
        ("version: 1\nname: a\ntests: [a]\nbudget: 0h", "give a time above 0"),
        (
            "version: 1\nname: a\ntests: [a]\ncompare: {tests: []}",
            "name tests, or leave compare out",
        ),
        (
            "version: 1\nname: a\ntests: [a]\ncompare: {tests: [b]}",
            "set history: the last good night",
        ),
        (
            "version: 1\nname: a\ntests: [a]\nhistory: h\ncompare: {tests: [b], tolerance: 0}",
            "use a share above 0",
        ),
        (
            "version: 1\nname: a\ntests: [a]\nhistory: h\ncompare: {tests: [b], budget: x}",
            "give a time above 0",
        ),
        ("version: 1\nname: a\ntests: [a]\nguard: {every: never}", "give a time above 0"),
        (
            "version: 1\nname: a\ntests: [a]\nguard: {window: {from: '1', to: '02:00'}}",
            "with quotes",
        ),
        (
            "version: 1\nname: a\ntests: [a]\nguard: {window: {from: '25:00', to: '02:00'}}",
            "with quotes",
        ),
        (
            "version: 1\nname: a\ntests: [a]\nguard: {window: {from: 90, to: '02:00'}}",
            "Expected `str`",
        ),
        (
            "version: 1\nname: a\ntests: [a]\nguard: {window: {from: '01:00', to: '02:00', zone: Mars}}",
            "name a time zone",
        ),
        (
            "version: 1\nname: a\ntests: [a]\nguard: {window: {from: '01:00', to: '02:00', days: [x]}}",
            "use mon, tue",
        ),
        (
            "version: 1\nname: a\ntests: [a]\nwebhook: {url_from: 'https://x'}",
            "instead of the URL, which may be a secret",
        ),
        ("version: 1\nname: a\ntests: [a]\nwebhook: {url_from: 'env:'}", "may be a secret"),
        (
            "version: 1\nname: a\ntests: [a]\nwebhook: {url_from: 'env:X', when: never}",
            "use always, change or bad",
        ),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_in_a_line(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "nightly.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=re.escape(told)) as refused:
        load(path)
    assert str(path) in str(refused.value)


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load(tmp_path / "nightly.yaml")


@pytest.mark.parametrize(
    ("begin", "end", "moment", "is_open"),
    [
        ("01:00", "05:00", "2026-11-24 00:59", False),
        ("01:00", "05:00", "2026-11-24 01:00", True),
        ("01:00", "05:00", "2026-11-24 05:00", False),
        ("22:00", "05:00", "2026-11-24 23:00", True),
        ("22:00", "05:00", "2026-11-25 04:59", True),
        ("22:00", "05:00", "2026-11-25 12:00", False),
        (
            "22:00",
            "05:00",
            "2026-11-28 03:00",
            True,
        ),  # a Saturday, of the night that began on Friday
        ("22:00", "05:00", "2026-11-28 23:00", False),  # a Saturday
        ("01:00", "05:00", "2026-11-29 02:00", False),  # a Sunday
        (
            "22:00",
            "05:00",
            "2026-11-30 02:00",
            False,
        ),  # a Monday, of the night that began on Sunday
    ],
)
def test_a_window_is_of_the_evening_on_which_it_began(
    begin: str, end: str, moment: str, is_open: bool
) -> None:
    window = NightWindow(begin, end, "Europe/Berlin", ("Mon", "tuesday", "wed", "thu", "fri"))
    at = datetime.fromisoformat(moment).replace(tzinfo=ZoneInfo("Europe/Berlin"))
    assert window.is_open(at.astimezone(UTC)) is is_open


# -- logs ------------------------------------------------------------------------------------------


def unit(test: str = "test_kill", part: Any = "experiments", **more: Any) -> NightUnit:
    return NightUnit(
        **{"part": part, "test": test, "runs": 5, "verdicts": {Verdict.PASSED: 5}, **more}
    )


def test_a_torn_line_costs_its_test_alone(tmp_path: Path) -> None:
    log = NightLog(tmp_path / "one")
    log.add(NightBegan("n", "small", "digest", "abc", 1))
    log.add(UnitDone(unit("one")))
    log.add(UnitDone(unit("two")))
    file = tmp_path / "one" / "night.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    again = NightLog(tmp_path / "one")
    assert again.state.has_done("experiments", "one")
    assert not again.state.has_done("experiments", "two")
    again.add(UnitDone(unit("two")))
    assert [done.test for done in read_log(tmp_path / "one").units] == ["one", "two"]


def test_a_night_goes_on_only_with_what_it_began(tmp_path: Path) -> None:
    log, began_ns, hour_ns = NightLog(tmp_path / "one"), 10**18, 3600 * 10**9
    assert not log.state.is_resumable("digest", "abc", began_ns)
    log.add(NightBegan("n", "small", "digest", "abc", began_ns))
    assert log.state.is_resumable("digest", "abc", began_ns + 23 * hour_ns)
    assert not log.state.is_resumable("digest", "abc", began_ns + 25 * hour_ns)
    assert not log.state.is_resumable("another plan", "abc", began_ns)
    assert not log.state.is_resumable("digest", "another commit", began_ns)
    log.add(NightEnded(night()))
    assert not read_log(tmp_path / "one").is_resumable("digest", "abc", began_ns)


def test_a_night_that_was_stopped_does_not_go_on(project: Project) -> None:
    """A kill may come before the night is recorded: the next night then ends it, and runs no
    test.
    """
    sources = project.git("rev-parse", "HEAD")
    plan = hashlib.sha256(
        msgspec.json.encode([load(project.path / "nightly.yaml"), ""])
    ).hexdigest()[:16]
    log = NightLog(project.path / "chaoskit-nights" / "2026-11-01-small-0000")
    log.add(NightBegan("n", "small", plan, sources, time.time_ns()))
    log.add(NightStopped("the abort condition holds: pages are firing"))
    status, _, errors = finish(start(project))
    assert status == 11, errors
    (record,) = nights(project)
    assert (record.night, record.reason) == ("n", "the abort condition holds: pages are firing")
    assert record.units == []


def test_a_night_that_is_there_twice_is_one() -> None:
    """A kill may come between the night's record in the history and the end of its log."""
    first = night()
    again = msgspec.structs.replace(first, seconds=99.0)
    assert RunContents(nights=[first, again]).in_order().nights == [again]


@pytest.mark.parametrize(
    "raised", [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "it is no text"), OSError("away")]
)
def test_a_condition_that_cannot_be_asked_ends_the_night(raised: Exception) -> None:
    def ask() -> str:
        raise raised

    def wait() -> None:
        with watched([AbortCondition(ask, 0.01)]):
            time.sleep(10)

    with pytest.raises(
        NightAborted, match=r"the abort condition cannot be checked: (Unicode|OSError)"
    ):
        wait()


def test_what_a_condition_says_need_not_be_text() -> None:
    assert abort_reason(["sh", "-c", r"printf '\377'"]) == "the abort condition holds: \ufffd"


def test_folders_of_old_nights_go_and_those_of_killed_ones_stay(tmp_path: Path) -> None:
    for day, (name, is_over) in enumerate(
        [("small", True), ("small", False), ("other", True), *[("small", True)] * 3]
    ):
        log = NightLog(tmp_path / f"2026-11-{day:02d}-{name}-0000-{day}")
        log.add(NightBegan("n", name, "digest", "abc", 1))
        if is_over:
            log.add(NightEnded(night(day, name=name)))
    assert [folder.name[8:10] for folder in folders_beyond(tmp_path, "small", keep=2)] == [
        "00",
        "03",
    ]
    assert folders_beyond(tmp_path, "small", keep=4) == []
    assert folders_beyond(tmp_path, "sma", keep=1) == []


# -- what a night has shown ------------------------------------------------------------------------


def night(day: int = 0, **more: Any) -> NightRecord:
    started = int((datetime(2026, 11, 1, 2, tzinfo=UTC) + timedelta(days=day)).timestamp() * 1e9)
    made = {
        "night": new_id(),
        "name": "small",
        "commit": f"{day:040d}",
        "started_unix_ns": started,
        "seconds": 60.0,
    }
    record = NightRecord(**{"exit_code": 0, "units": [unit()], **made, **more})
    return msgspec.structs.replace(record, exit_code=exit_code_of(record))


def regressed(**more: Any) -> NumberFinding:
    ratio = estimate_ratio([0.1] * 7, [0.15] * 7, 0.9)
    fields = {
        "series": "one",
        "title": "test_kill",
        "metric": "recovery",
        "unit": "s",
        "change": NumberChange.REGRESSED,
    }
    return NumberFinding(
        **{**fields, "before": 0.1, "after": 0.15, "ratio": ratio, "phase": "restored", **more}
    )


def line(state: State, **more: Any) -> dict[str, Any]:
    fields = {
        "sla": "a lost rank",
        "line": "recovery.p95 <= 2 s",
        "state": state,
        "runs": 60,
        "misses": 1,
    }
    return msgspec.to_builtins(Judged(**{**fields, **more}))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "nothing is wrong; 5 of 5 runs passed"),
        ({"units": [unit(failures=2)]}, "1 test failed by itself; 5 of 5 runs passed"),
        ({"units": [unit(failures=2)] * 2}, "2 tests failed by themselves; 10 of 10 runs passed"),
        ({"findings": [regressed()] * 2}, "2 regressions; 5 of 5 runs passed"),
        (
            {"units": [unit(verdicts={Verdict.FAILED: 2, Verdict.UNKNOWN: 3})]},
            "2 runs failed, 3 runs unknown; 0 of 5 runs passed",
        ),
        (
            {"units": [unit(verdicts={Verdict.PASSED: 3, Verdict.FAILED: 1, Verdict.UNKNOWN: 1})]},
            "1 run failed, 1 run unknown; 3 of 5 runs passed",
        ),
        ({"lines": ["left behind: process 7 (python)"]}, "1 left behind; 5 of 5 runs passed"),
        (
            {"reason": "pages are firing"},
            "the night ended early: pages are firing; 5 of 5 runs passed",
        ),
    ],
)
def test_a_sentence_hides_nothing_that_changes_the_exit_status(
    more: dict[str, Any], told: str
) -> None:
    assert night_sentence(night(**more)) == told
    assert told.startswith("nothing is wrong") is (night(**more).exit_code == 0)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, 0),
        ({"missing": [NO_GOOD_NIGHT]}, 0),
        ({"slas": [line(State.NOT_SHOWN)]}, 0),
        ({"findings": [regressed(accepted="accepted until 2999-01-01: sums")]}, 0),
        ({"findings": [regressed()]}, 1),
        ({"slas": [line(State.BROKEN)]}, 1),
        ({"units": [unit(verdicts={Verdict.PASSED: 4, Verdict.FAILED: 1})]}, 1),
        ({"units": [unit(failures=2, troubles=["failed: assert 1 == 2"])]}, 1),
        ({"units": [unit(failures=1, verdicts={Verdict.PASSED: 4, Verdict.UNKNOWN: 1})]}, 1),
        ({"units": [unit(troubles=["skipped: no GPU"])]}, 0),
        ({"slas": [line(State.UNKNOWN)]}, 10),
        (
            {
                "units": [
                    unit(
                        verdicts={Verdict.PASSED: 4, Verdict.UNKNOWN: 1},
                        troubles=["failed: unknown"],
                    )
                ]
            },
            10,
        ),
        ({"missing": ["experiments: test_b: skipped"]}, 10),
        ({"units": [unit(verdicts={Verdict.ERROR: 1}, troubles=["failed: error"])]}, 11),
        ({"lines": ["left behind: process 7 (python)"]}, 11),
        ({"reason": "the abort condition holds: pages", "findings": [regressed()]}, 11),
    ],
)
def test_the_exit_status_of_a_night(more: dict[str, Any], status: int) -> None:
    assert night(**more).exit_code == status


def test_the_report_says_since_when_and_how_to_see_it(tmp_path: Path) -> None:
    kept = [
        night(0, slas=[line(State.MET)], environment={"torch": "2.12"}),
        night(1, slas=[line(State.BROKEN, missed=["r1"])]),
        night(
            2,
            slas=[line(State.BROKEN, missed=["r2", "r3"], reason="too slow")],
            findings=[regressed(reason="the phase restored grew")],
            units=[unit(), unit("test_other", why_not="skipped")],
            missing=["experiments: test_other: skipped"],
            environment={"torch": "2.13"},
            against="9" * 40,
        ),
    ]
    kept[1] = msgspec.structs.replace(
        kept[1], units=[unit(), unit("test_gone")], environment={"torch": "2.12"}
    )
    contents = RunContents(nights=kept, runs=[run(series="two"), run(), run()])
    day = datetime.fromtimestamp(kept[-1].started_unix_ns / 1e9, UTC).date()
    contents.accepted = [
        AcceptedRecord(series="two", reason="sums", until=day + timedelta(days=3), by="me")
    ]
    report = build_report(contents, "s3://bucket/history")
    assert report.sentence.startswith("1 of 1 SLA line broken, 1 regression, ")
    (broken,) = report.broken
    assert broken.since == (kept[0].commit, kept[1].commit)
    assert broken.replay == ["chaoskit replay --history s3://bucket/history r3"]
    assert [
        (row.finding.metric, row.finding.phase) for row in report.regressions if row.finding
    ] == [("recovery", "restored")]
    assert not report.troubles
    skipped = night(
        units=[
            unit(troubles=["skipped: no GPU"]),
            unit("test_b", failures=1, troubles=["failed: x"]),
        ]
    )
    shown = build_report(RunContents(nights=[skipped]), "store").troubles
    assert [row.unit.test for row in shown if row.unit] == ["test_b"]
    assert report.regressions[0].replay.endswith(contents.runs[-1].run_id)
    assert report.not_run == ["experiments: test_other: skipped"]
    assert removed_tests(kept[2], kept[:2]) == [
        "experiments: test_gone: it ran in the night before, and is not part of this night"
    ]
    assert removed_tests(msgspec.structs.replace(kept[2], reason="aborted"), kept[:2]) == []
    (budget,) = report.budgets
    assert budget.left == pytest.approx(2.0)
    assert [acceptance.series for acceptance in report.expiring] == ["two"]
    assert report.changed == ["torch: 2.13 (was 2.12)"]

    shown = report_markdown(report)
    headings = re.findall(r"^### (.*)", shown, re.MULTILINE)
    assert headings == [
        "Broken SLAs",
        "Regressions",
        "What did not run",
        "Budgets",
        "Accepted regressions that expire soon",
        "Changed since the night before",
    ]
    page = report_html(report)
    for word, sentence in {**words.SLAS, **words.NUMBERS, **words.BUDGETS, **words.NIGHT}.items():
        assert f"<dt>{word}</dt><dd>{sentence}</dd>" in page
    assert len(re.findall("<table", page)) == 3
    assert len(re.findall('<table class="folding"', page)) == 1, "no other needs as many columns"
    places = [page.index(heading) for heading in headings]
    assert places == sorted(places)
    assert not re.search(
        r"""(src|href)=["']?(https?:)?//|@import|url\(""", page
    )  # it loads nothing


@pytest.mark.parametrize(
    ("seconds", "words_of_it"),
    [
        (0, "0 s"),
        (60, "60 s"),
        (119, "119 s"),
        (120, "2 minutes"),
        (3600, "1 hour"),
        (3660, "1 hour 1 minute"),
    ],
)
def test_a_night_took_so_long(seconds: float, words_of_it: str) -> None:
    page = report_html(build_report(RunContents(nights=[night(seconds=seconds)]), "store"))
    assert f"<dt>took</dt><dd>{words_of_it}</dd>" in page


def test_a_report_of_many_things_fits_into_a_comment() -> None:
    missing = [
        f"experiments: test_{number}: it did not run, for a reason of some length"
        for number in range(5000)
    ]
    markdown = report_markdown(build_report(RunContents(nights=[night(missing=missing)]), "store"))
    assert len(markdown.encode()) <= MARKDOWN_BYTES
    assert markdown.endswith("and more: see the report\n")


def test_a_night_of_changed_files_is_not_the_last_good_one() -> None:
    kept = [night(0), night(1, is_changed=True), night(2, missing=["experiments: test: skipped"])]
    assert RunContents(nights=kept).last_good("small") == kept[0].commit
    assert RunContents(nights=kept).last_good("another") == ""


def test_what_tests_say_is_no_markup() -> None:
    nasty = "<script>alert(1)</script> | [x](http://x) @you `y`"
    report = build_report(RunContents(nights=[night(missing=[nasty], reason=nasty)]), "store")
    assert "<script>" not in report_html(report)
    assert "<script>" not in report_markdown(report).replace("\\<script", "")
    assert "\\@you" in report_markdown(report)


@pytest.mark.parametrize("name", ["", "2026-11-02", "0" * 39 + "1"])
def test_a_night_is_named_by_its_day_or_commit(name: str) -> None:
    kept = [night(0), night(1)]
    assert build_report(RunContents(nights=kept), "store", name).night.night == kept[1].night


def test_a_night_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="name a history with nights"):
        build_report(RunContents(), "store")
    with pytest.raises(BadInput, match="name a night by its day"):
        build_report(RunContents(nights=[night()]), "store", "2020-01-01")


def test_a_series_is_drawn_over_nights() -> None:
    sessions = sorted(new_id() for _ in range(2))
    runs = [
        run(0.05 + 0.01 * number, session=session) for session in sessions for number in range(3)
    ]
    contents = RunContents(runs=runs, plans={"one": SeriesRecord(series="one", plan={})})
    contents.nights = [
        night(day, units=[unit(session=session)]) for day, session in enumerate(sessions)
    ]
    report = build_report(contents, "store")
    (curve,) = report.curves
    assert (curve.title, curve.recovered, curve.runs) == ("test_kill", 3, 3)
    # the day on which the night began, whenever its runs ended
    assert [str(point.day) for point in curve.points] == ["2026-11-01", "2026-11-02"]
    page = report_html(report)
    assert page.count("<circle") == 2
    texts = [float(y) for y in re.findall(r'<text x="0%" y="([\d.]+)"[^>]*>slowest: ', page)]
    points = [
        float(y) - float(r)
        for y, r in re.findall(r'<circle cx="[\d.]+%" cy="([\d.]+)" r="(\d)"', page)
    ]
    assert len(texts) == 1
    assert len(points) == 2
    assert min(points) > texts[0] + 3, "no point lies on the greatest value"
    assert [
        len(curve.points) for curve in build_report(contents, "store", "2026-11-01").curves
    ] == [1]


def test_a_large_history_is_reported_quickly() -> None:
    """A report of 100,000 runs of 30 nights takes less than a second; from a folder, 3 seconds."""
    session = new_id()
    runs = [run(0.05, session=session, series=f"s{number % 200}") for number in range(20_000)]
    kept = night(units=[unit(session=session)])
    began = time.monotonic()
    report_html(build_report(RunContents(runs=runs, nights=[kept]), "store"))
    assert time.monotonic() - began < 30


# -- webhooks --------------------------------------------------------------------------------------


class _Chat(BaseHTTPRequestHandler):
    messages: ClassVar[list[dict[str, Any]]] = []
    status: ClassVar[int] = 200

    def do_POST(self) -> None:
        self.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Write no log."""


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Chat]]:
    class Chat(_Chat):
        messages: ClassVar[list[dict[str, Any]]] = []

    server = HTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("CHAT", f"http://127.0.0.1:{server.server_port}/secret")
    yield Chat
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_chat_is_told(chat: type[_Chat]) -> None:
    record = night(slas=[line(State.BROKEN)])
    assert post(Webhook("env:CHAT"), record, None) == ""
    (message,) = chat.messages
    assert message["text"] == f"small: {night_sentence(record)}"
    assert message["exit_code"] == 1


@pytest.mark.parametrize(
    ("when", "before", "now", "is_told"),
    [
        ("always", 0, 0, True),
        ("bad", 0, 0, False),
        ("bad", 0, 1, True),
        ("change", 0, 0, False),
        ("change", 0, 1, True),
        ("change", 1, 0, True),
        ("change", 1, 1, False),
    ],
)
def test_a_chat_is_told_when_it_shall_be(
    chat: type[_Chat], when: str, before: int, now: int, is_told: bool
) -> None:
    earlier, later = (
        msgspec.structs.replace(night(), exit_code=status) for status in (before, now)
    )
    assert post(Webhook("env:CHAT", when), later, earlier) == ""
    assert bool(chat.messages) is is_told


def test_a_chat_that_fails_changes_nothing(
    chat: type[_Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.status = 500
    assert post(Webhook("env:CHAT"), night(), None) == "the webhook has failed: HTTPError"
    monkeypatch.setenv("CHAT", "http://127.0.0.1:1/secret")
    assert post(Webhook("env:CHAT"), night(), None) == "the webhook has failed: URLError"
    monkeypatch.setenv("CHAT", "nonsense")
    assert (
        post(Webhook("env:CHAT"), night(), None)
        == "the webhook was not called: env:CHAT contains no URL"
    )
    monkeypatch.setenv("CHAT", "http://127.0.0.1:1/a secret")
    assert post(Webhook("env:CHAT"), night(), None) == "the webhook has failed: InvalidURL"
    assert "No such file" in post(Webhook("file:/nowhere"), night(), None)


# -- examples --------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "deploy" / "nightly"


def test_the_units_of_systemd_are_whole() -> None:
    service, timer = configparser.ConfigParser(strict=False), configparser.ConfigParser()
    service.optionxform = timer.optionxform = str  # type: ignore[assignment,method-assign]
    service.read(EXAMPLES / "chaoskit-nightly.service")
    timer.read(EXAMPLES / "chaoskit-nightly.timer")
    assert service["Service"]["ExecStart"].endswith("/chaoskit nightly run nightly.yaml")
    assert service["Service"]["SuccessExitStatus"] == "1 10"
    assert {"OnCalendar", "Persistent"} <= {*timer["Timer"]}
    if verify := shutil.which("systemd-analyze"):
        done = subprocess.run(
            [verify, "verify", "--man=no", str(EXAMPLES / "chaoskit-nightly.timer")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Unknown" not in done.stderr


def test_the_workflow_runs_a_night_and_keeps_its_report(project: Project) -> None:
    """The commands of the workflow run unchanged, except for the installation; the night is only
    previewed.
    """
    workflow = read_document("workflow", EXAMPLES / "nightly.yml")
    commands = [step["run"] for step in workflow["jobs"]["night"]["steps"] if "run" in step]
    assert workflow["jobs"]["night"]["steps"][0]["with"] == {"fetch-depth": 0}
    _, night_of, summary = commands
    assert night_of == "chaoskit nightly run nightly.yaml"
    status, _, errors = finish(start(project, "--preview"))
    assert status == 0, errors
    folder = project.path / "chaoskit-nights" / "one"
    folder.mkdir(parents=True)
    (folder / "report.md").write_text("## a night\n")
    own = {**os.environ, "GITHUB_STEP_SUMMARY": str(project.path / "summary.md")}
    subprocess.run(["bash", "-ec", summary], cwd=project.path, check=True, env=own)
    assert (project.path / "summary.md").read_text() == "## a night\n"
