"""Reports of a failed command show the log line with the reason, ten lines around it, and a hint."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from chaoskit import BadInput, Harness, HarnessError, LogPatterns, Outcome, Verdict
from chaoskit.errors import error_line, long_notes
from chaoskit.experiment.directory import judge_directory
from chaoskit.pytest_plugin import Stock
from chaoskit.report.html import write_html
from chaoskit.report.junit import write_junit
from chaoskit.report.store import decode_outcome, encode_outcome
from chaoskit.report.summary import render_summary
from chaoskit.stacks.log_end import LINES, find_error, find_hints, read_lines

WATCH = LogPatterns(step=r"step (\d+)")
ALLOWED_S = 60.0
TORCHRUN = """
E1128 18:32:22.123000 1846 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {status})
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
  File "/venv/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
train.py FAILED
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_18:32:22
  rank      : 1 (local_rank: 1)
  exitcode  : {status} (pid: 18635)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 18635
=======================================================
"""
LOST_PEER = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 12, in <module>
[rank0]:     loss.backward()
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37300.
"""
OWN_ERROR = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 7, in <module>
[rank1]:     raise {name}("bad batch")
[rank1]: {name}: bad batch
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            "step 1\nTraceback (most recent call last):\n  File 'x'\nKeyError: 'lr'\n",
            "KeyError: 'lr'",
        ),
        (
            "Traceback (most recent call last):\n  File 'x'\nmine.BadShape: 3 by 4\nbye\n",
            "mine.BadShape: 3 by 4",
        ),
        (OWN_ERROR.format(name="ValueError") + TORCHRUN, "[rank1]: ValueError: bad batch"),
        (OWN_ERROR.format(name="Unfit") + LOST_PEER + TORCHRUN, "[rank1]: Unfit: bad batch"),
        (
            LOST_PEER + TORCHRUN.format(status=-9),
            "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37300.",
        ),
        (
            "step 3\n" + TORCHRUN.format(status=-9),
            "E1128 18:32:22.123000 1846 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9)",
        ),
        (
            "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x\n",
            "train.py: error: unrecognized ",
        ),
        ("sh: 1: torchrum: command not found\n", "sh: 1: torchrum: command not found"),
        (
            "python: can't open file '/x/train.py': [Errno 2] No such file or directory\n",
            "python: can't open file",
        ),
        ("/venv/bin/python: No module named trian\n", "/venv/bin/python: No module named trian"),
        (
            "step 1\nFatal Python error: Segmentation fault\n\nStack:\n",
            "Fatal Python error: Segmentation fault",
        ),
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  x\n",
            "terminate called after",
        ),
        ("run.sh: line 3: 1234 Killed  python train.py\n", "run.sh: line 3: 1234 Killed"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\nsrun: error: n1: task 0: Exited\n",
            "torch.OutOf",
        ),
        ("\x1b[31mValueError: red\x1b[0m\n", "ValueError: red"),
        (" 10%|#   | 1/9\r 20%|##  | 2/9\rOSError: disk\n", "OSError: disk"),
        ("ValueError: first\nstep 2\nTypeError: second\nstep 3\n", "TypeError: second"),
        ("step 1 error: 0.25\nval_error: 0.5\nno errors so far\n", ""),
        ("eval: validation_error: nan\nstep 3 error: inf\n", ""),
        ("", ""),
    ],
)
def test_the_line_that_says_why_a_command_failed_is_found(log: str, error: str) -> None:
    """The error of the program precedes a lost connection, which precedes the launcher's report."""
    part = find_error(log.split("\n"), lambda line: WATCH.read(line) is not None)
    assert part.error.startswith(error)
    assert bool(part.error) is bool(error)
    assert len(part.lines) <= LINES
    assert not error or any(part.error in line for line in part.lines)


def test_the_lines_are_the_last_ones_unless_the_error_stands_before_them() -> None:
    numbered = [f"line {number}" for number in range(30)]
    assert find_error(numbered).lines == tuple(numbered[-10:])
    numbered[25] = "ValueError: late"
    assert find_error(numbered).lines == tuple(numbered[-10:])
    numbered[25], numbered[9] = "line 25", "ValueError: early"
    assert find_error(numbered).lines == tuple(numbered[2:12])


def test_lines_that_only_underline_code_are_left_out() -> None:
    lines = [
        "[rank1]:   loss.backward()",
        "[rank1]:   ^^^^^~~~~^^^^^",
        "    ^^^",
        "[rank1]: ValueError: 3",
    ]
    assert find_error(lines).lines == (lines[0], lines[3])


def test_the_end_of_a_long_log_is_enough(tmp_path: Path) -> None:
    log = tmp_path / "node0.log"
    log.write_bytes(b"\xff ValueError: first\n" + b"x" * 200_000 + b"\nstep 1\nOSError: last")
    assert read_lines(log) == ["step 1", "OSError: last"]
    assert read_lines(tmp_path / "none.log") == []


@pytest.mark.parametrize("before", [0, (1 << 20) - 10, 3 << 20])
def test_a_mesh_of_gloo_that_fails_has_a_hint(tmp_path: Path, before: int) -> None:
    log = tmp_path / "node0.log"
    log.write_bytes(
        b"." * before
        + b"RuntimeError: Gloo connectFullMesh failed with [...] no error\n"
        + b"." * before
    )
    (hint,) = find_hints(log, ["torchrun", "--max-restarts=2", "train.py"])
    assert "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment" in hint
    assert (
        find_hints(log, ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun", "train.py"])
        == []
    )
    log.write_bytes(b"RuntimeError: Connection closed by peer\n")
    assert find_hints(log, ["torchrun"]) == []


@pytest.mark.parametrize(
    ("command", "log", "stood_still", "is_hinted"),
    [
        (["torchrun", "--max-restarts=2", "train.py"], LOST_PEER, True, True),
        (
            ["python", "-m", "torch.distributed.run", "--max-restarts", "2", "train.py"],
            LOST_PEER,
            True,
            True,
        ),
        (["torchrun", "--max-restarts=2", "train.py"], LOST_PEER, False, False),
        (["torchrun", "--max-restarts=2", "train.py"], "step 3\n", True, False),
        (["torchrun", "train.py"], LOST_PEER, True, False),
        (
            ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun", "--max-restarts=2"],
            LOST_PEER,
            True,
            False,
        ),
    ],
)
def test_ranks_that_wait_after_a_restart_have_a_hint(
    tmp_path: Path, command: list[str], log: str, stood_still: bool, is_hinted: bool
) -> None:
    """Gloo may also wait for ever, without output, if it has the address of a rank that ended."""
    (tmp_path / "node0.log").write_text(log)
    assert bool(find_hints(tmp_path / "node0.log", command, stood_still=stood_still)) is is_hinted


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture
def harness(substrate: str, chaos_stock: Stock) -> Harness:
    return chaos_stock.harness(substrate)


def shell(
    harness: Harness,
    script: str,
    *,
    twin: bool = False,
    nodes: int = 1,
    stalled_s: float | None = None,
) -> Outcome:
    return harness.run(
        command=["sh", "-c", script],
        watch=WATCH,
        twin=twin,
        nodes=nodes,
        deadline_s=ALLOWED_S,
        stalled_s=stalled_s,
    )


def reports(outcome: Outcome, directory: Path) -> list[str]:
    """Return an outcome as a page, as JUnit's XML and as terminal text."""
    write_html([outcome], directory / "report.html")
    write_junit([outcome], directory / "junit.xml")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_summary([outcome]))
    return [
        (directory / "report.html").read_text(),
        (directory / "junit.xml").read_text(),
        console.export_text(),
    ]


def test_a_command_that_fails_says_why_wherever_it_is_reported(
    harness: Harness, tmp_path: Path
) -> None:
    script = "echo step 0; echo 'RuntimeError: Gloo connectFullMesh failed with <x>'; exit 3"
    outcome = shell(harness, script)
    assert outcome.verdict is Verdict.FAILED
    (end,) = outcome.log_ends
    assert (end.node, end.error) == ("node0", "RuntimeError: Gloo connectFullMesh failed with <x>")
    assert end.lines == ["step 0", end.error]
    assert Path(end.path).read_text() == f"step 0\n{end.error}\n"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in outcome.reasons[-1]
    assert decode_outcome(encode_outcome(outcome)) == outcome
    for text in reports(outcome, tmp_path):
        assert "connectFullMesh failed with" in text
        assert end.path in text
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    again = judge_directory(Path(outcome.directory))
    assert (again.log_ends, again.reasons) == (outcome.log_ends, outcome.reasons)


def test_a_command_that_ends_well_shows_no_log(harness: Harness) -> None:
    outcome = shell(harness, "echo step 0; echo 'ValueError: was handled'")
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert outcome.log_ends == []


def test_the_log_of_a_node_that_failed_is_shown_and_no_other(harness: Harness) -> None:
    outcome = shell(
        harness,
        "echo step 0; [ {node_rank} = 0 ] || { echo OSError: {node_rank}; exit 1; }",
        nodes=3,
    )
    assert [(end.node, end.error) for end in outcome.log_ends] == [
        ("node1", "OSError: 1"),
        ("node2", "OSError: 2"),
    ]


def test_an_unbroken_run_that_fails_says_why(harness: Harness) -> None:
    with pytest.raises(
        HarnessError, match=r"ended with status 1: train\.py: error: no such option; see /"
    ) as failed:
        shell(harness, "echo 'train.py: error: no such option'; exit 1", twin=True)
    assert "train.py: error: no such option" in failed.value.__notes__[0]
    assert "node0.log" in failed.value.__notes__[0]


def test_a_command_that_stalls_is_ended_before_its_deadline(harness: Harness) -> None:
    """Lines without a step are no progress, and the end of the log shows the cause of the wait."""
    outcome = shell(
        harness,
        "echo step 4; echo waiting for rank 1; while sleep 0.1; do echo alive; done",
        stalled_s=1.0,
    )
    assert outcome.verdict is Verdict.FAILED
    assert (
        "training completed: no step was shown for 1 s (stalled_s), and the run was ended"
        in outcome.reasons
    )
    assert outcome.wall_s < ALLOWED_S / 2
    assert outcome.log_ends[0].lines[-1] == "alive"
    assert outcome.settings["stalled_s"] == 1.0
    assert judge_directory(Path(outcome.directory)).reasons == outcome.reasons


def test_a_command_has_not_stalled_before_its_first_step(harness: Harness) -> None:
    outcome = shell(harness, "sleep 1; echo step 0; echo step 1", stalled_s=0.5)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), "5", True])
def test_a_limit_that_is_none_is_refused(harness: Harness, seconds: float) -> None:
    with pytest.raises(BadInput, match=r"^stalled_s="):
        shell(harness, "echo step 0", stalled_s=seconds)


@pytest.mark.costly
def test_pytest_shows_why_a_command_failed(pytester: pytest.Pytester, substrate: str) -> None:
    pytester.makepyfile(
        """
        import pytest
        from chaoskit import LogPatterns

        @pytest.mark.parametrize("twin", [True, False])
        def test_one(chaos, twin):
            command = ["sh", "-c", "echo step 0; echo KeyError: 17; exit 1"]
            chaos.run(command=command, watch=LogPatterns(step=r"step (\\\\d+)"), twin=twin)
        """
    )
    done = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "--tb=short", f"--chaos-substrate={substrate}"
    )
    broken, judged = done.stdout.str().partition("test_one[False]")[::2]
    assert "ended with status 1: KeyError: 17; see " in broken
    for text in (broken, judged):
        assert "the last error on node0: KeyError: 17" in text
        assert "node0.log:" in text
        assert "  step 0" in text


def test_a_log_in_the_note_of_an_error_stays_in_lines() -> None:
    error = HarnessError("the unbroken run did not complete")
    error.add_note("objects may be left on the cluster: forbidden")
    error.add_note("log of node0:\n  line 1\n  line 2")
    assert (
        error_line(error)
        == "the unbroken run did not complete; objects may be left on the cluster: forbidden"
    )
    assert long_notes(error) == ["log of node0:\n  line 1\n  line 2"]
