"""A restarted process has its data at once: mapped pages outlive it, and positions are computed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from jobs.training.mapped import read_all
from support.waiting import wait_until

from chaoskit.journal import read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Event
from faults import Kill

SIZE = 40 * 2**20
#: The page cache belongs to the whole machine: the kernel may take back some pages at any time.
MOST, LITTLE = SIZE * 0.9, SIZE * 0.1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of tokens on a disk, none of them in memory."""
    path = tmp_path / "corpus.tokens"
    np.random.default_rng(0).integers(0, 50_000, SIZE // 2).astype(np.uint16).tofile(path)
    command = ["stat", "--file-system", "--format=%T", str(path)]
    if subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() in (
        "tmpfs",
        "ramfs",
    ):
        pytest.skip("temporary files lie in memory here")
    wait_until(lambda: is_dropped(path), "the end of the pages of a file that nothing maps")
    return path


def is_dropped(path: Path) -> bool:
    """Drop the file from the cache, and return True if reading it needs the disk.

    The kernel may keep pages at first.
    """
    drop(path)
    was_away = read_all(str(path)) > MOST
    drop(path)
    return was_away


def drop(path: Path) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.promise(
    "Which samples belong to a step is computed, so there is no sampler to fast-forward"
)
def test_the_replacement_of_a_killed_rank_waits_for_no_disk(
    chaos: Chaos, file: Path, tmp_path: Path
) -> None:
    """The replacement has the samples of the step at which it joins, in a world of 2 that was one
    of 1 meanwhile.
    """
    notes = tmp_path / "notes"
    options = {"path": str(file), "notes": str(notes)}
    kill = Kill(rank=1, at_step=4)
    outcome = chaos.run(
        "../../jobs/training/mapped.py",
        options=options,
        nodes=2,
        spares=0,
        steps=20,
        until={"world": 2},
        faults=[kill],
    )
    outcome.assert_same_losses_as_twin()
    assert {point.world for point in outcome.steps} == {1, 2}
    read = {
        int(pid): int(size)
        for pid, size in (line.split() for line in notes.read_text().splitlines())
    }
    ready = [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event == Event.READY
    ]
    begun = [read[record["pid"]] for record in ready]
    assert sum(begun[:2]) > MOST, "the first world reads the file from the disk"
    assert begun[2:], "a replacement"
    assert max(begun[2:]) < LITTLE
