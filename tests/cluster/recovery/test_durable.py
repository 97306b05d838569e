"""Snapshots in the disk and remote tiers outlive every node of their job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.waiting import wait_until
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.suites.goals import JournalFlag
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import AtHook
from faults import Fault, KillCoordinator, ReplaceNode, Target
from faults.evidence import Evidence, ReadBack

pytestmark = pytest.mark.costly

LIMIT_S = 300.0  # limit of a launch
TINY = {"size": "tiny"}
PLAIN = f"{Path(__file__).parents[2] / 'jobs' / 'failing' / 'troubled.py'}:plain"


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals of a run, by time."""
    return [
        record
        for record in read_journals(Path(outcome.directory) / "journal")
        if record.event in events
    ]


def plain_load(path: Path) -> dict[str, Any]:
    """Read a snapshot with plain ``torch.distributed.checkpoint``, into tensors without any part of
    chaoskit.
    """
    reader = dcp.FileSystemReader(path)
    state: dict[str, Any] = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        if isinstance(metadata, TensorStorageMetadata)
        else None
        for name, metadata in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@dataclass(frozen=True, kw_only=True)
class Wait(Fault):
    """A fault that does no harm: its rank waits at its step while the test handles the message of
    the hook.
    """

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        yield ReadBack(subject=target.rank_process, source="the harness", value="it went on")


def awaiting(stored: DiskTier, *steps: int) -> dict[str, Any]:
    """Return settings of a run that waits at each of ``steps`` until the state at its beginning is
    stored.

    So no save is skipped.
    """

    def watch(message: Any) -> None:
        if isinstance(message, AtHook) and message.step in steps:
            wait_until(
                lambda: (
                    message.step
                    in {snapshot.manifest.step for snapshot in stored.snapshots().snapshots}
                ),
                "the snapshot",
            )

    return {"faults": [Wait(rank=0, at_step=step) for step in steps], "watch": watch}


def settings_of(job: str) -> dict[str, Any]:
    """Return options that make ``job`` small, or its steps slow."""
    return {"step_s": 0.05} if job == PLAIN else TINY


@pytest.mark.promise(
    "Plain DCP reads these snapshots: `model.head.weight`, `optimizer.state.head.weight.exp_avg`",
    job="fsdp",
)
@pytest.mark.parametrize("job", [PLAIN, "fsdp"])
def test_plain_dcp_reads_what_the_agents_wrote(chaos: Chaos, tmp_path: Path, job: str) -> None:
    """Plain DCP reads the snapshots that the agents wrote."""
    stored = DiskTier(tmp_path / "stored")
    disk = {"target": str(stored.root), "every_steps": 6, "keep_last": 3}
    plan = {"options": settings_of(job), "disk": disk} | awaiting(stored, 6, 12, 18)
    outcome = chaos.run(job, nodes=2, spares=0, steps=20, twin=False, **plan)
    assert not journal(outcome, Event.SAVE_FAILED)
    listing = stored.snapshots()
    assert [kept.manifest.step for kept in listing.snapshots] == [20, 18, 12]  # step 20 was not due
    assert not listing.damaged
    for snapshot in listing.snapshots:
        snapshot.verify()
        assert {part.file for part in snapshot.manifest.items} == {"__0_0.distcp", "__1_0.distcp"}
    state = plain_load(listing.snapshots[0].path)
    assert state["scalars"]["step"] == 20
    weight = "3.weight" if job == PLAIN else "head.weight"
    assert state[f"optimizer.state.{weight}.exp_avg"].shape == state[f"model.{weight}"].shape
    assert all(
        tensor.isfinite().all() for tensor in state.values() if isinstance(tensor, torch.Tensor)
    )
    dcp_to_torch_save(listing.snapshots[0].path, tmp_path / "state.pt")
    plain = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(plain[f"model.{weight}"], state[f"model.{weight}"])
    assert Snapshot.open(listing.snapshots[0].path).manifest.world == 2


@pytest.mark.slow
@pytest.mark.promise(
    "the coordinator picks a step ahead of it, so that all nodes store the same one", job=PLAIN
)
@pytest.mark.parametrize("job", [PLAIN, "fsdp"])
def test_by_time_all_nodes_store_the_same_states(chaos: Chaos, tmp_path: Path, job: str) -> None:
    """Snapshots that are due by time are complete in both tiers."""
    disk = {"target": str(tmp_path / "stored"), "every_steps": 0, "every_s": 1.0, "keep_last": 0}
    remote = {
        "target": f"file://{tmp_path}/remote",
        "every_steps": 0,
        "every_s": 0.5,
        "keep_last": 0,
    }
    settings = settings_of(job) | ({"step_s": 0.1} if job == PLAIN else {"schedule_steps": 40})
    steps: set[int] = set()
    events: set[str] = set()

    def is_last(record: Record) -> bool:
        steps.update(
            [record["step"]] if record.event == Event.SAVED and record["tier"] == "disk" else []
        )
        events.add(record.event)
        return len(steps) >= 2 and Event.EVIDENCE in events

    flag, fault = JournalFlag(chaos, is_last), ReplaceNode(rank=1, at_step=25)
    goal = {"until": flag.until | {"world": 2}, "watch": flag, "deadline_s": 120.0}
    outcome = chaos.run(
        job, nodes=2, steps=40, options=settings, disk=disk, remote=remote, faults=[fault], **goal
    )
    stored = DiskTier(tmp_path / "stored").snapshots().snapshots
    saved = {record["step"] for record in journal(outcome, Event.SAVED) if record["tier"] == "disk"}
    assert saved == {kept.manifest.step for kept in stored}
    assert len(saved) >= 2
    plans = {record["generation"]: record["members"] for record in journal(outcome, Event.PLAN)}
    for snapshot in stored:
        snapshot.verify()
        # A replicated job writes a part per node, and a sharded job a part per rank.
        # A replacement of a replicated job may be on any node.
        writers = {
            member["node" if job == PLAIN else "rank"]
            for member in plans[snapshot.manifest.generation]
        }
        assert len({part.file for part in snapshot.manifest.items}) == len(writers)


def lose_all(nodes: int, at_step: int) -> list[ReplaceNode]:
    """Return faults that replace every node by an empty one at one step, so that all memory is
    lost.
    """
    return [ReplaceNode(rank=rank, at_step=at_step) for rank in range(nodes)]


@pytest.mark.promise("nodes that come back in `startup_s` go on by themselves", job="fsdp")
@pytest.mark.parametrize("job", [PLAIN, "fsdp"])
def test_when_every_node_is_lost_the_job_goes_on_from_disk(
    chaos: Chaos, tmp_path: Path, job: str
) -> None:
    stored = DiskTier(tmp_path / "stored")
    plan = awaiting(stored, 5, 10)
    plan["faults"] += lose_all(2, 19)
    outcome = chaos.run(
        job,
        nodes=2,
        spares=0,
        steps=40,
        options=settings_of(job),
        disk={"target": str(stored.root), "every_steps": 5},
        max_lost_steps=9,
        **plan,
    )
    origins = {
        record.source: record["source"].split()[0] for record in journal(outcome, Event.RESTORED)
    }
    late = {
        origin for origin in origins.values() if origin != "disk"
    }  # from a node that joined first and began without a snapshot
    assert origins, outcome.directory
    assert all(origins.get(origin) == "disk" for origin in late), outcome.directory
    outcome.assert_same_losses_as_twin()


# -- a launcher that is killed, and started again --------------------------------------------------


class Launches:
    """Launches of one job with one directory of checkpoints."""

    def __init__(self, directory: Path, job: str, *options: str) -> None:
        self.directory, self.stored, self._job, self._options = (
            directory,
            DiskTier(directory / "stored"),
            job,
            options,
        )
        self._mark = str(uuid.uuid4())

    def start(self, report: str, *options: str, nodes: int = 2) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "chaoskit",
            "launch",
            self._job,
            *self._options,
            "--nodes",
            str(nodes),
        ]
        command += [
            "--spares",
            "0",
            "--shards",
            "4",
            "--json",
            "--report",
            str(self.directory / report),
            *options,
        ]
        return subprocess.Popen(
            command,
            env={**os.environ, "XDG_STATE_HOME": str(self.directory / "state"), "MARK": self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, report: str, *options: str, nodes: int = 2) -> dict[str, Any]:
        """Run a launch to its end, and return its result."""
        stdout, stderr = self.start(report, *options, nodes=nodes).communicate(timeout=LIMIT_S)
        assert stdout, stderr
        result: dict[str, Any] = json.loads(stdout)
        return result

    def keep(self, every: int = 5) -> list[str]:
        return ["--checkpoints", str(self.stored.root), "--checkpoint-every", str(every)]

    def kill_at(self, step: int, *options: str, also: Callable[[], object] = lambda: True) -> None:
        """Kill the launcher, and all processes that it has started, when two snapshots are there,
        one of ``step`` or later.

        Args:
            also: a further condition of the kill.
        """

        def are_there() -> bool:
            ages = [snapshot.manifest.step for snapshot in self.stored.snapshots().snapshots]
            return len(ages) >= 2 and max(ages) >= step and bool(also())

        launcher = self.start("killed", *options)
        wait_until(are_there, "the snapshots", limit_s=LIMIT_S)
        launcher.kill()
        launcher.communicate(timeout=LIMIT_S)
        wait_until(lambda: not self._living(), "the end of all processes", poll_s=0.05)

    def _living(self) -> list[str]:
        return [
            process.name
            for process in Path("/proc").glob("[0-9]*")
            if self._mark.encode() in _environment(process)
        ]

    def restored(self, report: str) -> list[Record]:
        records = read_journals(self.directory / report / "journal")
        return [record for record in records if record.event == Event.RESTORED]


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


OF_PLAIN = ["--set", "steps=60", "--set", "step_s=0.04"]
OF_FSDP = ["--set", "steps=60", "--set", "size=tiny"]


@pytest.mark.slow
@pytest.mark.promise(
    "The same command, given again after everything was lost, goes on from the newest snapshot that is whole",
    job=PLAIN,
)
@pytest.mark.parametrize(
    ("job", "options"), [(PLAIN, OF_PLAIN), pytest.param("fsdp", OF_FSDP, marks=pytest.mark.slow)]
)
def test_a_job_whose_launcher_was_killed_is_resumed(
    tmp_path: Path, job: str, options: list[str]
) -> None:
    launches = Launches(tmp_path, job, *options)
    unbroken = launches.end("unbroken")
    launches.kill_at(10, *launches.keep())
    resumed = launches.end("resumed", *launches.keep())
    assert (resumed["ok"], resumed["steps"], resumed["reason"]) == (True, 60, unbroken["reason"])
    assert min(record["step"] for record in launches.restored("resumed")) >= 10
    assert resumed["resumed_from"] >= 10
    assert resumed["weights_digest"] == unbroken["weights_digest"] != ""
    assert resumed["loss"] == unbroken["loss"]


@pytest.mark.slow
def test_a_sharded_job_is_resumed_at_another_world_size(tmp_path: Path) -> None:
    launches = Launches(tmp_path, "fsdp", *OF_FSDP)
    unbroken = launches.end("unbroken")
    launches.kill_at(10, *launches.keep())
    resumed = launches.end("resumed", *launches.keep(), nodes=1)
    assert resumed["steps"] == 60
    assert launches.restored("resumed")
    assert resumed["loss"] == pytest.approx(unbroken["loss"], rel=1e-3)


@pytest.mark.parametrize("during", ["regroup", "restore"])
@pytest.mark.parametrize("job", [PLAIN, pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_coordinator_is_killed_while_a_job_resumes(
    chaos: Chaos, tmp_path: Path, job: str, during: str
) -> None:
    """The next coordinator reads from its log that the job resumes, and does not begin it anew."""
    common: dict[str, Any] = {"nodes": 2, "spares": 0, "options": settings_of(job)}
    stored = DiskTier(tmp_path / "stored")
    disk = {"target": str(stored.root), "every_steps": 5}
    chaos.run(job, **common, steps=12, twin=False, disk=disk, **awaiting(stored, 5, 10))
    fault = KillCoordinator(rank=0, during=during)
    outcome = chaos.run(
        job, **common, steps=40, disk=disk, resume=True, faults=[fault], check=False
    )
    assert [injected.state for injected in outcome.faults] == ["confirmed"]
    assert journal(outcome, Event.RESUMED), "no other coordinator took over"
    assert not journal(outcome, Event.RECORD_LOST)
    restored = journal(
        outcome, Event.RESTORED
    )  # a late rank takes the state from a rank that has read it
    assert {record["step"] for record in restored} == {12}
    assert "disk" in {record["source"].split()[0] for record in restored}
    assert {record["step"] for record in journal(outcome, Event.COMMIT)} == set(range(12, 40))
    if (
        job == PLAIN
    ):  # the learning rate of the other job depends on its length, which differs in the first run
        verdicts = {
            check.name: check.verdict for check in outcome.checks
        }  # other checks miss the steps of the run before
        assert verdicts["final weights equal the twin's"] == Verdict.PASSED


def test_the_newest_snapshot_is_damaged(tmp_path: Path) -> None:
    launches = Launches(tmp_path, PLAIN, *OF_PLAIN)
    launches.kill_at(10, *launches.keep())
    newest, older, *_ = launches.stored.snapshots().snapshots
    with (newest.path / "__1_0.distcp").open("r+b") as file:
        file.seek(200)
        file.write(b"damage")
    resumed = launches.end("resumed", *launches.keep())
    assert resumed["ok"]
    assert {record["step"] for record in launches.restored("resumed")} == {older.manifest.step}
    records = read_journals(tmp_path / "resumed" / "journal")
    assert {record["step"] for record in records if record.event == Event.QUARANTINED} == {
        newest.manifest.step
    }
    assert [
        path.name.partition("~")[0] for path in (launches.stored.root / "quarantine").iterdir()
    ] == [newest.name]


def test_a_full_disk_ends_no_training(chaos: Chaos, tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(stored)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        disk = {"target": str(stored), "every_steps": 5}
        outcome = chaos.run("gpt", nodes=2, spares=0, steps=20, options=TINY, twin=False, disk=disk)
        assert not DiskTier(stored).snapshots().snapshots
        assert {record["step"] for record in journal(outcome, Event.COMMIT)} == set(range(20))
        assert any(
            "No space left" in record["reason"] for record in journal(outcome, Event.SAVE_FAILED)
        )
    finally:
        subprocess.run(["umount", "-l", str(stored)], check=True)


@pytest.mark.parametrize(
    ("job", "options"), [(PLAIN, OF_PLAIN), pytest.param("fsdp", OF_FSDP, marks=pytest.mark.slow)]
)
def test_a_job_whose_disk_was_lost_is_resumed_from_the_remote_tier(
    tmp_path: Path, job: str, options: list[str]
) -> None:
    launches = Launches(tmp_path, job, *options)
    remote = ["--remote", f"file://{tmp_path}/remote", "--remote-every", "10"]

    def manifests() -> list[Path]:
        return list((tmp_path / "remote").glob("*/manifest.json"))

    launches.kill_at(25, *launches.keep(), *remote, also=manifests)
    uploaded = {path.parent.name for path in manifests()}
    shutil.rmtree(launches.stored.root)
    resumed = launches.end("resumed", *launches.keep(), *remote)
    assert (resumed["ok"], resumed["steps"]) == (True, 60)
    restored = launches.restored("resumed")
    sources = [record["source"] for record in restored]
    assert sum(source.startswith("remote") for source in sources) == (
        1 if job == PLAIN else 2
    )  # a replicated job reads once
    assert {record["step"] for record in restored} == {
        max(parse_name(name) or (0, 0) for name in uploaded)[0]
    }


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"disk": {"target": "relative"}}, "disk"),
        ({"disk": {"target": "s3://bucket/run"}}, "disk"),
        ({"disk": {"target": "/proc/nowhere"}}, "disk"),
        ({"disk": {"target": "/tmp", "every_steps": 0}}, "disk.every_steps"),
        ({"disk": {"target": "/tmp", "keep_last": -1}}, "disk.keep_last"),
        ({"remote": {"target": "memory://run"}}, "remote"),
        ({"disk": {"target": "/tmp"}, "remote": {"target": "bucket"}}, "remote"),
    ],
)
def test_a_tier_that_cannot_work_is_refused_before_anything_starts(
    settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput) as refused:
        plan_experiment(PLAIN, steps=5, nodes=2, **settings)
    assert refused.value.field == field


@pytest.mark.promise("`--no-resume` refuses to begin in a directory that holds snapshots")
def test_snapshots_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    DiskTier(tmp_path).save(5, {"model.x": torch.zeros(2)})
    disk = {"target": str(tmp_path)}
    with pytest.raises(BadInput, match="resume"):
        plan_experiment(PLAIN, steps=5, nodes=2, disk=disk)
    assert plan_experiment(PLAIN, steps=5, nodes=2, disk=disk, resume=True).config.resume
