"""Crash tests of the disk tier: real processes are killed in the middle of saves, and of removals
of old snapshots.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.failing.crashing_saver import SMALL

from chaoskit.checkpoint.disk.names import Owner
from chaoskit.checkpoint.disk.retention import Retention
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.layout.boundaries import BOUNDARIES

pytestmark = pytest.mark.costly

SAVER = Path(__file__).parents[2] / "jobs" / "failing" / "crashing_saver.py"
LIMIT_S = 300


def lives(root: Path, kind: str, times: int, seed: int = 1) -> list[dict[str, Any]]:
    """Kill ``times`` processes while they save; return the contents of the disk after each of
    them.
    """
    done = subprocess.run(
        [sys.executable, str(SAVER), str(root), kind, str(seed), str(times)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(states: list[dict[str, Any]], times: int) -> None:
    """Check, for each kill, that the newest snapshot is complete, of one step, and no older than
    the acknowledged one.
    """
    assert len(states) == times
    before = None
    for state in states:
        assert state["damaged"] == [], state
        assert state["left"] == [], state
        assert len(state["steps"]) <= 2 + 4, (
            state
        )  # a process that is killed before it prunes leaves one more
        acknowledged = state["acknowledged"] if state["acknowledged"] is not None else before
        if acknowledged is not None or state["steps"]:
            assert not state["mixed"], state
            assert state["lost"] == [], state
            assert state["step"] == state["steps"][0], state
            assert state["step"] in (
                (acknowledged, acknowledged + 1) if acknowledged is not None else (0,)
            ), state
            before = state["step"]


@pytest.mark.slow(boundary="publish")
@pytest.mark.promise(
    "the newest complete snapshot is the last one committed, or the one that was about to be",
    boundary=["manifest", "publish"],
)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_kill_at_a_boundary(tmp_path: Path, boundary: str) -> None:
    """The process leaves the stored snapshots, and a leftover that the next process recognises."""
    states = lives(tmp_path, boundary, 4)
    check(states, 4)
    assert [state["signal"] for state in states] == [signal.SIGKILL] * 4
    if boundary in ("write", "sync", "metadata", "manifest", "seal", "commit"):
        assert [state["swept"] for state in states] == [
            1
        ] * 4  # the leftover is recognised as the dead process's
    else:
        assert [state["swept"] for state in states] == [0] * 4


def test_a_kill_at_any_byte(tmp_path: Path) -> None:
    """A process that the kernel ends at any byte of a file, by SIGXFSZ, damages no snapshot."""
    states = lives(tmp_path / "root", "byte", 60)
    check(states, 60)
    tier = DiskTier(tmp_path / "whole")
    tier.save(0, {"w": torch.zeros(SMALL, dtype=torch.int32), "step": torch.tensor(0)})
    largest = max(path.stat().st_size for path in (tmp_path / "whole").rglob("*.distcp"))
    killed = [state["signal"] == signal.SIGXFSZ for state in states]
    assert killed == [state["limit"] < largest for state in states]
    assert killed.count(True) > 40, "draw other limits"


def test_a_kill_at_any_instant(tmp_path: Path) -> None:
    """A process that is killed at any instant has stored all that it has committed before."""
    states = lives(tmp_path, "instant", 80)
    check(states, 80)
    assert [state["signal"] for state in states] == [signal.SIGKILL] * 80
    newest = -1
    for state in states:
        assert state.get("step", -1) >= newest + state["saves"], state
        newest = state.get("step", -1)
    assert newest >= sum(state["saves"] for state in states) - 1


@pytest.mark.promise("A writer that lives is left alone")
def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    """A sweep removes leftovers of dead processes of this kernel and old ones of other kernels, but
    none of a live one.
    """
    staged = DiskTier(tmp_path).begin(1)
    gone = staged.path.with_name(staged.path.name.replace(f"-{os.getpid()}-", f"-{os.getpid()}-9"))
    foreign = staged.path.with_name(staged.path.name.replace(Owner.this().kernel, "0" * 16))
    stale = staged.path.with_name(staged.path.name.replace(Owner.this().kernel, "1" * 16))
    for path in (gone, foreign, stale, tmp_path / ".staging" / "something else"):
        path.mkdir()
    os.utime(stale, (0, 0))
    assert sorted(DiskTier(tmp_path).sweep()) == sorted([gone.name, stale.name])
    assert staged.path.exists()
    assert foreign.exists()
    with staged.writer("file") as writer:
        writer.add_object("o", b"x")
        part = writer.finish()
    assert staged.commit([part]).manifest.step == 1


def test_a_file_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    """An error while a file is written leaves no part of it."""
    staging = DiskTier(tmp_path).begin(1)
    with contextlib.suppress(KeyError), staging.writer("file") as writer:
        writer.add_object("o", b"x")
        raise KeyError
    assert list(staging.path.iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Provide a file system with room for two megabytes."""
    target = tmp_path / "tiny"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "chaoskit-tiny", str(target)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


@pytest.mark.promise("the save fails as a whole; training can go on")
def test_a_full_disk(tiny_disk: Path) -> None:
    """A save that finds no room raises, leaves only the older snapshot, and the next save
    succeeds.
    """
    tier = DiskTier(tiny_disk, retention=Retention(keep_last=1))
    small, large = {"w": torch.ones(100_000)}, {"w": torch.ones(500_000)}
    tier.save(1, small)
    with pytest.raises(OSError, match="No space left"):
        tier.save(2, large)
    assert [snapshot.manifest.step for snapshot in tier.snapshots().snapshots] == [1]
    assert list((tiny_disk / ".staging").iterdir()) == []
    tier.save(3, small)
    assert tier.newest_verified().snapshot.manifest.step == 3


LIMITED = """
import errno, resource, sys
import torch
from chaoskit.checkpoint import DiskTier

tier = DiskTier(sys.argv[1])
tier.save(1, {"w": torch.ones(1000)})
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    tier.save(2, {"w": torch.ones(100_000)})
except OSError as error:
    sys.exit(0 if error.errno == errno.EFBIG else 3)
"""


def test_a_limit_on_files(tmp_path: Path) -> None:
    """The limit is set in a process of its own, since it is for all writes of a process."""
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], check=True, timeout=LIMIT_S)
    assert [snapshot.manifest.step for snapshot in DiskTier(tmp_path).snapshots().snapshots] == [1]
    assert list((tmp_path / ".staging").iterdir()) == []


@pytest.mark.promise(
    "files are synced before the manifest, that before the rename, and the rename before `commit` returns"
)
def test_nothing_becomes_visible_before_the_disk_has_it(tmp_path: Path) -> None:
    """A loss of power damages nothing: each file is synced after its last write, and all files
    before the rename.
    """
    if shutil.which("strace") is None:
        if os.environ.get("CI"):
            pytest.fail("strace is not installed: CI must run this test")
        pytest.skip("needs strace")
    root, log = tmp_path / "root", tmp_path / "strace"
    save = f"DiskTier({str(root)!r}).save(1, {{'w': torch.ones(5 << 20)}})"
    code = f"import torch; from chaoskit.checkpoint import DiskTier; {save}"
    calls = "trace=fsync,fdatasync,write,writev,pwrite64,pwritev,rename,mkdir"
    command = ["strace", "-f", "-y", "-qq", "-e", calls, "-o", str(log), sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=LIMIT_S, env=os.environ | {"OMP_NUM_THREADS": "1"})
    events = []
    for line in log.read_text().splitlines():
        call_match = re.search(r" (\w+)\((?:\d+<(.*?)>|\"(.*?)\")", line)
        if call_match and str(tmp_path) in (path := call_match[2] or call_match[3]):
            events.append(("write" if "write" in call_match[1] else call_match[1], path))
    (renamed,) = (number for number, (call, _) in enumerate(events) if call == "rename")
    staging = events[renamed][1]
    for name in ("__0_0.distcp", ".metadata", "manifest.json"):
        about = [
            (number, call)
            for number, (call, path) in enumerate(events)
            if path == f"{staging}/{name}"
        ]
        assert {call for _, call in about} == {"write", "fsync"}, name
        assert about[-1][1] == "fsync", name
        assert about[-1][0] < renamed, name
    assert ("fsync", staging) in events[:renamed]
    assert ("fsync", str(root)) in events[renamed:]
    assert ("fsync", str(tmp_path)) in events[:renamed]  # the root was made, too
    data = max(number for number, (_, path) in enumerate(events) if path.endswith(".distcp"))
    manifest = min(
        number for number, (_, path) in enumerate(events) if path.endswith("manifest.json")
    )
    assert data < manifest
