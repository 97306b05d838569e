"""Tests of ``chaoskit checkpoint``: its output, its exit codes, and drills that find what cannot be
restored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from chaoskit.checkpoint import DiskTier, RemoteTier, Retention, Snapshot
from chaoskit.checkpoint.disk.dcp_metadata import encode_metadata
from chaoskit.checkpoint.disk.files import write_file
from chaoskit.checkpoint.layout.manifest import (
    FILE_CHUNK_BYTES,
    FileEntry,
    Manifest,
    decode_manifest,
)
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.cli.app import run
from chaoskit.fixtures.s3_server import S3Server
from chaoskit.substrate.object_store.proxy import ObjectProxy
from chaoskit.substrate.object_store.troubles import ErrorReply


class Command:
    """A runner of the command line in this process; it checks the exit code and returns the
    output.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: object, code: int = 0) -> str:
        assert run(["checkpoint", *map(str, arguments)]) == code
        printed = self._capsys.readouterr()
        return printed.out or printed.err

    def run_json(self, *arguments: object, code: int = 0) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.run(*arguments, "--json", code=code))
        return content


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory with three snapshots; one file of the newest is damaged."""
    tier = DiskTier(tmp_path / "root", retention=Retention(keep_last=0))
    for step in (10, 20, 30):
        tensors = {
            "w": torch.randn(50, 20),
            "other": torch.randn(50, 20),
            "half": torch.randn(9).bfloat16(),
            "count": torch.tensor(step),
        }
        tier.save(step, tensors, {"note": b"text"})
    file = tier.root / "step-000000030.g0" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[-700] ^= 1
    file.write_bytes(data)
    return tier.root


def test_list_and_verify(command: Command, root: Path) -> None:
    assert [line.split()[0] for line in command.run("list", root).splitlines()[1:]] == [
        f"step-{step:09}.g0" for step in (30, 20, 10)
    ]
    assert command.run_json("list", root)["snapshots"][0]["tensors"] == 4
    assert "step-000000020.g0  whole" in command.run("verify", root, "--step", 20)
    assert "step-000000030.g0  damaged: __0_0.distcp was changed in its bytes" in command.run(
        "verify", root, code=1
    )
    verified = command.run_json("verify", root, "--quarantine", code=1)
    assert verified["verdict"] == "failed"
    assert [bool(snapshot["damage"]) for snapshot in verified["snapshots"]] == [True, False, False]
    assert command.run_json("verify", root)["verdict"] == "passed"
    assert [name[:17] for name in command.run_json("list", root)["quarantine"]] == [
        "step-000000030.g0"
    ]


@pytest.mark.slow
@pytest.mark.promise("that a snapshot restores is shown, not claimed")
@pytest.mark.costly
def test_a_drill_proves_that_it_restores(command: Command, root: Path) -> None:
    assert "does not restore: __0_0.distcp" in command.run("restore-drill", root, code=1)
    drill = command.run_json("restore-drill", root, "--step", 20)
    assert (drill["verdict"], drill["tensors"], drill["objects"], drill["differ"]) == (
        "passed",
        4,
        1,
        [],
    )
    assert "step-000000010.g0 restores: 4 tensors and 1 objects" in command.run(
        "restore-drill", root, "--step", 10
    )


@pytest.mark.costly
def test_a_drill_finds_what_torch_reads_differently(command: Command, root: Path) -> None:
    """The manifest and ``.metadata`` disagree: each is as it was written, and only a load shows the
    difference.
    """
    path = root / "step-000000020.g0"
    manifest = decode_manifest((path / "manifest.json").read_bytes())
    containers = {tensor.path: tensor.container for tensor in manifest.items}
    lie = [
        msgspec.structs.replace(tensor, container=containers["other"])
        if tensor.path == "w"
        else tensor
        for tensor in manifest.items
    ]
    for name in (".metadata", "manifest.json"):
        (path / name).unlink()
    metadata_file = write_file(
        path / ".metadata", encode_metadata(msgspec.structs.replace(manifest, items=tuple(lie)))
    )
    files = (*manifest.files[:-1], metadata_file)
    write_file(path / "manifest.json", msgspec.structs.replace(manifest, files=files).encode())
    Snapshot.open(path).verify()
    assert command.run_json("restore-drill", root, "--step", 20, code=1)["differ"] == ["w"]


def test_prune(command: Command, root: Path) -> None:
    assert command.run("prune", root, "--keep-last", 1, "--dry-run").splitlines() == [
        "would delete step-000000010.g0"
    ]
    assert command.run_json("prune", root, "--keep-last", 1)["deleted"] == ["step-000000010.g0"]
    assert command.run("prune", root, "--keep-last", 1).strip() == "nothing to delete"
    assert [snapshot["step"] for snapshot in command.run_json("list", root)["snapshots"]] == [
        30,
        20,
    ]  # the damaged one, and the good one


def test_bad_input(command: Command, root: Path, tmp_path: Path) -> None:
    assert "name a directory" in command.run("list", tmp_path / "nowhere", code=2)
    assert "use one of 30, 20, 10" in command.run("verify", root, "--step", 11, code=2)
    assert (
        command.run_json("prune", root, "--keep-last", "-1", code=2)["error"]["field"]
        == "keep_last"
    )
    (tmp_path / "empty").mkdir()
    assert command.run_json("verify", tmp_path / "empty", code=10)["verdict"] == "unknown"
    assert "nothing to restore" in command.run("restore-drill", tmp_path / "empty", code=10)
    assert "no snapshots" in command.run("list", tmp_path / "empty")


# -- behind a URL ----------------------------------------------------------------------------------


class Behind:
    """A copy of the snapshots of steps 10 to 30 behind a URL; a byte of the newest was changed
    after its commit.
    """

    def __init__(self, root: Path, url: str, endpoint: str = "") -> None:
        self.url, self.options = url, ["--endpoint", endpoint] if endpoint else []
        self.tier = RemoteTier(url, storage_options={"endpoint_url": endpoint} if endpoint else {})
        file = root / "step-000000030.g0" / "__0_0.distcp"
        damaged = file.read_bytes()
        whole = bytearray(damaged)
        whole[-700] ^= 1
        file.write_bytes(whole)
        for path in sorted(root.glob("step-*")):
            self.tier.upload(DirectorySource(path))
        self.tier.store.put("step-000000030.g0/__0_0.distcp", damaged)

    def arguments(self, action: str, *more: object) -> list[object]:
        return [action, self.url, *self.options, *more]


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture(params=["file", "s3"])
def behind(request: pytest.FixtureRequest, root: Path, tmp_path: Path) -> Iterator[Behind]:
    if request.param == "file":
        behind = Behind(root, f"file://{tmp_path}/mount/run")
    else:
        pytest.importorskip("s3fs", reason="no S3 client here: pip install 'chaoskit[s3]'")
        request.getfixturevalue("credentials")
        server: S3Server = request.getfixturevalue("s3_server")
        bucket = f"inspected-{abs(hash(tmp_path)) % 10**12}"
        server.make_bucket(bucket)
        behind = Behind(root, f"s3://{bucket}/run", server.url)
    yield behind
    behind.tier.close()


@pytest.mark.slow(behind="s3")
@pytest.mark.promise(
    "a drill downloads the snapshot, verified, into a directory below `$TMPDIR` that it removes"
)
@pytest.mark.costly
def test_behind_a_url(
    command: Command, behind: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands print the same for a URL, and what they quarantine is quarantined for every
    restore.
    """
    steps = [30, 20, 10]
    names = [f"step-{step:09}.g0" for step in steps]
    assert [
        line.split()[0] for line in command.run(*behind.arguments("list")).splitlines()[1:]
    ] == names
    verified = command.run_json(*behind.arguments("verify"), code=1)
    assert [(snapshot["path"], bool(snapshot["damage"])) for snapshot in verified["snapshots"]] == [
        (f"{behind.url}/{name}", name == names[0]) for name in names
    ]
    (tmp_path / "place").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "place"))
    assert "does not restore: chunk 0 of __0_0.distcp" in command.run(
        *behind.arguments("restore-drill"), code=1
    )
    drill = command.run_json(*behind.arguments("restore-drill", "--step", 20))
    assert (drill["verdict"], drill["tensors"], drill["objects"], drill["download_s"] > 0) == (
        "passed",
        4,
        1,
        True,
    )
    assert not list((tmp_path / "place").iterdir()), "nothing of the download is left"

    pruning = behind.arguments("prune", "--keep-last", 1)
    assert command.run_json(*pruning, "--dry-run")["deleted"] == names[2:], (
        "the newest that is whole stays, too"
    )
    assert behind.tier.names() == names
    assert "damaged: chunk 0" in command.run(
        *behind.arguments("verify", "--step", 30, "--quarantine"), code=1
    )
    assert behind.tier.names() == names[1:]
    behind.tier.store.put("step-000000040.g0/__0_0.distcp", b"an upload that broke off")
    listed = command.run_json(*behind.arguments("list"))
    assert [snapshot["step"] for snapshot in listed["snapshots"]] == steps[1:]
    assert (listed["quarantine"], listed["staging"]) == (names[:1], ["step-000000040.g0"])
    assert command.run(*pruning).splitlines() == [f"deleted {names[2]}"]
    assert "nothing to delete" in command.run(*pruning)
    assert command.run_json(*behind.arguments("verify"))["verdict"] == "passed"
    behind.tier.store.put(f"{names[1]}/manifest.json", b"{}")
    assert "damaged: the manifest" in command.run(*behind.arguments("list"))
    assert "damaged: the manifest" in command.run(*behind.arguments("verify"), code=1)


def test_urls_that_cannot_be_used(command: Command, tmp_path: Path) -> None:
    assert "name a directory" in command.run("list", f"file://{tmp_path}/nowhere", code=2)
    assert "leave it out" in command.run(
        "list", f"file://{tmp_path}", "--endpoint", "http://minio", code=2
    )
    assert "write http://HOST:PORT" in command.run(
        "list", "s3://bucket/run", "--endpoint", "minio:9000", code=2
    )
    assert command.run_json("prune", "nonsense://x/y", code=2)["error"]["field"] == "url"
    assert "no snapshots" in command.run("list", f"file://{tmp_path}")
    assert "nothing to restore" in command.run("restore-drill", f"file://{tmp_path}", code=10)


@pytest.mark.usefixtures("credentials")
def test_a_store_that_does_not_do_it(
    command: Command, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("s3fs", reason="no S3 client here: pip install 'chaoskit[s3]'")
    endpoint = ["--endpoint", s3_server.url]
    assert "create the bucket" in command.run("list", "s3://no-such-bucket/run", *endpoint, code=2)
    refused = command.run_json("verify", "s3://no-such-bucket/run", *endpoint, code=2)
    assert (refused["error"]["field"], refused["error"]["value"]) == (
        "root",
        "s3://no-such-bucket/run",
    )
    closed_port = ["--endpoint", "http://127.0.0.1:9", "--deadline-s", "0.2"]
    for action in ("list", "verify", "restore-drill", "prune"):
        assert "cannot list snapshots, tried" in command.run(
            action, "s3://bucket/run", *closed_port, code=2
        )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "give credentials" in command.run("list", "s3://bucket/run", *endpoint, code=2)


@pytest.mark.usefixtures("credentials")
def test_what_may_not_be_set_aside_is_said(
    command: Command, s3_server: S3Server, s3_proxy: ObjectProxy, root: Path, tmp_path: Path
) -> None:
    """The user of the command may have no right to write: the failed quarantine must not look
    successful.
    """
    pytest.importorskip("s3fs", reason="no S3 client here: pip install 'chaoskit[s3]'")
    bucket = f"read-only-{abs(hash(tmp_path)) % 10**12}"
    s3_server.make_bucket(bucket)
    Behind(root, f"s3://{bucket}/run", s3_server.url).tier.close()
    s3_proxy.impose(ErrorReply(403, methods=("PUT",)))
    verify = ["verify", f"s3://{bucket}/run", "--endpoint", s3_proxy.url, "--step", 30]
    assert "damaged: chunk 0" in command.run(*verify, code=1)
    assert (
        "check the credentials"
        in command.run_json(*verify, "--quarantine", code=2)["error"]["remedy"]
    )


def test_a_drill_asks_for_room_before_it_downloads(command: Command, tmp_path: Path) -> None:
    chunks = 2 + shutil.disk_usage(tmp_path).free * 2 // FILE_CHUNK_BYTES
    file = FileEntry("__0_0.distcp", chunks * FILE_CHUNK_BYTES, ("0" * 32,) * chunks)
    store = tmp_path / "store" / "step-000000001.g0"
    store.mkdir(parents=True)
    (store / "manifest.json").write_bytes(Manifest(step=1, files=(file,), items=()).encode())
    assert (
        command.run_json("restore-drill", f"file://{store.parent}", code=2)["error"]["field"]
        == "TMPDIR"
    )
