"""The state with which a job ends is stored, whatever its schedule says, and the launcher waits for
that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.waiting import stays, wait_until

from chaoskit.checkpoint.disk.due_steps import Patience
from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.portion import Portion
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.layout.boundaries import undisturbed
from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, FileEntry
from chaoskit.checkpoint.remote.backoff import Backoff
from chaoskit.checkpoint.remote.opening import open_store
from chaoskit.checkpoint.remote.store import Traffic
from chaoskit.config import CheckpointTier
from chaoskit.daemon.saving import Saver
from chaoskit.experiment.run.storing import Storing, await_last
from chaoskit.journal import Journal, Record, read_journals
from chaoskit.launcher.progress import Progress
from chaoskit.process.host_checks import answer_within
from chaoskit.pytest_plugin import Chaos
from chaoskit.substrate.core.command_environment import CommandEnvironment
from chaoskit.substrate.core.disk import Slow
from chaoskit.substrate.disk.disks import Disk
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.local import LocalSubstrate
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event
from faults import SlowDisk

LAUNCH_S = 300.0
LIMIT_S = 60.0  # limit of a wait that must end
JOBS = Path(__file__).parents[2] / "jobs" / "failing" / "troubled.py"
PLAIN = f"{JOBS}:plain"
needs_fuse = pytest.mark.skipif(
    bool(capabilities.disks()), reason=capabilities.disks() or "possible here"
)
NEVER = 1000  # steps between snapshots; a shorter run has none due


# -- the savers of nodes ---------------------------------------------------------------------------


def test_patience_lasts_as_long_as_something_moves() -> None:
    """A growing amount is waited for; an amount that stays the same for the whole time is given up."""
    patience = Patience(10.0)
    assert [
        patience.is_over(amount, now_s) for amount, now_s in ((0, 0.0), (0, 9.0), (5, 10.0))
    ] == [False] * 3
    assert not patience.is_over(5, 19.9)
    assert patience.is_over(5, 20.0)
    assert not patience.is_over(6, 20.1)


def test_what_a_failed_attempt_has_sent_does_not_count_twice(tmp_path: Path) -> None:
    """The bytes of a file are counted once if the store fails after its first chunk."""
    size_bytes, failures = 2 * FILE_CHUNK_BYTES, [OSError(errno.ENOSPC, "full")]

    def read(offset: int, length: int) -> bytes:
        if offset and failures:
            raise failures.pop()
        return bytes(length)

    store = open_store(f"file://{tmp_path}", traffic=Traffic(backoff=Backoff(base_s=0.01)))
    store.send("data", FileEntry("data", size_bytes, ()), read)
    assert (tmp_path / "data").stat().st_size == store.sent_bytes == size_bytes
    assert not failures


def test_what_is_sent_again_is_no_progress() -> None:
    """An upload that fails and begins again, and never gets further than before, is given up."""
    patience = Patience(10.0)
    assert not any(
        patience.is_over(amount, now_s) for amount, now_s in ((5, 0.0), (0, 4.0), (5, 8.0))
    )
    assert patience.is_over(0, 10.0)


class Savers:
    """The savers of two nodes with one directory; the first node leads."""

    def __init__(self, directory: Path) -> None:
        self.stored, self._directory = DiskTier(directory / "disk"), directory
        self._journal = Journal(directory / "journal", "any")
        tier = CheckpointTier(target=str(self.stored.root))
        self._savers = [
            Saver(tier, "5eed", self._journal, lambda _: None, _fail, undisturbed) for _ in range(2)
        ]

    def offer(self, number: int, step: int, *, last: bool) -> None:
        scalars = msgspec.msgpack.encode({"names": []})
        self._savers[number].offer(Portion(step, 1, number, 2, 2, not number, (), scalars, last))

    def settle(self, number: int) -> bool:
        return self._savers[number].settle()

    def finish(self, number: int, timeout_s: float) -> bool:
        return self._savers[number].finish(timeout_s)

    def await_part(self, number: int, step: int) -> None:
        pattern = f"step-{step:09}.*/{number}.part.json"
        wait_until(
            lambda: list((self.stored.root / ".staging").glob(pattern)),
            f"part {number} of step {step}",
        )

    def refuse(self, number: int, step: int) -> None:
        """Make a part of a snapshot that is being written fail."""
        (staging,) = (self.stored.root / ".staging").glob(f"step-{step:09}.*")
        (staging / f"{number}.refused").touch()

    def steps(self) -> list[int]:
        return [snapshot.manifest.step for snapshot in self.stored.snapshots().snapshots]

    def failed(self) -> list[int]:
        records = read_journals(self._directory / "journal")
        return [record["step"] for record in records if record.event == Event.SAVE_FAILED]


def _fail(error: BaseException) -> None:
    raise AssertionError from error


def test_the_last_snapshot_begins_when_the_one_before_is_over(tmp_path: Path) -> None:
    """A leading node that still waits for a part of an older snapshot when the job ends gives that
    snapshot up.
    """
    savers = Savers(tmp_path)
    savers.offer(0, 10, last=False)
    savers.await_part(0, 10)
    savers.offer(0, 13, last=True)
    savers.offer(1, 13, last=True)  # this node never had a part of step 10
    assert savers.settle(0)
    assert savers.settle(1)
    assert savers.steps() == [13]
    assert savers.failed() == [10]


@pytest.mark.parametrize("left", ["__1_0.distcp", "1.part.json", ""])
def test_no_part_joins_what_a_run_before_has_left(tmp_path: Path, left: str) -> None:
    """A part does not join a staging directory that a run on another host has left.

    This host cannot tell such a directory from that of a living run.
    """
    foreign = tmp_path / "disk" / ".staging" / "step-000000003.g1~0123456789abcdef-1-1-00000000"
    foreign.mkdir(parents=True)
    if left:
        (foreign / left).touch()
    savers = Savers(tmp_path)
    savers.offer(1, 3, last=False)
    stays(lambda: not savers.finish(1, 0.0), "the part waits for the node that leads", for_s=0.1)
    savers.offer(0, 3, last=False)
    wait_until(lambda: savers.steps() == [3], "the snapshot", limit_s=20.0)
    assert [path.name for path in foreign.iterdir()] == [left] * bool(left)


def test_a_part_that_is_being_taken_over_is_waited_for(tmp_path: Path) -> None:
    """A saver is not finished while its thread takes over a newer part.

    The thread is held after it took the part, and before it set the part aside for the leading
    node.
    """
    (tmp_path / "journal").mkdir()
    os.mkfifo(tmp_path / "journal" / "any.jsonl")
    reader = os.open(tmp_path / "journal" / "any.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    savers = Savers(tmp_path)
    for number in (0, 1):
        savers.offer(number, 5, last=False)
    assert savers.settle(0)
    assert savers.settle(1)  # both threads are at work from here on
    writer = os.open(tmp_path / "journal" / "any.jsonl", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))  # the record that step 10 is dropped finds no room
    savers.offer(1, 10, last=False)
    savers.offer(1, 13, last=False)
    stays(lambda: not savers.finish(1, 0.0), "a part is under way", for_s=0.3)
    os.set_blocking(reader, True)
    read = b""
    while Event.SAVE_FAILED.value.encode() not in read:
        read = read[-100:] + os.read(reader, 4096)
    os.close(writer)
    os.close(reader)


def test_a_last_snapshot_that_was_due_as_well_gets_another_chance(tmp_path: Path) -> None:
    """A snapshot that failed because of one part is saved again at the end, when every node offers
    its part again.
    """
    savers = Savers(tmp_path)
    savers.offer(0, 10, last=False)
    savers.await_part(0, 10)
    savers.offer(0, 10, last=True)
    savers.refuse(1, 10)
    savers.offer(1, 10, last=True)
    assert savers.settle(0)
    assert savers.settle(1)
    assert savers.steps() == [10]


def test_a_last_snapshot_that_is_there_is_not_stored_again(tmp_path: Path) -> None:
    """A job that is resumed at its end finds its last snapshot complete, and does not replace it."""
    savers = Savers(tmp_path)
    for number in (0, 1):
        savers.offer(number, 10, last=False)
    assert savers.settle(0)
    (path,) = [snapshot.path for snapshot in savers.stored.snapshots().snapshots]
    before = path.stat().st_ino
    for number in (0, 1):
        savers.offer(number, 10, last=True)
    assert savers.settle(0)
    assert savers.settle(1)
    assert path.stat().st_ino == before
    assert savers.failed() == []


def test_a_last_snapshot_that_fails_ends_the_wait_of_the_node_that_leads(tmp_path: Path) -> None:
    """The leading node stops waiting if the last snapshot fails; the launcher ends the other node."""
    savers = Savers(tmp_path)
    savers.offer(0, 10, last=True)
    savers.await_part(0, 10)
    savers.refuse(1, 10)
    assert savers.settle(0)
    assert savers.steps() == []
    assert savers.failed() == [10]


def test_what_is_waited_for_is_told() -> None:
    """The launcher's progress line names the step and the target, and the bytes written as far as
    they are available.
    """
    progress = Progress(0.0)
    (disk,) = progress.handle(Storing(7, "disk", "/kept", 12_400_000), 1.0)
    assert disk.text == "waiting until step 7 is stored in /kept, 12.4 MB so far"
    (remote,) = progress.handle(Storing(7, "remote", "s3://kept", 0), 1.0)
    assert remote.text == "waiting until step 7 is stored in s3://kept"
    (hung,) = progress.handle(Storing(7, "disk", "/kept", 0, answers=False), 1.0)
    assert hung.text == "waiting until step 7 is stored in /kept, which does not answer"


# -- the wait of a launcher ------------------------------------------------------------------------


class StoringNode:
    """A node with a process that lives on after the end of its job, and the events of a launcher
    that waits for it.
    """

    def __init__(self, directory: Path) -> None:
        self.stored, self.run = directory / "stored", directory / "run"
        (self.stored / ".staging").mkdir(parents=True)  # a snapshot has begun
        self.events: list[Storing] = []
        self._disk = CheckpointTier(target=str(self.stored))

    @contextlib.contextmanager
    def living(self) -> Iterator[None]:
        with contextlib.closing(LocalSubstrate()) as substrate:
            self._cluster = substrate.bare(1, self.run)
            try:
                self._cluster.start(
                    "node0",
                    ("sleep", "1000"),
                    CommandEnvironment({}, {}),
                    str(self.stored.parent),
                )
                wait_until(lambda: self._cluster.node("node0"), "its process")
                yield
            finally:
                self._cluster.end()

    def awaited(self, limit_s: float, **changes: Any) -> str:
        """Wait for the node as a launcher does, and return the problem.

        The wait runs on a thread with a time limit: a wait that does not end is an error of the
        test.
        """
        place = (self._cluster, "node0", self._disk, None, self.run)
        return answer_within(
            LIMIT_S, lambda: await_last(*place, limit_s, self.events.append, **changes)
        )


def test_a_node_that_stores_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    """The launcher waits for a living node until the deadline, and no longer."""
    node = StoringNode(tmp_path)
    with node.living():
        assert node.awaited(1.5) == "it was not stored before the deadline of the run"
    assert [event.answers for event in node.events] == [True]


@contextlib.contextmanager
def disk_that_hangs(directory: Path, undo: Path) -> Iterator[None]:
    """Mount a disk that does not answer, and unmount it by hand afterwards.

    A request in progress keeps the mount when the process of the disk ends.
    """
    try:
        with contextlib.closing(Disk(directory, [], UndoLog(undo))) as disk:
            disk.impose(Slow(delay_ms=3_600_000.0))
            yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=False)


@needs_fuse
def test_a_disk_that_hangs_does_not_hold_up_the_deadline(tmp_path: Path) -> None:
    """The deadline holds although the disk does not answer how much is written so far."""
    node = StoringNode(tmp_path)
    with node.living(), disk_that_hangs(node.stored, tmp_path / "undo"):
        assert node.awaited(1.5) == "it was not stored before the deadline of the run"
    assert [event.answers for event in node.events] == [False]


@needs_fuse
def test_a_disk_that_hangs_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """A launch, which has no deadline, gives up a node with a disk that hangs."""
    node = StoringNode(tmp_path)
    with node.living(), disk_that_hangs(node.stored, tmp_path / "undo"):
        assert (
            node.awaited(math.inf, patience_s=0.5)
            == "nothing of it was written for 0.5 s, and its node did not end"
        )
    assert {event.answers for event in node.events} == {False}


# -- launches --------------------------------------------------------------------------------------


def launch(directory: Path, report: str, job: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Return exit status and result of a launch with its snapshots in ``stored``."""
    command = [
        sys.executable,
        "-m",
        "chaoskit",
        "launch",
        job,
        "--nodes",
        "2",
        "--spares",
        "0",
        "--shards",
        "4",
    ]
    command += [
        "--checkpoints",
        str(directory / "stored"),
        "--checkpoint-every",
        str(NEVER),
        *options,
    ]
    process = subprocess.run(
        [*command, "--json", "--report", str(directory / report)],
        env={**os.environ, "XDG_STATE_HOME": str(directory / "state")},
        capture_output=True,
        text=True,
        check=False,
        timeout=LAUNCH_S,
    )
    assert process.stdout, process.stderr
    return process.returncode, json.loads(process.stdout)


def records(directory: Path, *events: Event) -> list[Record]:
    """Return the records of ``events`` from all journals in a directory, by time."""
    return [record for record in read_journals(directory / "journal") if record.event in events]


@pytest.mark.costly
@pytest.mark.promise(
    "the newest snapshot is then that of the last step, whatever was due", job=PLAIN
)
@pytest.mark.promise("given again, the command trains no step", job=PLAIN)
@pytest.mark.parametrize(
    ("job", "options"),
    [
        (PLAIN, ["--set", "steps=13"]),
        pytest.param("fsdp", ["--set", "steps=13", "--set", "size=tiny"], marks=pytest.mark.slow),
    ],
)
def test_a_job_that_has_ended_is_stored_with_its_last_step(
    tmp_path: Path, job: str, options: list[str]
) -> None:
    """Both tiers store the last step although neither is due; the same command, given again, trains
    no step.
    """
    tiers = ["--remote", f"file://{tmp_path}/remote", "--remote-every", str(NEVER)]
    status, first = launch(tmp_path, "first", job, *options, *tiers)
    assert (status, first["ok"], first["steps"], first["not_stored"]) == (0, True, 13, "")
    (snapshot,) = DiskTier(tmp_path / "stored").snapshots().snapshots
    assert snapshot.manifest.step == 13
    snapshot.verify()
    (uploaded,) = (tmp_path / "remote").glob("*/manifest.json")
    assert parse_name(uploaded.parent.name) == snapshot.manifest.age
    status, again = launch(tmp_path, "again", job, *options, *tiers)
    assert (status, again["ok"], again["not_stored"]) == (0, True, "")
    assert again["weights_digest"] == first["weights_digest"] != ""
    assert {record["step"] for record in records(tmp_path / "again", Event.RESTORED)} == {13}
    assert not records(tmp_path / "again", Event.COMMIT)


@pytest.mark.costly
@pytest.mark.promise("`not stored` says why not, and the exit code is 1")
def test_a_disk_that_is_full_at_the_end_is_told(tmp_path: Path) -> None:
    """A run with complete training and no stored result does not count as a success."""
    (tmp_path / "stored").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path / "stored")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        status, result = launch(tmp_path, "run", PLAIN, "--set", "steps=13")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "stored")], check=True)
    assert (status, result["ok"], result["steps"]) == (1, True, 13)
    assert result["not_stored"].startswith(f"step 13 is not in {tmp_path / 'stored'}: ")
    assert "No space left" in result["not_stored"]


@pytest.mark.costly
def test_a_job_that_fails_is_not_stored_with_its_last_step(chaos: Chaos, tmp_path: Path) -> None:
    """A failed job does not store its last state, because that state may be the cause of the
    failure.
    """
    disk = {"target": str(tmp_path / "stored"), "every_steps": NEVER}
    plan = {
        "nodes": 2,
        "spares": 0,
        "steps": 13,
        "twin": False,
        "check": False,
        "nonfinite": "stop",
        "disk": disk,
    }
    outcome = chaos.run(f"{JOBS}:bad_batches", options={"bad": {"9": [0]}}, **plan)
    assert {record["step"] for record in records(Path(outcome.directory), Event.COMMIT)} == set(
        range(9)
    )
    assert not DiskTier(tmp_path / "stored").snapshots().snapshots


@pytest.mark.costly
@pytest.mark.promise("A disk that is slow is waited for, with a line now and then")
def test_a_slow_disk_is_waited_for(chaos: Chaos, tmp_path: Path) -> None:
    """The launcher waits for a node that needs seconds for its part, and reports the wait."""
    stored, events = DiskTier(tmp_path / "stored"), list[Storing]()
    outcome = chaos.run(
        PLAIN,
        nodes=2,
        spares=0,
        steps=13,
        twin=False,
        check=False,
        disk={"target": str(stored.root), "every_steps": NEVER},
        faults=[SlowDisk(rank=0, at_step=3, directory="checkpoints", delay_ms=250.0)],
        watch=lambda message: events.append(message) if isinstance(message, Storing) else None,
    )
    assert {record["step"] for record in records(Path(outcome.directory), Event.SAVED)} == {13}
    assert [snapshot.manifest.step for snapshot in stored.snapshots().snapshots] == [13]
    assert {(event.step, event.tier, event.target) for event in events} == {
        (13, "disk", str(stored.root))
    }
