"""Measure the cost of chaoskit on one GPU:
``python -m benchmarks.steps.gpu [--device cpu] [--smoke] [--json FILE]``.

The step of the reference job on one rank is compared with the same loop in plain PyTorch and in
plain FSDP2. The kinds take turns, run by run, and each row is a median. Then the cost of a snapshot
of a state in device memory is measured. Prints a table; ``docs/gpu.md`` has the results. A run with
``--device cpu`` only shows that the script works.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from chaoskit.checkpoint.layout.held import HeldTensor
from chaoskit.checkpoint.memory.slots import Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.experiment.harness import Harness
from chaoskit.fixtures.jobs.corpus import ByteDataset, corpus_file
from chaoskit.fixtures.jobs.gpt import build, choose, warmup_cosine
from chaoskit.fixtures.jobs.gpt_model import next_byte_loss

DROPPED = 20  # steps at the start of each run
#: Name of a shape -> windows in a batch, bytes in a window; the model has 10M parameters.
SHAPES = {"short steps": (64, 128), "long steps": (256, 512)}
TENSOR_BYTES = 2**24


def plain(device: str, steps: int, batch: int, context: int, *, sharded: bool) -> float:
    """Return the median seconds of a step without chaoskit."""
    shape = choose("10m", steps=steps, batch=batch, context=context)
    dataset = ByteDataset(corpus_file(shape.corpus_bytes), shape.context)
    torch.manual_seed(1)
    model = build(shape, 0.1).to(device)
    if sharded:
        mesh = init_device_mesh(device, (1,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, warmup_cosine(steps))
    seconds = []
    for step in range(steps):
        begin_s = time.perf_counter()
        first = step * batch % (len(dataset) - batch)
        loss = next_byte_loss(
            model, dataset.__getitems__(list(range(first, first + batch))).to(device)
        )
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss.item()  # chaoskit reads the loss in each step, too
        seconds.append(time.perf_counter() - begin_s)
    return median(seconds[DROPPED:])


def protected(device: str, steps: int, batch: int, context: int, job: str, reduction: str) -> float:
    """Return the median seconds of a step of a run of one rank, with all defaults."""
    options = {"size": "10m", "batch": batch, "context": context}
    plan = {"nodes": 1, "spares": 0, "steps": steps, "twin": False, "deadline_s": 300.0}
    with Harness() as harness:
        outcome = harness.run(job, device=device, options=options, reduction=reduction, **plan)
    if len(outcome.steps) != steps:
        raise RuntimeError(f"{job}, {reduction}: {'; '.join(outcome.reasons)}")
    return median(point.seconds for point in outcome.steps[DROPPED:])


def measure_steps(
    device: str, steps: int, rounds: int, shapes: dict[str, tuple[int, int]]
) -> dict[str, float]:
    """Return the median seconds of each kind of step."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, (batch, context) in shapes.items():
            place = (device, steps, batch, context)
            kinds: dict[str, Callable[[], float]] = {
                "plain PyTorch": lambda place=place: plain(*place, sharded=False),
                "exact": lambda place=place: protected(*place, "gpt", "exact"),
                "fast": lambda place=place: protected(*place, "gpt", "fast"),
                "plain FSDP2": lambda place=place: plain(*place, sharded=True),
                "sharded": lambda place=place: protected(*place, "fsdp", "exact"),
            }
            for kind, run in kinds.items():
                times.setdefault(f"{name}, {kind}", []).append(run())
    return {name: median(seconds) for name, seconds in times.items()}


def measure_snapshots(device: str, tensors: int, rounds: int) -> dict[str, float]:
    """Return the median seconds that training waits for a snapshot, and those until it is
    sealed.
    """
    state = [
        HeldTensor(f"t{number}", torch.randn(TENSOR_BYTES // 4, device=device))
        for number in range(tensors)
    ]
    weights = torch.randn(
        8192 if device == "cuda" else 512, 8192 if device == "cuda" else 512, device=device
    )
    snapshotter = Snapshotter(Slots(), state)
    times: dict[str, list[float]] = {
        "begin": [],
        "wait": [],
        "sealed": [],
        "step beside it": [],
        "step alone": [],
    }

    def timed(act: Callable[[], object], name: str) -> None:
        begin_s = time.perf_counter()
        act()
        times[name].append(time.perf_counter() - begin_s)

    def step() -> None:
        for _ in range(20):
            weights @ weights
        if device == "cuda":
            torch.cuda.synchronize()

    for number in range(1, rounds + 3):
        timed(step, "step alone")
        begin_s = time.perf_counter()
        timed(lambda number=number: snapshotter.begin(number), "begin")
        timed(step, "step beside it")
        timed(snapshotter.wait, "wait")
        for held in state:
            held.tensor.add_(1)
        snapshotter.settle()
        times["sealed"].append(time.perf_counter() - begin_s)
    snapshotter.close()
    return {
        name: median(seconds[2:]) for name, seconds in times.items()
    }  # the first two register their memory


def main() -> None:
    """Measure all kinds, and print the table."""
    parser = argparse.ArgumentParser(description="What chaoskit costs on one GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--smoke", action="store_true", help="small and short: durations mean nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    steps, rounds = (DROPPED + 5, 1) if arguments.smoke else (80, 3)
    shapes = {"short steps": (4, 16)} if arguments.smoke else SHAPES
    with tempfile.TemporaryDirectory() as directory:
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{directory}/store", rank=0, world_size=1
        )
        results = measure_snapshots(
            arguments.device, 2 if arguments.smoke else 128, 2 if arguments.smoke else 10
        )
        results |= measure_steps(arguments.device, steps, rounds, shapes)
        dist.destroy_process_group()
    for name, seconds in results.items():
        print(f"{name:28} {seconds * 1e3:9.2f} ms")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"seconds": results, "torch": torch.__version__}, indent=1)
        )


if __name__ == "__main__":
    main()
