"""Compare the remote tier with s3fs's put and get:
``python -m benchmarks.checkpoints.checkpoint_remote [--rounds N]``.

A state of 100 MB goes to moto's S3 server, which runs in a process of its own and uses more CPU
than the client. The time and the client's CPU time are compared. Each round does everything once,
in turn. Writes results/checkpoint_remote.json. Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import logging
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import fsspec
import torch

from benchmarks.harness.bars import Bar, Report, look_at_machine, show, spread
from benchmarks.harness.lab import show_progress
from benchmarks.harness.results import RESULTS, save
from chaoskit.checkpoint import DiskTier, RemoteTier
from chaoskit.checkpoint.layout.boxes import whole
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.fixtures.s3_server import S3Server

#: An upload that is verified, or a restore, may take this much longer than a plain transfer of the same bytes.
MOST = 1.5


class Stopwatch:
    """Wall-clock seconds and CPU seconds of this process, by name of the measurement."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.cpu_seconds: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, name: str, act: Callable[[], object]) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        act()
        self.seconds[name].append(time.perf_counter() - begin_s)
        self.cpu_seconds[name].append(time.process_time() - begin_cpu_s)


def transfers(server: S3Server, size_bytes: int, rounds: int, place: Path) -> list[Bar]:
    """Return bars on uploads and restores beside those of s3fs. The first round is a warm-up and is
    not counted.
    """
    disk, watch = DiskTier(place / "disk"), Stopwatch()
    state = {"state": torch.rand(size_bytes // 4)}
    target = torch.zeros(size_bytes // 4)
    plain = fsspec.filesystem("s3", skip_instance_cache=True, **server.options())
    for number in range(rounds + 1):
        show_progress(f"  round {number} of {rounds}")
        path = disk.save(number, state).path
        (file,) = path.glob("*.distcp")
        tier = RemoteTier("s3://bench/ours", storage_options=server.options())
        tier.names()  # connects
        source = DirectorySource(path)
        watch.time("upload: ours, verified", lambda tier=tier, source=source: tier.upload(source))
        watch.time("upload: s3fs", lambda file=file: plain.put_file(str(file), "bench/plain"))
        watch.time(
            "restore: ours, verified",
            lambda tier=tier: tier.read_into({"state": (target, whole(target.shape))}),
        )
        watch.time(
            "restore: s3fs, to a file", lambda: plain.get_file("bench/plain", str(place / "got"))
        )
        tier.remove(path.name)
        tier.close()
    return [
        _ratio("upload, verified / s3fs put", watch, "upload: ours, verified", "upload: s3fs"),
        _ratio(
            "restore, verified / s3fs get",
            watch,
            "restore: ours, verified",
            "restore: s3fs, to a file",
        ),
        *(_seconds(name, size_bytes, watch, values[1:]) for name, values in watch.seconds.items()),
    ]


def _ratio(name: str, watch: Stopwatch, ours: str, other: str) -> Bar:
    ratio = median(watch.seconds[ours][1:]) / median(watch.seconds[other][1:])
    return Bar(
        topic="transfers",
        name=name,
        measured=f"{ratio:.2f} x",
        limit=f"{MOST:g} x",
        met=ratio <= MOST,
    )


def _seconds(name: str, size_bytes: int, watch: Stopwatch, seconds: list[float]) -> Bar:
    rate, cpu_s = size_bytes / median(seconds) / 1e6, median(watch.cpu_seconds[name][1:])
    measured = f"{spread(seconds)}; {rate:.0f} MB/s; {cpu_s * 1e3:.0f} ms of CPU time in the client"
    return Bar(topic="transfers", name=f"{name}", measured=measured, samples={"s": seconds})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="that count")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: 20 MB, one round, no claims"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    machine = look_at_machine()
    size_bytes, rounds = (20 * 10**6, 1) if options.quick else (100 * 10**6, options.rounds)
    with S3Server() as server, tempfile.TemporaryDirectory(prefix="chaoskit-bench-") as place:
        server.make_bucket("bench")
        bars = transfers(server, size_bytes, rounds, Path(place))
    report = Report(machine=machine, smoke=options.quick, bars=bars)
    save(report, options.results, "checkpoint_remote")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
