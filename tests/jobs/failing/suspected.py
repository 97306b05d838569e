"""A sharded job with a NaN in one step, and a rank that dies while the step is computed again to
find its cause.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

SUSPECT, DOOMED = 2, 1  # ranks


def train(trainer: Any, *, steps: int, bad_step: int = 0, marker: str = "") -> None:
    """Train a linear model.

    Args:
        bad_step: step in which the loss of rank ``SUSPECT`` is NaN the first time, and rank
            ``DOOMED`` dies the second time; 0: never.
        marker: path of a file that exists after that.
    """
    torch.manual_seed(trainer.seed)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=trainer.mesh())
    trainer.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(64, 8))
    visits = 0
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=8):  # one shard per rank in each attempt
                due = bad_step > 0 and trainer.step == bad_step and not Path(marker).exists()
                visits += due
                loss = model(shard.batch[0]).square().mean()
                step.backward(
                    loss * float("nan") if due and visits == 1 and trainer.rank == SUSPECT else loss
                )
                if due and visits == 2 and trainer.rank == DOOMED:
                    Path(marker).touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
