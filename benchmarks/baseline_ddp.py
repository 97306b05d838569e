"""The reference job on stock PyTorch: torchrun and DistributedDataParallel. Our step time is compared with this one's.

python benchmarks/baseline_ddp.py --world 4 --steps 40 --size 10m --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from chaoskit.errors import BadInput
from chaoskit.fixtures.jobs.corpus import ByteDataset, corpus_file
from chaoskit.fixtures.jobs.gpt import build, choose, warmup_cosine
from chaoskit.fixtures.jobs.gpt_model import next_byte_loss

WARM_UP = 5


def run(world: int, steps: int, size: str, environment: Mapping[str, str] | None = None) -> list[float]:
    """Wall-clock seconds of each of ``steps`` steps on rank 0, after the warm-up.

    Args:
        environment: further variables for torchrun and its ranks.

    Raises:
        subprocess.CalledProcessError: if a rank failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        outfile = Path(directory) / "seconds.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        arguments = ["--steps", str(steps), "--size", size, "--json", str(outfile)]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
        subprocess.run([*launcher, __file__, *arguments], check=True, env=variables)
        seconds: list[float] = json.loads(outfile.read_text())
        return seconds


def work(steps: int, size: str, outfile: Path) -> None:
    """One rank; rank 0 writes what :func:`run` returns."""
    dist.init_process_group("gloo")
    seconds = measure(steps, size)
    if dist.get_rank() == 0:
        outfile.write_text(json.dumps(seconds))
    dist.barrier()
    # Under DDP gloo's threads outlive destroy_process_group, and now and then abort a process that exits regularly.
    os._exit(0)


def measure(steps: int, size: str) -> list[float]:
    """Train, and return this rank's seconds of each step after the warm-up."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = choose(size, steps=steps)
    if shape.batch % world:
        raise BadInput("world", world, f"use a divisor of the global batch of {shape.batch}")
    dataset = ByteDataset(corpus_file(shape.corpus_bytes), shape.context)
    torch.manual_seed(0)
    model = DistributedDataParallel(build(shape, dropout=0.1))
    torch.manual_seed(rank)  # equal weights, but each rank drops other elements
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, warmup_cosine(WARM_UP + steps))
    share = shape.batch // world
    seconds = []
    for step in range(WARM_UP + steps):
        begin = time.perf_counter()
        first = step * shape.batch + rank * share
        next_byte_loss(model, dataset.__getitems__(list(range(first, first + share)))).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds[WARM_UP:]


def main() -> None:
    """Run as a rank where torchrun started this process, else start torchrun and summarise."""
    parser = argparse.ArgumentParser(description="Step time of the reference job on stock DistributedDataParallel.")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        work(arguments.steps, arguments.size, arguments.json)
        return
    seconds = run(arguments.world, arguments.steps, arguments.size)
    summary = {"world": arguments.world, "size": arguments.size, "median": statistics.median(seconds)}
    arguments.json.write_text(json.dumps({**summary, "seconds": seconds}))
    print(f"{arguments.world} ranks, {arguments.size}: median step {summary['median'] * 1e3:.1f} ms of {len(seconds)}")


if __name__ == "__main__":
    main()
