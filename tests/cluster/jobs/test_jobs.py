"""The larger reference jobs: a residual network with BatchNorm, and transformers' Llama."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment, require_divisible
from chaoskit.fixtures.jobs import digits as digits_file
from chaoskit.fixtures.jobs.digits import digits
from chaoskit.job import JobSpec, resolve_job, stated_batches
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.worker.process import load_job
from faults import Fault, Hang, Kill, NaN


def broken(chaos: Chaos, job: str, faults: list[Fault], **plan: Any) -> Outcome:
    """Run a job with faults; no step may be lost, and the losses must be those of the twin."""
    settings: dict[str, Any] = {"nodes": 2, "spares": 1, "shards": 4, "deadline_s": 180.0}
    outcome = chaos.run(job, faults=faults, **settings | plan)
    assert outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()
    return outcome


@pytest.mark.slow
@pytest.mark.promise("trains a residual network with BatchNorm on scikit-learn's digits")
def test_resnet_learns_whatever_happens(chaos: Chaos) -> None:
    """Running statistics survive a kill and a NaN bit for bit, and the accuracy rises."""
    faults: list[Fault] = [
        Kill(rank=1, at_step=9, phase="backward"),
        NaN(rank=0, at_step=21, parameter="head.weight"),
    ]
    outcome = broken(chaos, "resnet", faults, steps=60, options={"evaluate_every": 15})
    logs = "\n".join(path.read_text() for path in Path(outcome.directory, "log").glob("*.log"))
    accuracy = dict(re.findall(r"accuracy after (\d+) steps: ([\d.]+)", logs))
    assert {"15", "60"} <= set(accuracy)
    assert float(accuracy["60"]) > 0.9
    assert float(accuracy["60"]) > float(accuracy["15"])


def test_digits_are_all_there_and_held_out_ones_apart() -> None:
    train, test = digits(held_out=False), digits(held_out=True)
    assert (len(train), len(test)) == (1437, 360)
    images, labels = train.tensors
    assert images.shape[1:] == (1, 8, 8)
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert set(labels.tolist()) == set(range(10))


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (Kill(rank=0, at_step=7, phase="reduce"), {"autocast": True, "tied": True, "dropout": 0.1}),
        (Hang(rank=1, at_step=7, phase="backward", how="spin"), {"freeze": 1}),
    ],
    ids=["autocast, tied, dropout", "frozen"],
)
def test_llama_is_the_same_run_whatever_happens(
    chaos: Chaos, fault: Fault, options: dict[str, Any]
) -> None:
    """Import and build, which take seconds, are no hang; a pause of a few steps is one."""
    outcome = broken(chaos, "llama", [fault], steps=20, options=options)
    losses = [point.loss for point in outcome.steps if point.loss is not None]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.2


def test_tying_and_freezing_do_what_they_say() -> None:
    from chaoskit.fixtures.jobs import llama  # importing transformers takes seconds

    shape = llama.SIZES["tiny"]
    torch.manual_seed(0)
    tied, apart = (
        llama.build(shape, tied=True, dropout=0.0),
        llama.build(shape, tied=False, dropout=0.0),
    )
    assert (
        sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in tied.parameters())
        == 256 * 48
    )
    llama._freeze(apart, 1)
    still = {name for name, weight in apart.named_parameters() if not weight.requires_grad}
    assert "model.embed_tokens.weight" in still
    assert any(name.startswith("model.layers.0.") for name in still)
    assert not any(name.startswith("model.layers.1.") for name in still)


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from chaoskit.fixtures.jobs import llama  # while the package is installed

    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    train = load_job(JobSpec(llama.__file__))
    with pytest.raises(BadInput, match=r"pip install 'chaoskit\[jobs\]'"):
        sys.modules[train.__module__].build(llama.SIZES["tiny"], tied=False, dropout=0.0)
    monkeypatch.setattr(digits_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'chaoskit\[jobs\]'"):
        digits(held_out=False)


@pytest.mark.parametrize(
    ("job", "options", "field"),
    [
        ("resnet", {"size": "huge"}, "size"),
        ("resnet", {"evaluate_every": 0}, "evaluate_every"),
        ("llama", {"size": "huge"}, "size"),
        ("llama", {"freeze": 2}, "freeze"),
    ],
)
def test_bad_options_are_refused(job: str, options: dict[str, Any], field: str) -> None:
    train = load_job(resolve_job(job, options))
    with pytest.raises(BadInput) as caught:
        train(None, **options)
    assert caught.value.field == field


JOB = """
BATCH = 12

def train(trainer, steps=3, batch_size=8, wide=False):
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size={batch}):
                step.backward(loss(shard.batch))
"""


@pytest.mark.parametrize(
    ("batch", "options", "stated"),
    [
        ("6", {}, [6]),
        ("batch_size", {}, [8]),
        ("batch_size", {"batch_size": 10}, [10]),
        ("BATCH", {}, [12]),
        ("shape.batch_size", {"batch_size": 10}, []),
        ("shape.batch_size", {}, []),
        ("2 * BATCH", {}, []),
        ("steps", {}, [3]),
        ("other", {}, []),
        ("wide", {}, []),
    ],
)
def test_batches_that_the_source_of_a_job_states(
    tmp_path: Path, batch: str, options: dict[str, Any], stated: list[int]
) -> None:
    (tmp_path / "train.py").write_text(JOB.format(batch=batch))
    assert stated_batches(JobSpec(str(tmp_path / "train.py"), options=options)) == stated


@pytest.mark.parametrize(
    "source",
    [
        "B = 6\nB *= 2\ndef train(trainer): loop(trainer, 8)\ndef loop(trainer): step.shards(x, batch_size=B)",
        "B = 6\nif DEBUG:\n    B = 8\ndef train(trainer): step.shards(x, batch_size=B)",
        "B = 6\ndef train(trainer): loop(trainer, 8)\ndef loop(trainer, B): step.shards(x, batch_size=B)",
    ],
)
def test_a_batch_that_is_known_at_run_time_only_is_not_guessed(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert stated_batches(JobSpec(str(tmp_path / "train.py"))) == []


@pytest.mark.parametrize(
    ("job", "plan", "told"),
    [
        ("gpt", {"nodes": 3}, "batch_size=8: use a multiple of the number of shards, 3"),
        ("gpt", {"nodes": 3, "options": {"batch": 9}}, ""),
        (
            "gpt",
            {"nodes": 2, "options": {"batch": 3}},
            "batch_size=3: use a multiple of the number of shards, 2",
        ),
        (
            "gpt",
            {"nodes": 2, "shards": 3, "options": {"size": "tiny"}},
            "batch_size=8: use a multiple",
        ),
        ("paced", {"nodes": 2, "options": {"batch_size": 7}}, "batch_size=7: use a multiple"),
        ("paced", {"nodes": 2, "options": {"batch_size": 0}}, "batch_size=0: use a multiple"),
        ("paced", {"nodes": 2}, ""),
    ],
)
def test_a_batch_that_shards_cannot_share_is_refused_before_anything_starts(
    job: str, plan: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadInput) if told else contextlib.nullcontext() as refused:
        require_divisible(plan_experiment(job, steps=5, **plan).config)
    assert told in (str(refused.value) if refused is not None else "")
