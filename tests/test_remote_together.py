"""Ranks read together from a store: real processes over gloo, and a proxy that counts what they take from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from chaoskit.checkpoint.disk import DiskTier
from chaoskit.checkpoint.manifest import FILE_CHUNK_BYTES
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.checkpoint.remote.tier import RemoteTier
from chaoskit.fixtures.s3_server import S3Server
from chaoskit.substrate.object_proxy import ObjectProxy
from chaoskit.substrate.object_troubles import Outage, Reply
from chaoskit.substrate.undo import UndoLog

pytestmark = pytest.mark.costly

pytest.importorskip("s3fs", reason="no S3 client here: pip install 'chaoskit[s3]'")

RANKS = 3
ROWS, COLUMNS = 2100, 5000  # 42 MB: three chunks
SMALL_BYTES = 30_000  # listings, manifests

RANK = """
import json, sys
import torch
import torch.distributed as dist
from chaoskit.checkpoint.layout import Box, whole
from chaoskit.checkpoint.remote.backoff import Backoff
from chaoskit.checkpoint.remote.store import Traffic
from chaoskit.checkpoint.remote.tier import RemoteTier
from chaoskit.checkpoint.remote.together import read_into_together
from chaoskit.osprocess import die_with_parent

rank, count, port, options, launcher = sys.argv[1:]
rank, count = int(rank), int(count)
die_with_parent(int(launcher))
store = dist.TCPStore("127.0.0.1", int(port), is_master=rank == 0)
if rank == 0:
    print(store.port, flush=True)  # the kernel chose it
dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
traffic = Traffic(backoff=Backoff(base_s=0.02, cap_s=0.1, deadline_s=1.0), parallel=2)
for line in sys.stdin:
    url, rows, columns, mine = json.loads(line)
    tier = RemoteTier(url, storage_options=json.loads(options), traffic=traffic)
    if mine == "all":
        box = whole((rows, columns))
    else:
        share = rows // count
        box = Box((share * rank, 0), (share, columns))
    tensors = {"large": (torch.zeros(box.extent), box)}
    if mine == "wrong" and rank == 1:
        tensors = {"none": (torch.zeros(1), whole((1,)))}
    try:
        restored = read_into_together(tier, tensors)
        value = tensors["large"][0]
        every = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
        expected = every[box.within(whole((rows, columns)))]
        step, right = restored.manifest.step, torch.equal(value, expected + restored.manifest.step)
        answer = {"step": step, "right": right, "lost": [one.name for one in restored.lost]}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    disk, found = DiskTier(tmp_path_factory.mktemp("disk")), {}
    for step in (1, 2):
        staging = disk.begin(step)
        with staging.writer("a.distcp") as writer:
            large = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
            writer.add_tensor("large", large + step)
            found[step] = staging.commit([writer.finish()]).path
    return found


@pytest.fixture
def bucket(s3_server: S3Server, snapshots: dict[int, Path], tmp_path: Path) -> Iterator[str]:
    name = f"together-{abs(hash(tmp_path)) % 10**12}"
    s3_server.make_bucket(name)
    tier = RemoteTier(f"s3://{name}/run", storage_options=s3_server.options())
    for path in snapshots.values():
        tier.upload(DirectorySource(path))
    yield name
    tier.close()


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectProxy]:
    """As s3_proxy, for all tests: what they impose they lift."""
    undo = UndoLog(tmp_path_factory.mktemp("undo"))
    proxy = ObjectProxy("127.0.0.1", s3_server.port, undo)
    yield proxy
    proxy.close()
    undo.close()


Ask = Callable[[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ask(s3_server: S3Server, proxy: ObjectProxy) -> Iterator[Ask]:
    """Have all ranks read from a bucket all, a share or what is not there; returns what became of it."""

    def start(rank: int, port: str) -> subprocess.Popen[str]:
        arguments = [str(rank), str(RANKS), port, json.dumps(s3_server.options(proxy.url)), str(os.getpid())]
        command = [sys.executable, "-c", RANK, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    processes = [start(0, "0")]
    port = processes[0].stdout.readline().strip()
    processes += [start(rank, port) for rank in range(1, RANKS)]

    def tell(bucket: str, mine: str) -> list[dict[str, Any]]:
        for process in processes:
            process.stdin.write(json.dumps([f"s3://{bucket}/run", ROWS, COLUMNS, mine]) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline() or '{"error": "gone"}') for process in processes]

    yield tell
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.promise("So N replicas take the state from the store once instead of N times.")
def test_each_byte_is_read_once(ask: Ask, proxy: ObjectProxy, bucket: str) -> None:
    """All ranks together take each byte of a snapshot from the store once, whether they want all of it or shares."""
    size_bytes = ROWS * COLUMNS * 4
    for mine in ("all", "share"):
        before = proxy.traffic().received_bytes
        assert ask(bucket, mine) == [{"step": 2, "right": True, "lost": []}] * RANKS
        read = proxy.traffic().received_bytes - before
        assert size_bytes <= read <= size_bytes + SMALL_BYTES, mine


def test_all_are_told_what_one_of_them_met(ask: Ask, proxy: ObjectProxy, bucket: str) -> None:
    """An error of one rank is raised on every rank, and the next reading succeeds on all of them."""
    errors = ask(bucket, "wrong")
    assert [answer["error"] for answer in errors] == ["ChaoskitError"] * RANKS
    assert all("'none'" in answer["text"] for answer in errors)
    for trouble, name in ((Reply(403, path="a.distcp"), "RemoteRefused"), (Outage(), "RemoteUnavailable")):
        number = proxy.impose(trouble)
        assert [answer["error"] for answer in ask(bucket, "all")] == [name] * RANKS
        proxy.lift(number)
    assert ask(bucket, "share") == [{"step": 2, "right": True, "lost": []}] * RANKS, "no rank is left behind"


@pytest.mark.slow
@pytest.mark.promise("All ranks get the same snapshot, or the same error")
def test_all_take_the_same_snapshot(ask: Ask, s3_server: S3Server, snapshots: dict[int, Path], bucket: str) -> None:
    """Only one rank reads the damaged chunk; all of them read the older snapshot."""
    direct = fsspec.filesystem("s3", skip_instance_cache=True, **s3_server.options())
    path = f"{bucket}/run/{snapshots[2].name}/a.distcp"
    data = bytearray(direct.cat_file(path))
    data[2 * FILE_CHUNK_BYTES + 5] ^= 1
    direct.pipe_file(path, bytes(data))
    assert ask(bucket, "share") == [{"step": 1, "right": True, "lost": [snapshots[2].name]}] * RANKS
    assert ask(bucket, "all") == [{"step": 1, "right": True, "lost": []}] * RANKS, "it was set aside"
    direct.rm(f"{bucket}/run/{snapshots[1].name}", recursive=True)
    assert [answer["error"] for answer in ask(bucket, "all")] == ["NothingToRestore"] * RANKS
