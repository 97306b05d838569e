"""The reference: plain PyTorch shows errors that the runtime makes in every run, or reports why it
cannot.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit import BadInput, judge_directory
from chaoskit.data.positions import Positions
from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.plan.planfile import load, save
from chaoskit.experiment.reference.plain_process import ask
from chaoskit.experiment.reference.reference import (
    NAME,
    STATE,
    Reference,
    check_reference,
    reference_of,
)
from chaoskit.experiment.twin.twin import Twin
from chaoskit.job import JobSpec
from chaoskit.journal import read_events
from chaoskit.plain import PlainAnswer, Request, dealt_samples, sum_in_halves
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import Check, Outcome
from chaoskit.runtime.reduction.tree import Subtree, merge_order
from chaoskit.substrate.undo import UndoLog
from chaoskit.suites.canary.journals import Journals
from chaoskit.vocabulary import Event, Verdict
from faults import BadBatch, Kill

JOB = str(Path(__file__).parents[2] / "jobs" / "wrong" / "wrong_everywhere.py")
TINY: dict[str, Any] = {"size": "tiny"}


def of(outcome: Outcome, name: str) -> Check:
    """Return the check with this name."""
    return next(check for check in outcome.checks if check.name == name)


@pytest.mark.parametrize(
    "how", ["scales_wrongly", "drops_a_shard", "clips_twice", "seeds_by_step_only"]
)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_mistake_in_every_run_is_seen(chaos: Chaos, how: str, reduction: str) -> None:
    """The reference shows a mistake that the twin makes, too."""
    plan = {"nodes": 2, "shards": 3, "spares": 0, "reduction": reduction, "options": {"how": how}}
    outcome = chaos.run(JOB, steps=10, reference="required", check=False, **plan)
    assert of(outcome, "losses equal the twin's").verdict == Verdict.PASSED
    assert of(outcome, NAME).verdict == Verdict.FAILED
    assert outcome.verdict == Verdict.FAILED
    assert [reason for reason in outcome.reasons if reason.startswith(NAME)]


def test_a_sampler_that_is_wrong_in_every_run_is_seen(chaos: Chaos) -> None:
    """A wrong sampler violates a property.

    Neither the twin nor the reference can show it: plain PyTorch is given the samples that journals
    name.
    """
    plan = {"nodes": 2, "shards": 3, "spares": 0, "options": {"how": "deals_half_twice"}}
    outcome = chaos.run(JOB, steps=10, reference="required", check=False, **plan)
    assert outcome.verdict == Verdict.FAILED
    assert of(outcome, "every sample exactly once").verdict == Verdict.PASSED
    assert of(outcome, "property 39S: epochs are permutations").verdict == Verdict.FAILED


@pytest.mark.parametrize(
    ("job", "plan", "how"),
    [
        (JOB, {"nodes": 2, "shards": 3}, "8 losses of plain PyTorch, bit for bit"),
        (
            "gpt",
            {"nodes": 3, "shards": 4, "reduction": "fast", "options": TINY},
            "within what another order",
        ),
        ("fsdp", {"nodes": 2, "options": TINY}, "within what another order"),
    ],
    ids=["exact", "fast", "sharded"],
)
def test_a_faithful_run_equals_plain_pytorch(
    chaos: Chaos, job: str, plan: dict[str, Any], how: str
) -> None:
    outcome = chaos.run(
        job, steps=10, faults=[Kill(rank=1, at_step=4)], reference="required", twin=False, **plan
    )
    assert how in of(outcome, NAME).detail
    assert of(outcome, STATE).verdict == Verdict.PASSED
    assert (Path(outcome.directory) / "reference.json").is_file()


@pytest.mark.parametrize("at_step", [7, 8])
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", {"options": TINY}),
        ("gpt", {"options": TINY, "reduction": "fast", "min_world": 1, "spares": 0}),
        ("fsdp", {"options": TINY}),
    ],
    ids=["exact", "fast", "sharded"],
)
def test_a_rank_that_is_lost_where_states_are_told(
    chaos: Chaos, job: str, plan: dict[str, Any], at_step: int
) -> None:
    """The ranks of the next generation describe the state of the step again, and their description
    counts.
    """
    outcome = chaos.run(
        job,
        steps=11,
        nodes=2,
        faults=[Kill(rank=1, at_step=at_step)],
        reference="required",
        twin=False,
        **plan,
    )
    assert of(outcome, STATE).verdict == Verdict.PASSED
    records = [
        record
        for record in read_events(Path(outcome.directory) / "journal", Event.STATE)
        if record["step"] == 8
    ]
    assert records
    if job == "fsdp" and at_step == 8:  # all ranks of this job begin again
        assert len({record["generation"] for record in records}) == 2


def test_a_state_that_no_rank_told_is_unknown(chaos: Chaos, tmp_path: Path) -> None:
    """The verdict is unknown if no rank described its state, or the reference has lost its own."""
    outcome = chaos.run(
        JOB, steps=10, nodes=2, shards=3, spares=0, reference="required", twin=False
    )
    silent = shutil.copytree(outcome.directory, tmp_path / "silent")
    journals = Journals(silent)
    journals.drop(lambda _, record: record["event"] == Event.STATE and record["step"] == 8)
    journals.write()
    assert "no rank described its state after 8 steps" in of(judge_directory(silent), STATE).detail
    assert judge_directory(silent).verdict == Verdict.UNKNOWN
    cut = shutil.copytree(outcome.directory, tmp_path / "cut")
    reference = msgspec.json.decode((cut / "reference.json").read_bytes())
    (cut / "reference.json").write_bytes(msgspec.json.encode(reference | {"state": {}}))
    assert of(judge_directory(cut), STATE).verdict == Verdict.UNKNOWN
    (cut / "reference.json").write_bytes(msgspec.json.encode(reference | {"trained": "0" * 32}))
    assert "reference.json: it belongs to another run" in judge_directory(cut).reasons[0]


def test_a_step_that_was_skipped_ends_what_is_compared(chaos: Chaos) -> None:
    """Plain PyTorch takes the steps before a skipped one, and no state is compared."""
    plan = {"steps": 10, "nodes": 2, "options": TINY, "reference": "required", "twin": False}
    outcome = chaos.run("gpt", faults=[BadBatch(at_step=4)], **plan)
    assert of(outcome, NAME).detail.startswith("4 losses")
    assert "step 4 was skipped for a fault" in outcome.not_applied[STATE]


@pytest.mark.parametrize(
    ("target", "options", "reason"),
    [
        (JOB, {"norm": True}, "the forward pass changes buffers of the model"),
        (f"{JOB}:imports_the_runtime", {}, "the job imports chaoskit.runtime"),
    ],
)
def test_what_plain_pytorch_cannot_show_is_said(
    chaos: Chaos, target: str, options: dict[str, Any], reason: str, tmp_path: Path, undo: UndoLog
) -> None:
    plan = {
        "steps": 4,
        "nodes": 1,
        "spares": 0,
        "options": options,
        "reference": "on",
        **chaos.limits,
    }
    experiment = plan_experiment(target, **plan)
    run = chaos.harness._execute(experiment, None, 0)
    reference = reference_of(experiment, History(run.records), tmp_path, undo)
    outcome = judge(run, None, "local", reference)
    assert reason in outcome.not_applied[NAME]
    assert NAME not in [check.name for check in outcome.checks]
    required = dataclasses.replace(
        run, experiment=dataclasses.replace(experiment, reference="required")
    )
    assert of(judge(required, None, "local", reference), NAME).verdict == Verdict.UNKNOWN


MIXED = """
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512

def train(trainer, *, steps):
    model = nn.Linear(4, 1)
    fully_shard(model, mesh=trainer.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=4):
                step.backward(model(shard.batch).square().mean())
"""


def test_a_model_that_is_sharded_in_another_type_is_not_known(
    tmp_path: Path, undo: UndoLog
) -> None:
    """A model with mixed precision has no reference, which would compute in the type of the
    weights.
    """
    job = tmp_path / "mixed.py"
    job.write_text(MIXED)
    request = Request(JobSpec(str(job), options={"steps": 2}), 1, [[[0, 1], [2, 3]]] * 2)
    answer = ask(request, tmp_path, "reference", undo)
    assert answer.losses == []
    assert answer.reason == "fully_shard has a mixed precision, of which one process knows nothing"


ONE_SEED = """
import torch

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512

def train(trainer, *, steps):
    if trainer.seed:
        raise ValueError("there is one seed only")
    model = torch.nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=6):
                step.backward(model(shard.batch).square().mean())
"""


BREAKS = """
import os
import torch

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512

def train(trainer, *, steps):
    if trainer.worker == "reference":
        os._exit(3)
    model = torch.nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=6):
                step.backward(model(shard.batch).square().mean())
"""


def test_where_plain_pytorch_breaks_nothing_is_known(chaos: Chaos, tmp_path: Path) -> None:
    """The verdict is unknown if plain PyTorch breaks: there is neither a reference nor a floor."""
    job = tmp_path / "breaks.py"
    job.write_text(BREAKS)
    plan = {"steps": 4, "nodes": 2, "spares": 0, "shards": 3, "reduction": "fast", "check": False}
    assert "reference.json" in chaos.run(str(job), reference="on", twin=False, **plan).reasons[0]
    outcome = chaos.run(str(job), **plan)
    assert outcome.verdict == Verdict.UNKNOWN
    assert "floor.json" in outcome.reasons[0]


SLOW = """
import pathlib
import time
import torch

def train(trainer, *, steps, hurry):
    while not pathlib.Path(hurry).exists():
        pass
    model = torch.nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(torch.ones(8, 4), batch_size=4):
                step.backward(model(shard.batch).square().mean())
"""


def test_an_answer_that_came_too_late_is_asked_for_again(
    tmp_path: Path, undo: UndoLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late answer is not kept: a busy machine would turn the reference off until the code
    changes.
    """
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / "cache")
    )  # an earlier session may have had a job at the same path
    job, hurry = tmp_path / "slow.py", tmp_path / "hurry"
    job.write_text(SLOW)
    request = Request(
        JobSpec(str(job), options={"steps": 2, "hurry": str(hurry)}), 1, [[[0, 1], [2, 3]]] * 2
    )
    assert "took longer than 5 s" in ask(request, tmp_path, "reference", undo, timeout_s=5.0).reason
    hurry.touch()
    assert len(ask(request, tmp_path, "reference", undo).losses) == 2


def test_losses_whose_rounding_is_not_known_are_not_compared(chaos: Chaos, tmp_path: Path) -> None:
    """A job that trains with its own seed alone has no known rounding.

    Two orders of a sum are compared under other seeds.
    """
    job = tmp_path / "one_seed.py"
    job.write_text(ONE_SEED)
    outcome = chaos.run(
        str(job), steps=4, nodes=2, spares=0, shards=3, reduction="fast", reference="on", seed=0
    )
    assert "there is one seed only" in outcome.not_applied[NAME]


def test_a_run_that_is_compared_with_itself_is_an_error(chaos: Chaos) -> None:
    experiment = plan_experiment(JOB, steps=4, nodes=1, spares=0, **chaos.limits)
    run = chaos.harness._execute(experiment, None, 0)
    twin = Twin.of(run)
    assert run.run_id
    outcome = judge(run, twin, "local")
    assert outcome.verdict == Verdict.ERROR
    assert "the twin is another run" in outcome.reasons[0]
    other = msgspec.structs.replace(twin, run_id="another")
    assert judge(run, other, "local").verdict == Verdict.PASSED
    same = Reference(run_id=run.run_id, losses=twin.losses)  # type: ignore[arg-type]
    assert judge(run, other, "local", same).verdict == Verdict.ERROR


def test_losses_are_compared_step_by_step() -> None:
    exact = Reference(losses=[1.0, 2.0], reason="")
    assert check_reference([1.0, 2.0, 3.0], exact).verdict == Verdict.PASSED
    assert (
        check_reference([1.0, 2.0000001], exact).detail
        == "step 1: 2.0000001 instead of 2.0 in plain PyTorch"
    )
    assert check_reference([1.0, None], exact).verdict == Verdict.FAILED
    rounded = Reference(losses=[1.0, 2.0], allowed=[1e-6, 1e-6])
    assert check_reference([1.0, 2.0000001], rounded).verdict == Verdict.PASSED
    assert check_reference([1.0, 2.00001], rounded).verdict == Verdict.FAILED
    assert check_reference([1.0, float("nan")], rounded).verdict == Verdict.FAILED


class _Term:
    """A term that writes its sums out as text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __add__(self, other: _Term) -> _Term:
        return _Term(f"({self}+{other})")

    def __str__(self) -> str:
        return self._text


@settings(deadline=None)
@given(st.integers(1, 70))
def test_both_statements_of_the_order_of_a_sum_agree(count: int) -> None:
    """The runtime adds subtrees as they arrive, and the reference splits in halves: both orders
    agree.
    """
    held = {Subtree(shard, shard + 1): f"{shard}" for shard in range(count)}
    for merge in merge_order(held, count):
        held[merge.parent] = f"({held.pop(merge.left)}+{held.pop(merge.right)})"

    assert (
        str(sum_in_halves([_Term(f"{shard}") for shard in range(count)])) == held[Subtree(0, count)]
    )


@settings(deadline=None)
@given(
    size=st.integers(1, 3000),
    seed=st.integers(0, 2**62),
    first=st.integers(0, 10_000),
    count=st.integers(0, 40),
)
def test_both_statements_of_the_order_of_samples_agree(
    size: int, seed: int, first: int, count: int
) -> None:
    """The runtime permutes arrays of NumPy, and the reference single numbers: both orders agree."""
    positions = [
        int(Positions(size, 1, seed).stretch(place, 1)[0]) for place in range(first, first + count)
    ]
    assert dealt_samples(size, seed, first, count) == positions


def test_the_wish_is_part_of_a_plan(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="use one of off, on, required"):
        plan_experiment("gpt", steps=4, nodes=1, reference="perhaps")  # type: ignore[arg-type]
    experiment = plan_experiment("gpt", steps=4, nodes=1, options=TINY, reference="required")
    assert load(save(experiment, tmp_path / "plan.json")) == experiment


def test_an_answer_is_a_file_that_a_person_can_read() -> None:
    answer = PlainAnswer("7f", [1.5, None], {"model/w": [0.0, 2.0]}, [0.0], {"model/w": 1e-7}, 1)
    assert msgspec.json.encode(answer) == (
        b'{"run_id":"7f","losses":[1.5,null],"state":{"model/w":[0.0,2.0]},"spread":[0.0],"floor":{"model/w":1e-7},'
        b'"orders":1,"is_steady":false,"rates":[],"misdealt":"","reason":""}'
    )
