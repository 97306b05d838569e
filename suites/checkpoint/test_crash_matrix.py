"""Crash matrix: a node dies between any two acts that copy or store a state.

The matrix has all tiers and kinds of jobs. Half-made copies count nowhere. Training goes on with
the bits of the unbroken run, and no tier shows an incomplete copy. When every node is lost
afterwards, the job goes on from what is stored.

-> checkpoint/layout/boundaries.py lists the boundaries; faults/storage/torn.py kills at one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaoskit import Chaos, Outcome
from chaoskit.checkpoint import DiskTier, RemoteTier
from chaoskit.checkpoint.layout import boundaries
from chaoskit.faults import Fault, ReplaceNode, TornWrite
from chaoskit.suites.checkpoint.expect import uploaded_after
from chaoskit.suites.recovery.expect import STEADY

AT = 8  # each 5th step is stored: every boundary is reached soon after this one
EVERY, STEPS, NODES = 5, 40, 3
#: Committed steps that the death of a node may cost, if no copy was dropped.
LOST = {"gpt": 0, "fsdp": 1, STEADY: 0}
DROPPED = 8  # factor if a busy machine dropped copies: the last complete step is kept for so long
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"shards": 4, "options": {"size": "tiny", "schedule_steps": STEPS}},
    "fsdp": {"shards": 3, "options": {"size": "tiny", "batch": 6, "schedule_steps": STEPS}},
    STEADY: {"shards": 4, "options": {"step_s": 0.03}},
}


def tiers(directory: Path) -> dict[str, Any]:
    """Return settings of tiers that have so little room that something is deleted soon."""
    return {
        "disk": {"target": str(directory / "disk"), "every_steps": EVERY, "keep_last": 2},
        "remote": {"target": f"file://{directory}/remote", "every_steps": EVERY, "keep_last": 1},
    }


def run(
    chaos: Chaos, directory: Path, job: str, *faults: Fault, after: str = "evidence", **plan: Any
) -> Outcome:
    """Run a job that may lose no more than allowed, with the twin's bits and only complete copies.

    It goes on until a snapshot is uploaded ``after`` this event.
    """
    goal = uploaded_after(chaos, after)
    plan |= {"until": goal.until, "watch": goal, "deadline_s": 240.0}
    settings: dict[str, Any] = {
        "nodes": NODES,
        "spares": 1,
        "steps": STEPS,
        "max_lost_steps": DROPPED * LOST[job],
    }
    settings["copies"] = "every_step"  # each step reaches the boundaries of a copy
    settings["lease_beats"] = 20  # a busy machine must not look silent during uploads and deaths
    outcome = chaos.run(job, faults=faults, **settings | OPTIONS[job] | tiers(directory) | plan)
    outcome.assert_same_losses_as_twin()
    if "max_lost_steps" not in plan and not outcome.records("copy_failed"):
        assert outcome.lost_steps <= LOST[job]
    stored = DiskTier(directory / "disk")
    assert not stored.snapshots().damaged
    assert not stored.newest_verified().lost
    uploaded = RemoteTier(f"file://{directory}/remote")
    names = uploaded.names()
    assert names, "nothing was uploaded"
    for name in names:
        uploaded.open(name).verify()
    return outcome


@pytest.mark.slow(job="fsdp")
@pytest.mark.promise(
    "a thread said that it stood at this boundary; then every process of its node is gone",
    boundary="copied",
    job="gpt",
)
@pytest.mark.promise(
    "a thread said that it stood at this boundary; then every process of its node is gone",
    boundary="chunk",
    job="fsdp",
)
@pytest.mark.parametrize("job", ["gpt", "fsdp"])
@pytest.mark.parametrize("boundary", boundaries.MEMORY)
def test_within_a_copy_in_memory(chaos: Chaos, tmp_path: Path, boundary: str, job: str) -> None:
    run(chaos, tmp_path, job, TornWrite(rank=0, at_step=AT, boundary=boundary))


@pytest.mark.slow
@pytest.mark.promise(
    "the workers of the node are given up; what was half made counts nowhere",
    boundary="verified",
)
@pytest.mark.parametrize("boundary", [*boundaries.OUTWARD, *boundaries.INWARD])
def test_within_a_copy_to_another_node(chaos: Chaos, tmp_path: Path, boundary: str) -> None:
    fault = TornWrite(rank=1, at_step=AT, boundary=boundary)
    run(chaos, tmp_path, "fsdp", fault, transport="tcp")


@pytest.mark.slow(boundary=["seal", "upload"])
@pytest.mark.slow(job="fsdp")
@pytest.mark.promise(
    "the run ends with the bits of the unbroken one, no tier shows a copy that is not whole",
    boundary=["write", "seal", "upload"],
    job="gpt",
)
@pytest.mark.promise(
    "the run ends with the bits of the unbroken one, no tier shows a copy that is not whole",
    boundary=["manifest", "commit"],
    job="fsdp",
)
@pytest.mark.parametrize("job", ["gpt", "fsdp"])
@pytest.mark.parametrize("boundary", [*boundaries.BOUNDARIES, *boundaries.REMOTE])
def test_within_a_save(chaos: Chaos, tmp_path: Path, boundary: str, job: str) -> None:
    run(chaos, tmp_path, job, TornWrite(rank=0, at_step=AT, boundary=boundary))


@pytest.mark.slow
@pytest.mark.promise(
    "A part that fails or does not come costs that snapshot and nothing else.", boundary="write"
)
@pytest.mark.parametrize("boundary", ["write", "sync"])
def test_within_a_part_of_a_save(chaos: Chaos, tmp_path: Path, boundary: str) -> None:
    """A save fails if the part of a lost node never comes, and later ones are made."""
    fault = TornWrite(rank=2, at_step=AT, boundary=boundary)
    outcome = run(chaos, tmp_path, STEADY, fault, after="save_failed")
    failed = [
        record["step"] for record in outcome.records("save_failed") if record["tier"] == "disk"
    ]
    assert failed, "no save was under way when the node died"
    assert min(failed) < DiskTier(tmp_path / "disk").newest_verified().snapshot.manifest.step


@pytest.mark.slow(boundary="uploaded")
@pytest.mark.promise(
    "when all nodes are lost afterwards the job goes on from what is stored",
    boundary=["commit", "uploaded"],
)
@pytest.mark.parametrize("boundary", [*boundaries.BOUNDARIES, *boundaries.REMOTE])
def test_every_node_is_lost_after_a_torn_save(chaos: Chaos, tmp_path: Path, boundary: str) -> None:
    """The newest complete snapshot is restored after all nodes are lost.

    One node is lost in the middle of a save, the others some steps later.
    """
    late = 60  # a save that the torn one has delayed is complete by then, even on a busy machine
    lost = [ReplaceNode(rank=rank, at_step=late) for rank in range(NODES - 1)]
    fault = TornWrite(rank=0, at_step=AT, boundary=boundary)
    outcome = run(
        chaos, tmp_path, "gpt", fault, *lost, spares=0, steps=2 * STEPS, max_lost_steps=late
    )
    restored = [
        record
        for record in outcome.records("restored")
        if record["source"].startswith(("disk", "remote"))
    ]
    assert restored
    assert min(record["step"] for record in restored) >= EVERY
