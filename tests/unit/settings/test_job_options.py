"""Options that a job's train function does not take, or lacks: the message names each remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chaoskit import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.job import resolve_job

JOB = """
def {signature}:
    while trainer.step < 40:
        with trainer.transaction() as step:
            step.backward(loss())
"""


@pytest.mark.parametrize(
    ("signature", "plan", "first_way", "other_way"),
    [
        (
            "train(trainer)",
            {"steps": 40},
            "steps=40: train takes no options: leave steps out, or give train the parameter",
            "as in def train(trainer, steps=40)",
        ),
        (
            "fit(trainer, lr=0.1)",
            {"steps": 40},
            "steps=40: fit takes lr: leave steps out, or give fit the parameter",
            "as in def fit(trainer, steps=40)",
        ),
        (
            "train(trainer, steps=10)",
            {"steps": 40, "until": {"world": 3}},
            "until={'world': 3}: train takes steps: leave until out, or give train the parameter",
            "as in def train(trainer, until={'world': 3})",
        ),
        (
            "train(trainer, *, lr=0.1, steps)",
            {"options": {"size": "x" * 99, "steps": 3}},
            f"options.size='{'x' * 99}': train takes lr, steps: leave size out, or give train the parameter",
            "as in def train(trainer, size=...)",
        ),
        (
            "train(trainer, steps)",
            {},
            "options.steps=None: give this option a value (--set steps=VALUE; in Python options={'steps': VALUE})",
            "or a default in def train(...)",
        ),
    ],
)
def test_a_job_and_its_options_that_do_not_fit(
    tmp_path: Path, signature: str, plan: dict[str, Any], first_way: str, other_way: str
) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB.format(signature=signature))
    with pytest.raises(BadInput, match=rf"^{re.escape(f'{first_way}, {other_way}')}$"):
        plan_experiment(f"{file}:{signature.partition('(')[0]}", **plan)


def test_a_job_of_chaoskit_cannot_be_given_a_parameter() -> None:
    with pytest.raises(
        BadInput, match=r"^options\.nosuch=1: train takes [\w, ]+: leave nosuch out$"
    ):
        resolve_job("gpt", {"nosuch": 1})


@pytest.mark.parametrize("name", ["trainer", "no-name"])
def test_a_parameter_that_cannot_be_is_not_proposed(tmp_path: Path, name: str) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB.format(signature="train(trainer)"))
    with pytest.raises(BadInput, match=rf"train takes no options: leave {name} out$"):
        resolve_job(str(file), {name: 1})


def test_a_job_with_any_options_takes_all(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB.format(signature="train(trainer, **options)"))
    assert plan_experiment(str(file), steps=40).steps == 40
