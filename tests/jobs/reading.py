"""A job whose workers drop a data file from the page cache before they read it."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from chaoskit.data import TokenFile
from chaoskit.fixtures.jobs.goal import Goal
from chaoskit.osprocess import children, parent, process_name

LIMIT_S = 60.0


def train(trainer: Any, *, path: str, notes: str, steps: int, until: dict[str, Any] | None = None) -> None:
    """Notes what each worker read from the disk, after its agent had mapped the file."""
    trainer.keep_warm(path)
    wait_until_mapped(Path(path))
    with Path(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tokens, waits = read_all(Path(path))
    with Path(notes).open("a") as file:
        file.write(f"{os.getpid()} {waits}\n")
    model = torch.nn.Linear(1024, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-9))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace(0.02)
            for shard in step.shards(tokens, batch_size=8):
                step.backward(model(shard.batch.float()).mean())


def read_all(path: Path) -> tuple[TokenFile, int]:
    """The data, once read; and the bytes that this process read from the disk meanwhile (torch's code among them)."""
    TokenFile(__file__, 15, dtype="uint8").__getitems__(range(8))  # the pages of torch's own code are not the question
    before = resource.getrusage(resource.RUSAGE_SELF)
    tokens = TokenFile(path, 1023, dtype="uint16")
    tokens.__getitems__(range(len(tokens)))
    after = resource.getrusage(resource.RUSAGE_SELF)
    return tokens, 512 * (after.ru_inblock - before.ru_inblock)


def wait_until_mapped(path: Path) -> None:
    """By the keeper of this node: like the zygote that has started this process, a child of the agent."""
    agent, deadline_s = parent(os.getppid()), time.monotonic() + LIMIT_S
    assert agent is not None
    while True:
        keepers = [pid for pid in children(agent) if process_name(pid) == "ck-keeper"]  # none until it has its name
        if any(mapped_bytes(keeper, path) >= path.stat().st_size for keeper in keepers):
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the keepers {keepers} do not map {path}")
        time.sleep(0.01)


def mapped_bytes(pid: int | None, path: Path) -> int:
    """How much of a file a process has in its page tables, rounded up to pages."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if not line.partition(" ")[0].endswith(":"):  # the first line of a mapping
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
