"""A loop body that writes into parameters is refused: usually before step 0, always before a
commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.ranks import Line
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812  # the usual name of this module

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.job import JobSpec, resolve_job
from chaoskit.journal import Journal
from chaoskit.process.progress_board import Board
from chaoskit.pytest_plugin import Chaos
from chaoskit.runtime.group.regroup import Regrouper
from chaoskit.runtime.reduction.checksums import bits_digest, ordered_sum
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.step.callbacks import Callbacks
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.hooks import Hooks
from chaoskit.runtime.step.shardwork import ShardWork
from chaoskit.runtime.worker.entries import Entries

TOKENS = torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(1))


class Work:
    """The shards of a world of one rank; the first shard that is computed is the rehearsal."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
        self._work = ShardWork(self.replica, RunConfig(job=JobSpec("job.py"), nodes=2))

    def compute(self, write: Callable[[], Any] = lambda: None) -> None:
        """Compute a shard with a loop body that calls ``write`` before its backward pass."""
        self._work.begin(0, overlap=False, launch=False)
        loss = self.model(TOKENS).square().mean()
        write()
        self._work.backward(loss)
        self._work.end(0)


class Body(nn.Module):
    """An embedding and a linear layer, which ``act`` changes in each forward pass."""

    def __init__(self, act: Callable[[Body], Any] = lambda model: None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.act = act
        self.calls = 0
        self.embedding = nn.Embedding(9, 4)
        self.linear = nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.act(self)
        result: Tensor = self.linear(self.embedding(tokens))
        return result


def refusal(model: nn.Module, shards: int = 1) -> BadInput:
    """Return the error of the last of ``shards`` loop bodies; all before it are computed."""
    work = Work(model)
    for _ in range(shards - 1):
        work.compute()
    with pytest.raises(BadInput) as caught:
        work.compute()
    assert caught.value.field == "model"
    return caught.value


# -- refused in the rehearsal ----------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_max_norm_is_named(kind: Any, limit: float) -> None:
    """The module is named even if no row is too long yet, because training makes rows longer."""
    model = nn.Sequential(kind(9, 4, max_norm=limit), nn.Linear(4, 1))
    error = refusal(model)
    assert error.value == "0.weight"
    assert f"module 0 ({kind.__name__}) without max_norm" in error.remedy
    assert "torch.renorm" in error.remedy


def test_of_a_tied_weight_the_module_that_writes_is_named() -> None:
    """The module that writes is named, although the weight has the name of the layer registered
    first.
    """
    model = nn.ModuleDict({"head": nn.Linear(4, 9), "tokens": nn.Embedding(9, 4, max_norm=1.0)})
    model["tokens"].weight = model["head"].weight
    model.forward = lambda tokens: model["head"](model["tokens"](tokens))  # type: ignore[method-assign]
    error = refusal(model)
    assert error.value == "head.weight"
    assert "module tokens (Embedding) without max_norm" in error.remedy


@pytest.mark.parametrize(
    "act",
    [
        lambda model: model.linear.weight.clamp_(-0.1, 0.1),
        lambda model: model.linear.weight.data.clamp_(-0.1, 0.1),
        lambda model: model.linear.weight.detach().numpy().fill(0.5),
        lambda model: setattr(model.linear.weight, "data", model.linear.weight * 0.5),
        lambda model: setattr(model.linear.weight, "data", model.linear.weight.clone()),
        lambda model: model.linear.weight.copy_(model.linear.weight.flip(1)),
        lambda model: model.linear.weight.data.copy_(model.linear.weight.flip(1)),
        lambda model: nn.init.normal_(model.linear.weight),
        lambda model: model.linear.load_state_dict(model.linear.state_dict()),
    ],
    ids=[
        "clamp",
        "data",
        "numpy",
        "replaced_data",
        "same_data",
        "order",
        "order_data",
        "init",
        "load",
    ],
)
def test_every_way_to_write_is_found(act: Callable[[Body], Any]) -> None:
    error = refusal(Body(act))
    assert error.value == "linear.weight"
    assert "module linear (Linear)" in error.remedy


def test_a_frozen_teacher_that_the_forward_pass_averages_is_refused() -> None:
    """Parameters that no optimizer owns, as of a momentum encoder, must not be averaged in the
    forward pass.
    """

    def follow(model: Body) -> None:
        for slow, fast in zip(model.teacher.parameters(), model.linear.parameters(), strict=True):
            slow.data = slow.data * 0.99 + fast.data * 0.01

    model = Body(follow)
    model.teacher = nn.Linear(4, 1).requires_grad_(False)
    assert refusal(model).value == "teacher.weight"


def test_a_write_beside_the_forward_pass_is_refused() -> None:
    """The loop body must not clip the weights itself, as for a Wasserstein critic."""
    model = Body()
    with pytest.raises(BadInput) as caught:
        Work(model).compute(lambda: model.linear.bias.data.clamp_(-0.01, 0.01))
    assert caught.value.value == "linear.bias"


def test_parameters_that_come_go_or_are_replaced_are_refused() -> None:
    def late(model: Body) -> None:
        if not hasattr(model, "late"):
            model.late = nn.Linear(4, 1)

    for act, name, remedy in (
        (late, "late.bias", "before register"),
        (lambda model: setattr(model.linear, "bias", None), "linear.bias", "before register"),
        (
            lambda model: setattr(model.linear, "bias", nn.Parameter(torch.zeros(1))),
            "linear.bias",
            "that were registered",
        ),
    ):
        error = refusal(Body(act))
        assert error.value == name
        assert remedy in error.remedy


# -- refused later ---------------------------------------------------------------------------------


def test_a_write_that_begins_later_is_refused_before_its_step_commits() -> None:
    def late(model: Body) -> None:
        if model.calls > 2:
            model.linear.weight.clamp_(-0.1, 0.1)

    assert refusal(Body(late), shards=3).value == "linear.weight"


def test_a_write_in_training_mode_alone_is_refused() -> None:
    model = Body(lambda model: model.training and model.linear.weight.mul_(0.5))
    model.eval()
    work = Work(model)
    work.compute()
    model.train()
    with pytest.raises(BadInput, match=r"linear\.weight"):
        work.compute()


# -- not refused -----------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers that write into buffers, or compute weights, in their forward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(9, 4)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(3)
        self.new_spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.new_weight = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.old_weight = nn.utils.weight_norm(nn.Linear(4, 4))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.recurrent.flatten_parameters()
        values, _ = self.recurrent(self.embedding(tokens))
        values = self.norm(values)
        for layer in (self.new_spectral, self.old_spectral, self.new_weight, self.old_weight):
            values = layer(values)
        limited = torch.renorm(self.embedding.weight, 2, 0, 1.0)
        values = self.frozen(self.orthogonal(values)) + F.embedding(tokens, limited)
        result: Tensor = self.head(values)
        return result


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_buffers_and_computed_weights_are_no_writes() -> None:
    work = Work(Layers())
    for _ in range(3):
        work.compute()
    assert "norm.running_mean" in work.replica.buffers.committed


def test_the_optimizer_and_a_restore_between_shards_are_no_writes() -> None:
    work = Work(Body())
    work.compute()
    for _ in range(2):
        work.compute()
        with work.replica.update():
            work.replica.advance()
        work.replica.load_scalars(work.replica.scalars(), work.replica.step)


@pytest.mark.parametrize(
    "read", [bits_digest, lambda values: ordered_sum(values.view(torch.uint8))]
)
@pytest.mark.parametrize("size", [1, 7, 64, 2**21 + 3])
def test_a_digest_sees_bits_and_their_order(read: Callable[[Tensor], Any], size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(2))
    before = read(values)
    assert before == read(values.clone())
    if size > 1:
        assert before != read(values.flip(0))
        values[-1].neg_()
        assert before != read(values)


# -- sharded jobs ----------------------------------------------------------------------------------


def rehearse(line: Line, directory: Path, kinds: Sequence[str]) -> list[str]:
    """Return the error of the rehearsal of each sharded job; empty if it has none."""
    journal, board, unused = Journal(directory, "node0.0"), Board.create(), Any
    worker = WorkerContext(
        "node0.0",
        RunConfig(job=resolve_job("fsdp"), nodes=1),
        journal,
        board,
        hooks=Hooks("node0.0", None, board, journal),
        regrouper=Regrouper("node0.0", journal, unused, unused, unused, unused),
        callbacks=Callbacks(journal, board),
        send=lambda message: None,
        serve_state=unused,
        report_ready=lambda endpoint: None,
        token="",
        host="127.0.0.1",
        disk=directory,
    )

    def write(kind: str, model: Body) -> None:
        if kind == "gathered":
            model.linear.bias.mul_(0.5)
        if kind == "whole":
            model.scale.mul_(0.5)

    def train(kind: str, trainer: Any) -> None:
        model = Body(partial(write, kind))
        model.scale = nn.Parameter(torch.ones(1))
        model.norm = nn.BatchNorm1d(3)
        if kind == "max_norm":
            model.embedding = nn.Embedding(9, 4, max_norm=1e6)
        mesh = trainer.mesh()
        fully_shard(model, mesh=mesh, ignored_params={model.scale})
        trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        with trainer.transaction() as step:
            for shard in step.shards(TOKENS, batch_size=4):
                step.backward((model.scale * model.norm(model(shard.batch))).sum())
                if kind == "own":
                    model.linear.weight.to_local().data.mul_(0.5)

    errors = []
    for kind in kinds:
        try:
            Entries(worker, partial(train, kind)).rehearse(0)
        except BadInput as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


def test_sharded_jobs_are_rehearsed_alike(tmp_path: Path) -> None:
    """Writes into parameters of a sharded job are refused.

    A write into a parameter gathered by FSDP would be lost. A write into the part of each rank
    would make ranks differ.
    """
    words = {
        "none": "",
        "max_norm": "model='embedding.weight': build module embedding (Embedding) without max_norm",
        "gathered": "model='linear.bias': compute with a changed copy",
        "whole": "model='scale': compute with a changed copy",
        "own": "model='linear.weight': compute with a changed copy",
    }
    (errors,) = ranks.results(1, rehearse, tmp_path, [*words])
    for error, beginning in zip(errors, words.values(), strict=True):
        assert error.startswith(beginning)
        assert bool(error) == bool(beginning)


# -- runs ------------------------------------------------------------------------------------------

JOB = "../../jobs/training/writing.py"


def test_a_job_with_max_norm_is_refused_before_its_first_step(chaos: Chaos) -> None:
    """The message names parameter, module and remedy."""
    with pytest.raises(BadInput, match="without max_norm") as refused:
        chaos.run(f"{JOB}:limited", nodes=2, spares=0, steps=10, twin=False)
    assert str(refused.value).startswith(
        "model='embedding.weight': build module embedding (Embedding)"
    )


def test_a_late_write_into_a_whole_parameter_of_a_sharded_job_is_refused(chaos: Chaos) -> None:
    """Ranks of a sharded job compare no such parameter: the weights would differ to the end."""
    with pytest.raises(BadInput, match=r"model='scale': .* of the model \(FSDPClipped\)"):
        chaos.run(f"{JOB}:sharded", nodes=2, spares=0, steps=10, twin=False)
