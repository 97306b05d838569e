"""Common features of training: each gives the same bits when the world shrinks and grows, or is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs.training import features
from support import ranks
from support.ranks import Line
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from chaoskit.config import RunConfig
from chaoskit.job import resolve_job
from chaoskit.journal import Journal
from chaoskit.process.progress_board import Board
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.group.regroup import Regrouper
from chaoskit.runtime.state.sampling import Sampler, fetch, seed_everything
from chaoskit.runtime.step.callbacks import Callbacks
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.hooks import Hooks
from chaoskit.runtime.worker.entries import Entries
from chaoskit.vocabulary import Phase
from faults import Kill

JOBS = "../../jobs/training/features.py"
SHARDS = 4
RUN: dict[str, Any] = {"nodes": 3, "spares": 0, "shards": SHARDS, "steps": 20, "deadline_s": 120.0}


class PlainTrainer:
    """Plain torch behind the calls of a trainer: one process, which adds the gradients of all
    shards in float32.

    Attributes:
        losses: the mean of each step over its shards.
    """

    def __init__(self, directory: Path) -> None:
        self.seed, self.step, self.world, self.disk = 0, 0, 1, directory / "disk"
        self.losses: list[float] = []

    def register(self, *, model: nn.Module, optimizer: Any, scheduler: Any = ()) -> None:
        self._parameters = list(model.parameters())
        self._optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self._schedulers = scheduler

    @contextmanager
    def transaction(self) -> Iterator[PlainTrainer]:
        self._gradients: list[list[Tensor | None]] = []
        self._loss = 0.0
        yield self
        for parameter, gradients in zip(
            self._parameters, zip(*self._gradients, strict=True), strict=True
        ):
            parameter.grad = _mean(gradients, parameter)
        for part in [*self._optimizers, *self._schedulers]:
            part.step()
        self.losses.append(self._loss / SHARDS)
        self.step += 1

    def shards(self, dataset: Any, *, batch_size: int) -> Iterator[Any]:
        sampler = Sampler(len(dataset), batch_size, SHARDS, self.seed)
        for shard in range(SHARDS):
            for parameter in self._parameters:
                parameter.grad = None
            seed_everything(self.seed, self.step, shard)
            yield SimpleNamespace(
                batch=fetch(dataset, sampler.samples(self.step, shard), torch.device("cpu"))
            )
            self._gradients.append([parameter.grad for parameter in self._parameters])

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self._loss += loss.item()


def _mean(gradients: tuple[Tensor | None, ...], parameter: Tensor) -> Tensor | None:
    """Return the mean gradient of the four shards, added in the order of ranks: pairs, then their
    sums.
    """
    if all(gradient is None for gradient in gradients):
        return None
    first, second, third, fourth = (
        torch.zeros_like(parameter) if gradient is None else gradient.float()
        for gradient in gradients
    )
    return (((first + second) + (third + fourth)) / SHARDS).to(parameter.dtype)


def plain_losses(job: str, directory: Path) -> list[float]:
    """Return the losses of the first steps of a job, trained by plain torch."""
    trainer = PlainTrainer(directory)
    getattr(features, job)(trainer, steps=RUN["steps"])
    return trainer.losses


def resized(chaos: Chaos, job: str, **plan: Any) -> Outcome:
    """Run a job on 3 ranks, then 2, then 3; every loss and every weight must be that of the
    unbroken run.
    """
    settings = RUN | {"until": {"world": 3}} | plan
    outcome = chaos.run(
        f"{JOBS}:{job}", faults=[Kill(rank=1, at_step=6, phase="backward")], **settings
    )
    outcome.assert_same_losses_as_twin()
    worlds = [point.world for point in outcome.steps]
    assert min(worlds) == 2
    assert worlds[-1] == 3
    return outcome


@pytest.mark.slow(job="optimizers")
@pytest.mark.promise(
    "reduced with the gradients: 8 bytes a channel; two copies of the statistics a shard",
    job="batchnorm",
)
@pytest.mark.promise("nothing; gradients are summed in float32", job=["autocast", "half"])
@pytest.mark.promise("gradients and losses add up; refused with `buckets` > 1", job="accumulation")
@pytest.mark.promise("tied weights, tied buffers | covered", job="tied")
@pytest.mark.promise("may thaw later, if registered before they were frozen", job="frozen")
@pytest.mark.promise(
    "from some shards: zeros there. From all: the optimizer skips them, as in plain training",
    job="experts",
)
@pytest.mark.promise("they step in this order, all of them every step", job="optimizers")
@pytest.mark.parametrize(
    "job",
    ["batchnorm", "autocast", "half", "accumulation", "tied", "frozen", "experts", "optimizers"],
)
def test_a_feature_survives_a_resize(chaos: Chaos, tmp_path: Path, job: str) -> None:
    """The bits are those of the unbroken run, also of steps with the rank that joined.

    Plain torch, with the same numbers, learns the same.
    """
    outcome = resized(chaos, job)
    if job != "batchnorm":  # plain torch has no mean over shards of the buffers
        assert outcome.losses[: RUN["steps"]] == pytest.approx(
            plain_losses(job, tmp_path), rel=1e-6
        )


@pytest.mark.parametrize(
    "plan",
    [{"buckets": 3, "transport": "tcp"}, {"reduction": "fast"}],
    ids=["overlapped, over TCP", "fast"],
)
def test_moving_buffers_travel_every_way(chaos: Chaos, plan: dict[str, Any]) -> None:
    """Buffers travel in several buckets, from a peer over TCP, and by plain all-reduce, which
    promises no bits.

    ``test_overlap.py`` shows that buckets travel while the backward pass runs.
    """
    outcome = chaos.run(
        f"{JOBS}:batchnorm", faults=[Kill(rank=2, at_step=6, phase="optimizer")], **RUN | plan
    )
    assert outcome.lost_steps == 0


@pytest.mark.slow
def test_a_compiled_model_survives_a_resize(chaos: Chaos) -> None:
    """``aot_eager`` traces forward and backward as ``inductor`` does, without the half minute of a
    C++ compiler.
    """
    resized(chaos, "compiled", options={"backend": "aot_eager"})


@pytest.mark.parametrize("reset", [False, True])
def test_a_compilation_in_the_middle_of_a_step_is_no_hang(chaos: Chaos, reset: bool) -> None:
    """The other ranks wait for a compilation, as long as it takes."""
    outcome = chaos.run(f"{JOBS}:compiling_late", twin=False, options={"reset": reset}, **RUN)
    assert outcome.false_alarms == 0
    assert outcome.recoveries == []


def enter_twice(line: Line, directory: Path) -> list[Phase]:
    """Enter a sharded train function twice; return the phases after a compilation in each entry's
    step.
    """
    shown: list[Phase] = []
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

    def train(trainer: Any) -> None:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=trainer.mesh())
        trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        scale = torch.compile(lambda tensor: tensor * len(shown), backend="eager")
        with trainer.transaction() as step:
            for shard in step.shards(torch.ones(8, 4), batch_size=4):
                scale(torch.ones(2))
                shown.append(board.phase)
                step.backward(model(shard.batch).sum())

    entries = Entries(worker, train)
    for _ in range(2):
        entries.rehearse(0)
    return shown


def test_a_step_goes_on_after_a_compilation_in_each_entry(tmp_path: Path) -> None:
    """The interrupted phase is shown again after a compilation, so that a hang is still detected
    there.
    """
    assert ranks.results(1, enter_twice, tmp_path) == [[Phase.FORWARD, Phase.FORWARD]]
