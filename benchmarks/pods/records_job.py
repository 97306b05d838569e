"""A job with a rank that prints a thousand records a second and writes the number of each to a
witness outside its pod.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
PERIOD_S = 0.001


def write(witness: str) -> None:
    """Print records, and write the number of the last complete one to the witness."""
    name = f"{os.uname().nodename}.{os.getpid()}"
    witness_fd = os.open(Path(witness) / name, os.O_CREAT | os.O_WRONLY, 0o666)
    due_s = time.monotonic()
    for number in count():
        os.write(1, f"record {name} {number}\n".encode())
        os.pwrite(witness_fd, struct.pack("<q", number), 0)
        due_s += PERIOD_S
        time.sleep(max(0.0, due_s - time.monotonic()))


def train(trainer: Any, *, steps: int, step_s: float, witness: str) -> None:
    """Train while the rank prints."""
    torch.manual_seed(trainer.seed)
    model = torch.nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.Adam(model.parameters()))
    begun = False
    while trainer.step < steps:
        if trainer.rank == 1 and not begun:
            threading.Thread(target=write, args=[witness], daemon=True).start()
            begun = True
        with trainer.transaction() as step:
            time.sleep(step_s)
            for shard in step.shards(DATA, batch_size=24):
                step.backward(model(shard.batch).square().mean())
