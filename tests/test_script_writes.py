"""Functions that a job gives to `trainer.after_update`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaoskit.errors import BadInput
from chaoskit.experiment.outcome import Outcome
from chaoskit.experiment.plan import plan_experiment
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Verdict
from faults import Kill

JOB = str(Path(__file__).parent / "jobs" / "averaging.py")
STEPS = 20
TRAINED = {"how", "first", "ranks"}  # options that say what is trained, not which rank ends


def run(
    chaos: Chaos, tmp_path: Path, *, most_lost: int = 0, most_detected: int = 0, sharded: bool = False, **plan: Any
) -> Outcome:
    """A run that must end with the bits of its twin, although ranks end themselves between two steps."""
    options = {"marks": str(tmp_path)} | plan.pop("options", {})
    settings = {"nodes": 3, "spares": 1, "steps": STEPS, "deadline_s": 90.0} | plan
    job = f"{JOB}:train_sharded" if sharded else JOB
    outcome = chaos.run(job, twin=False, check=False, options=options, max_lost_steps=most_lost, **settings)
    problems = [check for check in outcome.checks if check.verdict != Verdict.PASSED and check.name != "no false alarm"]
    assert not problems, outcome.directory
    assert not outcome.records("corrupt"), outcome.directory
    ended = sum(len(ranks) for ranks in options.get("fatal", {}).values()) + most_detected
    assert len(outcome.records("detected")) <= ended, outcome.directory
    same = {"nodes": settings["nodes"], "steps": len(outcome.steps)}
    unbroken = plan_experiment(job, options={name: options[name] for name in TRAINED & {*options}}, **same)
    twin = chaos.harness.twin(unbroken)
    assert [point.loss for point in outcome.steps] == twin.losses, outcome.directory
    assert outcome.weights_digest == twin.weights_digest, outcome.directory
    assert outcome.lost_steps <= most_lost, outcome.directory
    return outcome


@pytest.mark.parametrize("how", ["hook", "statistics"])
def test_changes_in_the_commit_survive_a_loss(chaos: Chaos, tmp_path: Path, how: str) -> None:
    run(chaos, tmp_path, options={"how": how, "fatal": {"8": [1]}, "place": "written"})


@pytest.mark.promise("at the end of the update, behind the schedulers, once for each committed step")
def test_plain_pytorch_changes_the_same(chaos: Chaos) -> None:
    options = {"how": "hook"}
    chaos.run(
        JOB, nodes=2, steps=10, twin=False, reference="required", options=options, faults=[Kill(rank=1, at_step=4)]
    )


def test_a_function_that_comes_too_late_is_refused(chaos: Chaos) -> None:
    with pytest.raises(BadInput, match="after_update='change': call it before the first transaction"):
        chaos.run(JOB, nodes=1, spares=0, steps=4, twin=False, check=False, options={"how": "late"})
