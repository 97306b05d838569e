"""Compare the exact reduction with gloo's all-reduce:
``python -m benchmarks.steps.reduction [--json FILE]``.

Ranks are forked processes with one thread on this machine. The three kinds take turns, so that
other load affects all of them. A repetition takes as long as its slowest rank. The kind
``all-reduce`` only sums a flat tensor in place.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import FileStore

from chaoskit.runtime.group.process_group import Group
from chaoskit.runtime.reduction.choice import FlatLayout, LocalGradients, make_reducer

WIDTH = 400


def join(path: Path, rank: int, size: int) -> Group:
    """Return the runtime's own process group, on the loopback interface."""
    return Group(
        FileStore(str(path), size),
        rank,
        size,
        torch.device("cpu"),
        address="127.0.0.1",
        timeout_s=120,
    )


def barrier(group: Group) -> None:
    """Return when all ranks have called it."""
    group.all_reduce(torch.zeros(1)).wait()


def kinds(group: Group, floats: int) -> dict[str, Callable[[], object]]:
    """Return the compared reductions by name. Gradients are those of square layers with biases."""
    layers = max(floats // (WIDTH * WIDTH + WIDTH), 1)
    layout = FlatLayout(
        [(WIDTH, WIDTH), (WIDTH,)] * layers, [torch.float32] * 2 * layers, torch.device("cpu")
    )
    local = LocalGradients(layout, group.size)
    local.add(group.rank, [torch.randn(shape) for shape in layout.shapes])
    ownership = [[rank] for rank in range(group.size)]
    reductions: dict[str, Callable[[], object]] = {}
    plain = layout.allocate()
    reductions["all-reduce"] = lambda: group.all_reduce(plain).wait()
    for kind in ("exact", "fast"):
        reducer = make_reducer(kind, local, group.size + 1)
        reducer.begin(group, ownership)
        reductions[kind] = lambda reducer=reducer: reducer.reduce([0.0] * (group.size + 1))
    return reductions


def measure(path: Path, rank: int, times: torch.Tensor, floats: int) -> None:
    """Fill ``times[:, :, rank]``: wall-clock and CPU seconds, by kind, rank and repetition."""
    group = join(path, rank, times.shape[2])
    torch.manual_seed(rank)
    compared = kinds(group, floats)
    for repetition in range(-2, times.shape[3]):
        for index, run in enumerate(compared.values()):
            barrier(group)
            wall, cpu = time.monotonic(), time.process_time()
            run()
            if repetition >= 0:
                times[0, index, rank, repetition] = time.monotonic() - wall
                times[1, index, rank, repetition] = time.process_time() - cpu


def run_ranks(ranks: int, repetitions: int, floats: int) -> torch.Tensor:
    """Times as in :func:`measure`. Raises RuntimeError if a rank fails."""
    times = torch.zeros(2, 3, ranks, repetitions, dtype=torch.float64).share_memory_()
    children = []
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    measure(Path(directory) / "store", rank, times, floats)
                    code = 0
                finally:
                    if code:
                        traceback.print_exc()
                    os._exit(code)
            children.append(pid)
        if any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children):
            raise RuntimeError("a rank failed")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--floats", type=int, default=10_200_000)
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = run_ranks(options.ranks, options.repetitions, options.floats)
    wall = times[0].amax(dim=1) * 1e3
    cpu = times[1].mean(dim=1) * 1e3
    rows = []
    print(
        f"{'':12}{'median ms':>10}{'min ms':>10}{'CPU ms':>10}{'ratio':>8}   ({options.ranks} ranks)"
    )
    for index, kind in enumerate(("all-reduce", "exact", "fast")):
        ratio = float(
            (wall[index] / wall[0]).median()
        )  # of neighbours in time, so that load cancels out
        median, least, busy = (
            float(wall[index].median()),
            float(wall[index].min()),
            float(cpu[index].median()),
        )
        rows.append(
            {"kind": kind, "median_ms": median, "min_ms": least, "cpu_ms": busy, "ratio": ratio}
        )
        print(f"{kind:12}{median:10.1f}{least:10.1f}{busy:10.1f}{ratio:8.2f}")
    if options.json:
        summary = {
            "ranks": options.ranks,
            "floats": options.floats,
            "repetitions": options.repetitions,
            "kinds": rows,
        }
        options.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
