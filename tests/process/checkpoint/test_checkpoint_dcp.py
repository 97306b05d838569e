"""Tests of scripts that keep their DCP calls: gloo ranks with FSDP2 save through chaoskit's
plug-ins and load in other worlds.
"""

from __future__ import annotations

import copy
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from chaoskit.checkpoint import (
    DiskTier,
    NothingToRestore,
    RemoteTier,
    Retention,
    SaveFailed,
    Snapshot,
    SnapshotReader,
    SnapshotWriter,
    restore,
)
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.checkpoint.remote.upload import Sent
from chaoskit.errors import BadInput, ChaoskitError

JOB = Path(__file__).parents[2] / "jobs" / "training" / "sharded_state.py"
LIMIT_S = 120

pytestmark = [pytest.mark.costly, pytest.mark.filterwarnings("ignore::UserWarning")]


def ranks(
    tmp_path: Path, world: int, act: str, step: int = 1, codes: list[int] | None = None
) -> dict[str, Any]:
    """Run a job on ``world`` ranks, and return the result of the first one."""
    store = tmp_path / f"store-{len(list(tmp_path.glob('store-*')))}"
    command = [sys.executable, str(JOB)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(store), str(tmp_path / "root"), act, str(step)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == (codes or [0] * world), outputs
    if codes:
        return {}
    result: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return result


def test_two_ranks_save_and_others_load(tmp_path: Path) -> None:
    saved = ranks(tmp_path, 2, "save")
    listing = DiskTier(tmp_path / "root").snapshots()
    assert [snapshot.name for snapshot in listing.snapshots] == ["step-000000001.g0"]
    assert listing.snapshots[0].manifest.world == 2
    assert DiskTier(tmp_path / "root").newest_verified().snapshot == listing.snapshots[0]
    for world, act in ((2, "load"), (1, "load"), (3, "load"), (1, "plain"), (2, "plain")):
        assert ranks(tmp_path, world, act)["digest"] == saved["digest"], (world, act)


@pytest.mark.parametrize("act", ["async", pytest.param("process", marks=pytest.mark.slow)])
def test_asynchronous_saves(tmp_path: Path, act: str) -> None:
    saved = ranks(tmp_path, 2, act)
    assert ranks(tmp_path, 1, "load")["digest"] == saved["digest"]


@pytest.mark.slow
def test_more_ranks_than_rows(tmp_path: Path) -> None:
    saved = ranks(tmp_path, 4, "save")
    for world, act in ((4, "load"), (2, "load"), (4, "plain"), (1, "plain")):
        assert ranks(tmp_path, world, act)["digest"] == saved["digest"], (world, act)


@pytest.mark.slow
@pytest.mark.promise(
    "`restore` loads the newest snapshot that is whole, on all ranks, or the one before it"
)
def test_a_damaged_snapshot_is_passed_over_by_all_ranks(tmp_path: Path) -> None:
    older, _ = ranks(tmp_path, 2, "save", 1), ranks(tmp_path, 2, "save", 2)
    newest = tmp_path / "root" / "step-000000002.g0" / "__1_0.distcp"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    restored = ranks(tmp_path, 2, "restore")
    assert restored == {"step": 1, "lost": ["step-000000002.g0"], "digest": older["digest"]}
    assert len(list((tmp_path / "root" / "quarantine").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.promise("`dcp.save` raises then, on all ranks.")
def test_a_full_disk_of_one_rank_is_heard_of_by_all(tmp_path: Path) -> None:
    failed = ranks(tmp_path, 2, "full")
    assert "rank 1: OSError: [Errno 28] No space left on device" in failed["error"]
    assert [
        snapshot.manifest.step for snapshot in DiskTier(tmp_path / "root").snapshots().snapshots
    ] == [2]
    assert list((tmp_path / "root" / ".staging").iterdir()) == []


def test_ranks_that_name_different_steps_are_refused(tmp_path: Path) -> None:
    answer = ranks(tmp_path, 2, "differ", 7)
    assert "checkpoint_id=[7, 8]: name the same step on all ranks" in answer["error"]
    assert DiskTier(tmp_path / "root").snapshots().snapshots == []


@pytest.mark.slow
def test_the_step_in_the_state_reaches_a_process_that_saves(tmp_path: Path) -> None:
    ranks(tmp_path, 2, "keyed", 7)
    assert [snapshot.name for snapshot in DiskTier(tmp_path / "root").snapshots().snapshots] == [
        "step-000000007.g0"
    ]


def test_a_rank_that_dies_in_a_save_leaves_nothing_that_counts(tmp_path: Path) -> None:
    ranks(tmp_path, 2, "save")
    ranks(tmp_path, 2, "dies", 2, codes=[1, -signal.SIGKILL])
    tier = DiskTier(tmp_path / "root")
    assert [snapshot.manifest.step for snapshot in tier.snapshots().snapshots] == [1]
    assert len(tier.sweep()) == 1
    assert tier.newest_verified().lost == []


# -- one process -----------------------------------------------------------------------------------


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(40, 30, generator=generator), "steps": torch.tensor(seed)},
        "half": torch.randn(6, 4, generator=generator).to(torch.bfloat16),
        "list": [1, torch.ones(2), {"deep": "text"}],
        "nothing": torch.empty(0, 3),
    }


def is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(is_equal, left, right))
    return bool(left == right)


@pytest.mark.promise(
    "Everything else stays: FSDP2, `DTensor`, nested states, stateful objects, planners, a world of "
    "another size at loading."
)
def test_a_nested_state_comes_back_through_every_reader(tmp_path: Path) -> None:
    saved = state(1)
    dcp.save(saved, checkpoint_id="step-7", storage_writer=SnapshotWriter(tmp_path))
    for arguments in (
        {"storage_reader": SnapshotReader(tmp_path)},
        {"storage_reader": SnapshotReader(tmp_path), "checkpoint_id": "whatever/step_7"},
        {"storage_reader": SnapshotReader(tmp_path / "step-000000007.g0")},
        {"checkpoint_id": tmp_path / "step-000000007.g0"},
    ):
        loaded = state(2)
        dcp.load(loaded, **arguments)
        assert is_equal(loaded, saved), arguments


@pytest.mark.promise(
    "Everything else stays: FSDP2, `DTensor`, nested states, stateful objects, planners, a world of "
    "another size at loading."
)
def test_plain_torch_converts_a_snapshot(tmp_path: Path) -> None:
    """The file that torch makes of a snapshot has the nested state, although torch had no state to
    fill.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved = state(1)
    dcp.save(saved, checkpoint_id="7", storage_writer=SnapshotWriter(tmp_path))
    dcp_to_torch_save(tmp_path / "step-000000007.g0", tmp_path / "whole.pt")
    assert is_equal(torch.load(tmp_path / "whole.pt", weights_only=True), saved)


@pytest.mark.promise("they are read into a parameter without a second copy")
def test_tensors_are_loaded_in_place(tmp_path: Path) -> None:
    """A parameter stays in its memory, and loading needs no memory of its size."""
    saved, loaded = torch.ones(2**24), torch.full((2**24,), 2.0)
    dcp.save({"weight": saved}, checkpoint_id="step-1", storage_writer=SnapshotWriter(tmp_path))
    address = loaded.data_ptr()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_bytes()
    dcp.load({"weight": loaded}, storage_reader=SnapshotReader(tmp_path))
    assert peak_bytes() - before < loaded.nbytes // 2
    assert loaded.data_ptr() == address
    assert torch.equal(loaded, saved)


def peak_bytes() -> int:
    """Return the peak memory of this process, as the kernel counts it."""
    (line,) = [
        row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM")
    ]
    return int(line.split()[1]) * 1024


@pytest.mark.promise("in other scripts it is 0, and 1 for a step that is saved a second time")
def test_a_step_that_is_trained_again_has_a_place_of_its_own(tmp_path: Path) -> None:
    for seed in (1, 2):
        dcp.save(state(seed), checkpoint_id="step-5", storage_writer=SnapshotWriter(tmp_path))
    names = [snapshot.name for snapshot in DiskTier(tmp_path).snapshots().snapshots]
    assert names == ["step-000000005.g1", "step-000000005.g0"]
    loaded = state(3)
    dcp.load(loaded, storage_reader=SnapshotReader(tmp_path))
    assert is_equal(loaded, state(2))


@pytest.mark.promise(
    "`restore` loads the newest snapshot that is whole, on all ranks, or the one before it"
)
def test_the_newest_of_all_places_is_restored(tmp_path: Path) -> None:
    """A damaged snapshot is quarantined in its own place, and the newest of the others is restored,
    one after another.
    """
    stored, disk = RemoteTier(f"file://{tmp_path}/remote"), DiskTier(tmp_path / "disk")
    writer = SnapshotWriter(
        disk,
        committed=lambda snapshot: uploaded.append(stored.upload(DirectorySource(snapshot.path))),
    )
    uploaded: list[Sent] = []
    memory = SnapshotWriter(tmp_path / "memory")
    for step in (1, 2, 3, 4):
        dcp.save(
            state(step), checkpoint_id=f"step-{step}", storage_writer=memory if step % 2 else writer
        )
    assert [sent.name for sent in uploaded] == ["step-000000002.g0", "step-000000004.g0"]
    disk.quarantine(tmp_path / "disk" / "step-000000002.g0", "it is only in the store")
    places: dict[str, Any] = {
        "memory": tmp_path / "memory",
        "disk": disk,
        "remote": stored.store.url,
    }

    def restored(step: int, place: str, lost: list[str]) -> None:
        loaded = state(9)
        result = restore(loaded, **places)
        assert result is not None
        assert (result.step, Path(result.path).parent.name) == (step, place)
        assert [snapshot.name for snapshot in result.lost] == lost
        assert is_equal(loaded, state(step))

    def damage(place: str, step: int) -> str:
        path = tmp_path / place / f"step-{step:09}.g0"
        (path / "__0_0.distcp").write_bytes(b"")
        return path.name

    restored(4, "disk", [])
    damaged = damage("disk", 4)
    restored(4, "remote", [damaged])
    (tmp_path / "remote" / damage("remote", 4) / "manifest.json").write_text("{}")
    restored(3, "memory", [damaged])
    restored(2, "remote", [damage("memory", 3)])
    assert len(list((tmp_path / "memory" / "quarantine").iterdir())) == 1
    assert stored.names() == ["step-000000002.g0"]
    damage("remote", 2)
    assert restore(state(9), memory=tmp_path / "memory", disk=tmp_path / "none") is not None
    damage("memory", 1)
    with pytest.raises(NothingToRestore, match="step-000000001"):
        restore(state(9), **places)
    assert restore(state(9), **places) is None, "all of them are in quarantine"


def test_places_that_are_none_are_refused() -> None:
    with pytest.raises(BadInput, match="name a place"):
        restore(state())
    with pytest.raises(BadInput, match="upload from there"):
        SnapshotWriter("s3://bucket/run")
    elsewhere = SnapshotReader("/dev/shm/of another host/step-000000001.g0")
    with pytest.raises(BadInput, match="use a directory that all ranks see"):
        elsewhere.read_metadata()


class FullDisk:
    """A hook that stands for a disk without room, at one boundary."""

    def __init__(self, boundary: str) -> None:
        self.boundary, self.full = boundary, True

    def __call__(self, boundary: str) -> None:
        if self.full and boundary == self.boundary:
            raise OSError(28, "No space left on device")


@pytest.mark.promise("leaves the snapshots before it, and nothing partial", boundary="commit")
@pytest.mark.parametrize(
    "boundary", ["stage", "write", "sync", "metadata", "manifest", "seal", "commit"]
)
def test_a_save_that_fails_leaves_the_one_before_and_nothing_else(
    tmp_path: Path, boundary: str
) -> None:
    disk = FullDisk(boundary)
    disk.full = False
    tier = DiskTier(tmp_path / "disk", at=disk)
    writer = SnapshotWriter(tier)
    dcp.save(state(1), checkpoint_id="step-1", storage_writer=writer)
    disk.full = True
    with pytest.raises(CheckpointException, match="No space left"):
        dcp.save(state(2), checkpoint_id="step-2", storage_writer=writer)
    assert [snapshot.manifest.step for snapshot in tier.snapshots().snapshots] == [1]
    assert list((tmp_path / "disk" / ".staging").iterdir()) == []
    disk.full = False
    dcp.save(state(3), checkpoint_id="step-3", storage_writer=writer)
    assert tier.newest_verified().snapshot.manifest.step == 3


@pytest.mark.promise('With `on_failure="report"` it goes into the log and to `writer.failures`')
def test_a_failure_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    disk = FullDisk("seal")
    writer = SnapshotWriter(DiskTier(tmp_path, at=disk), on_failure="report")
    dcp.save(state(1), checkpoint_id="step-1", storage_writer=writer)
    assert [str(failure) for failure in writer.failures] == [
        f"step 1 was not saved to {tmp_path}: [Errno 28] No space left on device"
    ]
    dcp.async_save(
        state(2), checkpoint_id="step-2", storage_writer=writer, process_group=None
    ).result()
    assert [failure.step for failure in writer.failures] == [2]
    assert restore(state(3), disk=tmp_path) is None


@pytest.mark.promise("quarantine the snapshot, take the one before and say how much is lost")
def test_restore_falls_through_and_says_what_was_lost(tmp_path: Path) -> None:
    writer = SnapshotWriter(DiskTier(tmp_path, retention=Retention(keep_last=0)))
    for step in (1, 2, 3):
        dcp.save(state(step), checkpoint_id=f"step-{step}", storage_writer=writer)
    (tmp_path / "step-000000003.g0" / "__0_0.distcp").unlink()
    (tmp_path / "step-000000002.g0" / "manifest.json").write_text("{}")
    loaded = state(9)
    result = restore(loaded, disk=tmp_path)
    assert result is not None
    assert result.step == 1
    assert sorted(snapshot.name for snapshot in result.lost) == [
        "step-000000002.g0",
        "step-000000003.g0",
    ]
    assert is_equal(loaded, state(1))
    (tmp_path / "step-000000001.g0" / "__0_0.distcp").unlink()
    with pytest.raises(ChaoskitError, match="can be restored"):
        restore(loaded, disk=tmp_path)


def test_a_planner_that_repeats_old_plans_is_refused(tmp_path: Path) -> None:
    writer, planner = SnapshotWriter(tmp_path), DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state(1), checkpoint_id="step-1", storage_writer=writer, planner=planner)
    with pytest.raises(CheckpointException, match="enable_plan_caching=True: leave it False"):
        dcp.save(state(2), checkpoint_id="step-2", storage_writer=writer, planner=planner)
    assert restore(state(3), disk=tmp_path).step == 1  # type: ignore[union-attr]


def test_errors_reach_other_ranks() -> None:
    for error in (
        SaveFailed(3, "disk", "full"),
        BadInput("step", -1, "use 0 or more"),
        NothingToRestore(Path("x"), []),
    ):
        assert str(copy.copy(error)) == str(error)


def test_agents_do_not_pay_for_torch_distributed_checkpoint() -> None:
    code = "import sys, chaoskit.checkpoint.disk.tier as d; assert 'torch.distributed.checkpoint' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_torch_needs_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="checkpoint_id"):
        dcp.save(state(), storage_writer=SnapshotWriter(tmp_path))
    with pytest.raises(CheckpointException):
        dcp.load(state(), storage_reader=SnapshotReader(tmp_path))


def test_objects_are_verified_too(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id="1", storage_writer=SnapshotWriter(tmp_path))
    snapshot = Snapshot.open(tmp_path / "step-000000001.g0")
    assert torch.load(io.BytesIO(snapshot.read_object("list.2.deep")), weights_only=True) == "text"


@pytest.mark.slow
def test_the_script_of_the_documentation_runs_and_resumes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text("# script:" + page.split("```python\n# script:")[1].split("```")[0])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    for first in (0, 30):
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert f"from {first} to {first + 30}" in done.stdout, done.stderr
