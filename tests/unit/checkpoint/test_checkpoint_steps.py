"""The step of a checkpoint comes from its state, its writer or its name; a name with several
numbers is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from chaoskit.checkpoint import (
    DiskTier,
    RemoteTier,
    Retention,
    SnapshotReader,
    SnapshotWriter,
    restore,
)
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.checkpoint.step_names import step_of
from chaoskit.errors import BadInput

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LIGHTNING = "step={step}-val_loss={loss:.2f}"
LOSSES = {100: 0.95, 200: 0.85, 300: 0.75, 400: 0.65}


def state(step: int) -> dict[str, Any]:
    """Return a nested state of a recognisable step."""
    return {
        "weight": torch.full((8,), float(step)),
        "loop": {"step": step, "seen": torch.tensor(step)},
    }


def steps_in(root: Path) -> list[int]:
    """Return the steps of the snapshots of a directory, the newest first."""
    return [snapshot.manifest.step for snapshot in DiskTier(root).snapshots().snapshots]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("120", 120),
        ("step-120", 120),
        ("step_120", 120),
        ("step=120", 120),
        ("step 120", 120),
        ("step120", 120),
        ("Step-120.pt", 120),
        ("global_step120", 120),
        ("checkpoint-120", 120),
        ("ckpt_0000120", 120),
        ("a/b-7/step_12", 12),
        (Path("step-000000120.g3"), 120),
        ("epoch=3-step=400.ckpt", 400),
        ("2024-05-01-step-120", 120),
        ("run7-lr1e-4-step-120", 120),
        ("bf16-step-120", 120),
        ("ema-step-120", 120),
        ("stop-120", 120),  # "stop" is part of the word
        ("blueprint120", 120),
    ],
)
def test_a_name_that_says_its_step(name: str, step: int) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("step=400-val_loss=0.65", "400, 0 and 65"),
        ("step-1e5", "1 and 5"),
        ("step-1_000", "1 and 000"),
        ("step-1,000", "1 and 000"),
        ("step-120.5", "120 and 5"),
        ("2024-05-01", "2024, 05 and 01"),
        ("ckpt-20240501", "20240501"),
        ("ckpt-20240501-120000", "20240501 and 120000"),
        ("step-120-v2", "120 and 2"),
        ("last-v2", "2"),
        ("step-120-rank0", "120 and 0"),
        ("state-rank0", "0"),
        ("step-100-step-200", "100 and 200"),
        ("epoch3-batch7", "3 and 7"),
        ("step-10k", "10"),
        ("run-7fa", "7"),
        ("step--5", "5"),
        ("loss=.65", "65"),
        ("loss=2", "2"),
        ("step-0x1f", "0 and 1"),
        ("top1", "1"),
        ("model-fp16", "16"),
        ("weights.bf16", "16"),
        ("bfloat16", "16"),
        ("int8", "8"),
        ("bleu31", "31"),
        ("ppl-12", "12"),
        ("wer=9", "9"),
        ("fold3", "3"),
        ("ema_999", "999"),
        ("run_3", "3"),
        ("tp2", "2"),
        ("lr-3", "3"),
    ],
)
def test_a_name_that_leaves_the_step_open_is_refused(
    tmp_path: Path, name: str, candidates: str
) -> None:
    with pytest.raises(BadInput) as refused:
        step_of(name)
    assert refused.value.field == "checkpoint_id"
    assert f"its numbers are {candidates}" in str(
        refused.value
    ) or f"its number is {candidates}" in str(refused.value)
    with pytest.raises(BadInput):
        dcp.save(state(1), checkpoint_id=name, storage_writer=SnapshotWriter(tmp_path / "root"))
    with pytest.raises(BadInput):
        dcp.load(state(1), checkpoint_id=name, storage_reader=SnapshotReader(tmp_path / "root"))
    assert not (tmp_path / "root").exists(), "it was refused after something was written"


def test_a_name_without_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="step-120"):
        step_of("newest")


@pytest.mark.parametrize("key", ["loop.step", "loop.seen"])
def test_the_state_says_the_step_whatever_the_name(tmp_path: Path, key: str) -> None:
    """The newest checkpoints are kept and restored even if the loss in their names falls."""
    writer = SnapshotWriter(DiskTier(tmp_path, retention=Retention(keep_last=2)), step_key=key)
    for step, loss in LOSSES.items():
        dcp.save(
            state(step), checkpoint_id=LIGHTNING.format(step=step, loss=loss), storage_writer=writer
        )
    assert steps_in(tmp_path) == [400, 300]
    loaded = state(0)
    restored = restore(loaded, disk=tmp_path)
    assert restored is not None
    assert (restored.step, loaded["loop"]["step"]) == (400, 400)
    assert list((tmp_path / ".staging").iterdir()) == []


def test_the_writer_is_given_the_step(tmp_path: Path) -> None:
    writer = SnapshotWriter(DiskTier(tmp_path, retention=Retention(keep_last=2)))
    for step, loss in LOSSES.items():
        writer.step = step
        dcp.save(
            state(step), checkpoint_id=LIGHTNING.format(step=step, loss=loss), storage_writer=writer
        )
    dcp.save(state(400), storage_writer=writer)
    assert [snapshot.name for snapshot in DiskTier(tmp_path).snapshots().snapshots] == [
        "step-000000400.g1",
        "step-000000400.g0",
    ]
    writer.step = None
    dcp.save(state(500), checkpoint_id="step-500", storage_writer=writer)
    assert steps_in(tmp_path) == [500, 400]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.tensor(1.5), "one whole number"),
        (torch.tensor([1, 2]), "one whole number"),
        (True, "one whole number"),
        ("400", "one whole number"),
        (-1, "one whole number"),
    ],
)
def test_a_value_that_is_no_step_is_refused_and_nothing_is_left(
    tmp_path: Path, value: Any, reason: str
) -> None:
    writer = SnapshotWriter(tmp_path, step_key="step")
    dcp.save({"step": 1}, storage_writer=writer)
    with pytest.raises(CheckpointException, match=reason):
        dcp.save({"step": value}, storage_writer=writer)
    assert steps_in(tmp_path) == [1]
    assert list((tmp_path / ".staging").iterdir()) == []
    dcp.save({"step": 2}, storage_writer=writer)
    assert steps_in(tmp_path) == [2, 1]


def test_a_key_that_the_state_lacks_is_refused(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, step_key="step")
    with pytest.raises(CheckpointException, match=r"step_key='step': .*loop\.step"):
        dcp.save(state(1), storage_writer=writer)
    assert steps_in(tmp_path) == []


def test_a_save_without_a_name_does_not_take_the_step_of_the_save_before(tmp_path: Path) -> None:
    """torch tells a writer a name only if there is one: formerly the step before stayed in
    force.
    """
    writer = SnapshotWriter(tmp_path)
    dcp.save(state(1), checkpoint_id="step-1", storage_writer=writer)
    with pytest.raises(CheckpointException, match="checkpoint_id"):
        dcp.save(state(2), storage_writer=writer)
    assert steps_in(tmp_path) == [1]


def test_two_ways_to_say_the_step_are_refused(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, step_key="loop.step")
    with pytest.raises(BadInput, match="step_key"):
        writer.step = 3
    for step in (-1, 1.5, True, "7"):
        with pytest.raises(BadInput, match="whole number"):
            SnapshotWriter(tmp_path).step = step  # type: ignore[assignment]


def test_a_name_of_a_snapshot_loads_that_one(tmp_path: Path) -> None:
    """The name selects one of two snapshots of a step, and the next load without a name takes the
    newest again.
    """
    writer = SnapshotWriter(DiskTier(tmp_path, retention=Retention(keep_last=0)))
    for seed in (1, 2):
        dcp.save(state(seed), checkpoint_id="step-5", storage_writer=writer)
    reader, loaded = SnapshotReader(tmp_path), state(0)
    dcp.load(loaded, checkpoint_id="step-000000005.g0", storage_reader=reader)
    assert loaded["loop"]["step"] == 1
    dcp.load(loaded, storage_reader=reader)
    assert loaded["loop"]["step"] == 2


def test_training_that_went_back_keeps_what_it_stores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that loads step 100 and trains on stores step 150 beside a step 300 that it
    gave up.
    """
    writer = SnapshotWriter(DiskTier(tmp_path, retention=Retention(keep_last=2)))
    for step in (100, 200, 300):
        dcp.save(state(step), checkpoint_id=f"step-{step}", storage_writer=writer)
    dcp.save(state(150), checkpoint_id="step-150", storage_writer=writer)
    assert 150 in steps_in(tmp_path)
    assert "step 150 was saved, but a restore would load the newer step 300" in caplog.text


def test_a_renamed_directory_is_no_snapshot_of_its_name(tmp_path: Path) -> None:
    """A copy of step 100 under the name of step 900 is set aside, and does not push out the real
    ones.
    """
    tier = DiskTier(tmp_path, retention=Retention(keep_last=1))
    tier.save(100, {"weight": torch.ones(2)})
    shutil.copytree(tmp_path / "step-000000100.g0", tmp_path / "step-000000900.g0")
    tier.prune()
    assert steps_in(tmp_path) == [100]


def test_a_store_prunes_by_manifests(tmp_path: Path) -> None:
    """A copy of step 1 in a store under the name of step 900 counts neither as the newest nor as
    whole.
    """
    disk = DiskTier(tmp_path / "disk", retention=Retention(keep_last=0))
    store = RemoteTier(f"file://{tmp_path}/store", retention=Retention(keep_last=1))
    for step in (1, 2):
        store.upload(DirectorySource(disk.save(step, {"weight": torch.ones(2)}).path))
    shutil.copytree(
        tmp_path / "store" / "step-000000001.g0", tmp_path / "store" / "step-000000900.g0"
    )
    assert store.prune() == ["step-000000001.g0"]
    assert (tmp_path / "store" / "step-000000002.g0" / "manifest.json").is_file()


def test_names_that_chaoskit_does_not_write_are_no_snapshots(tmp_path: Path) -> None:
    """A tenth digit that pads a number, or digits of another script, would be a second name of the
    same step.
    """
    tier = DiskTier(tmp_path)
    tier.save(100, {"weight": torch.ones(2)})
    for name in ("step-0000000100.g0", "step-000000100.g00", "step-٠٠٠٠٠٠١٠٠.g0"):
        shutil.copytree(tmp_path / "step-000000100.g0", tmp_path / name)
    assert [snapshot.name for snapshot in tier.snapshots().snapshots] == ["step-000000100.g0"]
