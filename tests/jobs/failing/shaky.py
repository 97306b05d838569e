"""A sharded job in which one rank's first process never completes a step: its collectives fail
repeatedly.

With ``resets`` the other rank notices each failure at once, as if its peer closed its connections.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistNetworkError
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset


def train(trainer: Any, *, steps: int = 12, bad_step: int = 5, resets: bool = False) -> None:
    torch.manual_seed(trainer.seed)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=trainer.mesh())
    trainer.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(64, 8))
    first, journal = trainer.disk / "first", trainer.disk.parents[1] / "journal" / "node1.0.jsonl"
    failures = _failures(journal)
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=8):
                step.backward(model(shard.batch[0]).square().mean())
                if trainer.rank == 1 and trainer.step == bad_step:
                    if not first.exists():
                        first.write_text(str(os.getpid()))
                    if first.read_text() == str(os.getpid()):
                        raise DistNetworkError("a link that fails for this process only")
                if (
                    resets
                    and trainer.rank == 0
                    and trainer.step == bad_step
                    and _fails_again(journal, failures)
                ):
                    raise DistNetworkError("connection closed by peer")


def _failures(journal: Path) -> int:
    return journal.read_text().count('"quiesced"') if journal.exists() else 0


def _fails_again(journal: Path, failures: int) -> bool:
    """Return True if the other rank has reported a failure in this entry; its replacement does not."""
    deadline_s = time.monotonic() + 0.1  # less than the time until the generation is planned again
    while time.monotonic() < deadline_s and _failures(journal) == failures:
        time.sleep(0.002)
    time.sleep(0.01)  # the report follows that record
    return _failures(journal) > failures
