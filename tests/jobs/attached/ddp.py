"""A training of a small model by DistributedDataParallel over gloo, in the pods of a job.

    torchrun ... ddp.py DIRECTORY STEP_S STEPS
    python ddp.py DIRECTORY STEP_S STEPS RANK NODES HOST:PORT

All pods share DIRECTORY. Rank 0 prints ``step N loss X`` for each step, and writes a checkpoint
there after every fifth step, from which each new attempt goes on. STEPS is the number of the last
step; 0 trains until the pod ends.

Each rank also appends ``NANOSECONDS STEP RANK`` to a file there after each step, by the kernel's
monotonic clock. All pods of the tests' cluster have one kernel, so these times can be compared.

TRAINING_SEED draws the first weights; 0 by default.

torchelastic kills a rank that does not end a step in time: see TORCHELASTIC_ENABLE_FILE_TIMER. The
time is the variable STEP_LIMIT_S.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerClient

CHECKPOINT_EVERY = 5
KEPT_CHECKPOINTS = 3
LEARNING_RATE = 0.05
#: Seconds within which a step must end; afterwards the agent kills the rank, even a stopped one.
STEP_LIMIT_S = float(os.environ["STEP_LIMIT_S"])
#: Limit of a collective. It is far above that of a step: an agent that notices the end of *other*
#: ranks first would wait 30 s for a stopped rank of its own.
GROUP_LIMIT_S = 60.0
#: The same without torchrun, where a rank may wait for a group that is gone.
ALONE_LIMIT_S = 15.0


def load(directory: Path, model: nn.Module) -> int:
    """Load the newest checkpoint, if there is one, and return the number of its step."""
    checkpoints = sorted(directory.glob("checkpoint-*.pt"))
    if not checkpoints:
        return 0
    model.load_state_dict(torch.load(checkpoints[-1]))
    return int(checkpoints[-1].stem.partition("-")[2])


def save(directory: Path, model: nn.Module, step: int) -> None:
    """Write a checkpoint, and remove old ones."""
    draft = directory / f"draft-{os.getpid()}"
    torch.save(model.state_dict(), draft)
    draft.replace(directory / f"checkpoint-{step:08d}.pt")
    for old in sorted(directory.glob("checkpoint-*.pt"))[:-KEPT_CHECKPOINTS]:
        old.unlink(missing_ok=True)


def first_step(directory: Path, model: nn.Module, rank: int) -> int:
    """Return the step after which all ranks go on, which rank 0 reads from its checkpoint."""
    step = torch.tensor(load(directory, model) if rank == 0 else 0)
    dist.broadcast(step, 0)
    return int(step)


def train_step(model: nn.Module, step: int, rank: int) -> float:
    """Train a step, and return its loss."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    data = torch.randn(16, 8, generator=generator)
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    return float(loss)


def join_group(rank: str = "", nodes: str = "", host: str = "") -> None:
    """Join the group of all ranks: as torchrun says, or with a rank that no variable shows."""
    if not rank:
        dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_LIMIT_S))
        return
    limit = timedelta(seconds=ALONE_LIMIT_S)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}", rank=int(rank), world_size=int(nodes), timeout=limit
    )
    print(f"rank {rank} of {nodes} has joined", flush=True)


def step_timer() -> FileTimerClient | None:
    """Return the timer by which torchrun ends a rank that hangs; None without torchrun."""
    path = os.environ.get("TORCHELASTIC_TIMER_FILE")
    return FileTimerClient(path) if path else None


def main() -> None:
    directory, step_s, steps = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    join_group(*sys.argv[4:])
    rank = dist.get_rank()
    torch.manual_seed(int(os.environ.get("TRAINING_SEED", "0")))
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    step = first_step(directory, network, rank)
    model = nn.parallel.DistributedDataParallel(network)
    timer = step_timer()
    record = directory / f"record-{socket.gethostname()}"
    with record.open("a") as lines:
        while not steps or step < steps:
            step += 1
            if timer is not None:
                timer.acquire("step", time.time() + STEP_LIMIT_S)
            time.sleep(step_s)
            loss = train_step(model, step, rank)
            lines.write(f"{time.monotonic_ns()} {step} {rank}\n")
            lines.flush()
            if rank == 0:
                print(f"step {step} loss {loss:.6f}", flush=True)
                if step % CHECKPOINT_EVERY == 0:
                    save(directory, network, step)
    if timer is not None:
        timer.release("step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
