"""Logs with uncountable or unusual steps are read right, or named as unknown, and never fail a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from chaoskit import Chaos, LogPatterns, Outcome, Verdict
from faults import Kill

JOB = Path(__file__).parents[2] / "jobs" / "logs" / "printed.py"
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.]+)")
BAR = LogPatterns(step=r"\| (\d+)/\d+ \[", loss=r"loss=([\d.]+)")
#: Shell code that starts a training until it ends well, three times at most.
AGAIN = 'for n in 1 2 3; do RANK=0 "$@" && exit 0; done; exit 1'


def run(
    chaos: Chaos,
    how: str,
    *faults: Kill,
    steps: int = 30,
    step_s: float = 0.03,
    odd: str = "",
    **plan: Any,
) -> Outcome:
    command = ["sh", "-c", AGAIN, "sh", sys.executable, str(JOB), how, str(steps), str(step_s), odd]
    settings: dict[str, Any] = {
        "watch": WATCH,
        "check": False,
        "deadline_s": 60.0,
        "max_lost_steps": 2,
    }
    return chaos.run(command=command, faults=faults, **settings | plan)


def shows(outcome: Outcome) -> str:
    """Return the detail about steps of a run that is unknown, and in which no check has failed."""
    assert outcome.verdict is Verdict.UNKNOWN, outcome.reasons
    assert [
        check for check in outcome.checks if check.verdict in (Verdict.FAILED, Verdict.ERROR)
    ] == []
    (check,) = (check for check in outcome.checks if check.name == "the log shows steps")
    assert check.verdict is Verdict.UNKNOWN
    return check.detail


@pytest.mark.promise("Such a log is *unknown* and never failed", how="bar", twin=False)
@pytest.mark.parametrize("twin", [True, False])
@pytest.mark.parametrize("how", ["bar", "bare"])
def test_a_progress_bar_is_no_log_of_steps(chaos: Chaos, how: str, twin: bool) -> None:
    detail = shows(run(chaos, how, Kill(rank=0, at_step=30), steps=60, watch=BAR, twin=twin))
    assert re.search(
        r"\d+ of \d+ lines with a step are drawn over by the next one, as by a progress bar", detail
    )
    assert "tqdm.write" in detail


def test_a_line_that_each_step_draws_over_is_counted(chaos: Chaos) -> None:
    outcome = run(chaos, "steady", Kill(rank=0, at_step=15), watch=LogPatterns(step=r"step (\d+)"))
    assert outcome.verdict in (Verdict.PASSED, Verdict.UNKNOWN), outcome.reasons
    assert run(chaos, "steady", watch=WATCH).verdict is Verdict.PASSED


@pytest.mark.parametrize("twin", [True, False])
@pytest.mark.parametrize("how", ["epochs", "uneven"])
def test_steps_that_begin_anew_in_each_epoch_are_named(chaos: Chaos, how: str, twin: bool) -> None:
    detail = shows(
        run(chaos, how, Kill(rank=0, at_step=5), steps=30 if how == "epochs" else 35, twin=twin)
    )
    assert detail.startswith("steps begin anew: the log on node0 goes back from step 9 to step 0")
    assert "a number that grows over the whole training" in detail


def test_a_training_that_begins_at_its_first_step_again_has_lost_all(chaos: Chaos) -> None:
    """A training that goes back from its last step to its first one has lost all steps."""
    train = "import time; [(time.sleep(0.02), print('step', n, flush=True)) for n in range(20)]; time.sleep(0.3)"
    command = ["sh", "-c", AGAIN, "sh", sys.executable, "-c", train]
    outcome = chaos.run(
        command=command,
        faults=[Kill(rank=0, at_step=19)],
        watch=LogPatterns(step=r"step (\d+)"),
        check=False,
    )
    assert outcome.verdict is Verdict.FAILED
    assert outcome.lost_steps == 20


@pytest.mark.parametrize("twin", [True, False])
def test_lines_that_are_printed_by_the_clock_are_named(chaos: Chaos, twin: bool) -> None:
    detail = shows(run(chaos, "clock", Kill(rank=0, at_step=8), steps=20, step_s=0.13, twin=twin))
    assert (
        "lines that are printed by the clock cannot be counted" in detail
        or "steps are in its twin's log only" in detail
    )


def test_a_step_that_is_shown_while_it_takes_long_is_not_lost(chaos: Chaos) -> None:
    """A step that is printed again was not computed again if no fault struck."""
    detail = shows(run(chaos, "stalls", steps=10, twin=False, max_lost_steps=0))
    assert "the log on node0 repeats steps that were not computed again" in detail


def kept(outcome: Outcome) -> Verdict:
    """Return the verdict on whether committed steps were kept."""
    return next(check.verdict for check in outcome.checks if check.name == "committed steps kept")


# -- failures that stay failures -------------------------------------------------------------------


@pytest.mark.parametrize("twin", [True, False])
@pytest.mark.parametrize(
    ("odd", "pattern"),
    [
        ("step 1.25", r"step (\S+)"),
        ("step 5,123 tok", r"step (\d+)"),
        ("step 17,250", r"step (\d+)"),
        ("step 1.2k", r"step (\S+)"),
        ("step 1e3", r"step (\S+)"),
    ],
)
def test_an_odd_line_excuses_no_lost_steps(
    chaos: Chaos, odd: str, pattern: str, twin: bool
) -> None:
    watch = LogPatterns(step=pattern)
    outcome = run(chaos, "loses", Kill(rank=0, at_step=15), odd=odd, watch=watch, twin=twin)
    assert (outcome.verdict, kept(outcome)) == (Verdict.FAILED, Verdict.FAILED), outcome.reasons
    assert outcome.lost_steps is not None
    assert outcome.lost_steps >= 5


def test_a_line_that_each_step_draws_over_excuses_no_lost_steps(chaos: Chaos) -> None:
    outcome = run(
        chaos, "loses-drawn", Kill(rank=0, at_step=15), watch=LogPatterns(step=r"step (\d+)")
    )
    assert (outcome.verdict, kept(outcome)) == (Verdict.FAILED, Verdict.FAILED), outcome.reasons


@pytest.mark.parametrize("twin", [True, False])
def test_a_step_that_one_process_computes_again_is_lost(chaos: Chaos, twin: bool) -> None:
    """Steps that the printing process computes again are lost, though no process is started again."""
    outcome = run(
        chaos, "again", Kill(rank=1, at_step=10), steps=20, ranks=2, twin=twin, step_s=0.1
    )
    assert (outcome.verdict, kept(outcome)) == (Verdict.FAILED, Verdict.FAILED), outcome.reasons
    assert outcome.lost_steps == 3


# -- forms of steps --------------------------------------------------------------------------------


def test_colours_are_left_out(chaos: Chaos) -> None:
    outcome = run(chaos, "colours", Kill(rank=0, at_step=15))
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert [point.step for point in outcome.steps] == list(range(30))


def test_thousands_have_separators(chaos: Chaos) -> None:
    watch = LogPatterns(step=r"step ([\d,]+)", loss=r"loss ([\d.]+)")
    outcome = run(chaos, "thousands", Kill(rank=0, at_step=1000), watch=watch)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
    assert [point.step for point in outcome.steps] == list(range(985, 1015))


def test_a_pattern_that_cuts_numbers_is_named(chaos: Chaos) -> None:
    detail = shows(run(chaos, "thousands", Kill(rank=0, at_step=990)))
    assert "matches '1,000' or the like in 15 lines" in detail
    assert r"([\d,]+)" in detail


def test_a_pattern_that_cuts_the_last_few_numbers_is_named(chaos: Chaos) -> None:
    """The cut numbers are one of fifteen lines, and no step follows them."""
    command = [sys.executable, "-c", "for step in range(850, 1010): print(f'step {step:,}')"]
    outcome = chaos.run(
        command=command, watch=LogPatterns(step=r"step (\d+)"), check=False, twin=False
    )
    assert "matches '1,000' or the like in 10 lines" in shows(outcome)


def test_abbreviated_numbers_are_named(chaos: Chaos) -> None:
    detail = shows(run(chaos, "abbreviated", watch=LogPatterns(step=r"step (\S+)")))
    assert "matches '1.0k' or the like in 15 lines" in detail


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("quiet", "the command printed nothing; have it print its steps, on stdout or stderr"),
        ("endless", "without the end of a line: have it end each line with a line feed"),
    ],
)
def test_a_log_without_lines_is_named(chaos: Chaos, how: str, told: str) -> None:
    assert told in shows(run(chaos, how, steps=5))


@pytest.mark.parametrize("option", ["--redirects=3", "-r3"])
def test_torchrun_that_redirects_all_output_is_named(
    chaos: Chaos, tmp_path: Path, option: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        option,
    ]
    outcome = chaos.run(
        command=[*command, f"--log-dir={tmp_path}", str(JOB), "plain", "5", "0.01"],
        watch=WATCH,
        check=False,
    )
    assert "writes what ranks print into files of its own: use --tee=3" in shows(outcome)
