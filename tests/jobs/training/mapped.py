"""A job with samples in a file that each worker maps, and reads once from end to end when it
starts.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chaoskit.fixtures.jobs.goal import Goal

CONTEXT = 1024


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset of windows of ``CONTEXT + 1`` tokens; the last token of a window is the first of
    the next.
    """

    def __init__(self, path: str) -> None:
        tokens = np.memmap(path, np.uint16, mode="r")
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)[::CONTEXT]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._windows[index].astype(np.float32))


def train(
    trainer: Any, *, path: str, notes: str, steps: int, until: dict[str, Any] | None = None
) -> None:
    """Train, and note the bytes that this worker read from the disk before it could train."""
    windows, read_bytes = Windows(path), read_all(path)
    with Path(notes).open("a") as file:
        file.write(f"{os.getpid()} {read_bytes}\n")
    torch.manual_seed(trainer.seed)
    model = torch.nn.Linear(CONTEXT + 1, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-9))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace(0.02)
            for shard in step.shards(windows, batch_size=8):
                step.backward(model(shard.batch).mean())


def read_all(path: str) -> int:
    """Read every page of the mapped file; return the bytes that came from the disk for this
    process.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    int(np.memmap(path, np.uint16, mode="r")[::1024].sum(dtype=np.int64))
    return 512 * (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before)
