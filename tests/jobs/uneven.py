"""Jobs of which one rank is slow by itself."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class Records:
    """A data set from which rank 1 reads slowly."""

    def __init__(self, trainer: Any, read_s: float) -> None:
        self._trainer, self._read_s = trainer, read_s
        self._data = torch.arange(512, dtype=torch.float32).view(128, 4) / 512

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        if self._trainer.took_part and self._trainer.rank == 1:
            time.sleep(self._read_s)
        return list(self._data[indices])

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]


def slow_input(trainer: Any, *, steps: int, shard_s: float, read_s: float) -> None:
    """``read_s``: what a batch takes on rank 1."""
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    data = Records(trainer, read_s)
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=48):
                time.sleep(shard_s)
                step.backward(model(shard.batch).square().mean())
