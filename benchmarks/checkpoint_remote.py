"""The remote tier beside s3fs's own put and get: ``python benchmarks/checkpoint_remote.py [--rounds N]``.

A state of 100 MB, and moto's S3 server in a process of its own, which costs more than we do: what is compared is the
time, and the CPU time of the client. Each round does everything once, in turn. Then four ranks restore the whole state,
each for itself and together, through a proxy that counts what they take from the store. Writes
results/checkpoint_remote.json and results/checkpoint_remote.md. Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import logging
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import fsspec
import torch
from bars import Bar, Report, look_at_machine, save, show, spread
from lab import say

from chaoskit.checkpoint import DiskTier, RemoteTier
from chaoskit.checkpoint.layout import whole
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.fixtures.s3_server import S3Server
from chaoskit.substrate.object_proxy import ObjectProxy
from chaoskit.substrate.undo import UndoLog

#: An upload that is verified, or a restore, may take this much longer than a plain transfer of the same bytes.
MOST = 1.5
#: Ranks that restore the same state.
RANKS = 4
#: What may be read beside the state when ranks read together: listings, manifests, containers.
OVERHEAD = 0.01

_RANK = """
import json, sys, time, torch, torch.distributed as dist
from chaoskit.checkpoint import RemoteTier
from chaoskit.checkpoint.layout import whole
from chaoskit.checkpoint.remote.together import read_into_together
from chaoskit.osprocess import die_with_parent

rank, count, port, launcher, url, options, elements = json.loads(sys.argv[1])
die_with_parent(launcher)
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
tier = RemoteTier(url, storage_options=options)
targets = {"state": (torch.zeros(elements), whole((elements,)))}
tier.names()
for line in sys.stdin:
    dist.barrier()
    begin_s = time.perf_counter()
    read_into_together(tier, targets) if line.strip() == "together" else tier.read_into(targets)
    dist.barrier()
    print(time.perf_counter() - begin_s, flush=True)
"""


class Stopwatch:
    """Seconds, and CPU seconds of this process, of each measurement by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.cpu_seconds: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, name: str, act: Callable[[], object]) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        act()
        self.seconds[name].append(time.perf_counter() - begin_s)
        self.cpu_seconds[name].append(time.process_time() - begin_cpu_s)


def transfers(server: S3Server, size_bytes: int, rounds: int, place: Path) -> list[Bar]:
    """Uploads and restores beside s3fs's own. The first round warms up and does not count."""
    disk, watch = DiskTier(place / "disk"), Stopwatch()
    state = {"state": torch.rand(size_bytes // 4)}
    target = torch.zeros(size_bytes // 4)
    plain = fsspec.filesystem("s3", skip_instance_cache=True, **server.options())
    for number in range(rounds + 1):
        say(f"  round {number} of {rounds}")
        path = disk.save(number, state).path
        (file,) = path.glob("*.distcp")
        tier = RemoteTier("s3://bench/ours", storage_options=server.options())
        tier.names()  # connects
        source = DirectorySource(path)
        watch.time("upload: ours, verified", lambda tier=tier, source=source: tier.upload(source))
        watch.time("upload: s3fs", lambda file=file: plain.put_file(str(file), "bench/plain"))
        watch.time(
            "restore: ours, verified", lambda tier=tier: tier.read_into({"state": (target, whole(target.shape))})
        )
        watch.time("restore: s3fs, to a file", lambda: plain.get_file("bench/plain", str(place / "got")))
        tier.remove(path.name)
        tier.close()
    return [
        _ratio("upload, verified / s3fs put", watch, "upload: ours, verified", "upload: s3fs"),
        _ratio("restore, verified / s3fs get", watch, "restore: ours, verified", "restore: s3fs, to a file"),
        *(_seconds(name, size_bytes, watch, values[1:]) for name, values in watch.seconds.items()),
    ]


def _ratio(name: str, watch: Stopwatch, ours: str, other: str) -> Bar:
    ratio = median(watch.seconds[ours][1:]) / median(watch.seconds[other][1:])
    return Bar(topic="transfers", name=name, measured=f"{ratio:.2f} x", limit=f"{MOST:g} x", met=ratio <= MOST)


def _seconds(name: str, size_bytes: int, watch: Stopwatch, seconds: list[float]) -> Bar:
    rate, cpu_s = size_bytes / median(seconds) / 1e6, median(watch.cpu_seconds[name][1:])
    measured = f"{spread(seconds)}; {rate:.0f} MB/s; {cpu_s * 1e3:.0f} ms of CPU time in the client"
    return Bar(topic="transfers", name=f"{name} (median / p95 / max)", measured=measured, samples={"s": seconds})


def together(server: S3Server, size_bytes: int, rounds: int, place: Path) -> list[Bar]:
    """What ranks that all need the same take from the store."""
    tier = RemoteTier("s3://bench/together", storage_options=server.options())
    tier.upload(DirectorySource(DiskTier(place / "replicas").save(1, {"state": torch.rand(size_bytes // 4)}).path))
    undo = UndoLog(place)
    proxy = ObjectProxy("127.0.0.1", server.port, undo)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, options = "s3://bench/together", server.options(proxy.url)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, json.dumps([rank, RANKS, port, os.getpid(), url, options, size_bytes // 4])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    found: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for number in range(rounds + 1):
        for how in ("alone", "together"):
            before = proxy.traffic().received_bytes
            seconds = max(_restore(ranks, how))
            if number:
                found[how].append((seconds, proxy.traffic().received_bytes - before))
    for rank in ranks:
        rank.communicate()
    proxy.close()
    undo.close()
    tier.close()
    return [_taken(how, size_bytes, values) for how, values in found.items()]


def _restore(ranks: list[subprocess.Popen[str]], how: str) -> list[float]:
    for rank in ranks:
        assert rank.stdin is not None
        print(how, file=rank.stdin, flush=True)
    return [float(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]


def _taken(how: str, size_bytes: int, values: list[tuple[float, int]]) -> Bar:
    seconds, read = [value for value, _ in values], max(value for _, value in values)
    limit = "1 x" if how == "together" else ""
    return Bar(
        topic="together",
        name=f"{RANKS} ranks restore the same state, {how}: read from the store",
        measured=f"{read / size_bytes:.2f} x its size; {spread(seconds)}",
        limit=limit,
        met=read <= size_bytes * (1 + OVERHEAD) if limit else None,
        timed=False,
        samples={"s": seconds, "bytes": [value for _, value in values]},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="that count")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 20 MB, one round, no claims")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIRECTORY")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    machine = look_at_machine()
    size_bytes, rounds = (20 * 10**6, 1) if options.quick else (100 * 10**6, options.rounds)
    with S3Server() as server, tempfile.TemporaryDirectory(prefix="chaoskit-bench-") as place:
        server.make_bucket("bench")
        bars = transfers(server, size_bytes, rounds, Path(place))
        say("  ranks that restore together")
        bars += together(server, size_bytes, max(1, rounds // 2), Path(place))
    report = Report(machine=machine, smoke=options.quick, bars=bars)
    save(report, options.results, "checkpoint_remote")
    show(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
