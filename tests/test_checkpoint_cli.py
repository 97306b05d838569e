"""``chaoskit checkpoint``: what it says, its exit codes, and that a drill finds what does not restore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from chaoskit.checkpoint import DiskTier, Retention, Snapshot
from chaoskit.checkpoint.dcp_metadata import encode_metadata
from chaoskit.checkpoint.files import write_file
from chaoskit.checkpoint.manifest import decode_manifest
from chaoskit.cli import _run


class Command:
    """The command line in this process: what it prints, after its exit code was checked."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: object, code: int = 0) -> str:
        assert _run(["checkpoint", *map(str, arguments)], "--json" in arguments) == code
        printed = self._capsys.readouterr()
        return printed.out or printed.err

    def told(self, *arguments: object, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(*arguments, "--json", code=code))
        return found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three snapshots; one file of the newest is damaged."""
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
    assert [line.split()[0] for line in command.run("list", root).splitlines()] == [
        f"step-{step:09}.g0" for step in (30, 20, 10)
    ]
    assert command.told("list", root)["snapshots"][0]["tensors"] == 4
    assert "step-000000020.g0  whole" in command.run("verify", root, "--step", 20)
    assert "step-000000030.g0  damaged: __0_0.distcp is not what was written" in command.run("verify", root, code=1)
    found = command.told("verify", root, "--quarantine", code=1)
    assert found["verdict"] == "failed"
    assert [bool(one["damage"]) for one in found["snapshots"]] == [True, False, False]
    assert command.told("verify", root)["verdict"] == "passed"
    assert [name[:17] for name in command.told("list", root)["quarantine"]] == ["step-000000030.g0"]


def test_a_drill_proves_that_it_restores(command: Command, root: Path) -> None:
    assert "does not restore: __0_0.distcp" in command.run("restore-drill", root, code=1)
    found = command.told("restore-drill", root, "--step", 20)
    assert (found["verdict"], found["tensors"], found["objects"], found["differ"]) == ("passed", 4, 1, [])
    assert "step-000000010.g0 restores: 4 tensors and 1 objects" in command.run("restore-drill", root, "--step", 10)


def test_a_drill_finds_what_torch_reads_differently(command: Command, root: Path) -> None:
    """The manifest and ``.metadata`` disagree: each is what was written, and only a load shows it."""
    path = root / "step-000000020.g0"
    manifest = decode_manifest((path / "manifest.json").read_bytes())
    containers = {item.path: item.container for item in manifest.items}
    lie = [
        msgspec.structs.replace(item, container=containers["other"]) if item.path == "w" else item
        for item in manifest.items
    ]
    for name in (".metadata", "manifest.json"):
        (path / name).unlink()
    entry = write_file(path / ".metadata", encode_metadata(msgspec.structs.replace(manifest, items=tuple(lie))))
    files = (*manifest.files[:-1], entry)
    write_file(path / "manifest.json", msgspec.structs.replace(manifest, files=files).encode())
    Snapshot.open(path).verify()
    assert command.told("restore-drill", root, "--step", 20, code=1)["differ"] == ["w"]


def test_prune(command: Command, root: Path) -> None:
    assert command.run("prune", root, "--keep-last", 1, "--dry-run").splitlines() == ["would delete step-000000010.g0"]
    assert command.told("prune", root, "--keep-last", 1)["deleted"] == ["step-000000010.g0"]
    assert command.run("prune", root, "--keep-last", 1).strip() == "nothing to delete"
    assert [one["step"] for one in command.told("list", root)["snapshots"]] == [
        30,
        20,
    ]  # the damaged one, and the good one


def test_bad_input(command: Command, root: Path, tmp_path: Path) -> None:
    assert "name a directory" in command.run("list", tmp_path / "nowhere", code=2)
    assert "use one of 30, 20, 10" in command.run("verify", root, "--step", 11, code=2)
    assert command.told("prune", root, "--keep-last", "-1", code=2)["error"]["field"] == "keep_last"
    (tmp_path / "empty").mkdir()
    assert command.told("verify", tmp_path / "empty", code=10)["verdict"] == "unknown"
    assert "nothing to restore" in command.run("restore-drill", tmp_path / "empty", code=10)
    assert "no snapshots" in command.run("list", tmp_path / "empty")
