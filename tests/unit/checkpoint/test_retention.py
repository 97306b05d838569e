"""Times at which a snapshot is due, and snapshots that are kept: pure decisions, for any
history.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.checkpoint.disk.retention import Kept, Retention, Schedule
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.errors import BadInput

AGES = st.tuples(st.integers(0, 30), st.integers(0, 2))
PRESENT = st.dictionaries(AGES, st.integers(1, 100), max_size=12).map(
    lambda sizes: [Kept(*age, size_bytes) for age, size_bytes in sizes.items()]
)
RETENTIONS = st.builds(
    Retention,
    keep_last=st.integers(0, 5),
    keep_every=st.integers(0, 7),
    budget_bytes=st.integers(0, 300),
)


@given(PRESENT, RETENTIONS, st.sets(AGES))
def test_the_newest_and_the_newest_whole_one_stay(
    present: list[Kept], retention: Retention, verified: set[tuple[int, int]]
) -> None:
    doomed = retention.doomed(present, verified)
    staying = [kept for kept in present if kept not in doomed]
    assert doomed == sorted(doomed)
    if present:
        assert max(present) in staying
    if whole := [kept for kept in present if kept.age in verified]:
        assert max(whole) in staying
    if retention.budget_bytes:
        safe = {max(present, default=None), max(whole, default=None)}
        within = sum(kept.size_bytes for kept in staying) <= retention.budget_bytes
        assert within or set(staying) <= safe
    else:
        newest = sorted(present, reverse=True)[: retention.keep_last or None]
        assert set(newest) <= set(staying)
        milestones = {
            kept
            for kept in present
            if retention.keep_every and kept.step % retention.keep_every == 0
        }
        assert set(staying) <= {
            *newest,
            *milestones,
            *(max(snapshots) for snapshots in (present, whole) if snapshots),
        }
        assert milestones <= set(staying)


@given(PRESENT, RETENTIONS, st.sets(AGES))
def test_pruning_twice_is_pruning_once(
    present: list[Kept], retention: Retention, verified: set[tuple[int, int]]
) -> None:
    doomed = retention.doomed(present, verified)
    assert retention.doomed([kept for kept in present if kept not in doomed], verified) == []


@given(st.integers(1, 20), st.lists(st.integers(1, 5), min_size=1, max_size=50))
def test_no_more_than_so_many_steps_pass(every_steps: int, strides: list[int]) -> None:
    schedule, step, last_step = Schedule(every_steps=every_steps), 0, None
    for stride in strides:
        step += stride
        if schedule.due(step, last_step, None):
            assert last_step is None or step > last_step
            last_step = step
        assert last_step is not None
        assert step - last_step < every_steps


def test_schedules() -> None:
    assert Schedule().due(5, 4, 0.0)
    assert [step for step in range(1, 13) if Schedule(every_steps=4).due(step, step - 1, None)] == [
        4,
        8,
        12,
    ]
    timed = Schedule(every_s=60)
    assert timed.due(1, None, None)
    assert timed.due(9, 8, 60.0)
    assert timed.due(9, 8, None)
    assert not timed.due(9, 8, 59.0)
    # Steps that are trained again, after a restore of an older step.
    assert [step for step in range(1, 9) if Schedule(every_steps=4).due(step, 99, None)] == [4, 8]
    with pytest.raises(BadInput, match="every_s"):
        Schedule(every_s=-1)
    with pytest.raises(BadInput, match="keep_last"):
        Retention(keep_last=-1)


def test_a_tier_prunes_what_its_retention_dooms(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, retention=Retention(keep_last=2, keep_every=3))
    for step in range(8):
        tier.save(step, {"w": torch.full((10,), step)})
    assert tier.prune() == [f"step-{step:09}.g0" for step in (1, 2, 4, 5)]
    assert [snapshot.manifest.step for snapshot in tier.snapshots().snapshots] == [7, 6, 3, 0]
    assert list((tmp_path / ".trash").iterdir()) == []


def test_the_last_one_that_is_whole_outlives_newer_damaged_ones(tmp_path: Path) -> None:
    for step in range(4):
        DiskTier(tmp_path).save(step, {"w": torch.full((10,), step)})
    for step in (2, 3):
        (tmp_path / f"step-{step:09}.g0" / "__0_0.distcp").write_bytes(b"")
    tier = DiskTier(
        tmp_path, retention=Retention(keep_last=1)
    )  # as after a restart: the tier has no history yet
    assert tier.prune() == ["step-000000000.g0", "step-000000002.g0"]
    assert tier.newest_verified().snapshot.manifest.step == 1


def test_nothing_is_pruned_where_nothing_is_whole(tmp_path: Path) -> None:
    for step in range(3):
        DiskTier(tmp_path).save(step, {"w": torch.full((10,), step)})
        (tmp_path / f"step-{step:09}.g0" / "__0_0.distcp").write_bytes(b"")
    assert DiskTier(tmp_path, retention=Retention(keep_last=1)).prune() == []
