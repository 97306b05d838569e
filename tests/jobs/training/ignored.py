"""Jobs in which all labels of a shard are ignored: the loss is the mean of nothing, and the
gradient is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

IGNORED = -100


class Labelled:
    """A dataset of random inputs with one of four labels each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 4)


def replicated(
    trainer: Any, *, steps: int, ignored: dict[str, list[int]], spoiled: int = -1
) -> None:
    """Train with ignored labels in the shards ``ignored[step]``, and a NaN gradient in step
    ``spoiled``.
    """
    _train(trainer, _model(trainer), steps, ignored, spoiled)


def sharded(trainer: Any, *, steps: int, ignored: dict[str, list[int]]) -> None:
    """Train with ignored labels a model that is sharded over all ranks."""
    model = _model(trainer)
    fully_shard(model, mesh=trainer.mesh())
    _train(trainer, model, steps, ignored, -1)


def _model(trainer: Any) -> nn.Module:
    torch.manual_seed(trainer.seed)
    return nn.Linear(8, 4)


def _train(
    trainer: Any, model: nn.Module, steps: int, ignored: dict[str, list[int]], spoiled: int
) -> None:
    trainer.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(Labelled(), batch_size=32):
                inputs, labels = shard.batch
                if shard.index in ignored.get(str(trainer.step), ()):
                    labels = torch.full_like(labels, IGNORED)
                loss = cross_entropy(model(inputs), labels)
                step.backward(loss * float("nan") if trainer.step == spoiled else loss)
