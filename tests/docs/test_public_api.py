"""The public names: their list, the modules that an import of each loads, and their function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import chaoskit
from chaoskit import BadInput, Harness, launch
from chaoskit.interface import Trainer
from chaoskit.runtime.step.base_trainer import BaseTrainer
from chaoskit.runtime.step.sharded_trainer import ShardedTrainer
from chaoskit.runtime.step.trainer import ReplicatedTrainer
from faults import Kill

#: A name that is added or removed is a change for users: it belongs into the changelog.
NAMES = [
    "BadInput",
    "BatchScaling",
    "Chaos",
    "ChaoskitError",
    "CheckpointTier",
    "ElasticPolicy",
    "Harness",
    "HarnessError",
    "LaunchResult",
    "LogPatterns",
    "LogRule",
    "Outcome",
    "Preemption",
    "RankLost",
    "Record",
    "Recovery",
    "RequestReply",
    "Resize",
    "RunClient",
    "RunConfig",
    "Shard",
    "Trainer",
    "Transaction",
    "Verdict",
    "VerdictError",
    "WorldState",
    "__version__",
    "check_log_rules",
    "judge_directory",
    "launch",
    "read_outcomes",
]
#: These work on tensors, or hold a job.
WITH_TORCH = {"Preemption", "RankLost", "Resize", "Shard", "Transaction"}


def test_the_public_names_are_these() -> None:
    assert sorted(chaoskit.__all__) == sorted(NAMES) == sorted(dir(chaoskit))
    for name in NAMES:
        assert getattr(chaoskit, name) is not None


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Coordinator'"):
        chaoskit.Coordinator  # noqa: B018 -- the access is what fails


def test_names_that_do_not_need_torch_do_not_load_it() -> None:
    names = ", ".join(sorted(set(NAMES) - WITH_TORCH))
    code = f"import sys; from chaoskit import {names}; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_the_package_can_be_run() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "chaoskit", "--version"], capture_output=True, text=True, check=True
    )
    assert chaoskit.__version__ in ran.stdout


@pytest.mark.parametrize("trainer", [ReplicatedTrainer, ShardedTrainer])
def test_both_trainers_have_the_public_interface(trainer: type[BaseTrainer]) -> None:
    methods = {name for name in vars(Trainer) if not name.startswith("_")}
    assert methods > {"step", "register", "transaction", "mesh", "on_fault"}
    assert not [name for name in methods if not hasattr(trainer, name)]
    assert set(Trainer.__annotations__) == {"seed", "device", "disk"}


# -- what they do ----------------------------------------------------------------------------------

TINY = {"size": "tiny"}


@pytest.mark.costly
def test_an_experiment_outside_of_pytest(tmp_path: Path) -> None:
    with Harness(directory=tmp_path) as harness:
        outcome = harness.run(
            "gpt", nodes=2, steps=20, options=TINY, faults=[Kill(rank=1, at_step=5)]
        )
    outcome.assert_recovered(within_s=60.0)
    with pytest.raises(AssertionError, match="more than 0 s"):
        outcome.assert_recovered(within_s=0.0)
    for worse in ({"lost_steps": 1}, {"false_alarms": 1}):
        with pytest.raises(AssertionError):
            msgspec.structs.replace(outcome, **worse).assert_recovered(within_s=60.0)
    assert outcome.twin_losses is not None
    others = (
        {"twin_losses": [*outcome.twin_losses[:-1], 0.0]},
        {"twin_weights_digest": "other"},
        {"twin_losses": None},
    )
    for other in others:
        differs = msgspec.structs.replace(outcome, **other)
        with pytest.raises(AssertionError, match=r"loss of step 19|final weights|no twin"):
            differs.assert_recovered(within_s=60.0)
        differs.assert_recovered(within_s=60.0, bit_equal=False)
    (detected,) = outcome.records("detected")
    assert detected["cause"] == "exited"
    assert {record.event for record in outcome.records("detected", "commit")} == {
        "detected",
        "commit",
    }
    assert len(outcome.records()) > len(outcome.records("commit"))
    with pytest.raises(BadInput, match="write commit"):
        outcome.records("comit")


def test_a_substrate_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="use one of local, netns, docker") as refused:
        Harness("cloud", tmp_path)
    assert refused.value.field == "substrate"


@pytest.mark.costly
def test_a_training_is_launched_from_python(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = launch("gpt", nodes=1, spares=0, report=tmp_path / "run", options=TINY | {"steps": 3})
    assert (result.ok, result.steps) == (True, 3)
    assert (tmp_path / "run" / "journal").is_dir()
    assert capfd.readouterr() == ("", "")


MESH = """
def train(trainer, steps):
    globals()["sharded"](trainer)
    with trainer.transaction() as step:
        step.backward(0)

def sharded(trainer):
    trainer.mesh()
"""


@pytest.mark.costly
def test_a_mesh_in_a_replicated_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(MESH)
    with (
        pytest.raises(
            BadInput, match="in a function of the same file that it calls by name"
        ) as refused,
        Harness(directory=tmp_path) as harness,
    ):
        harness.run(str(tmp_path / "job.py"), nodes=1, spares=0, steps=1, twin=False)
    assert refused.value.field == "mesh"
