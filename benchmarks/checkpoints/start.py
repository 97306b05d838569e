"""Measure the time to the first batch of a restarted process:
``python -m benchmarks.checkpoints.start [--quick]``.

Two parts are measured. Finding the position: the samples of step 10⁶ in an order of 10⁹ samples.
This is compared with a new random permutation (torch.randperm), which a sampler with a seed must
repeat after a restart. Reading the first batch: a fresh process reads random windows of a file that
is cached in memory, and of one that was dropped from it. Writes results/start.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.harness.bars import Bar, Report, look_at_machine, show, spread
from benchmarks.harness.lab import show_progress
from benchmarks.harness.results import RESULTS, save
from chaoskit.data import Positions

_STEP, _BATCH, _CONTEXT = 10**6, 512, 1024

#: Prints seconds from the opening of the file to the first batch.
_PROCESS = f"""
import sys, time
import numpy as np
import torch
from chaoskit.data import Positions

def windows(path, context):
    return np.lib.stride_tricks.sliding_window_view(np.memmap(path, np.uint16, mode="r"), context + 1)[::context]

torch.from_numpy(windows(sys.argv[2], 16)[[0]].astype(np.int64))  # load NumPy's and torch's code before the clock runs
begin_s = time.perf_counter()
tokens = windows(sys.argv[1], {_CONTEXT})
torch.from_numpy(tokens[Positions(len(tokens), {_BATCH}).batch({_STEP})].astype(np.int64))
print(time.perf_counter() - begin_s)
"""


def seconds(act: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    act()
    return time.perf_counter() - begin_s


def time_positions(sizes: list[int], rounds: int) -> list[Bar]:
    """Return bars on finding the first batch after a restart, with nothing cached."""
    bars = []
    for size in sizes:
        show_progress(f"  positions of {size:g} samples")
        ours = [
            seconds(lambda size=size: Positions(size, _BATCH).batch(_STEP)) for _ in range(rounds)
        ]  # type: ignore[misc]
        shuffled = [
            seconds(
                lambda size=size: torch.randperm(size, generator=torch.Generator().manual_seed(1))
            )  # type: ignore[misc]
            for _ in range(1 if size >= 10**9 else 3)
        ]
        topic = f"{size:.0e} samples"
        name = f"positions of step {_STEP:.0e} of {topic}"
        bars += [
            Bar(
                topic=topic,
                name=f"{name}, computed",
                measured=f"{median(ours) * 1e3:.2g} ms",
                samples={"s": ours},
            ),
            Bar(
                topic=topic,
                name=f"{name}, torch.randperm",
                measured=spread(shuffled),
                samples={"s": shuffled},
            ),
            Bar(
                topic=topic,
                name=f"{name}, memory of the permutation",
                measured=f"{size * 8 / 2**20:.0f} MiB",
            ),
        ]
    return bars


def time_first_batch(folder: Path, size_bytes: int, rounds: int) -> list[Bar]:
    """Return bars on the first batch of a fresh process, with the file in memory and with its pages
    dropped.
    """
    chunk = np.random.default_rng(0).integers(0, 50_000, 2**22).astype(np.uint16)
    path, small = folder / "tokens", folder / "small"
    with path.open("wb") as file:
        for _ in range(size_bytes // chunk.nbytes):
            chunk.tofile(file)
    chunk[:1000].tofile(small)
    times_by_state: dict[str, list[float]] = {"in memory": [], "dropped": []}
    for number in range(rounds):
        show_progress(f"  first batch: round {number + 1} of {rounds}")
        for state, times in times_by_state.items():
            if state == "dropped":
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                with path.open("rb") as file:
                    while file.read(2**24):
                        pass
            command = [sys.executable, "-c", _PROCESS, str(path), str(small)]
            times.append(
                float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            )
    topic = f"{size_bytes / 2**30:.2g} GiB of tokens"
    windows = (size_bytes // 2 - 1) // _CONTEXT
    what = f"first batch of {_BATCH} of {windows} windows of {_CONTEXT}"
    return [
        Bar(
            topic=topic, name=f"{what}, pages {state}", measured=spread(times), samples={"s": times}
        )
        for state, times in times_by_state.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: small files, small orders"
    )
    parser.add_argument(
        "--directory", type=Path, help="a disk to write to; default: that for temporary files"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    machine = look_at_machine()
    bars = time_positions([10**6] if options.quick else [10**6, 10**8, 10**9], rounds)
    with tempfile.TemporaryDirectory(prefix="chaoskit-bench-", dir=options.directory) as folder:
        bars += time_first_batch(Path(folder), 2**24 if options.quick else 2**30, rounds)
    report = Report(machine=machine, smoke=options.quick, bars=bars)
    save(report, options.results, "start")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
