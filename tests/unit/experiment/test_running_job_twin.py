"""Tests of the losses of a running job against those of a second job, from the records alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from chaoskit.experiment.judge.command_judge import LOSSES, judge_command
from chaoskit.experiment.plan.command_plan import CommandExperiment, RunningJob
from chaoskit.experiment.run.command_run import load_command_run
from chaoskit.experiment.run.run import LATER
from chaoskit.experiment.twin.command_twin import CommandTwin
from chaoskit.faults import Kill
from chaoskit.journal import Journal
from chaoskit.runlog.outcome import RECOVERED, Outcome
from chaoskit.stacks import LogPatterns
from chaoskit.vocabulary import Event, RunEnd, Verdict

S = 10**9
EXPERIMENT = CommandExperiment(
    name="llama",
    command=(),
    watch=LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.]+)"),
    nodes=2,
    ranks=2,
    seed=0,
    faults=(Kill(rank=1, after_s=1.0),),
    working_directory="",
    deadline_s=60.0,
    running_job=RunningJob("statefulset/llama", "ml", 10.0),
)
#: Step and loss of each line, in order.
Lines = list[tuple[int, float]]
Judged = Callable[..., Outcome]


def twin(losses: Mapping[int, tuple[float, ...]], failure: str = "") -> CommandTwin:
    """Return the result of a second job in which each loss of a step has a line of its own."""
    counts = {step: len(of_step) for step, of_step in losses.items()}
    return CommandTwin(counts, dict(losses), "twin", failure=failure)


def falling(first: int, last: int) -> dict[int, tuple[float, ...]]:
    """Return the losses of an unbroken training."""
    return {step: (1.0 / step,) for step in range(first, last + 1)}


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    """Return a function that judges the lines of a running job, struck before line ``struck``."""

    def judge(
        lines: Lines,
        unbroken: CommandTwin | None,
        twin_id: str = LATER,
        struck: int = -1,
        reads_nan: bool = False,
    ) -> Outcome:
        start = {"names": ["llama-0", "llama-1"], "substrate": "attached", "run_id": "run"}
        journal = Journal(tmp_path / "journal", "harness", role="harness")
        journal.write(Event.STARTED, t_ns=S, twin=twin_id, sharded=False, **start)
        for number, (step, loss) in enumerate(lines):
            if number == struck:
                at_ns = (2 + number) * S - 1
                target = {"fault": "fault0", "worker": "llama-1.9", "rank": 1, "node": "llama-1"}
                moment = {"pid": 9, "ticks": 5, "step": step - 1, "phase": "", "waiting": ""}
                journal.write(
                    Event.INJECTED, t_ns=at_ns, nodes=[], done_ns=at_ns, **target, **moment
                )
            text = str(loss) if reads_nan or not math.isnan(loss) else None
            journal.write(Event.LOGGED, t_ns=(2 + number) * S, node="llama-0", step=step, loss=text)
        logs = {"lines": len(lines), "example": "", "odd": ""}
        journal.write(
            Event.RUN_ENDED,
            t_ns=(2 + len(lines)) * S,
            reason=RunEnd.OBSERVED,
            ok=True,
            detail="",
            exits={},
            logs=logs,
        )
        journal.close()
        return judge_command(load_command_run(tmp_path, EXPERIMENT), unbroken, "attached")

    return judge


def losses_of(outcome: Outcome) -> tuple[Verdict, str]:
    """Return verdict and detail of the check of losses."""
    (check,) = [check for check in outcome.checks if check.name == LOSSES]
    return check.verdict, check.detail


def lines_of(losses: Mapping[int, tuple[float, ...]]) -> Lines:
    return [(step, loss) for step, of_step in losses.items() for loss in of_step]


def test_a_job_that_was_joined_in_its_middle_is_compared_from_there_on(judged: Judged) -> None:
    """The twin begins before and ends after it."""
    outcome = judged(lines_of(falling(40, 60)), twin(falling(1, 80)))
    assert losses_of(outcome) == (Verdict.PASSED, "21 of 21 losses, to the last digit")
    (shows_steps,) = [check for check in outcome.checks if check.name == "the log shows steps"]
    assert shows_steps.verdict is Verdict.PASSED


def test_a_loss_that_differs_fails_with_its_step(judged: Judged) -> None:
    losses = falling(40, 60) | {50: (0.5,)}
    verdict, detail = losses_of(judged(lines_of(losses), twin(falling(1, 60))))
    assert verdict is Verdict.FAILED
    assert detail == "step 50: 0.5 instead of 0.02"


def test_steps_that_were_computed_again_are_compared_again(judged: Judged) -> None:
    lines = lines_of(falling(40, 50)) + lines_of(falling(46, 60) | {48: (0.75,)})
    verdict, detail = losses_of(judged(lines, twin(falling(1, 60)), struck=11))
    assert verdict is Verdict.FAILED
    assert detail.startswith("step 48: 0.75 instead of")


def test_steps_at_the_edges_that_lack_lines_are_left_out(judged: Judged) -> None:
    """Two pods print losses of their own, and one of them was followed later than the other."""
    both: dict[int, tuple[float, ...]] = {step: (step + 0.25, step + 0.5) for step in range(1, 30)}
    own = {step: of_step for step, of_step in both.items() if 10 <= step <= 20}
    own |= {10: (10.25,), 11: (11.25,), 20: (20.5,)}
    outcome = judged(lines_of(own), twin(both))
    assert losses_of(outcome) == (Verdict.PASSED, "8 of 8 losses, to the last digit")


@pytest.mark.parametrize("silent_steps", [range(301, 326), range(303, 326), range(310, 314)])
def test_losses_before_the_fault_alone_prove_nothing(judged: Judged, silent_steps: range) -> None:
    """The pattern does not match nan, so most steps after the fault have no loss."""
    losses = falling(1, 325) | dict.fromkeys(silent_steps, (math.nan,))
    verdict, detail = losses_of(judged(lines_of(losses), twin(falling(1, 325)), struck=300))
    assert verdict is Verdict.UNKNOWN
    assert f"{len(silent_steps)} of 25 steps after the last act of a fault" in detail
    assert "match nan?" in detail


def test_a_few_steps_after_the_fault_may_have_no_loss(judged: Judged) -> None:
    losses = falling(1, 325) | dict.fromkeys((301, 302), (math.nan,))
    verdict, detail = losses_of(judged(lines_of(losses), twin(falling(1, 325)), struck=300))
    assert (verdict, detail) == (Verdict.PASSED, "323 of 325 losses, to the last digit")


def test_a_pattern_that_matches_nan_compares_it(judged: Judged) -> None:
    losses = falling(1, 325) | dict.fromkeys(range(301, 326), (math.nan,))
    outcome = judged(lines_of(losses), twin(falling(1, 325)), struck=300, reads_nan=True)
    verdict, detail = losses_of(outcome)
    assert verdict is Verdict.FAILED
    assert detail.startswith("step 301: nan instead of")


def test_a_twin_that_ends_before_the_fault_proves_nothing(judged: Judged) -> None:
    """A step shown once, of two pods that print it, is not compared."""
    both: dict[int, tuple[float, ...]] = {step: (step + 0.25, step + 0.5) for step in range(1, 30)}
    own = both | {step: (step + 0.25,) for step in range(20, 30)}
    verdict, detail = losses_of(judged(lines_of(own), twin(both), struck=40))
    assert verdict is Verdict.UNKNOWN
    assert detail.startswith("no step after the last act of a fault is shown whole")


def test_without_a_common_step_nothing_is_known(judged: Judged) -> None:
    outcome = judged(lines_of(falling(40, 60)), twin(falling(1, 30)))
    assert losses_of(outcome) == (Verdict.UNKNOWN, "no step is shown whole in both logs")


def test_a_second_job_that_failed_proves_nothing(judged: Judged) -> None:
    """Its steps are not those of an unbroken run, so they do not count for other checks either."""
    counts_twice = dict.fromkeys(range(1, 61), (1.0, 2.0))
    outcome = judged(lines_of(falling(40, 60)), twin(counts_twice, "it has failed"))
    detail = "the unbroken run did not show its steps: it has failed"
    assert losses_of(outcome) == (Verdict.UNKNOWN, detail)
    others = [check for check in outcome.checks if check.name == "committed steps kept"]
    assert [check.verdict for check in others] == [Verdict.PASSED]


def test_a_twin_that_was_not_made_is_no_success(judged: Judged) -> None:
    verdict, detail = losses_of(judged(lines_of(falling(40, 60)), None))
    assert (verdict, detail) == (
        Verdict.UNKNOWN,
        "no unbroken run was made, as this run did not end well",
    )


def test_without_a_twin_the_check_is_not_asked(judged: Judged) -> None:
    outcome = judged(lines_of(falling(40, 60)), None, twin_id="")
    assert outcome.not_applied[LOSSES] == "the unbroken run is not known"


def test_the_end_of_the_twin_proves_no_recovery(judged: Judged) -> None:
    """The twin ends where the run does: no step after the fault was shown."""
    losses = falling(40, 60)
    outcome = judged([*lines_of(losses), (60, 1.0 / 60)], twin(falling(1, 60)), struck=21)
    (recovered,) = [check for check in outcome.checks if check.name == RECOVERED]
    assert recovered.verdict is Verdict.UNKNOWN
