"""Compare the disk tier with raw writes and with torch:
``python -m benchmarks.checkpoints.checkpoint_disk [--rounds N]``.

States of 100 MB and 1 GB consist of a model and Adam's moments. Each round runs every kind once, in
turn, so that all kinds use the same disk. First come the saves, all of them with fsync: a raw write
of the same bytes, chaoskit's save, ``torch.save`` and ``dcp.save``. Then each file is loaded from
the page cache into existing tensors. Writes results/checkpoint_disk.json. Exit status 1 if a bar is
not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.harness.bars import Bar, Report, look_at_machine, show, spread
from benchmarks.harness.lab import show_progress
from benchmarks.harness.results import RESULTS, save
from chaoskit.checkpoint import DiskTier, Snapshot, SnapshotReader, SnapshotWriter
from chaoskit.checkpoint.layout.boxes import whole
from chaoskit.checkpoint.layout.raw import tensor_bytes

#: A save may cost this much more than a raw write and fsync of its bytes.
SAVE_RATIO = 1.2
#: A load from the page cache is faster than torch's by this factor.
LOAD_FACTOR = 3.0

State = dict[str, Tensor]


def make_state(size_bytes: int) -> State:
    """Return layers of 4 MB with their biases, each with two moments, up to ``size_bytes``."""
    state: State = {}
    for layer in range(max(1, round(size_bytes / 3 / (2**22 + 2**12)))):
        for kind in ("weight", "exp_avg.weight", "exp_avg_sq.weight"):
            state[f"layer{layer}.{kind}"] = torch.rand(1024, 1024)
            state[f"layer{layer}.{kind}.bias"] = torch.rand(1024)
    return state


def synced_file(path: Path, write: Callable[[int], object]) -> None:
    """Create a file, write its bytes, and wait until they are on the disk, as every save here
    does.
    """
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    write(fd)
    os.fsync(fd)
    os.close(fd)


def raw(path: Path, data: memoryview) -> None:
    """Write ``data`` with as few calls as the kernel allows."""

    def write(fd: int) -> None:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])

    synced_file(path, write)


def torch_save(path: Path, state: State) -> None:
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


class Stopwatch:
    """Seconds of each measurement, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, name: str, act: Callable[[], object]) -> None:
        begin_s = time.perf_counter()
        act()
        self.seconds[name].append(time.perf_counter() - begin_s)


def one_round(
    watch: Stopwatch, place: Path, state: State, targets: State, flat: memoryview, number: int
) -> None:
    """Save and load in every way, and remove the files while the clock is stopped.

    Each round begins with another kind of save, since disks get slower after so many bytes.
    """
    tier = DiskTier(place / "ours")
    saves: dict[str, Callable[[], object]] = {
        "raw": lambda: raw(place / "raw", flat),
        "ours": lambda: tier.save(1, state),
        "ours in dcp.save": lambda: dcp.save(
            state, checkpoint_id="1", storage_writer=SnapshotWriter(place / "plugin"), no_dist=True
        ),
        "torch.save": lambda: torch_save(place / "torch.pt", state),
        "dcp.save": lambda: dcp.save(state, checkpoint_id=place / "dcp", no_dist=True),
    }
    names = list(saves)
    for place_in_round in range(len(names)):
        name = names[(number + place_in_round) % len(names)]
        os.sync()
        watch.time(f"save: {name}", saves[name])
    os.sync()
    snapshot = Snapshot.open(place / "ours" / "step-000000001.g0")
    boxes = {path: (target, whole(tuple(target.shape))) for path, target in targets.items()}
    loads: dict[str, Callable[[], object]] = {
        "memory copy": lambda: [target.copy_(state[path]) for path, target in targets.items()],
        "ours": lambda: snapshot.read_into(boxes),
        "ours in dcp.load": lambda: dcp.load(
            targets, storage_reader=SnapshotReader(snapshot.path), no_dist=True
        ),
        "dcp.load": lambda: dcp.load(targets, checkpoint_id=place / "dcp", no_dist=True),
        "torch.load": lambda: torch.load(place / "torch.pt", weights_only=True),
    }
    for name, act in loads.items():
        watch.time(f"load: {name}", act)
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def measure(size_bytes: int, rounds: int, directory: Path | None) -> list[Bar]:
    """Return the bars of one size. The first round is a warm-up and is not counted."""
    label = f"{size_bytes / 1e6:.0f} MB"
    state = make_state(size_bytes)
    targets = {path: torch.rand(tensor.shape) for path, tensor in state.items()}
    flat = memoryview(b"".join(tensor_bytes(tensor, path) for path, tensor in state.items()))
    watch = Stopwatch()
    with tempfile.TemporaryDirectory(prefix="chaoskit-bench-", dir=directory) as place:
        for number in range(rounds + 1):
            show_progress(f"  {label}: round {number} of {rounds}")
            one_round(watch, Path(place), state, targets, flat, number)
    seconds = {name: values[1:] for name, values in watch.seconds.items()}
    return _claims(label, seconds) + [
        Bar(topic=label, name=f"{label}, {name}", measured=spread(values), samples={"s": values})
        for name, values in seconds.items()
    ]


def _claims(label: str, seconds: dict[str, list[float]]) -> list[Bar]:
    def ratio(name: str, other: str) -> float:
        """Return the median ratio of two durations of the same round, so that a slow disk affects
        both.
        """
        return median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))

    cost, plugin = ratio("save: ours", "save: raw"), ratio("save: ours in dcp.save", "save: raw")
    gain, plugin_gain = (
        ratio("load: dcp.load", "load: ours"),
        ratio("load: dcp.load", "load: ours in dcp.load"),
    )
    most, least = f"{SAVE_RATIO:g} x", f"{LOAD_FACTOR:g} x"
    return [
        _bar(label, "save / raw write and fsync of the same bytes", cost, most, cost <= SAVE_RATIO),
        _bar(
            label,
            "dcp.save with our writer / raw write and fsync",
            plugin,
            most,
            plugin <= SAVE_RATIO,
        ),
        _bar(
            label,
            "load from the page cache, verified: faster than dcp.load",
            gain,
            least,
            gain >= LOAD_FACTOR,
        ),
        _bar(label, "dcp.load with our reader: faster than with torch's", plugin_gain, "", None),
    ]


def _bar(label: str, name: str, ratio: float, limit: str, met: bool | None) -> Bar:
    return Bar(
        topic=label, name=f"{label}, {name}", measured=f"{ratio:.2f} x", limit=limit, met=met
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="that count, of each size")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: 10 MB, one round, no claims"
    )
    parser.add_argument(
        "--directory", type=Path, help="where to write; default: that for temporary files"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    machine = look_at_machine()
    sizes = [10 * 10**6] if options.quick else [100 * 10**6, 10**9]
    bars = [
        bar
        for size in sizes
        for bar in measure(size, 1 if options.quick else options.rounds, options.directory)
    ]
    report = Report(machine=machine, smoke=options.quick, bars=bars)
    save(report, options.results, "checkpoint_disk")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
