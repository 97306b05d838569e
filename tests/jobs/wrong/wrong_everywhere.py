"""A job with the same mistake of its runtime in every run, the twin included: only plain PyTorch
shows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
BATCH = 24


def none(trainer: Any) -> None:
    """Make no mistake."""


def scales_wrongly(trainer: Any) -> None:
    """Scale gradients as those of a sum over one shard less."""
    _after_backward(trainer, lambda shard, gradient: gradient.mul_(1.5))


def drops_a_shard(trainer: Any) -> None:
    """Leave shard 1 out of the sum."""
    _after_backward(trainer, lambda shard, gradient: gradient.mul_(float(shard != 1)))


def _after_backward(trainer: Any, change: Any) -> None:
    work = trainer._work
    begin, backward = work.begin, work.backward
    under_way = [0]

    def note(shard: int, **more: Any) -> None:
        under_way[0] = shard
        begin(shard, **more)

    def wrong(loss: Any) -> None:
        backward(loss)
        for parameter in trainer.replica.parameters:
            change(under_way[0], parameter.grad)

    work.begin, work.backward = note, wrong


def clips_twice(trainer: Any) -> None:
    """Clip gradients to half of the norm that the job asks for."""
    trainer._committer._clip_norm /= 2


def seeds_by_step_only(trainer: Any) -> None:
    """Draw the same numbers in all shards of a step."""
    from chaoskit.runtime.step import trainer as module

    seed_everything = module.seed_everything
    module.seed_everything = lambda seed, step, *_: seed_everything(seed, step)


def deals_half_twice(trainer: Any) -> None:
    """Deal one of each two samples twice, and the other never."""
    from chaoskit.runtime.state.sampling import Sampler

    samples = Sampler.samples
    Sampler.samples = lambda self, *where: [sample & ~1 for sample in samples(self, *where)]


def ends_with_nan(trainer: Any) -> None:
    """Set a weight to NaN after the last step, when nothing is computed from it any more."""
    _at_the_end(
        trainer, lambda replica: replica.parameters[0].data.view(-1)[:1].fill_(float("nan"))
    )


def forgets_momentum(trainer: Any) -> None:
    """Drop the optimizer's momentum in a recovery, in the last step: no weight shows it."""

    def forget(replica: Any) -> None:
        if trainer._formation.plan.generation > 1:
            for path, tensor in replica.tensors():
                if "momentum" in path:
                    tensor.zero_()

    _at_the_end(trainer, forget)


def _at_the_end(trainer: Any, change: Any) -> None:
    def parts() -> Any:
        with torch.no_grad():
            change(trainer.replica)
        return described()

    described, trainer.replica.described = trainer.replica.described, parts


def normalised() -> nn.Module:
    """Return a model with statistics that the forward pass changes."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def train(trainer: Any, *, steps: int, how: str = "none", norm: bool = False) -> None:
    """Train; workers alone get the mistake, as plain PyTorch has no part that could make it."""
    torch.manual_seed(trainer.seed)
    model = (
        normalised()
        if norm
        else nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer.register(
        model=model, optimizer=optimizer, clip_norm=0.05 if how == "clips_twice" else None
    )
    if trainer.worker != "reference":
        globals()[how](trainer)
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=BATCH):
                step.backward((model(shard.batch) - 1).square().mean())


def imports_the_runtime(trainer: Any, *, steps: int) -> None:
    """Train a job that imports the runtime, and so cannot be compared with plain PyTorch."""
    import chaoskit.runtime.state.sampling

    assert chaoskit.runtime.state.sampling.derive_seed(1)
    train(trainer, steps=steps)
