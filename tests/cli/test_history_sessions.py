"""Records over sessions of pytest: what a first session keeps, what a later one reports, and the
commands for both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.waiting import wait_until

from chaoskit.history.record import RunRecord
from chaoskit.history.session import read

TESTS = Path(__file__).parents[1]
RELAXED = "[pytest]\nchaos_detection = relaxed\n"
JOB = """
import os, time
import torch
from torch import nn

DATA = torch.rand(48, 4, generator=torch.Generator().manual_seed(5))

def train(trainer, *, steps):
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            time.sleep(0.01)
            for shard in step.shards(DATA, batch_size=24):
                if trainer.step == 6 and not trainer.worker.endswith(".0") and os.path.exists(SLOW):
                    time.sleep(0.3)  # in the first step of the worker that takes another one's place
                step.backward(model(shard.batch).square().mean())
"""
SESSION = """
import pytest
from faults import Kill

def test_kill(chaos):
    chaos.run("train.py", nodes=2, steps=16, faults=[Kill(rank="any", at_step=6)])

def test_calm(chaos):
    chaos.run("train.py", nodes=2, steps=8, twin=False)

def test_other():
    pass
"""


@pytest.fixture
def sessions(pytester: pytest.Pytester) -> Sessions:
    return Sessions(pytester)


class Sessions:
    """Sessions of one project, with a job that recovers slowly if the file ``SLOW`` exists."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.path, self._pytester = pytester.path, pytester
        pytester.makeini(RELAXED)
        pytester.makepyfile(test_session=SESSION)
        (self.path / "train.py").write_text(f"SLOW = {str(self.path / 'slow')!r}\n{JOB}")

    def run(self, *options: str, tests: str = "kill or calm") -> pytest.RunResult:
        return self._pytester.runpytest_subprocess("-k", tests, "-p", "no:cacheprovider", *options)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chaoskit", *arguments]
        return subprocess.run(command, cwd=self.path, capture_output=True, text=True, check=False)

    def records(self, place: str) -> list[RunRecord]:
        return read(str(self.path / place)).runs


@pytest.mark.slow
@pytest.mark.costly
@pytest.mark.promise("The first session makes `base.jsonl`")
@pytest.mark.promise("A run that has no equal in it has *no reference*")
def test_a_first_session_is_what_later_ones_are_compared_with(sessions: Sessions) -> None:
    first = sessions.run(
        "--chaos-compare", "base.jsonl", "--chaos-history", "history", tests="kill"
    )
    assert first.ret == 0
    first.stdout.fnmatch_lines(["1 run recorded; nothing to compare with yet*base.jsonl"])
    later = sessions.run(
        "--chaos-compare", "base.jsonl", "--chaos-history", "history", "--chaos-summary", "told.md"
    )
    assert later.ret == 0
    later.stdout.fnmatch_lines(["2 runs recorded; compared with base.jsonl: *1 no reference"])
    summary = (sessions.path / "told.md").read_text()
    assert "test_session.py::test_calm" in summary
    assert "runs now: 1; before: none" in summary
    kept = sessions.records("history")
    assert [run.title for run in kept].count("test_session.py::test_kill") == 2
    assert len({run.session for run in kept}) == 2
    assert len({run.series for run in kept}) == 2
    (killed, *_) = sessions.records("base.jsonl")
    assert {
        "recovered",
        "lost_steps",
        "false_alarms",
        "losses_equal",
        "recovery",
        "recovery.detected",
        "step",
        "bound",
    } <= {*killed.metrics}
    assert killed.faults == ["Kill"]
    assert "cores, local" in killed.machine


@pytest.mark.costly
def test_strict_sessions_must_have_decided(sessions: Sessions) -> None:
    assert sessions.run("--chaos-compare", "base.jsonl", "--chaos-strict", tests="calm").ret == 10
    assert sessions.run("--chaos-compare", "base.jsonl", "--chaos-strict", tests="kill").ret == 10


@pytest.mark.promise("A session in which nothing was compared ends with 10")
def test_a_comparison_that_looked_at_nothing_is_unknown(sessions: Sessions) -> None:
    (sessions.path / "base.jsonl").write_bytes(
        (TESTS / "recorded" / "history" / "version-1.jsonl").read_bytes()
    )
    result = sessions.run("--chaos-compare", "base.jsonl", tests="other")
    assert result.ret == 10
    result.stdout.fnmatch_lines(["0 runs recorded; compared with base.jsonl: nothing was compared"])


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("What got worse fails the session")
def test_a_recovery_that_got_slower_fails_the_session(sessions: Sessions) -> None:
    assert sessions.run("--chaos-save", "base.jsonl", "--chaos-repeats", "6", tests="kill").ret == 0
    (sessions.path / "slow").touch()
    worse = sessions.run("--chaos-compare", "base.jsonl", "--chaos-repeats", "6", tests="kill")
    assert worse.ret == 1
    # seconds may not be comparable, and full strength may be the recovery itself
    worse.stdout.fnmatch_lines(["*compared with base.jsonl: [2-4] regressed, [45] unchanged*"])


@pytest.mark.costly
def test_a_false_alarm_that_there_was_not_before_fails_it(sessions: Sessions) -> None:
    """A single run is enough, since chance cannot explain it.

    Only this number differs between the sessions.
    """
    assert sessions.run("--chaos-save", "now.jsonl", tests="kill").ret == 0
    assert sessions.run("--chaos-compare", "now.jsonl", tests="kill").ret == 0
    (sessions.path / "conftest.py").write_text(ONE_FALSE_ALARM)
    worse = sessions.run("--chaos-compare", "now.jsonl", tests="kill")
    assert worse.ret == 1
    worse.stdout.fnmatch_lines(["regressed*false_alarms*100%*"])


ONE_FALSE_ALARM = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    for outcome in getattr(item.funcargs.get("chaos"), "outcomes", ()):
        outcome.false_alarms = 1
"""


@pytest.mark.costly
def test_a_session_that_is_no_baseline_makes_none(sessions: Sessions) -> None:
    """The cases are a session without runs, and one that did not end well."""
    assert sessions.run("--chaos-compare", "base.jsonl", tests="other").ret == 10
    assert sessions.run("--chaos-save", "base.jsonl", tests="other").ret == 10
    assert sessions.run("--chaos-compare", "base.jsonl", "--collect-only").ret == 0
    (sessions.path / "test_session.py").write_text(
        f"{SESSION}\n\ndef test_bad_calm():\n    assert False\n"
    )
    failed = sessions.run("--chaos-compare", "base.jsonl", tests="calm")
    assert failed.ret == 1
    failed.stdout.fnmatch_lines(["*base.jsonl was not made: the session did not end well"])
    assert not (sessions.path / "base.jsonl").exists()


@pytest.mark.costly
def test_a_baseline_that_cannot_be_written_is_an_error(sessions: Sessions) -> None:
    """The disk may fill up while tests run; this test removes the folder instead."""
    (sessions.path / "folder").mkdir()
    gone = SESSION.replace(
        "def test_calm(chaos):",
        'def test_calm(chaos):\n    import os; os.rmdir("folder"); open("folder", "x")',
    )
    (sessions.path / "test_session.py").write_text(gone)
    result = sessions.run("--chaos-compare", "folder/base.jsonl", tests="calm")
    assert result.ret == 11
    result.stdout.fnmatch_lines(["*base.jsonl was not made*"])


@pytest.mark.costly
def test_a_history_is_its_own_baseline_from_the_second_session_on(sessions: Sessions) -> None:
    """This holds even if a test changes the working directory."""
    moves = SESSION.replace(
        "def test_calm(chaos):",
        "def test_calm(chaos, tmp_path, monkeypatch):\n    monkeypatch.chdir(tmp_path)",
    )
    moves = moves.replace(
        '"train.py", nodes=2, steps=8', f'"{sessions.path}/train.py", nodes=2, steps=8'
    )
    (sessions.path / "test_session.py").write_text(moves)
    for message in ("nothing to compare with yet", "compared with history"):
        result = sessions.run(
            "--chaos-compare", "history", "--chaos-history", "history", tests="calm"
        )
        assert result.ret == 0
        result.stdout.fnmatch_lines([f"1 run recorded; {message}*"])
    assert len(sessions.records("history")) == 2


IN_STRANGE_PLACES = """
import pytest

@pytest.fixture
def prepared(chaos):
    chaos.run("train.py", nodes=2, steps=8, twin=False)
    raise RuntimeError("the test does not begin")

def test_in_setup(prepared):
    pass

def test_by_name(request):
    request.getfixturevalue("chaos").run("train.py", nodes=2, steps=8, twin=False)

def test_in_parts(chaos, subtests):
    chaos.run("train.py", nodes=2, steps=8, twin=False, options={"label": "a\u2028b"})
    for number in range(3):
        with subtests.test(number=number):
            pass
"""


@pytest.mark.costly
def test_each_run_is_recorded_once_wherever_it_is_made(sessions: Sessions) -> None:
    job = (sessions.path / "train.py").read_text()
    (sessions.path / "train.py").write_text(job.replace("*, steps)", '*, steps, label="")'))
    (sessions.path / "test_session.py").write_text(IN_STRANGE_PLACES)
    sessions.run("--chaos-history", "history", "--chaos-report", "report", tests="test")
    assert len(sessions.records("history")) == 3
    for _ in range(2):
        assert sessions.command("history", "add", "history", "report").returncode == 0
    assert len(sessions.records("history")) == 3


@pytest.mark.costly
def test_two_workers_write_one_file(sessions: Sessions) -> None:
    """The controller writes the file. Repeats of a test, and other seeds, are one series."""
    pytest.importorskip("xdist")
    result = sessions.run("-n", "2", "--chaos-history", "history", "--chaos-repeats", "2")
    assert result.ret == 0
    kept = sessions.records("history")
    assert len(kept) == 4
    assert len({run.session for run in kept}) == 1
    assert sessions.run("--chaos-history", "history", "--chaos-seed", "5", tests="kill").ret == 0
    kept = [run for run in sessions.records("history") if "kill" in run.title]
    assert {run.seed for run in kept} == {0, 5}
    assert len({run.series for run in kept}) == 1, (
        "a role that is drawn anew is the same experiment"
    )


@pytest.mark.costly
@pytest.mark.promise("A session that is killed has kept the runs that it had finished")
def test_a_killed_session_has_kept_its_runs(sessions: Sessions) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-k",
        "kill",
        "--chaos-history",
        "history",
        "--chaos-repeats",
        "50",
    ]
    started = subprocess.Popen(command, cwd=sessions.path, stdout=subprocess.DEVNULL)
    wait_until(
        lambda: len(list(sessions.path.glob("history/*/*.jsonl"))) > 0,
        "the first record",
        limit_s=60.0,
    )
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert sessions.records("history")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--chaos-compare", "nonsense.jsonl"], "name a file of records"),
        (["--chaos-compare", "empty"], "name a store that has records"),
        (["--chaos-history", "nowhere://x"], "url"),
        (["--chaos-save", "/proc/x/y.jsonl"], "chaos_save"),
        (["--chaos-compare", "base.jsonl", "--chaos-tolerance", "0"], "chaos-tolerance"),
        (["--chaos-tolerance", "0.2"], "give --chaos-compare, too"),
        (["--chaos-save", "x.jsonl", "--chaos-compare", "x.jsonl"], "use two files"),
        (["--chaos-save", "empty"], "name a file"),
    ],
)
def test_bad_input_is_refused_before_a_test_runs(
    sessions: Sessions, options: list[str], reason: str
) -> None:
    (sessions.path / "nonsense.jsonl").write_text("nonsense\n")
    (sessions.path / "empty").mkdir()
    result = sessions.run(*options)
    assert result.ret == 4
    assert reason in result.stderr.str() + result.stdout.str()


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("`chaoskit replay --history STORE RUN` works from that alone")
def test_commands_read_a_history(sessions: Sessions) -> None:
    assert sessions.run("--chaos-history", "history", "--chaos-seed", "3", tests="kill").ret == 0
    (kept,) = sessions.records("history")
    listed = sessions.command("history", "list", "history")
    assert kept.series in listed.stdout
    assert "1 of 1" in listed.stdout
    shown = json.loads(sessions.command("history", "show", "history", "test_kill", "--json").stdout)
    assert [run["run_id"] for run in shown] == [kept.run_id]
    assert sessions.command("history", "show", "history", "nothing").returncode == 2
    assert sessions.command("history", "show", "history", "kill", "--metric", "x").returncode == 2
    rows = sessions.command("history", "export", "history", "--format", "csv").stdout.splitlines()
    assert len(rows) == 1 + len(kept.metrics)
    replayed = sessions.command(
        "replay", "--history", "history", kept.run_id[:28], "--no-twin", "--json"
    )
    assert replayed.returncode == 0, replayed.stderr
    (outcome,) = json.loads(replayed.stdout)["outcomes"]
    assert outcome["seed"] == 3
    (report,) = (sessions.path / "chaoskit-runs").glob("replay-*")
    added = sessions.command("history", "add", "history", str(report), "--json")
    assert json.loads(added.stdout) == {"added": 1}
    assert [run.series for run in sessions.records("history")] == [kept.series] * 2
    assert (
        sessions.command(
            "history", "prune", "history", "--older-than-days", "1", "--dry-run"
        ).returncode
        == 0
    )
    assert sessions.command("history", "list", "nowhere").returncode == 2


WITH_SLA = """
import pytest
from faults import Kill

@pytest.mark.sla("lost_steps == 0", "recovered", "recovery.p95 <= 9 s", window="{window}")
def test_kill(chaos):
    chaos.run("train.py", nodes=2, steps=16, faults=[Kill(rank=1, at_step=6)])

@pytest.mark.sla("recovery.max <= 1 ms")
def test_kill_again(chaos):
    chaos.run("train.py", nodes=2, steps=16, faults=[Kill(rank=1, at_step=7)])

@pytest.mark.sla("recovered")
def test_nothing():
    pass
"""


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("A marker promises the same of one test")
def test_a_test_promises_something_of_its_runs(sessions: Sessions) -> None:
    (sessions.path / "test_session.py").write_text(WITH_SLA.format(window="30 nights"))
    met = sessions.run("--chaos-history", "history", tests="kill and not again")
    assert met.ret == 0
    met.stdout.fnmatch_lines(["SLAs: 1 not shown, 2 met", "*59 runs needed with 0 misses, 1 so*"])
    assert sessions.run("--chaos-strict", tests="kill and not again").ret == 10
    broken = sessions.run("-n", "2", tests="again")
    assert broken.ret == 1
    broken.stdout.fnmatch_lines(["SLAs: 1 broken"])
    nothing = sessions.run(tests="nothing")
    assert nothing.ret == 10
    nothing.stdout.fnmatch_lines(["SLAs: 1 unknown", "*no run was recorded*"])
    (sessions.path / "sla.yaml").write_text(
        "version: 1\nslas: [{name: kill, where: {fault: Kill}, always: [recovered]}]\n"
    )
    assert sessions.command("sla", "check", "sla.yaml", "history").returncode == 0
    assert sessions.command("sla", "lint", "sla.yaml").returncode == 0
    assert "PrometheusRule" in sessions.command("sla", "export", "sla.yaml").stdout


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        ('"recovery.p95 <= 1 s", window="20 runs"', "59 runs without a miss"),
        ('"recovered", always=["lost_steps == 0"]', "use window, confidence, at_least"),
        ('"recovered", name="x"', "use window, confidence, at_least"),
        ("5", "write lines as text"),
        ("", "promises nothing"),
    ],
)
def test_a_marker_that_promises_nothing_is_refused(
    sessions: Sessions, marker: str, reason: str
) -> None:
    test = f"import pytest\n\n@pytest.mark.sla({marker})\ndef test_kill(chaos):\n    pass\n"
    (sessions.path / "test_session.py").write_text(test)
    result = sessions.run()
    assert result.ret == 4
    assert reason in result.stderr.str() + result.stdout.str()


def test_markers_of_a_class_promise_beside_those_of_a_test(sessions: Sessions) -> None:
    test = """
        import pytest

        @pytest.mark.sla("recovered")
        class TestKill:
            @pytest.mark.sla("lost_steps == 0")
            @pytest.mark.sla("false_alarms == 0")
            def test_kill(self):
                pass
    """
    (sessions.path / "test_session.py").write_text(textwrap.dedent(test))
    result = sessions.run()
    assert result.ret == 10
    result.stdout.fnmatch_lines(["*false_alarms == 0, lost_steps == 0, recovered*"])


# -- a session that makes no baseline --------------------------------------------------------------

PROMISE = "later sessions are compared with"


@pytest.mark.costly
def test_a_first_session_writes_its_summary(sessions: Sessions) -> None:
    """The summary names what was recorded, and says that there was nothing to compare with."""
    first = sessions.run(
        "--chaos-compare", "base.jsonl", "--chaos-summary", "told.md", tests="calm"
    )
    assert first.ret == 0
    summary = (sessions.path / "told.md").read_text()
    assert summary.startswith("### chaoskit: 1 run recorded; nothing to compare with yet")
    assert f"{PROMISE} base.jsonl" in summary


def test_a_session_without_runs_promises_no_baseline(sessions: Sessions) -> None:
    result = sessions.run(
        "--chaos-compare", "base.jsonl", "--chaos-summary", "told.md", tests="other"
    )
    assert result.ret == 10
    result.stdout.fnmatch_lines(
        ["0 runs recorded; nothing to compare with yet", "*base.jsonl was not made: *"]
    )
    summary = (sessions.path / "told.md").read_text()
    assert PROMISE not in summary
    assert "base.jsonl was not made: no run was recorded" in summary


def test_a_first_session_whose_test_failed_promises_no_baseline(sessions: Sessions) -> None:
    (sessions.path / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    result = sessions.run("--chaos-compare", "base.jsonl", tests="wrong")
    result.stdout.no_fnmatch_line(f"*{PROMISE}*")
    assert not (sessions.path / "base.jsonl").exists()


def test_a_history_that_no_run_has_made_is_not_promised(sessions: Sessions) -> None:
    result = sessions.run("--chaos-compare", "history", "--chaos-history", "history", tests="other")
    result.stdout.no_fnmatch_line(f"*{PROMISE}*")


def test_a_session_that_is_interrupted_promises_no_baseline(sessions: Sessions) -> None:
    (sessions.path / "test_wait.py").write_text(
        "import time\nfrom pathlib import Path\n\ndef test_wait():\n    Path('waits').touch()\n    time.sleep(60)\n"
    )
    options = (
        "-k",
        "wait",
        "-p",
        "no:cacheprovider",
        "--chaos-compare",
        "base.jsonl",
        "--chaos-summary",
        "told.md",
    )
    command = [sys.executable, "-m", "pytest", *options]
    with subprocess.Popen(command, cwd=sessions.path, stdout=subprocess.PIPE, text=True) as process:
        wait_until((sessions.path / "waits").exists, "the test waits")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert "base.jsonl was not made" in output
    assert PROMISE not in output
    assert PROMISE not in (sessions.path / "told.md").read_text()
    assert not (sessions.path / "base.jsonl").exists()
