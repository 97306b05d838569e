"""The disk and remote tiers of a job: what outlives every node of it, for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from chaoskit.checkpoint.disk import DiskTier
from chaoskit.checkpoint.snapshot import Snapshot
from chaoskit.experiment.outcome import Outcome
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Event
from faults import ReplaceNode

TINY = {"size": "tiny"}
PLAIN = f"{Path(__file__).parent / 'jobs' / 'troubled.py'}:plain"


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    return [record for record in read_journals(Path(outcome.directory) / "journal") if record.event in events]


def plain_load(path: Path) -> dict[str, Any]:
    """What plain ``torch.distributed.checkpoint`` reads, into tensors that know nothing of chaoskit."""
    reader = dcp.FileSystemReader(path)
    state: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
        for name, one in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize("job", ["gpt", "fsdp"])
def test_plain_dcp_reads_what_the_agents_wrote(chaos: Chaos, tmp_path: Path, job: str) -> None:
    disk = {"target": str(tmp_path / "stored"), "every_steps": 4, "keep_last": 3}
    outcome = chaos.run(job, nodes=2, spares=0, steps=10, options=TINY, twin=False, disk=disk)
    assert not journal(outcome, Event.SAVE_FAILED)
    found = DiskTier(disk["target"]).snapshots()
    assert [one.manifest.step for one in found.snapshots] == [8, 4]
    assert not found.damaged
    for snapshot in found.snapshots:
        snapshot.verify()
        assert {item.file for item in snapshot.manifest.items} == {"__0_0.distcp", "__1_0.distcp"}
    state = plain_load(found.snapshots[0].path)
    assert state["scalars"]["step"] == 8
    assert state["optimizer.state.head.weight.exp_avg"].shape == state["model.head.weight"].shape
    assert all(one.isfinite().all() for one in state.values() if isinstance(one, torch.Tensor))
    assert Snapshot.open(found.snapshots[0].path).manifest.world == 2


def lose_all(nodes: int, at_step: int) -> list[ReplaceNode]:
    """Every node is lost at one step, with all that is in memory; empty ones come in their places."""
    return [ReplaceNode(rank=rank, at_step=at_step) for rank in range(nodes)]


@pytest.mark.parametrize("job", [PLAIN, "fsdp"])
def test_when_every_node_is_lost_the_job_goes_on_from_disk(chaos: Chaos, tmp_path: Path, job: str) -> None:
    options = {"step_s": 0.05} if job == PLAIN else TINY
    outcome = chaos.run(
        job,
        nodes=2,
        spares=0,
        steps=30,
        options=options,
        disk={"target": str(tmp_path / "stored"), "every_steps": 5},
        faults=lose_all(2, 19),
        max_lost_steps=14,
    )
    assert {record["source"].split()[0] for record in journal(outcome, Event.RESTORED)} == {"disk"}
    outcome.assert_same_losses_as_twin()
