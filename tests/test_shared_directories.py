"""Slots as files for jobs without an agent: whose they are, how long they last, and what is never touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chaoskit.checkpoint import shared
from chaoskit.checkpoint.held import HeldTensor
from chaoskit.checkpoint.slots import slot_files
from chaoskit.checkpoint.stored import stored
from chaoskit.errors import BadInput

SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    from chaoskit.checkpoint import shared
    from chaoskit.checkpoint.held import HeldTensor
    from chaoskit.checkpoint.slots import Slots, slot_files
    from chaoskit.checkpoint.snapshotter import Snapshotter
    from chaoskit.checkpoint.stored import stored

    directory = shared.claim("job", root=Path(sys.argv[1]))
    weight = torch.zeros(1000)
    tensors = [HeldTensor("weight", weight)]
    with stored(slot_files(directory, "rank0")) as copies:
        first = int(copies[0].read_into(tensors)) if copies else 0
    print(first, weight.unique().tolist(), flush=True)
    step = first
    snapshotter = Snapshotter(Slots.at(directory, "rank0"), tensors, lambda: str(step).encode())
    while step < first + 5:
        snapshotter.wait()
        weight += 1
        step += 1
        snapshotter.begin(step)
    snapshotter.close()
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chaoskit-test-", dir="/dev/shm") as directory:
        yield Path(directory)


def gone_pid() -> int:
    """Of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.costly
def test_a_script_that_is_killed_goes_on_from_its_own_memory(root: Path) -> None:
    """Its parent, this process, owns the job, as ``torchrun`` would."""
    lines = []
    for _ in range(2):
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(root)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert ended.returncode == -9, ended.stderr
        lines.append(ended.stdout.strip())
    assert lines == ["0 [0.0]", "5 [5.0]"]
    assert shared.sweep(0.0, root) == []
    target = HeldTensor("weight", torch.zeros(1000))
    with stored(slot_files(shared.directory_of("job", root), "rank0")) as copies:
        assert copies[0].read_into([target]) == b"10"
    shared.release("job", root)
    assert list(root.iterdir()) == []


def test_what_a_dead_owner_left_is_removed_when_it_is_old(root: Path) -> None:
    dead = shared.claim("dead", gone_pid(), root)
    shared.claim("living", os.getpid(), root)
    (root / "chaoskit-other").mkdir()
    assert shared.sweep(root=root) == []
    assert shared.sweep(0.0, root) == [dead]
    assert sorted(path.name for path in root.iterdir()) == [f"chaoskit-{os.getuid()}-living", "chaoskit-other"]


def test_an_owner_that_is_gone_is_succeeded(root: Path) -> None:
    before = shared.claim("job", gone_pid(), root)
    (before / "rank0.0").write_bytes(b"kept")
    assert shared.claim("job", os.getpid(), root) == before
    assert (before / "rank0.0").read_bytes() == b"kept"
    assert shared.claim("job", os.getpid(), root) == before  # the next rank
    with pytest.raises(BadInput, match=f"process {os.getpid()} runs a job of this name"):
        shared.claim("job", os.getppid(), root)


def test_names_and_strangers(root: Path) -> None:
    with pytest.raises(BadInput, match="use letters"):
        shared.claim("../etc", root=root)
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    (root / f"chaoskit-{os.getuid()}-job").symlink_to(elsewhere)
    with pytest.raises(BadInput, match="another user's"):
        shared.claim("job", root=root)
    assert shared.sweep(0.0, root) == []
    assert elsewhere.is_dir()


def test_the_janitor_removes_what_a_job_left_an_hour_ago() -> None:
    job = f"test-{os.getpid()}"
    directory = shared.claim(job, owner_pid=gone_pid())
    try:
        long_ago_s = time.time() - 2 * shared.KEPT_S
        for path in (*directory.iterdir(), directory):
            os.utime(path, (long_ago_s, long_ago_s))
        done = subprocess.run(
            [sys.executable, "-m", "chaoskit.cli", "janitor", "--json"], capture_output=True, check=True
        )
        removed = [repair["target"] for repair in json.loads(done.stdout)["repairs"] if repair["act"] == "copies"]
        assert str(directory) in removed
        assert not directory.exists()
    finally:
        shared.release(job)
