"""User code around the loop over the shards runs once per committed step, whatever breaks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chaoskit import BadInput, Chaos, Outcome
from faults import Fault, Kill, NaN

JOB = "../../jobs/training/user_code.py"


def run(
    chaos: Chaos, notes: Path, *faults: Fault, job: str = JOB, **plan: Any
) -> tuple[Outcome, dict[str, list[int]]]:
    """Run a job; return the outcome, and the steps that each worker had committed when the code
    after its transactions ran.
    """
    notes.mkdir(exist_ok=True)
    options = {"notes": str(notes)} | plan.pop("options", {})
    outcome = chaos.run(
        job,
        faults=faults,
        options=options,
        **{"nodes": 3, "spares": 1, "shards": 4, "steps": 20} | plan,
    )
    return outcome, {
        file.name: [int(line) for line in file.read_text().split()] for file in notes.iterdir()
    }


def victims(outcome: Outcome) -> set[str]:
    return {record["worker"] for record in outcome.records("detected")}


@pytest.mark.promise(
    "Code after the transaction runs once a committed step on each rank", phase="optimizer"
)
@pytest.mark.parametrize("phase", ["forward", "reduce", "optimizer"])
def test_code_after_a_transaction_runs_once_a_step(
    chaos: Chaos, tmp_path: Path, phase: str
) -> None:
    """Some ranks have committed the step in the optimizer's phase, and the others take their state
    over.
    """
    fault = Kill(rank=1, at_step=6, phase=phase)
    outcome, steps = run(chaos, tmp_path / "notes", fault, twin=False, until={"world": 3})
    (dead,) = victims(outcome)
    members = [{member["worker"] for member in plan["members"]} for plan in outcome.records("plan")]
    survivors, last = members[0] - {dead}, len(outcome.steps)
    for worker in survivors:
        assert steps[worker] == list(range(1, last + 1))
    assert steps[dead] == list(range(1, 7))
    adopted = {record.source: record["step"] for record in outcome.records("adopt")}
    for worker in steps.keys() - members[0]:
        assert steps[worker][0] == adopted[worker], "it begins behind the step that it took over"
        assert steps[worker][-1] == last
        assert all(later == earlier + 1 for earlier, later in pairwise(steps[worker]))
    assert steps.keys() == set.union(*members), "nothing runs in a process that never had a rank"


def test_a_step_that_is_computed_again_counts_once(chaos: Chaos, tmp_path: Path) -> None:
    """A NaN leads to rounds in which other ranks compute the shards."""
    fault = NaN(rank=1, at_step=6, parameter="2.weight", where="activation")
    outcome, steps = run(chaos, tmp_path / "notes", fault, twin=False)
    assert {
        tuple(numbers) for worker, numbers in steps.items() if worker not in victims(outcome)
    } >= {tuple(range(1, 21))}
    assert all(
        later == earlier + 1 for numbers in steps.values() for earlier, later in pairwise(numbers)
    )


@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize("caught", ["pass", "block"])
def test_a_backward_pass_that_fails_can_be_repeated(
    chaos: Chaos, caught: str, buckets: int
) -> None:
    """A backward pass can be repeated even if a part of the gradient was folded, and being sent,
    when it failed.

    The code that catches the exception is shown in its own phase, with the limit of that phase.
    """
    job, settings = (
        f"{JOB}:fails_in_backward",
        {"nodes": 2, "spares": 0, "shards": 4, "steps": 12, "twin": False},
    )
    failing, clean = (
        chaos.run(
            job,
            options={"at_step": at_step, "caught": caught},
            buckets=buckets,
            check=False,
            **settings,
        )
        for at_step in (5, -1)
    )
    assert not failing.records("failed")
    assert failing.losses == clean.losses
    assert failing.weights_digest == clean.weights_digest


def test_code_after_a_transaction_of_a_sharded_job(chaos: Chaos, tmp_path: Path) -> None:
    """The rehearsal runs no such code; an entry goes on behind the step that it restored."""
    fault = NaN(rank=1, at_step=6, parameter="2.weight", where="activation")
    outcome, steps = run(chaos, tmp_path / "notes", fault, job=f"{JOB}:sharded", twin=False)
    assert outcome.records("nonfinite"), "the step was computed again"
    assert not outcome.recoveries
    assert [numbers for numbers in steps.values() if numbers] == [list(range(1, 21))] * 3


def test_an_evaluation_between_two_steps_may_take_its_time(chaos: Chaos, tmp_path: Path) -> None:
    """An evaluation after the first step may be longer than a rank may take to follow a plan."""
    outcome, steps = run(chaos, tmp_path / "notes", twin=False, options={"evaluate_s": 4.0})
    assert not outcome.records("detected")
    assert len(outcome.records("plan")) == 1
    assert [numbers for numbers in steps.values() if numbers] == [list(range(1, 21))] * 3


def test_autocast_around_the_loop(chaos: Chaos, tmp_path: Path) -> None:
    """Autocast must not keep copies of weights from before a rehearsal, a recovery or an update."""
    fault = Kill(rank=1, at_step=6, phase="optimizer")
    outcome, _ = run(chaos, tmp_path / "notes", fault, options={"autocast": True})
    outcome.assert_same_losses_as_twin()


def test_a_loop_that_is_left_early_is_refused(chaos: Chaos, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    options = {"notes": str(tmp_path / "notes"), "stop_early": True}
    with pytest.raises(BadInput, match="to its end in every transaction") as refused:
        chaos.run(JOB, nodes=1, spares=0, shards=2, steps=10, options=options, twin=False)
    assert refused.value.field == "step.shards"
