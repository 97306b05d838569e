"""What ZeRO-1 costs a step, and what it saves: ``python benchmarks/zero.py [--smoke] [--output DIRECTORY]``.

Four ranks have gradients of the reference GPT. From there to new weights on every rank: by an all-reduce and AdamW, by
an all-reduce and torch's ``ZeroRedundancyOptimizer``, and by ours. All kinds take turns, so that other load meets all.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bars import Bar, Report, look_at_machine, save, show, spread
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

from chaoskit.fixtures.jobs.gpt import SIZES, build
from chaoskit.runtime.zero import ZeroOptimizer

WORLD = 4
WARM = 3
PLAIN, TORCH, OURS = "all-reduce, AdamW", "all-reduce, ZeroRedundancyOptimizer", "ZeroOptimizer"


class Kind:
    """A model of its own, and one way to a step."""

    def __init__(self, size: str, make: Callable[[nn.Module], Optimizer], *, reduces: bool) -> None:
        torch.manual_seed(0)
        self.model = build(SIZES[size], 0.0)
        self.optimizer, self._reduces = make(self.model), reduces
        self._flat = torch.zeros(sum(one.numel() for one in self.model.parameters()))

    def step(self, rank: int) -> float:
        """Seconds of a step, all ranks beginning together."""
        parameters = list(self.model.parameters())
        for one in parameters:
            one.grad = torch.full_like(one, 0.01 * (rank + 1))
        dist.barrier()
        started_s = time.perf_counter()
        if not self._reduces:
            self._all_reduce([one.grad for one in parameters if one.grad is not None])
        self.optimizer.step()
        return time.perf_counter() - started_s

    def _all_reduce(self, gradients: list[Tensor]) -> None:
        """As DistributedDataParallel does: through a flat bucket."""
        parts = self._flat.split([one.numel() for one in gradients])
        views = [part.view_as(one) for part, one in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(views, gradients)
        dist.all_reduce(self._flat)
        self._flat.div_(dist.get_world_size())
        torch._foreach_copy_(gradients, views)

    def state_bytes(self) -> list[int]:
        """Of the optimizer, by rank."""
        inner: Any = getattr(self.optimizer, "optim", self.optimizer)
        found = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        found[dist.get_rank()] = sum(one.nbytes for state in inner.state.values() for one in state.values())
        dist.all_reduce(found)
        return [int(one) for one in found]


def measure(path: Path, repeats: int, size: str) -> None:
    """On every rank; rank 0 writes what was found."""
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    kinds = {
        PLAIN: Kind(size, lambda model: AdamW(model.parameters()), reduces=False),
        TORCH: Kind(size, lambda model: ZeroRedundancyOptimizer(model.parameters(), AdamW), reduces=False),
        OURS: Kind(size, lambda model: ZeroOptimizer(model.parameters(), AdamW, mesh=mesh), reduces=True),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(WARM + repeats):
        for name, kind in kinds.items():
            times[name].append(kind.step(rank))
    found = {name: {"times": times[name][WARM:], "bytes": kind.state_bytes()} for name, kind in kinds.items()}
    if not rank:
        path.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo aborts now and then while it is taken down


def bars_of(found: dict[str, Any]) -> list[Bar]:
    ours, others = found[OURS], {name: one for name, one in found.items() if name != OURS}
    ratios = {
        name: median(mine / theirs for mine, theirs in zip(ours["times"], one["times"], strict=True))
        for name, one in others.items()
    }
    share, torchs = (max(found[name]["bytes"]) / found[PLAIN]["bytes"][0] for name in (OURS, TORCH))
    return [
        *(Bar(topic="step", name=name, measured=spread(one["times"])) for name, one in others.items()),
        *(
            Bar(
                topic="step",
                name=f"{OURS}, beside {name}",
                measured=f"{spread(ours['times'])}, {ratio:.2f} x",
                limit="1 x",
                met=ratio <= 1,
                samples={"seconds": ours["times"]},
            )
            for name, ratio in ratios.items()
        ),
        Bar(
            topic="memory",
            name="the optimizer's state on the fullest rank, as a share of all",
            measured=f"{share:.3f}; ZeroRedundancyOptimizer {torchs:.3f}",
            limit=f"1.01 / {WORLD}",
            met=share <= 1.01 / WORLD,
            timed=False,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="show that everything works; no duration is claimed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    repeats, size = (3, "tiny") if options.smoke else (25, "10m")
    if options.rank_of:
        measure(options.rank_of, repeats, size)
    machine = look_at_machine()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), __file__]
        subprocess.run([*run, "--rank-of", str(path), *(["--smoke"] if options.smoke else [])], check=True)
        found = json.loads(path.read_text())
    note = (
        "Four ranks over gloo on this machine, 9.9 million parameters, from gradients to new weights on every rank. "
        "Times are median / 95th percentile / maximum; ratios are medians over neighbours in time."
    )
    report = Report(machine=machine, smoke=options.smoke, bars=bars_of(found), notes=[note])
    show(report)
    save(report, options.output, "zero")


if __name__ == "__main__":
    main()
