"""The reference job on stock PyTorch (torchrun and DistributedDataParallel), with which our step
time is compared.

python -m benchmarks.steps.baseline_ddp --world 4 --steps 40 --size 10m --json FILE

With --referee it takes turns with chaoskit's job (overhead.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.harness.turns import Turns, take_turns
from chaoskit.errors import BadInput
from chaoskit.fixtures.jobs.corpus import ByteDataset, corpus_file
from chaoskit.fixtures.jobs.gpt import build, choose, warmup_cosine
from chaoskit.fixtures.jobs.gpt_model import next_byte_loss

WARM_UP = 5
_END_S = 30.0


def command(world: int, *arguments: str) -> list[str]:
    """Return the command line of a job of ``world`` ranks."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
    ]
    return [*launcher, "-m", "benchmarks.steps.baseline_ddp", *arguments]


def run(world: int, steps: int, size: str) -> list[float]:
    """Return the wall-clock seconds of each of ``steps`` steps on rank 0, after the warm-up.

    Raises:
        subprocess.CalledProcessError: if a rank failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        outfile = Path(directory) / "seconds.json"
        arguments = ["--steps", str(steps), "--size", size, "--json", str(outfile)]
        subprocess.run(
            command(world, *arguments), check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        seconds: list[float] = json.loads(outfile.read_text())
        return seconds


@contextlib.contextmanager
def in_turns(
    world: int,
    steps: int,
    size: str,
    referee: str,
    block: int,
    *,
    loader: bool,
    environment: Mapping[str, str],
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job that takes turns, for the duration of the context. If the block raises, the job is
    ended.

    Args:
        referee: the socket at which the token is passed. block: steps in a turn.
        loader: feed it by a DataLoader with one worker process a rank.
        environment: further variables for torchrun and its ranks.
    """
    arguments = ["--steps", str(steps), "--size", size, "--referee", referee, "--block", str(block)]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment)
    words = command(world, *arguments, *(["--loader"] if loader else []))
    with subprocess.Popen(words, env=variables) as job:
        try:
            yield job
            job.wait(_END_S)
        finally:
            if job.poll() is None:
                job.terminate()  # torchrun ends its ranks


def leave() -> NoReturn:
    """End a rank without a regular exit: under DDP gloo's threads outlive destroy_process_group and
    may abort it.
    """
    dist.barrier()
    os._exit(0)


def step_of(steps: int, size: str, *, loader: bool = False) -> Callable[[], None]:
    """Return a function that trains this rank by one step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = choose(size, steps=steps)
    if shape.batch % world:
        raise BadInput("world", world, f"use a divisor of the global batch of {shape.batch}")
    dataset = ByteDataset(corpus_file(shape.corpus_bytes), shape.context)
    torch.manual_seed(0)
    model = DistributedDataParallel(build(shape, dropout=0.1))
    torch.manual_seed(rank)  # equal weights, but each rank drops other elements
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, warmup_cosine(steps))
    share = shape.batch // world
    firsts = [(step * shape.batch + rank * share) % (len(dataset) - share) for step in range(steps)]
    batch_indices = [list(range(first, first + share)) for first in firsts]
    batches: Iterator[torch.Tensor] = map(dataset.__getitems__, batch_indices)
    if loader:
        batches = iter(
            DataLoader(dataset, batch_sampler=batch_indices, num_workers=1, collate_fn=_as_it_is)
        )

    def step() -> None:
        next_byte_loss(model, next(batches)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def _as_it_is(batch: torch.Tensor) -> torch.Tensor:
    """Return ``batch`` unchanged: the dataset reads whole batches."""
    return batch


def measure(steps: int, size: str) -> list[float]:
    """Train, and return the seconds of each step of this rank after the warm-up."""
    step, seconds = step_of(WARM_UP + steps, size), []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARM_UP:]


def work(arguments: argparse.Namespace) -> NoReturn:
    """Run one rank; without a referee, rank 0 writes the result of :func:`run`."""
    dist.init_process_group("gloo")
    rank, steps, block = dist.get_rank(), arguments.steps, arguments.block
    if arguments.referee:
        step = step_of(steps, arguments.size, loader=arguments.loader)
        take_turns(step, lambda: Turns(arguments.referee, "ddp", rank, block), steps, block)
        leave()
    seconds = measure(steps, arguments.size)
    if rank == 0:
        arguments.json.write_text(json.dumps(seconds))
    leave()


def main() -> None:
    """Run as a rank if torchrun started this process, else start torchrun and print a summary."""
    parser = argparse.ArgumentParser(
        description="Step time of the reference job on stock DistributedDataParallel."
    )
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--json", type=Path, default=Path(os.devnull), metavar="FILE")
    parser.add_argument("--referee", default="", help=argparse.SUPPRESS)
    parser.add_argument("--block", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--loader", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        work(arguments)
    seconds = run(arguments.world, arguments.steps, arguments.size)
    summary = {
        "world": arguments.world,
        "size": arguments.size,
        "median": statistics.median(seconds),
    }
    arguments.json.write_text(json.dumps({**summary, "seconds": seconds}))
    print(
        f"{arguments.world} ranks, {arguments.size}: median step {summary['median'] * 1e3:.1f} ms of {len(seconds)}"
    )


if __name__ == "__main__":
    main()
