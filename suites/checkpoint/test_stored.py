"""Tests of stored snapshots that are damaged, and of disks that fail during a save.

-> checkpoint/disk/tier.py quarantines a damaged snapshot; daemon/saving.py bears a failed save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaoskit import Chaos
from chaoskit.checkpoint import DiskTier
from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.faults import CorruptFile, DiskError, DiskFull, ReadOnlyDisk, ReplaceNode, SlowDisk
from chaoskit.faults.storage.stored import HOWS

NODES = 2
EVERY = 12
LATE = 28
STEPS = 40
#: Jobs with the state on every rank, or in pieces. They wait until all snapshots of the test are
#: stored.
JOBS = {"replicas": "stored", "pieces": "copied"}
SNAPSHOTS = {"22": [EVERY], str(LATE): [EVERY, 2 * EVERY], "38": [3 * EVERY]}  # one by one


def lose_all(at_step: int) -> list[ReplaceNode]:
    """Return faults that replace every node by an empty one."""
    return [ReplaceNode(rank=rank, at_step=at_step) for rank in range(NODES)]


@pytest.mark.slow(job="pieces")
@pytest.mark.promise(
    "bytes that are read back differ from those before, and their digest is wrong",
    job="replicas",
    how="bit",
)
@pytest.mark.promise(
    "sets the snapshot aside, and the next plan names the one before",
    job="pieces",
    how="older",
)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("job", JOBS)
def test_a_damaged_snapshot_is_never_loaded(
    chaos: Chaos, tmp_path: Path, job: str, how: str
) -> None:
    """The job goes on from the snapshot before the damaged one, with every node lost.

    The journal has the damage and its reason.
    """
    stored = DiskTier(tmp_path / "stored")
    outcome = chaos.run(
        f"{Path(__file__).with_name('jobs.py')}:{JOBS[job]}",
        nodes=NODES,
        spares=0,
        steps=STEPS,
        until={"snapshots": SNAPSHOTS, "directory": str(stored.root)},
        disk={"target": str(stored.root), "every_steps": EVERY, "keep_last": 3},
        faults=[CorruptFile(at_step=LATE, how=how), *lose_all(LATE)],
        max_lost_steps=LATE - EVERY,
    )
    outcome.assert_same_losses_as_twin()
    restored = {
        record["step"]
        for record in outcome.records("restored")
        if record["source"].startswith("disk")
    }
    assert restored == {EVERY}
    quarantined = outcome.records("quarantined")
    assert {record["step"] for record in quarantined} == {2 * EVERY}
    assert all(record["detail"] for record in quarantined)
    (aside,) = (stored.root / "quarantine").iterdir()
    assert parse_name(aside.name.partition("~")[0]) == (2 * EVERY, 1)
    assert stored.newest_verified().snapshot.manifest.step == STEPS


@pytest.mark.slow(kind=[DiskFull, ReadOnlyDisk, SlowDisk])
@pytest.mark.promise(
    "the save fails as a whole; training can go on", kind=[DiskFull, ReadOnlyDisk], rank=0
)
@pytest.mark.promise(
    "the save fails as a whole; training can go on", kind=[DiskError, SlowDisk], rank=1
)
@pytest.mark.parametrize("rank", range(NODES))
@pytest.mark.parametrize("kind", [DiskFull, DiskError, ReadOnlyDisk, SlowDisk])
def test_a_disk_that_fails_a_save_ends_no_training(
    chaos: Chaos,
    tmp_path: Path,
    kind: type[DiskFull | DiskError | ReadOnlyDisk | SlowDisk],
    rank: int,
) -> None:
    """Older snapshots stay whole, and the next ones are stored once the disk is well.

    The job waits at step 60 until the disk is well, and at step 95 until the snapshot of that step
    is stored; all nodes are lost before the next one is due.
    """
    if reason := kind.unavailable():
        pytest.skip(reason)
    stored = DiskTier(tmp_path / "stored")
    waits = {"healed_at": 60, "stored_at": 95, "every_steps": 5, "directory": str(stored.root)}
    more: dict[str, Any] = {"delay_ms": 20.0} if kind is SlowDisk else {}
    outcome = chaos.run(
        f"{Path(__file__).with_name('jobs.py')}:stored",
        nodes=NODES,
        spares=0,
        steps=100,
        until=waits,
        disk={"target": str(stored.root), "every_steps": 5},
        faults=[
            kind(rank=rank, at_step=8, directory="checkpoints", heal_after_s=1.5, **more),
            *lose_all(98),
        ],
        max_lost_steps=100,
    )
    outcome.assert_same_losses_as_twin()
    (healed_ns,) = [
        record.t_ns for record in outcome.records("lifted") if kind.__name__ in record["what"]
    ]
    failed = [record for record in outcome.records("save_failed") if record.t_ns < healed_ns]
    if kind is not SlowDisk:
        assert any("Errno" in record["reason"] for record in failed)
    restored = {
        record["step"]
        for record in outcome.records("restored")
        if record["source"].startswith("disk")
    }
    assert restored == {95}
    assert not stored.snapshots().damaged
