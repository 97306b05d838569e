"""Measure the cost of a dataset's time:
``python -m benchmarks.steps.input_time [--quick] [--results DIRECTORY]``.

One job is run with a dataset that needs 20 ms for the batch of a shard, and with one that needs no
time. The slow dataset is read in the step or fetched ahead. These are compared with
DistributedDataParallel and a DataLoader. Writes results/input_time.json. Exit status 1 if the bar
is not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.harness.bars import Bar, Report, look_at_machine, show, spread
from benchmarks.harness.lab import WARM_UP, Lab, show_progress, step_seconds
from benchmarks.harness.results import RESULTS, save
from chaoskit.fixtures.jobs.paced import SlowDataset

RANKS, BATCH, STEPS = 2, 64, 100
FETCH_S, SHARD_S = 0.02, 0.03
#: Of the time of the dataset, so much must be hidden.
SHARE = 0.8

JOB_NOTE = f"""The job is `fixtures/jobs/paced.py` on {RANKS} ranks, one shard each: a batch sleeps
{FETCH_S * 1000:g} ms and a shard {SHARD_S * 1000:g} ms, so that neither needs the CPUs that both ranks share.
DistributedDataParallel trains the same model on the same data, with one worker process a rank in its `DataLoader`."""


# -- DistributedDataParallel -----------------------------------------------------------------------


class Rows(SlowDataset):
    """The dataset for a DataLoader that asks for whole batches."""

    def __getitem__(self, indices: Sequence[int]) -> torch.Tensor:
        return self.__getitems__(indices)


def run_ddp(steps: int) -> list[float]:
    """Return the seconds of each step on rank 0, after the warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        outfile = Path(directory) / "seconds.json"
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
        ]
        subprocess.run(
            [
                *launcher,
                "-m",
                "benchmarks.steps.input_time",
                "--ddp",
                str(outfile),
                "--steps",
                str(steps),
            ],
            check=True,
        )
        seconds: list[float] = json.loads(outfile.read_text())
        return seconds


def train_ddp(outfile: Path, steps: int) -> None:
    """Train as one rank of DistributedDataParallel; rank 0 writes its step times to ``outfile``."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows, size = Rows(FETCH_S), BATCH // RANKS
    order = [
        [(size * number + place) % len(rows) for place in range(size)]
        for number in range(steps + WARM_UP)
    ]
    seconds, before_s = list[float](), time.perf_counter()
    for batch in DataLoader(rows, sampler=order, batch_size=None, num_workers=1):
        optimizer.zero_grad()
        time.sleep(SHARD_S)
        model(batch).square().mean().backward()
        optimizer.step()
        now_s = time.perf_counter()
        seconds.append(now_s - before_s)
        before_s = now_s
    if dist.get_rank() == 0:
        outfile.write_text(json.dumps(seconds[WARM_UP:]))
    dist.barrier()
    os._exit(0)  # gloo's threads outlive destroy_process_group under DDP


# -- the comparison --------------------------------------------------------------------------------


def train(lab: Lab, steps: int, **options: Any) -> list[float]:
    """Return the seconds of each step of one run."""
    settings: dict[str, Any] = {
        "job": "paced",
        "nodes": RANKS,
        "spares": 0,
        "shards": RANKS,
        "balance": False,
    }
    options |= {"shard_s": SHARD_S, "batch_size": BATCH}
    return step_seconds(lab.run(steps=steps, options=options, **settings))


def measure(lab: Lab) -> list[Bar]:
    """Run all four kinds in turns, several times each, and return the bars."""
    steps = 10 if lab.smoke else STEPS
    runs: dict[str, list[float]] = {"nothing": [], "waits": [], "ahead": [], "ddp": []}
    for _ in range(lab.repeats(3)):
        runs["nothing"] += train(lab, steps)
        runs["waits"] += train(lab, steps, fetch_s=FETCH_S)
        runs["ahead"] += train(lab, steps, fetch_s=FETCH_S, prefetch=True)
        runs["ddp"] += run_ddp(steps)
    nothing_s, waits_s, ahead_s, ddp_s = (median(seconds) for seconds in runs.values())
    hidden = (waits_s - ahead_s) / (waits_s - nothing_s)
    return [
        Bar(
            topic="input",
            name=f"share of a dataset's {FETCH_S * 1000:g} ms a batch that is hidden by prefetch=True",
            measured=f"{hidden:.2f}",
            limit=f"at least {SHARE:g}",
            met=hidden >= SHARE,
            samples={"steps_s": runs},
        ),
        Bar(
            topic="input",
            name="a step, median / p95 / max: a dataset that takes no time; fetched in the step; fetched ahead",
            measured="; ".join(spread(runs[name]) for name in ("nothing", "waits", "ahead")),
        ),
        Bar(
            topic="input",
            name="the same with DistributedDataParallel and a DataLoader; ours, fetched ahead, beside it",
            measured=f"{spread(runs['ddp'])}; {ahead_s / ddp_s:.2f} of its median",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: few steps, no claims")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    parser.add_argument("--ddp", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ddp is not None:
        train_ddp(options.ddp, options.steps)
    machine = look_at_machine()
    with Lab(smoke=options.quick) as lab:
        show_progress("input")
        bars = measure(lab)
    report = Report(machine=machine, smoke=options.quick, bars=bars, notes=[JOB_NOTE])
    save(report, options.results, "input_time")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
