"""Verdicts of the harness: runs that fail, stay unknown, are errors, or are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.goals import workers_lost

from chaoskit.errors import BadInput, HarnessError
from chaoskit.process import linux
from chaoskit.pytest_plugin import Chaos, VerdictError
from chaoskit.report.junit import write_junit
from chaoskit.report.store import read_outcomes
from chaoskit.runlog.outcome import Outcome
from chaoskit.substrate.local import LocalSubstrate
from chaoskit.vocabulary import Verdict
from chaoskit.wire.messages import ActReport, AtHook, Heartbeat, Plan, Welcome
from faults import DataStall, FailLoad, Fault, Hang, Kill, KillNode, NaN, Raise, Straggle, Target
from faults.evidence import Evidence, ProcessEnded

JOBS = "../../jobs/wrong/unfaithful.py"


def check(outcome: Outcome, name: str) -> Verdict:
    """Return the verdict of the check with this name."""
    return next(check.verdict for check in outcome.checks if check.name == name)


# -- must be unknown -------------------------------------------------------------------------------


@pytest.mark.promise(
    "One that the process survives leaves the fault without evidence, and the run's verdict `unknown`."
)
def test_a_signal_that_the_process_survives_is_unknown(chaos: Chaos) -> None:
    """SIGURG is delivered and ignored: the fault was armed, and has no evidence of an effect."""
    fault = Kill(rank=1, at_step=5, signum=signal.SIGURG)
    outcome = chaos.run(f"{JOBS}:faithful", nodes=2, steps=20, faults=[fault], check=False)
    assert outcome.verdict == Verdict.UNKNOWN
    assert outcome.faults[0].state == "not fired" or outcome.faults[0].state == "not observed"
    assert [evidence.level for evidence in outcome.faults[0].evidence] == ["armed"]


def test_a_fault_that_never_fires_is_unknown(chaos: Chaos) -> None:
    """A fault that waits for a second loss has no evidence if there is one loss."""
    faults = [Kill(rank=1, at_step=3), Kill(rank=0, during="detection", recovery=2)]
    outcome = chaos.run(f"{JOBS}:faithful", nodes=2, spares=0, steps=10, faults=faults, check=False)
    assert [fault.state for fault in outcome.faults] == ["confirmed", "not fired"]
    assert outcome.verdict == Verdict.UNKNOWN
    assert [
        evidence.verdict for evidence in outcome.checks if evidence.name.startswith("evidence of")
    ] == [
        Verdict.PASSED,
        Verdict.UNKNOWN,
    ]


@dataclass(frozen=True, kw_only=True)
class Pretended(Kill):
    """A faulty fault: it does nothing, and yields evidence that its target was killed."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        yield ProcessEnded(
            subject=target.rank_process, source="nothing", how="killed", status="SIGKILL"
        )


@pytest.mark.promise("A fault that must be felt, and was not, is *unknown*")
def test_a_fault_that_the_job_did_not_feel_is_unknown(chaos: Chaos) -> None:
    """Evidence of a kill is not enough: its rank must be lost, and a rank that finished is an
    error.
    """
    fault = Pretended(rank=1, at_step=5)
    outcome = chaos.run(f"{JOBS}:faithful", nodes=2, steps=20, faults=[fault], check=False)
    assert outcome.verdict == Verdict.ERROR
    evidence = next(check for check in outcome.checks if check.name.startswith("evidence of"))
    assert evidence.verdict == Verdict.UNKNOWN
    assert "no loss and no bad numbers followed, as they must" in evidence.detail
    assert "reached the end of the job" in outcome.reasons[0]


@pytest.mark.promise("`chaos.run` fails the test unless the verdict is `passed`.")
def test_unknown_fails_the_test_and_names_the_fault(chaos: Chaos) -> None:
    """``chaos.run`` raises for an outcome without evidence, unless ``check=False``."""
    fault = Kill(rank=0, at_step=5, signum=signal.SIGURG)
    with pytest.raises(VerdictError, match=r"unknown: evidence of Kill\(rank=0, at_step=5"):
        chaos.run(f"{JOBS}:faithful", nodes=2, steps=20, faults=[fault])


# -- must fail -------------------------------------------------------------------------------------


@pytest.mark.promise("the last shows as a difference from the twin in `chaos.run`")
def test_another_loss_after_recovery_fails(chaos: Chaos) -> None:
    """A job with numbers that depend on the process fails in the comparison with its twin."""
    outcome = chaos.run(
        f"{JOBS}:remembers_its_process",
        nodes=2,
        steps=20,
        faults=[Kill(rank=1, at_step=8)],
        check=False,
    )
    assert outcome.verdict == Verdict.FAILED
    assert check(outcome, "losses equal the twin's") == Verdict.FAILED
    with pytest.raises(AssertionError, match="loss of step"):
        outcome.assert_same_losses_as_twin()


@pytest.mark.promise(
    "A run that computed committed steps again has failed, unless `max_lost_steps` allows so many."
)
def test_losing_committed_steps_fails_unless_it_may_cost_them(chaos: Chaos) -> None:
    """A run that computes committed steps again fails, unless ``max_lost_steps`` allows it.

    Rank 1 is lost and not replaced yet when the node with the whole state is lost, its copies
    included. Training goes on from the other node's copy of the worker that it had lost long
    before.
    """
    faults = [
        FailLoad(rank=1, at_step=2, times=2),
        Kill(rank=1, at_step=4),
        KillNode(rank=0, at_step=12),
    ]
    plan = {"nodes": 2, "spares": 0, "steps": 40, "faults": faults}
    outcome = chaos.run(f"{JOBS}:faithful", **plan, check=False)
    assert outcome.lost_steps >= 5
    failed = [check.name for check in outcome.checks if check.verdict == Verdict.FAILED]
    assert (outcome.verdict, failed) == (Verdict.FAILED, ["committed steps kept"])
    assert chaos.run(f"{JOBS}:faithful", **plan, max_lost_steps=12).lost_steps >= 5


def test_a_job_that_fails_on_every_rank_fails(chaos: Chaos) -> None:
    """A bug that repeats on every rank ends the run with its reason instead of a loop."""
    outcome = chaos.run(
        f"{JOBS}:fails_everywhere", nodes=2, steps=20, twin=False, max_failures=4, check=False
    )
    assert outcome.verdict == Verdict.FAILED
    assert len(outcome.steps) == 5


def test_an_exception_of_the_job_is_its_own_failure_also_in_the_unbroken_run(chaos: Chaos) -> None:
    """The verdict is ``failed``, with the exception's last line; ``error`` would mean that chaoskit
    failed.
    """
    outcome = chaos.run(f"{JOBS}:fails_everywhere", nodes=2, steps=10, max_failures=2, check=False)
    assert outcome.verdict == Verdict.FAILED
    assert any("five is not a good number" in reason for reason in outcome.reasons), outcome.reasons


def test_a_run_past_its_deadline_fails(chaos: Chaos) -> None:
    """A run that does not end by itself ends at its deadline, and fails."""
    outcome = chaos.run(
        f"{JOBS}:never_ends", nodes=2, steps=20, twin=False, deadline_s=4.0, check=False
    )
    assert outcome.verdict == Verdict.FAILED
    assert "deadline of 4 s" in outcome.reasons[0]


@pytest.mark.promise("any other one is a false alarm")
def test_a_loss_that_no_fault_explains_is_a_false_alarm(chaos: Chaos, tmp_path: Path) -> None:
    """A rank that dies without a planned fault is noticed, survived, and reported."""
    pids: dict[str, int] = {}
    killed: list[int] = []
    lost = workers_lost(tmp_path / "lost")

    def kill_rank_one(message: Any) -> None:
        lost(message)
        if isinstance(message, Plan):
            pids.update({member.worker: member.endpoint.pid for member in message.members})
        if isinstance(message, Heartbeat) and not killed:
            for beat in message.beats:
                if beat.rank == 1 and beat.commits >= 5:
                    killed.append(pids[beat.worker])
                    os.kill(killed[0], signal.SIGKILL)

    plan: dict[str, Any] = {"nodes": 2, "steps": 20, "until": lost.until, "watch": kill_rank_one}
    outcome = chaos.run(f"{JOBS}:faithful", **plan, check=False)
    assert outcome.false_alarms == 1
    assert check(outcome, "no false alarm") == Verdict.FAILED
    outcome.assert_same_losses_as_twin()


@pytest.mark.parametrize(
    "fault", [Straggle(rank=1, at_step=8), DataStall(rank=1, at_step=8, stall_ms=20.0)]
)
def test_the_death_of_a_slow_rank_is_not_explained_by_its_slowness(
    chaos: Chaos, tmp_path: Path, fault: Fault
) -> None:
    """The kill of a rank that was made slow is a false alarm: its slowness killed nothing."""
    pids: list[int] = []
    lost = workers_lost(tmp_path / "lost")

    def kill_rank(message: Any) -> None:
        lost(message)
        if isinstance(message, AtHook):
            pids.append(message.pid)
        if isinstance(message, ActReport) and message.effective and pids:
            os.kill(pids.pop(), signal.SIGKILL)

    plan: dict[str, Any] = {"nodes": 2, "steps": 20, "until": lost.until, "watch": kill_rank}
    outcome = chaos.run(f"{JOBS}:faithful", faults=[fault], **plan, check=False)
    assert outcome.faults[0].state == "confirmed"
    assert outcome.false_alarms == 1
    assert outcome.verdict == Verdict.FAILED


# -- must be an error ------------------------------------------------------------------------------


@pytest.mark.promise("a harness that breaks makes it `error`")
def test_a_dead_coordinator_is_a_harness_error(chaos: Chaos, tmp_path: Path) -> None:
    """A coordinator that dies without a planned fault shows nothing about the job: the verdict is
    an error.
    """
    coordinators: list[int] = []

    def kill_coordinator(message: Any) -> None:
        if isinstance(message, Welcome):
            coordinators.append(message.pid)
        if (
            isinstance(message, Heartbeat)
            and any(beat.commits >= 3 for beat in message.beats)
            and coordinators
        ):
            os.kill(coordinators.pop(), signal.SIGKILL)

    never = {"file": str(tmp_path / "never")}
    with pytest.raises(HarnessError, match="coordinator"):
        chaos.run(
            f"{JOBS}:faithful", nodes=2, steps=20, until=never, twin=False, watch=kill_coordinator
        )


def test_every_start_puts_back_what_a_killed_harness_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a dead harness without a guard had stopped goes on as soon as the
    next harness starts.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(victim.pid, signal.SIGSTOP)
        code = (
            "import os, signal; from chaoskit.substrate.undo import ContinueEntry, UndoLog\n"
            f"undo = UndoLog(); undo.plan(ContinueEntry({victim.pid}, {linux.start_ticks(victim.pid)}))\n"
            "os.kill(undo.guard_pid, signal.SIGKILL); os.waitpid(undo.guard_pid, 0); os._exit(9)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
        LocalSubstrate().close()
        assert linux.state(victim.pid) != "T"
    finally:
        victim.kill()
        victim.wait()


# -- must be refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "field", "remedy"),
    [
        ({"nodes": 0}, "nodes", "1 or more"),
        ({"min_world": 3}, "min_world", "at most nodes=2"),
        ({"shards": 1}, "shards", "at least nodes=2"),
        ({"steps": 0}, "steps", "1 or more"),
        ({"node": 2}, "setting", "write nodes"),
        ({"reduction": "roughly"}, "reduction", "use one of exact, fast"),
        ({"options": {"width": 3}}, "options.width", "faithful takes steps"),
        ({"faults": [Kill(rank=2, at_step=1)]}, "rank", "from 0 to 1"),
        ({"faults": [Kill(rank=0, at_step=20)]}, "at_step", "from 0 to 19"),
        ({"faults": [Kill(rank=0, at_step=1, phase="lunch")]}, "phase", "use one of"),
        ({"faults": [Hang(rank=0, at_step=1, how="softly")]}, "how", "use one of"),
        (
            {"faults": [NaN(rank=0, at_step=1, parameter="0.weight", where="nowhere")]},
            "where",
            "use one of",
        ),
        ({"deadline_s": -1.0}, "deadline_s", "above 0"),
        ({"max_lost_steps": -1}, "max_lost_steps", "0 or more"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    chaos: Chaos, plan: dict[str, Any], field: str, remedy: str
) -> None:
    """A single line names field, value and remedy; no process is started, no directory made."""
    before = set(chaos.harness.directory.iterdir())
    with pytest.raises(BadInput, match=remedy) as refused:
        chaos.run(f"{JOBS}:faithful", **{"nodes": 2, "steps": 20, **plan})
    assert refused.value.field == field
    assert "\n" not in str(refused.value)
    assert set(chaos.harness.directory.iterdir()) == before


def test_an_unknown_field_of_a_fault_is_refused() -> None:
    """A typo in a fault is an error, not a default."""
    with pytest.raises(BadInput, match="at_stp=3: write at_step"):
        Raise(rank=0, at_stp=3)  # type: ignore[call-arg]


def test_a_job_without_a_loss_is_refused(chaos: Chaos) -> None:
    """A transaction that computes no loss cannot be trained."""
    with pytest.raises(BadInput, match="backward"):
        chaos.run(f"{JOBS}:no_loss", nodes=2, steps=3, twin=False)


def test_a_dataset_shorter_than_a_batch_is_refused(chaos: Chaos) -> None:
    """The worker's refusal reaches the user as the same single line."""
    with pytest.raises(BadInput, match="batch_size=128") as refused:
        chaos.run(f"{JOBS}:long_batch", nodes=2, steps=3, twin=False)
    assert refused.value.field == "dataset"


# -- sessions --------------------------------------------------------------------------------------

#: Settings of a separate session, which does not read those of this repository.
RELAXED = "[pytest]\nchaos_detection = relaxed\n"

SESSION = """
from faults import Kill
import signal

JOB = {job!r}

def test_passes(chaos):
    chaos.run(JOB + ":faithful", nodes=2, steps=10, faults=[Kill(rank=1, at_step=4)])

def test_unknown(chaos):
    chaos.run(JOB + ":faithful", nodes=2, steps=10, faults=[Kill(rank=1, at_step=4, signum=signal.SIGURG)])

def test_fails(chaos):
    chaos.run(JOB + ":fails_everywhere", nodes=2, steps=10, twin=False, max_failures=2)

def test_error(chaos):
    from chaoskit.errors import HarnessError
    raise HarnessError("the harness broke")
"""


@pytest.mark.slow
@pytest.mark.promise(
    "ends with 0 passed, 1 failed, 2 bad input, 10 unknown, 11 error", status=[1, 11]
)
@pytest.mark.costly
@pytest.mark.parametrize(
    ("tests", "status"),
    [
        ("test_passes", 0),
        ("test_passes or test_unknown", 10),
        ("test_unknown or test_fails", 1),
        ("test_fails or test_error", 11),
    ],
)
def test_the_worst_verdict_is_the_exit_status(
    pytester: pytest.Pytester, tests: str, status: int
) -> None:
    """The exit status is 0 for passed, 1 for failed, 10 for unknown, 11 for error."""
    pytester.makeini(RELAXED)
    pytester.makepyfile(test_session=SESSION.format(job=str(Path(__file__).parent / JOBS)))
    result = pytester.runpytest_subprocess(
        "-k", tests, "--chaos-report", "report", "-p", "no:cacheprovider"
    )
    assert result.ret == status
    report = pytester.path / "report"
    assert len(list(report.glob("runs/*/outcome.json"))) == len(
        [t for t in tests.split(" or ") if t != "test_error"]
    )
    if tests != "test_error":
        assert (report / "report.html").is_file()


ERRORS = """
from chaoskit.errors import CommandFailed, HarnessError

def test_plain(tmp_path):
    raise HarnessError("the harness broke")

def test_with_a_log(tmp_path):
    raise HarnessError("the driver ended; its last words:\\nTraceback ...\\n  line 1\\nOSError: disk full\\n")

def test_with_a_cause(tmp_path):
    try:
        {}["absent"]
    except KeyError as error:
        raise HarnessError("no session") from error

def test_within_another_error(tmp_path):
    try:
        raise RuntimeError("no running event loop")
    except RuntimeError:
        raise HarnessError("pods do not run")

def test_with_a_note(tmp_path):
    error = HarnessError("no stream")
    error.add_note("objects may be left on the cluster: forbidden")
    raise error

def test_of_a_command(tmp_path):
    raise CommandFailed("the unbroken run of train did not complete: status 1")
"""


def test_an_error_of_chaoskit_is_one_line_with_its_cause(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_session=ERRORS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == 11
    lines = [line for line in result.outlines if line.startswith("chaoskit failed: ")]
    assert [
        line.removeprefix("chaoskit failed: ").removesuffix(" (--chaos-traceback shows more)")
        for line in lines
    ] == [
        "the harness broke",
        "the driver ended; its last words: OSError: disk full",
        "no session; caused by KeyError: 'absent'",
        "pods do not run",
        "no stream; objects may be left on the cluster: forbidden",
    ]
    assert "no verdict: the unbroken run of train did not complete: status 1" in result.outlines
    assert "event loop" not in result.stdout.str()
    assert len(result.outlines) < 30


def test_the_traceback_of_an_error_of_chaoskit_is_shown_on_request(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(test_session=ERRORS)
    result = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "--chaos-traceback", "-k", "log"
    )
    assert result.ret == 11
    assert "  line 1" in result.stdout.str()
    assert "def test_with_a_log" in result.stdout.str()


def test_bad_input_fails_a_test_with_one_line_and_ends_the_session_with_2(
    pytester: pytest.Pytester,
) -> None:
    """The worst result counts: a failed test beside it makes the status 1."""
    pytester.makepyfile(
        test_session="""
        def test_refused(chaos):
            chaos.run("gpt", nodes=0)

        def test_fails():
            assert False
        """
    )
    result = pytester.runpytest_subprocess("-k", "refused", "-p", "no:cacheprovider")
    assert result.ret == 2
    result.stdout.fnmatch_lines(["bad input: nodes=0: use 1 or more (*.py:2)"])
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")
    assert pytester.runpytest_subprocess("-p", "no:cacheprovider").ret == 1


@pytest.mark.costly
def test_a_test_that_fails_after_a_run_that_passed_is_no_pass_in_the_report(
    pytester: pytest.Pytester,
) -> None:
    """Reports show the worse of verdict and test; the verdict stays, as the recovery probability
    counts it.
    """
    pytester.makeini(RELAXED)
    pytester.makepyfile(
        test_session=f"""
        def test_slow(chaos):
            chaos.run({str(Path(__file__).parent / JOBS)!r} + ":faithful", nodes=2, steps=10)
            assert False, "too slow"
        """
    )
    assert (
        pytester.runpytest_subprocess("--chaos-report", "report", "-p", "no:cacheprovider").ret == 1
    )
    (outcome,) = read_outcomes(pytester.path / "report")
    assert (outcome.verdict, outcome.result) == (Verdict.PASSED, Verdict.FAILED)
    assert outcome.test is not None
    assert outcome.test.nodeid == "test_session.py::test_slow"
    assert outcome.result_reasons == ["the test failed: AssertionError: too slow"]
    assert "too slow" in (pytester.path / "report" / "report.html").read_text()
    for arguments, status in (((), 0), (("--check",), 1)):
        shown = [sys.executable, "-m", "chaoskit", "report", "report", *arguments]
        assert (
            subprocess.run(shown, cwd=pytester.path, capture_output=True, check=False).returncode
            == status
        )
    write_junit([outcome], pytester.path / "junit.xml")
    assert 'failures="1"' in (pytester.path / "junit.xml").read_text()


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ("repeats=0", "repeats=0: use a whole number, 1 or more"),
        ("repeats='x'", "repeats='x': use a value of type int"),
        ("substrate='cloud'", "substrate='cloud': use one of local, netns, docker"),
        ("detection='lax'", "detection='lax': use one of "),
    ],
)
def test_a_marker_that_cannot_be_is_refused_at_collection(
    pytester: pytest.Pytester, marker: str, problem: str
) -> None:
    pytester.makepyfile(
        test_session=f"""
        import pytest

        @pytest.mark.chaos({marker})
        def test_marked(chaos):
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == 2
    result.stdout.fnmatch_lines([f"*marker chaos: {problem}*"])


def test_the_command_line_goes_before_the_marker(pytester: pytest.Pytester) -> None:
    """The command line, as of a nightly run, overrides seed and repeats."""
    pytester.makepyfile(
        test_session="""
        import pytest

        @pytest.mark.chaos(seed=7, repeats=3)
        def test_marked(chaos):
            assert chaos.defaults["seed"] == 5
        """
    )
    result = pytester.runpytest_subprocess(
        "--chaos-repeats", "2", "--chaos-seed", "5", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(passed=2)


@pytest.mark.costly
def test_repeats_and_marker_defaults(pytester: pytest.Pytester) -> None:
    """``--chaos-repeats`` runs each chaos test again; the marker sets defaults of ``chaos.run``."""
    pytester.makeini(RELAXED)
    pytester.makepyfile(
        test_session=f"""
        import pytest

        @pytest.mark.chaos(nodes=2, seed=7)
        def test_twice(chaos):
            outcome = chaos.run({str(Path(__file__).parent / JOBS)!r} + ":faithful", steps=10)
            assert (outcome.nodes, outcome.seed) == (2, 7)
        """
    )
    result = pytester.runpytest_subprocess("--chaos-repeats", "2", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)


@pytest.mark.slow
@pytest.mark.promise("how many recovered of those that were tried, with the Wilson score interval")
@pytest.mark.costly
def test_repeats_give_a_recovery_probability(pytester: pytest.Pytester) -> None:
    """A run with ``check=False``, which its test judges, does not count."""
    pytester.makeini(RELAXED)
    pytester.makepyfile(
        test_session=f"""
        from faults import Kill

        def test_a_kill(chaos):
            job = {str(Path(__file__).parent / JOBS)!r} + ":faithful"
            plan = {{"nodes": 2, "steps": 10, "faults": [Kill(rank=1, at_step=4)]}}
            chaos.run(job, **plan)
            chaos.run(job, **plan, check=False)
        """
    )
    options = ("--chaos-repeats", "2", "--chaos-report", "report", "-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=2)
    line = "recovered in 2 of 2 runs: 100 %, 95 % interval 34.24 % to 100 %;*2 judged by their tests alone"
    result.stdout.fnmatch_lines([line])


@pytest.mark.costly
def test_a_session_counts_its_own_runs(pytester: pytest.Pytester) -> None:
    """A report directory may be used again: the page and ``chaoskit report`` show all runs, by
    session.
    """
    pytester.makeini(RELAXED)
    pytester.makepyfile(
        test_session=f"""
        def test_trains(chaos):
            chaos.run({str(Path(__file__).parent / JOBS)!r} + ":faithful", nodes=1, spares=0, steps=3, twin=False)

        def test_idles():
            pass
        """
    )
    options = ("--chaos-report", "report", "-p", "no:cacheprovider", "-k")
    first = pytester.runpytest_subprocess(*options, "trains")
    first.stdout.fnmatch_lines(["*chaoskit: 1 run, *report.html =*"])
    second = pytester.runpytest_subprocess(*options, "trains")
    second.stdout.fnmatch_lines(["*chaoskit: 1 run, *report.html, with 1 run of other sessions =*"])
    third = pytester.runpytest_subprocess(*options, "idles")
    third.stdout.no_fnmatch_line("*chaoskit: *")
    sessions = [outcome.session for outcome in read_outcomes(pytester.path / "report")]
    assert len(set(sessions)) == 2
    command = [sys.executable, "-m", "chaoskit", "report", "report"]
    wide = os.environ | {"COLUMNS": "200"}
    shown = subprocess.run(
        command, cwd=pytester.path, env=wide, capture_output=True, text=True, check=True
    ).stdout
    assert [f"session {session}: 1 experiment: 1 passed" in shown for session in sessions] == [
        True,
        True,
    ]


def test_a_report_directory_that_cannot_be_written_is_refused(pytester: pytest.Pytester) -> None:
    """A usage error comes before any test."""
    (pytester.path / "occupied").write_text("a file, not a directory")
    result = pytester.runpytest_subprocess("--chaos-report", "occupied/report")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*chaos_report=*choose a directory that can be written*"])
