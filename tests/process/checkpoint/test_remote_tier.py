"""Tests of the remote tier on a real S3 server behind a proxy that breaks it, and on files and
memory.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import fsspec
import pytest
import torch
from support.waiting import LIMIT_S, wait_until
from torch import Tensor

from chaoskit.checkpoint.dcp import SnapshotReader, SnapshotWriter, restore
from chaoskit.checkpoint.disk.inventory import NothingToRestore
from chaoskit.checkpoint.disk.retention import Retention
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.layout.boxes import Box, whole
from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, MANIFEST, Damaged
from chaoskit.checkpoint.remote.backoff import Backoff, RemoteRefused, RemoteUnavailable
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.checkpoint.remote.store import Traffic
from chaoskit.checkpoint.remote.tier import RemoteTier
from chaoskit.checkpoint.remote.upload import QUARANTINE
from chaoskit.checkpoint.remote.uploader import Uploader
from chaoskit.config import CheckpointTier, RunConfig
from chaoskit.daemon.keeper_base import NodeContext
from chaoskit.daemon.replica_keeper import ReplicaKeeper
from chaoskit.errors import BadInput
from chaoskit.fixtures.s3_server import S3Server
from chaoskit.job import JobSpec
from chaoskit.journal import Journal
from chaoskit.substrate.object_store.proxy import ObjectProxy
from chaoskit.substrate.object_store.troubles import (
    ErrorReply,
    Garble,
    Lag,
    ResetConnection,
    Stall,
    StoreOutage,
    Trouble,
    Truncate,
)
from chaoskit.wire.messages import Sealed

pytestmark = pytest.mark.costly

pytest.importorskip("s3fs", reason="no S3 client here: pip install 'chaoskit[s3]'")

SLOW = pytest.mark.slow  # one of a kind is enough for each commit
QUICK = Traffic(backoff=Backoff(base_s=0.02, cap_s=0.2, deadline_s=20.0), request_timeout_s=5.0)
HASTY = Traffic(backoff=Backoff(base_s=0.02, cap_s=0.1, deadline_s=0.5), request_timeout_s=LIMIT_S)
LARGE = FILE_CHUNK_BYTES // 4 + 100_000  # elements: a file of two parts


def state(step: int) -> dict[str, Tensor]:
    """Return a state of some 17 MB; the states of two steps differ everywhere."""
    large = torch.arange(LARGE, dtype=torch.float32) + step
    return {
        "large": large.view(-1, 8),
        "small": torch.full((3, 5), float(step)),
        "count": torch.tensor(step),
    }


def save(disk: DiskTier, step: int) -> Path:
    """Commit a snapshot of two files."""
    staging, parts = disk.begin(step), []
    for name, paths in (("a.distcp", ["large"]), ("b.distcp", ["small", "count"])):
        with staging.writer(name) as writer:
            for path in paths:
                writer.add_tensor(path, state(step)[path])
            parts.append(writer.finish())
    return staging.commit(parts).path


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return snapshots that are committed on the disk, by their step."""
    disk = DiskTier(tmp_path_factory.mktemp("disk"))
    return {step: save(disk, step) for step in (1, 2, 3)}


class Remote:
    """A bucket that a tier accesses through the proxy, and the test directly."""

    def __init__(self, server: S3Server, proxy: ObjectProxy, bucket: str) -> None:
        server.make_bucket(bucket)
        self.proxy, self.url = proxy, f"s3://{bucket}/run"
        self.options = server.options(proxy.url)
        self.direct = fsspec.filesystem("s3", skip_instance_cache=True, **server.options())
        self.tiers: list[RemoteTier] = []

    def tier(self, traffic: Traffic = QUICK, **settings: Any) -> RemoteTier:
        tier = RemoteTier(self.url, storage_options=self.options, traffic=traffic, **settings)
        self.tiers.append(tier)
        return tier

    def objects(self) -> set[str]:
        """Return the names of the objects below the URL."""
        self.direct.invalidate_cache()
        root = self.url.removeprefix("s3://")
        return {path.removeprefix(f"{root}/") for path in self.direct.find(root)}

    def sent_bytes(self) -> int:
        return self.proxy.traffic().sent_bytes

    def spoil(self, name: str, offset: int) -> None:
        """Change a byte of an object at rest."""
        path = f"{self.url}/{name}"
        data = bytearray(self.direct.cat_file(path))
        data[offset] ^= 1
        self.direct.pipe_file(path, bytes(data))


@pytest.fixture
def remote(s3_server: S3Server, s3_proxy: ObjectProxy, tmp_path: Path) -> Iterator[Remote]:
    remote_store = Remote(s3_server, s3_proxy, f"bucket-{abs(hash(tmp_path)) % 10**12}")
    yield remote_store
    for tier in remote_store.tiers:
        tier.close()


def targets(step: int = 0) -> dict[str, tuple[Tensor, Box]]:
    return {
        path: (torch.zeros_like(tensor), whole(tuple(tensor.shape)))
        for path, tensor in state(step).items()
    }


def assert_restored(tier: RemoteTier, step: int, lost: int = 0) -> None:
    tensors = targets()
    restored = tier.read_into(tensors)
    assert (restored.manifest.step, len(restored.lost)) == (step, lost)
    for path, expected in state(step).items():
        assert torch.equal(tensors[path][0], expected), path


# -- what a node offers ----------------------------------------------------------------------------


@pytest.fixture
def offering(
    filled: Remote, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[ReplicaKeeper, SimpleQueue[Any]]]]:
    """Provide a function that starts keepers of nodes, and returns each with the queue of its
    answers.

    Their job has the bucket and a disk directory.
    """
    for name, setting in (
        ("ACCESS_KEY_ID", "any"),
        ("SECRET_ACCESS_KEY", "any"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", setting)
    remote = CheckpointTier(target=filled.url, endpoint=filled.proxy.url)

    def start(*, resume: bool = False) -> tuple[ReplicaKeeper, SimpleQueue[Any]]:
        tiers = {"disk": CheckpointTier(target=str(tmp_path / "disk")), "remote": remote}
        config, answers = (
            RunConfig(job=JobSpec("job.py"), resume=resume, **tiers),
            SimpleQueue[Any](),
        )
        journal = Journal(tmp_path / "journal", "node0")
        return ReplicaKeeper(
            NodeContext("node0", "127.0.0.1", "token", config, journal, answers.put, answers.put)
        ), answers

    yield start
    DiskTier(tmp_path / "disk").sweep()


def offered(answer: Sealed) -> tuple[int, list[tuple[str, int]]]:
    return answer.number, [(snapshot.tier, snapshot.step) for snapshot in answer.snapshots]


def test_a_node_offers_what_it_has_before_the_store_answers(
    filled: Remote, offering: Callable[..., tuple[ReplicaKeeper, SimpleQueue[Any]]], tmp_path: Path
) -> None:
    """The node names the snapshots of the store in another answer to the same question, once they
    are known.
    """
    DiskTier(tmp_path / "disk").save(2, state(2), generation=1)
    outage = filled.proxy.impose(StoreOutage())
    keeper, answers = offering()
    keeper.recall(7)
    assert offered(answers.get(timeout=LIMIT_S)) == (7, [("disk", 2)])
    assert answers.empty()
    filled.proxy.lift(outage)
    assert offered(answers.get(timeout=LIMIT_S)) == (
        7,
        [("disk", 2), ("remote", 3), ("remote", 2), ("remote", 1)],
    )


def test_a_store_that_hangs_holds_up_no_other_order(
    filled: Remote, offering: Callable[..., tuple[ReplicaKeeper, SimpleQueue[Any]]], tmp_path: Path
) -> None:
    """A node that resumes without any copy of its own waits for the store; other orders are carried
    out meanwhile.
    """
    filled.proxy.impose(Stall())
    keeper, answers = offering(resume=True)
    keeper.recall(7)
    keeper.ended("node0.0")
    DiskTier(tmp_path / "disk").save(2, state(2), generation=1)
    keeper.recall(8)
    assert offered(answers.get(timeout=15.0)) == (
        8,
        [("disk", 2)],
    )  # the first one waits for twice as long


# -- any file system -------------------------------------------------------------------------------


@pytest.mark.promise("the world may have another size than the one that saved", kind=["file", "s3"])
@pytest.mark.parametrize("kind", ["file", "memory", "s3"])
def test_round_trip(
    kind: str, snapshots: dict[int, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A snapshot uploaded to any file system is restored, as a whole and in part, and can be
    removed.
    """
    if kind == "s3":
        tier = request.getfixturevalue("remote").tier()
    else:
        tier = RemoteTier(f"{kind}://{tmp_path}/run", traffic=QUICK)
    with pytest.raises(NothingToRestore):
        tier.read_into(targets())
    for step in (1, 2):
        sent = tier.upload(DirectorySource(snapshots[step]))
        assert sent.read_bytes == (0 if kind == "s3" else sent.size_bytes), (
            "what a store does not confirm is read back"
        )
    assert tier.names() == [snapshots[2].name, snapshots[1].name]
    assert_restored(tier, 2)
    tier.open(snapshots[1].name).verify()
    part = torch.zeros(2, 3)
    tier.read_into({"large": (part, Box((4, 5), (2, 3)))})
    assert torch.equal(part, state(2)["large"][4:6, 5:8]), "resharding"
    tier.remove(snapshots[2].name)
    assert tier.names() == [snapshots[1].name]
    assert not tier.store.sizes(snapshots[2].name)
    tier.close()


def test_plain_torch_loads_what_was_uploaded(snapshots: dict[int, Path], tmp_path: Path) -> None:
    """Plain torch reads an uploaded snapshot as its own checkpoint."""
    import torch.distributed.checkpoint as dcp

    tier = RemoteTier(f"file://{tmp_path}/run", traffic=QUICK)
    tier.upload(DirectorySource(snapshots[2]))
    loaded = {path: torch.zeros_like(tensor) for path, tensor in state(2).items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "run" / snapshots[2].name, no_dist=True)
    assert all(torch.equal(loaded[path], tensor) for path, tensor in state(2).items())


def test_dcp_loads_from_the_store(filled: Remote, snapshots: dict[int, Path]) -> None:
    """The snapshot is loaded with chaoskit's reader, which verifies it, and with torch's own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    place = f"{filled.url}/{snapshots[2].name}"
    for reader in (SnapshotReader(filled.tier(), 2), FsspecReader(place, **filled.options)):
        loaded = {path: torch.zeros_like(tensor) for path, tensor in state(2).items()}
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert all(torch.equal(loaded[path], tensor) for path, tensor in state(2).items())
    with pytest.raises(BadInput, match="a snapshot of step 7"):
        SnapshotReader(filled.tier(), 7).read_metadata()


def test_dcp_loads_by_url(snapshots: dict[int, Path], tmp_path: Path) -> None:
    """The URL may be that of all snapshots, or of one of them."""
    import torch.distributed.checkpoint as dcp

    tier = RemoteTier(f"file://{tmp_path}/run")
    for step in (2, 3):
        tier.upload(DirectorySource(snapshots[step]))
    for url, step in ((tier.store.url, 3), (f"{tier.store.url}/{snapshots[2].name}", 2)):
        loaded = {path: torch.zeros_like(tensor) for path, tensor in state(2).items()}
        dcp.load(loaded, storage_reader=SnapshotReader(url), no_dist=True)
        assert all(torch.equal(loaded[path], tensor) for path, tensor in state(step).items())


def test_a_store_that_is_out_is_not_passed_over(
    filled: Remote, snapshots: dict[int, Path], tmp_path: Path
) -> None:
    """The store may hold a newer snapshot than the disk; once it answers, that snapshot is
    restored.
    """
    DiskTier(tmp_path / "disk").save(2, state(2))
    loaded = {path: torch.zeros_like(tensor) for path, tensor in state(2).items()}
    outage = filled.proxy.impose(StoreOutage())
    with pytest.raises(RemoteUnavailable):
        restore(loaded, disk=tmp_path / "disk", remote=filled.tier(HASTY))
    filled.proxy.lift(outage)
    result = restore(loaded, disk=tmp_path / "disk", remote=filled.tier())
    assert result is not None
    assert result.path == f"{filled.url}/{snapshots[3].name}"
    assert all(torch.equal(loaded[path], tensor) for path, tensor in state(3).items())


def test_what_dcp_saves_is_uploaded(remote: Remote, tmp_path: Path) -> None:
    """A snapshot that torch's DCP saves is uploaded after its commit."""
    import torch.distributed.checkpoint as dcp

    uploader = Uploader(remote.tier(), after_commit=RemoteTier.prune)
    writer = SnapshotWriter(
        DiskTier(tmp_path / "disk"), committed=lambda snapshot: uploader.offer(snapshot.path)
    )
    dcp.save(state(2), checkpoint_id="step-2", storage_writer=writer, no_dist=True)
    assert uploader.wait(LIMIT_S)
    assert uploader.close()
    assert_restored(remote.tier(), 2)


def test_objects_and_generations_are_uploaded(remote: Remote, tmp_path: Path) -> None:
    """A snapshot of a later generation keeps its name in the store, and its objects come back."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    tier = remote.tier()
    snapshot = DiskTier(tmp_path / "disk").save(2, state(2), {"epoch": b"three"}, generation=1)
    sent = tier.upload(DirectorySource(snapshot.path))
    assert sent.name == "step-000000002.g1"
    assert_restored(tier, 2)
    assert tier.open(sent.name).read_object("epoch") == b"three"
    loaded = {path: torch.zeros_like(tensor) for path, tensor in state(2).items()}
    dcp.load(
        loaded,
        storage_reader=FsspecReader(f"{remote.url}/{sent.name}", **remote.options),
        no_dist=True,
    )
    assert all(torch.equal(loaded[path], tensor) for path, tensor in state(2).items())


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("bucket/run", "PROTOCOL://PLACE"),
        ("s3://", "PROTOCOL://PLACE"),
        ("nonsense://x/y", "a protocol that fsspec knows"),
        ("gs://bucket/run", r"pip install 'chaoskit\[gcs\]'"),
    ],
)
def test_urls_that_are_none(url: str, remedy: str) -> None:
    """A URL that cannot work is bad input, with a remedy."""
    with pytest.raises(BadInput, match=remedy):
        RemoteTier(url)


@pytest.mark.promise("damage on the disk never becomes a good copy", kind="s3")
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_damaged_source_is_not_sent(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A damaged snapshot on the disk is not committed to the store."""
    disk = DiskTier(tmp_path / "other")
    path = save(disk, 1)
    with (path / "a.distcp").open("r+b") as file:
        file.seek(FILE_CHUNK_BYTES + 5)
        file.write(b"?")
    tier = (
        RemoteTier(f"file://{tmp_path}/run")
        if kind == "file"
        else request.getfixturevalue("remote").tier()
    )
    with pytest.raises(Damaged, match="chunk 1"):
        tier.upload(DirectorySource(path))
    assert tier.names() == []


# -- uploads that are disturbed --------------------------------------------------------------------


@pytest.mark.promise(
    "connection refused, reset, timed out; a body cut short; `BadDigest` | again, with back-off",
    trouble=ErrorReply(503, share=0.4, most=6),
)
@pytest.mark.parametrize(
    "trouble",
    [
        ErrorReply(503, share=0.4, most=6),
        pytest.param(ErrorReply(500, most=1), marks=SLOW),
        pytest.param(ErrorReply(429, most=2), marks=SLOW),
        ResetConnection(after_bytes=1_000_000, path="partNumber=1", most=2),
        ResetConnection(path="uploadId", methods=("POST",), most=1),
        Truncate(share=0.5, most=6),
        Stall(spared=2, most=2),
    ],
    ids=lambda trouble: (
        f"{type(trouble).__name__}-{getattr(trouble, 'status', '')}{''.join(trouble.methods)}"
    ),
)
def test_errors_that_pass_are_outlasted(
    snapshots: dict[int, Path], remote: Remote, trouble: Trouble
) -> None:
    """An upload outlasts errors that pass."""
    traffic = Traffic(
        backoff=QUICK.backoff, request_timeout_s=0.5 if isinstance(trouble, Stall) else 5.0
    )
    tier = remote.tier(traffic)
    number = remote.proxy.impose(trouble)
    tier.upload(DirectorySource(snapshots[2]))
    assert_restored(tier, 2)
    assert remote.proxy.lift(number) >= 1, "it was disturbed"


@pytest.mark.promise(
    "An upload is begun again, by any process on any host, and sends what is missing"
)
def test_an_outage_in_the_middle(snapshots: dict[int, Path], remote: Remote) -> None:
    """The process gives up; parts that the store had taken are not sent again."""
    tier = remote.tier(HASTY)
    stall = remote.proxy.impose(Stall(path="partNumber=2"))
    failed: list[Exception] = []

    def upload() -> None:
        try:
            tier.upload(DirectorySource(snapshots[2]))
        except RemoteUnavailable as error:
            failed.append(error)

    thread = threading.Thread(target=upload)
    thread.start()
    wait_until(lambda: tier.store.sent_bytes >= FILE_CHUNK_BYTES, "the first part to be sent")
    outage = remote.proxy.impose(StoreOutage())
    thread.join(LIMIT_S)
    assert "tried" in str(failed[0])
    assert not any(MANIFEST in name for name in remote.objects()), "half a snapshot was committed"
    remote.proxy.lift(stall)
    remote.proxy.lift(outage)
    before = remote.sent_bytes()
    remote.tier().upload(DirectorySource(snapshots[2]))
    size_bytes = DirectorySource(snapshots[2]).manifest.size_bytes
    assert remote.sent_bytes() - before < size_bytes - FILE_CHUNK_BYTES + 500_000, (
        "a part was there already"
    )
    assert_restored(remote.tier(), 2)


UPLOAD = """
import sys, json
from pathlib import Path
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.checkpoint.remote.tier import RemoteTier

tier = RemoteTier(sys.argv[1], storage_options=json.loads(sys.argv[2]))
tier.upload(DirectorySource(Path(sys.argv[3])))
"""


SHARES = [0.2, 0.5, 0.8, 0.9, 0.97, 0.99]


@SLOW
@pytest.mark.promise(
    "the manifest is the commit: it is put after every file is there and verified", share=0.97
)
@pytest.mark.parametrize("share", SHARES)
def test_a_kill_in_the_middle(snapshots: dict[int, Path], remote: Remote, share: float) -> None:
    """A partial snapshot is never visible, and the next process continues the upload."""
    source = DirectorySource(snapshots[2])
    remote.tier().upload(DirectorySource(snapshots[1]))
    before = remote.sent_bytes()
    remote.proxy.impose(Lag(bytes_per_s=40e6))
    command = [
        sys.executable,
        "-c",
        UPLOAD,
        remote.url,
        json.dumps(remote.options),
        str(snapshots[2]),
    ]
    with subprocess.Popen(command) as process:
        sent_bytes = share * source.manifest.size_bytes
        wait_until(lambda: remote.sent_bytes() - before > sent_bytes, "that share of the bytes")
        process.send_signal(signal.SIGKILL)
    if f"{snapshots[2].name}/{MANIFEST}" not in remote.objects():
        assert_restored(remote.tier(), 1)
    remote.tier().upload(source)
    assert_restored(remote.tier(), 2)


def test_one_may_be_pruned_while_it_is_uploaded(remote: Remote, tmp_path: Path) -> None:
    """A snapshot that was opened is uploaded although it is removed from the disk meanwhile."""
    source = DirectorySource(save(DiskTier(tmp_path / "disk"), 2))
    shutil.rmtree(tmp_path / "disk")
    remote.tier().upload(source)
    assert_restored(remote.tier(), 2)


def test_what_is_there_is_kept(snapshots: dict[int, Path], remote: Remote) -> None:
    """Files that the store has already are not sent again."""
    tier, source = remote.tier(), DirectorySource(snapshots[2])
    tier.upload(source)
    tier.store.remove(f"{snapshots[2].name}/{MANIFEST}")
    tier.store.remove(f"{snapshots[2].name}/b.distcp")
    before = remote.sent_bytes()
    assert tier.upload(source).kept_files == len(source.manifest.files) - 1
    assert remote.sent_bytes() - before < 100_000
    before = remote.sent_bytes()
    tier.upload(source)
    assert remote.sent_bytes() == before, "it is committed"


@pytest.mark.promise("`RemoteRefused` at once, with what to do about it")
def test_a_store_that_refuses(snapshots: dict[int, Path], remote: Remote) -> None:
    """A refusal is reported with a remedy, and not tried again."""
    number = remote.proxy.impose(ErrorReply(403))
    with pytest.raises(RemoteRefused, match="check the credentials"):
        remote.tier().upload(DirectorySource(snapshots[2]))
    assert remote.proxy.lift(number) <= 2, "it was tried again"
    tier = RemoteTier("s3://no-such-bucket/run", storage_options=remote.options, traffic=QUICK)
    with pytest.raises(RemoteRefused, match="create the bucket"):
        tier.upload(DirectorySource(snapshots[2]))
    tier.close()


@SLOW
def test_the_bandwidth_is_limited(snapshots: dict[int, Path], remote: Remote) -> None:
    """A piece waits for the time of those before it: the second upload waits for the time of the
    first.
    """
    size_bytes = DirectorySource(snapshots[1]).manifest.size_bytes
    tier = remote.tier(Traffic(limit_bytes_per_s=6e6))
    begin_s = time.monotonic()
    for step in (1, 2):
        tier.upload(DirectorySource(snapshots[step]))
    assert time.monotonic() - begin_s > 0.95 * size_bytes / 6e6


# -- reads that are disturbed ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(s3_server: S3Server, snapshots: dict[int, Path]) -> Iterator[str]:
    """Provide a bucket with the snapshots of steps 1 to 3. No test changes it."""
    s3_server.make_bucket("template")
    tier = RemoteTier("s3://template/run", storage_options=s3_server.options())
    for path in snapshots.values():
        tier.upload(DirectorySource(path))
    yield "template/run"
    tier.close()


@pytest.fixture
def filled(template: str, remote: Remote) -> Remote:
    """Return a bucket that holds a copy of the template's snapshots."""
    for path in remote.direct.find(template):
        remote.direct.cp_file(path, f"{remote.url}/{path.removeprefix(f'{template}/')}")
    return remote


@pytest.mark.promise(
    "it gets its `quarantine.json`, and the next older one is taken. Nothing is deleted."
)
def test_damage_at_rest_is_found_and_set_aside(filled: Remote, snapshots: dict[int, Path]) -> None:
    """Damaged snapshots are quarantined with a note, an older one is restored, and a new upload
    repairs them.
    """
    filled.spoil(f"{snapshots[3].name}/a.distcp", FILE_CHUNK_BYTES + 77)
    filled.direct.rm_file(f"{filled.url}/{snapshots[2].name}/b.distcp")
    tier = filled.tier()
    assert_restored(tier, 1, lost=2)
    assert tier.names() == [snapshots[1].name]
    note = json.loads(filled.direct.cat_file(f"{filled.url}/{snapshots[3].name}/{QUARANTINE}"))
    assert "a.distcp" in note["reason"]
    assert f"{snapshots[3].name}/a.distcp" in filled.objects(), "nothing was deleted"
    tier.upload(DirectorySource(snapshots[3]))
    assert_restored(tier, 3)


def test_a_damaged_manifest(filled: Remote, snapshots: dict[int, Path]) -> None:
    """A manifest that is damaged, or belongs to another snapshot, is quarantined."""
    filled.direct.pipe_file(f"{filled.url}/{snapshots[3].name}/{MANIFEST}", b"{}")
    filled.direct.pipe_file(
        f"{filled.url}/{snapshots[2].name}/{MANIFEST}", (snapshots[1] / MANIFEST).read_bytes()
    )
    assert_restored(filled.tier(), 1, lost=2)


@pytest.mark.promise(
    "One with a wrong digest is read once more, since bytes can also be damaged on their way"
)
def test_bytes_that_are_damaged_on_their_way(filled: Remote, snapshots: dict[int, Path]) -> None:
    """Bytes that are damaged once on their way are requested again; bytes that are always damaged
    count as damage.
    """
    tier, tensors = filled.tier(), targets()
    once = filled.proxy.impose(Garble(path="b.distcp", most=1))
    assert tier.read_into(tensors).lost == [], "what is struck once is asked for again"
    assert filled.proxy.lift(once) == 1
    always = filled.proxy.impose(Garble(path=f"{snapshots[3].name}/a.distcp"))
    assert_restored(tier, 2, lost=1)
    assert filled.proxy.lift(always) >= 2, "it was asked for twice"


@pytest.mark.parametrize(
    "trouble",
    [
        ErrorReply(503, most=3),
        ResetConnection(most=3),
        Truncate(path="a.distcp", after_bytes=1000, most=2),
        pytest.param(Lag(delay_ms=20), marks=SLOW),
    ],
)
def test_reads_outlast_what_passes(filled: Remote, trouble: Trouble) -> None:
    """A restore outlasts errors that pass."""
    number = filled.proxy.impose(trouble)
    assert_restored(filled.tier(), 3)
    assert filled.proxy.lift(number) >= 1


@pytest.mark.promise("That a store does not answer is no damage.")
def test_an_outage_during_a_restore(filled: Remote, snapshots: dict[int, Path]) -> None:
    """A short outage is outlasted. A long one is no damage: nothing is quarantined, and no older
    snapshot is restored.
    """
    tier, tensors = filled.tier(), targets()
    failing = filled.proxy.impose(ErrorReply(503))

    def lift() -> None:
        wait_until(lambda: filled.proxy.affected_count(failing), "a request that fails")
        outage = filled.proxy.impose(StoreOutage())
        filled.proxy.lift(failing)
        time.sleep(0.2)  # the duration of the outage; the restore tries for a hundred times as long
        filled.proxy.lift(outage)

    lifting = threading.Thread(target=lift)
    lifting.start()
    assert tier.read_into(tensors).manifest.step == 3
    lifting.join()
    for trouble in (
        StoreOutage(),
        ErrorReply(503, path=f"{snapshots[3].name}/a.distcp"),
    ):  # of the whole store, and of one file
        number = filled.proxy.impose(trouble)
        with pytest.raises(RemoteUnavailable):
            filled.tier(HASTY).read_into(targets())
        filled.proxy.lift(number)
    assert not any(QUARANTINE in name for name in filled.objects())


# -- the thread beside the training ----------------------------------------------------------------


@pytest.mark.promise("a newer one supersedes what has not begun")
def test_the_newest_supersedes_what_waits(snapshots: dict[int, Path], remote: Remote) -> None:
    """The newer of two snapshots offered during an upload is uploaded, and the older one is not;
    all are released.
    """
    stall = remote.proxy.impose(Stall())
    released: list[int] = []
    uploader = Uploader(remote.tier(Traffic(backoff=QUICK.backoff, request_timeout_s=2.0)))
    for step, path in snapshots.items():
        uploader.offer(path, lambda step=step: released.append(step))
        if step == 1:
            wait_until(
                lambda: remote.proxy.affected_count(stall), "the first upload to be under way"
            )
    remote.proxy.lift(stall)
    assert uploader.wait(LIMIT_S)
    status = uploader.status
    assert (status.committed, status.superseded, status.failed, status.last_error) == (2, 1, 0, "")
    assert sorted(released) == [1, 2, 3]
    assert released[0] == 2
    assert remote.tier().names() == [snapshots[3].name, snapshots[1].name]
    assert uploader.close()


@pytest.mark.promise("`offer` returns at once and never raises.")
def test_it_outlasts_outages_and_never_raises(snapshots: dict[int, Path], remote: Remote) -> None:
    """The uploader outlasts an outage, reports a refusal, and continues with the next snapshot."""
    uploader = Uploader(remote.tier(HASTY))
    outage = remote.proxy.impose(StoreOutage())
    uploader.offer(DirectorySource(snapshots[1]))
    wait_until(lambda: uploader.status.last_error, "the error of the outage")
    assert uploader.status.under_way == snapshots[1].name
    remote.proxy.lift(outage)
    assert uploader.wait(LIMIT_S)
    assert uploader.status.last is not None
    assert uploader.status.last.name == snapshots[1].name
    refusal = remote.proxy.impose(ErrorReply(403))
    uploader.offer(DirectorySource(snapshots[2]))
    assert uploader.wait(LIMIT_S)
    assert "check the credentials" in uploader.status.last_error
    assert uploader.status.failed == 1
    remote.proxy.lift(refusal)
    uploader.offer(snapshots[3].parent / "none")
    assert "no committed snapshot" in uploader.status.last_error
    uploader.offer(snapshots[3])
    assert uploader.wait(LIMIT_S)
    assert uploader.status.last_error == ""
    assert uploader.close()


@pytest.mark.promise("`close` ends it within its limit, also in the middle of a request.")
def test_it_ends_in_the_middle_of_a_request(snapshots: dict[int, Path], remote: Remote) -> None:
    """The end of the uploader waits for no request, and gives back snapshots that are offered
    later.
    """
    released = threading.Event()
    uploader = Uploader(remote.tier(Traffic(request_timeout_s=600.0)))
    stall = remote.proxy.impose(Stall())
    uploader.offer(DirectorySource(snapshots[1]), released.set)
    wait_until(lambda: remote.proxy.affected_count(stall), "a request that is not answered")
    assert uploader.close(LIMIT_S), "it waited for the end of the request"
    assert released.is_set()
    uploader.offer(DirectorySource(snapshots[2]), released.clear)
    assert not released.is_set(), "what is offered after the end is given back"


HANGS = """
import os, sys
from pathlib import Path
from chaoskit.checkpoint import RemoteTier, Uploader

root, snapshot = map(Path, sys.argv[1:])
(root / snapshot.name).mkdir(parents=True)
os.mkfifo(root / snapshot.name / "a.distcp")  # opening it blocks until it has a reader
uploader = Uploader(RemoteTier(f"file://{root}"))
uploader.offer(snapshot)
while not (root / snapshot.name / "b.distcp").exists():  # the file after it
    pass
print(uploader.close(0.2), flush=True)
"""


@pytest.mark.promise("`close` leaves a hanging thread behind, which holds up no exit")
def test_a_file_system_that_hangs_holds_up_no_exit(
    snapshots: dict[int, Path], tmp_path: Path
) -> None:
    """A file system that hangs does not delay the exit of the process."""
    command = [sys.executable, "-c", HANGS, str(tmp_path / "dead"), str(snapshots[1])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == "False", "it did not end in time, and said so"


# -- taking away -----------------------------------------------------------------------------------


def test_what_is_kept(snapshots: dict[int, Path], remote: Remote) -> None:
    """Old snapshots are removed from the store by the retention rule."""
    uploader = Uploader(remote.tier(retention=Retention(keep_last=1)), RemoteTier.prune)
    for path in snapshots.values():
        uploader.offer(DirectorySource(path))
        assert uploader.wait(LIMIT_S)
    assert uploader.close()
    assert {name.partition("/")[0] for name in remote.objects()} == {snapshots[3].name}


@pytest.mark.promise("Deleting goes the other way: manifest first.")
def test_a_kill_while_one_is_deleted(filled: Remote, snapshots: dict[int, Path]) -> None:
    """The manifest is removed first: the rest of a snapshot is not restored."""
    number = filled.proxy.impose(ErrorReply(403, methods=("DELETE",), spared=1))
    with pytest.raises(RemoteRefused):
        filled.tier().remove(snapshots[3].name)
    filled.proxy.lift(number)
    assert any(name.startswith(snapshots[3].name) for name in filled.objects())
    assert_restored(filled.tier(), 2)
