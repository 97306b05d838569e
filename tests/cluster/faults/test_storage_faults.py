"""Faults of checkpoints: refusals before the start, effects, and cases without evidence."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.waiting import LIMIT_S, wait_until

from chaoskit.checkpoint.disk.breakpoints import Breakpoints
from chaoskit.checkpoint.disk.portion import Portion
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.layout import boundaries
from chaoskit.checkpoint.memory import snapshotter
from chaoskit.checkpoint.peer import sender, server
from chaoskit.config import CheckpointTier
from chaoskit.daemon.saving import Saver
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.run.run import store_of
from chaoskit.fixtures.s3_server import S3Server
from chaoskit.journal import Journal, read_events, read_journals
from chaoskit.process.linux import is_ending
from chaoskit.pytest_plugin import Chaos
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, Verdict
from faults import CorruptFile, DiskFull, Fault, RemoteOutage, TornWrite
from faults.storage.damage import damage
from faults.storage.stored import HOWS

DISK = {"target": "/tmp/chaoskit-not-used"}
S3 = {"target": "s3://bucket/job"}


# -- breakpoints -----------------------------------------------------------------------------------


def test_boundaries_are_named_once() -> None:
    """Each boundary has a name of its own, and the components use those names."""
    assert len(set(boundaries.PLACES)) == len(boundaries.PLACES)
    named = (snapshotter.BEGUN, snapshotter.CHUNK, snapshotter.COPIED, snapshotter.SEALED)
    assert named == boundaries.MEMORY
    assert (sender.OFFERING, sender.SENDING, sender.ACKNOWLEDGED) == boundaries.OUTWARD
    assert (server.RECEIVING, server.VERIFIED, server.ANSWERING) == boundaries.INWARD


def test_the_first_thread_that_comes_stands_and_others_go_by() -> None:
    """A breakpoint stops the first thread that reaches it, reports its place, and stops no other."""
    over, stood, gone_on = threading.Event(), list[str](), threading.Event()
    breakpoints = Breakpoints(patience_s=3600.0, over=over)
    breakpoints.reach("commit")
    breakpoints.set("commit", stood.append)

    def reach() -> None:
        breakpoints.reach("seal")
        breakpoints.reach("commit")
        gone_on.set()

    threading.Thread(target=reach, daemon=True).start()
    wait_until(lambda: stood, "a thread at the breakpoint")
    breakpoints.reach("commit")  # the second thread passes
    assert not gone_on.is_set()
    assert len(stood) == 1
    assert stood[0].endswith("stood at 'commit'")
    over.set()
    assert gone_on.wait(LIMIT_S), "it stands for ever"


def test_a_thread_that_is_not_killed_goes_on() -> None:
    """A thread at a breakpoint goes on by itself after the patience."""
    breakpoints, stood = Breakpoints(patience_s=0.01), list[str]()
    breakpoints.set("commit", stood.append)
    breakpoints.reach("commit")
    assert len(stood) == 1


# -- refused faults --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "fault", "settings", "field"),
    [
        ("gpt", TornWrite(rank=0, at_step=3, boundary="middle"), {"disk": DISK}, "boundary"),
        ("gpt", TornWrite(rank=1, at_step=3, boundary="commit"), {"disk": DISK}, "rank"),
        ("gpt", TornWrite(rank="any", at_step=3, boundary="uploaded"), {"disk": DISK}, "rank"),
        ("gpt", TornWrite(rank=0, at_step=3, boundary="commit"), {}, "disk"),
        ("gpt", TornWrite(rank=0, at_step=3, boundary="upload"), {"disk": DISK}, "remote"),
        (
            "gpt",
            TornWrite(rank=0, at_step=3, boundary="prune"),
            {"disk": DISK | {"keep_last": 0}},
            "keep_last",
        ),
        ("gpt", TornWrite(rank=0, at_step=3, boundary="offering"), {}, "job"),
        ("gpt", TornWrite(rank=1, at_step=3, boundary="copied"), {}, "memory_copies"),
        (
            "fsdp",
            TornWrite(rank=1, at_step=3, boundary="verified"),
            {"memory_copies": 0},
            "memory_copies",
        ),
        ("fsdp", TornWrite(rank=1, at_step=3, boundary="sending"), {}, "transport"),
        ("gpt", CorruptFile(at_step=3, how="gently"), {"disk": DISK}, "how"),
        ("gpt", CorruptFile(at_step=3), {}, "disk"),
        ("gpt", DiskFull(rank=0, at_step=3, directory="checkpoints"), {}, "disk"),
        ("gpt", RemoteOutage(at_step=3), {"disk": DISK}, "remote"),
        ("gpt", RemoteOutage(at_step=3), {"disk": DISK, "remote": S3}, "remote.endpoint"),
        ("gpt", RemoteOutage(at_step=3, mode="angry"), {"disk": DISK, "remote": S3}, "mode"),
        (
            "gpt",
            RemoteOutage(at_step=3, heal_after_s=0.0),
            {"disk": DISK, "remote": S3},
            "heal_after_s",
        ),
        (
            "gpt",
            RemoteOutage(at_step=3),
            {"disk": DISK, "remote": S3 | {"endpoint": "localhost"}},
            "remote.endpoint",
        ),
        (
            "gpt",
            RemoteOutage(at_step=3),
            {"disk": DISK | {"endpoint": "http://any"}},
            "disk.endpoint",
        ),
    ],
)
def test_what_can_never_strike_is_refused_before_anything_starts(
    tmp_path: Path, job: str, fault: Fault, settings: dict[str, Any], field: str
) -> None:
    """A fault of storage that cannot strike this job is refused, with the field that prevents it."""
    if fault.unavailable():
        pytest.skip(fault.unavailable())
    if "disk" in settings:
        settings = settings | {"disk": settings["disk"] | {"target": str(tmp_path)}}
    with pytest.raises(BadInput) as refused:
        plan_experiment(job, nodes=2, steps=10, faults=[fault], resume=True, **settings)
    assert refused.value.field == field


# -- damage ----------------------------------------------------------------------------------------


def store(tier: DiskTier, *steps: int) -> None:
    for step in steps:
        tier.save(step, {"model.weight": torch.arange(20_000.0) + step}, {"scalars": b"%d" % step})


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_snapshot_is_passed_over(tmp_path: Path, how: str) -> None:
    """A snapshot that is damaged in any of these ways is set aside, and the snapshot before it is
    read.
    """
    tier = DiskTier(tmp_path)
    store(tier, 5, 10)
    assert "step-000000010" in damage(tier.root, how)
    search = DiskTier(tmp_path).newest_verified()
    assert search.snapshot.manifest.step == 5
    assert [snapshot.step for snapshot in search.lost] == [10]


@pytest.mark.parametrize(("how", "steps"), [("bit", []), ("older", [5])])
def test_nothing_to_damage(tmp_path: Path, how: str, steps: list[int]) -> None:
    """The directory stays unchanged if it has no snapshot to damage."""
    tier = DiskTier(tmp_path)
    store(tier, *steps)
    with pytest.raises(FileNotFoundError):
        damage(tier.root, how)
    assert len(tier.snapshots().snapshots) == len(steps)


# -- a part that never comes -----------------------------------------------------------------------


def test_a_part_that_was_never_copied_is_not_waited_for(tmp_path: Path) -> None:
    """A save that lacks a part ends when its node stores the next snapshot.

    The node had no room for the first one in memory.
    """
    journal = Journal(tmp_path / "journal", "any")
    savers = [
        Saver(
            CheckpointTier(target=str(tmp_path / "disk")),
            "5eed",
            journal,
            lambda _: None,
            _fail,
            _ignore,
        )
        for _ in range(2)
    ]

    def offer(number: int, step: int) -> None:
        scalars = msgspec.msgpack.encode({"names": []})
        savers[number].offer(Portion(step, 1, number, 2, 2, not number, (), scalars))

    offer(0, 10)
    wait_until(
        lambda: list((tmp_path / "disk" / ".staging").glob("step-000000010.*/0.part.json")),
        "the first part",
    )
    offer(1, 20)
    wait_until(
        lambda: any(record["step"] == 10 for record in _failures(tmp_path)), "the end of step 10"
    )
    assert savers[0].finish(LIMIT_S)
    offer(0, 20)
    wait_until(lambda: DiskTier(tmp_path / "disk").snapshots().snapshots, "the next snapshot")
    assert all(
        saver.finish(LIMIT_S) for saver in savers
    )  # a snapshot is seen before its record is written
    journal.close()
    assert [record["reason"] for record in _failures(tmp_path)] == ["part 1 failed"]
    assert [record["step"] for record in read_events(tmp_path / "journal", Event.SAVED)] == [20]


def _failures(directory: Path) -> list[Any]:
    return [
        record
        for record in read_journals(directory / "journal")
        if record.event == Event.SAVE_FAILED
    ]


def _fail(error: BaseException) -> None:
    raise AssertionError from error


def _ignore(boundary: str) -> None:
    """Let each thread pass the boundary."""


# -- the proxy of a run ----------------------------------------------------------------------------


def test_the_proxy_ends_with_the_run_however_that_ends(
    s3_server: S3Server, tmp_path: Path, undo: UndoLog
) -> None:
    """The proxy of a run ends with it, also when the run fails, and an unbroken run has none."""
    s3_server.make_bucket("proxied")
    remote = {"target": "s3://proxied/job", "endpoint": s3_server.url}
    settings: dict[str, Any] = {
        "disk": {"target": str(tmp_path / "disk")},
        "remote": remote,
        "resume": True,
    }
    experiment = plan_experiment(
        "gpt", nodes=2, steps=10, faults=[RemoteOutage(at_step=3)], **settings
    )
    with contextlib.suppress(RuntimeError), store_of(experiment, undo) as proxy:
        assert proxy is not None
        process = proxy.process
        raise RuntimeError("the run fails")
    assert is_ending(process.pid)
    with store_of(experiment.unbroken(), undo) as nothing:
        assert nothing is None


# -- no evidence -----------------------------------------------------------------------------------


def test_a_boundary_that_is_never_reached_is_no_evidence(chaos: Chaos, tmp_path: Path) -> None:
    """No process is killed and there is no evidence if too few snapshots are stored for one to be
    pruned.
    """
    disk = {"target": str(tmp_path), "every_steps": 10, "keep_last": 3}
    fault = TornWrite(rank=0, at_step=8, boundary="prune")
    options = {"size": "tiny"}
    outcome = chaos.run(
        "gpt",
        nodes=2,
        steps=20,
        options=options,
        twin=False,
        check=False,
        disk=disk,
        faults=[fault],
    )
    assert outcome.verdict == Verdict.UNKNOWN
    assert outcome.recoveries == []
    assert outcome.faults[0].state == "not observed"
