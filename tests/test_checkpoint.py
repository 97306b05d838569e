"""Seals and copies: complete and verified, or not there."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.checkpoint.arena import Arena, ArenaView
from chaoskit.checkpoint.memory import MemoryTier
from chaoskit.checkpoint.seal import CHUNK_BYTES, Torn, checksum, seal
from chaoskit.config import JobSpec, RunConfig, Tier
from chaoskit.control.keeper import Keeper, keepers
from chaoskit.control.keeping import NodeContext
from chaoskit.journal import Journal, read_journals
from chaoskit.messages import Endpoint, Member, Message, Plan, Sealed, Snapshot
from chaoskit.osprocess import host_id
from chaoskit.runtime.board import Board
from chaoskit.runtime.peer import Corrupt, pull
from chaoskit.runtime.replica import Replica
from chaoskit.vocabulary import Event

PATIENCE_S = 20.0


class Owner:
    """An arena with one tensor, whose every element is the number of committed steps."""

    def __init__(self, count: int = 1000) -> None:
        self.arena = Arena(8 * count)
        self.slot = self.arena.slot("model/weight", torch.float32, (count,))
        self.arena.stand_in(1)
        self.step = -1
        self.commit()

    def write(self, share: float = 1.0) -> None:
        """Part of an update."""
        tensor = self.arena.tensor(self.slot)
        tensor[: int(share * len(tensor))] = float(self.step + 1)

    def commit(self) -> None:
        with self.arena.writing():
            self.write()
            self.step += 1
            self.arena.publish(["model/weight"], b"scalars", self.step)

    def tear(self) -> None:
        """The writer ends in the middle of an update."""
        self.arena.begin_write()
        self.write(0.5)


def content(view: ArenaView) -> set[float]:
    return set(torch.frombuffer(bytearray(view.data()), dtype=torch.float32).tolist()) - {0.0} or {0.0}


def checksum_of(view: ArenaView) -> str:
    return checksum(view.step, view.index_bytes(), view.scalars_bytes(), view.data())


# -- seals --------------------------------------------------------------------------------------------------------


def test_a_seal_covers_step_index_scalars_and_every_byte() -> None:
    owner = Owner()
    sealed = seal(owner.arena)
    assert (sealed.step, sealed.generation, sealed.size_bytes) == (0, 1, owner.arena.size_bytes)
    parts = (0, owner.arena.index_bytes(), owner.arena.scalars_bytes(), bytes(owner.arena.data()))
    assert sealed.checksum == checksum(*parts[:3], memoryview(parts[3]))
    changed = [checksum(1, *parts[1:3], memoryview(parts[3]))]
    changed.append(checksum(0, parts[1] + b"x", parts[2], memoryview(parts[3])))
    changed.append(checksum(0, parts[1] + parts[2][:1], parts[2][1:], memoryview(parts[3])))
    for place in (0, 1777, len(parts[3]) - 1):
        data = bytearray(parts[3])
        data[place] ^= 1
        changed.append(checksum(*parts[:3], memoryview(data)))
    assert sealed.checksum not in changed
    assert len(set(changed)) == len(changed)


def test_the_checksum_does_not_depend_on_the_pieces() -> None:
    data = memoryview(os.urandom(CHUNK_BYTES + 12345))
    whole = checksum(3, b"i", b"s", data)
    assert whole == checksum(3, b"i", b"s", memoryview(bytes(data)))
    assert len(whole) == 32


def test_a_torn_state_has_no_seal() -> None:
    owner = Owner()
    owner.tear()
    with pytest.raises(Torn, match="not finished"):
        seal(owner.arena)


# -- the two slots ------------------------------------------------------------------------------------------------


def test_a_copy_equals_its_source_and_keeps_its_seal_while_the_next_is_made() -> None:
    owner, tier = Owner(), MemoryTier()
    assert tier.copies() == []
    for step in range(5):
        sealed = tier.save(owner.arena)
        (copy,) = tier.copies()
        assert copy.seal == sealed == seal(copy.view) == seal(owner.arena)
        assert content(copy.view) == {float(step)}
        owner.tear()
        with pytest.raises(Torn):
            tier.save(owner.arena)
        assert tier.copies() == [copy]
        assert checksum_of(copy.view) == sealed.checksum, "a copy that failed has changed the newest one"
        owner.arena.end_write()
        owner.commit()


def test_slots_are_reused_and_grow_with_the_state() -> None:
    owner, tier = Owner(), MemoryTier()
    views = []
    for _ in range(6):
        tier.save(owner.arena)
        views.append(tier.copies()[0].view)
        owner.commit()
    assert len({id(view) for view in views}) == 2
    larger = Owner(100_000)
    for _ in range(3):
        sealed = tier.save(larger.arena)
        assert seal(tier.copies()[0].view) == sealed
        larger.commit()


def test_a_writer_that_does_not_wait_is_noticed() -> None:
    """Whatever the tier calls complete is of one step; what was overtaken raises Torn."""
    owner, tier = Owner(2_000_000), MemoryTier()
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            owner.commit()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        torn = 0
        for _ in range(60):
            try:
                tier.save(owner.arena)
            except Torn:
                torn += 1
            for copy in tier.copies():
                assert content(copy.view) == {float(copy.seal.step)}
                assert checksum_of(copy.view) == copy.seal.checksum
    finally:
        over.set()
        thread.join()
    assert torn


def test_no_room_leaves_the_older_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, tier = Owner(), MemoryTier()
    tier.save(owner.arena)
    (copy,) = tier.copies()
    larger = Owner(5_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            tier.save(larger.arena)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert tier.copies() == [copy]


Act = st.sampled_from(["commit", "save", "tear", "mend"])


@settings(max_examples=300, deadline=None, database=None)
@given(st.lists(Act, max_size=30))
def test_whenever_the_writer_ends_the_newest_copy_is_whole_and_a_step_old_at_most(acts: list[str]) -> None:
    """A writer that waits for the copy of a step before it begins to write the next one."""
    owner, tier = Owner(16), MemoryTier()
    tier.save(owner.arena)
    for act in acts:
        writing = owner.arena.sequence % 2 == 1
        if act == "save":
            if writing:
                with pytest.raises(Torn):
                    tier.save(owner.arena)
            else:
                tier.save(owner.arena)
        elif act == "tear" and not writing and tier.copies()[0].seal.step == owner.step:
            owner.tear()
        elif act == "mend" and writing:
            owner.arena.end_write()
            owner.commit()
        (copy,) = tier.copies()  # the writer may end here
        assert copy.seal.step >= owner.step - 1
        assert content(copy.view) == {float(copy.seal.step)}
        assert checksum_of(copy.view) == copy.seal.checksum


# -- the keeper, with writers that are processes ------------------------------------------------------------------

WRITER = """
import sys, time
import torch
from chaoskit.checkpoint.arena import Arena
from chaoskit.runtime.board import Board

board = Board(int(sys.argv[1]), int(sys.argv[2]))
board.sign_on()
count = int(sys.argv[3])
arena = Arena(8 * count)
slot = arena.slot("model/weight", torch.float32, (count,))
with arena.writing():
    arena.tensor(slot).fill_(0.0)
    arena.publish(["model/weight"], b"", 0)
print(arena.fd, flush=True)
sys.stdin.readline()
arena.stand_in(1)
board.announce()
step = 0
while True:
    board.await_copy(step, 5.0, 5.0)
    with arena.writing():
        arena.tensor(slot).fill_(float(step + 1))
        step += 1
        arena.publish(["model/weight"], b"", step)
    board.progress(step, 0.0)
    board.announce()
"""


def config_of(copies: int, rack_nodes: int = 0) -> RunConfig:
    return RunConfig(job=JobSpec("job.py"), memory_copies=copies, rack_nodes=rack_nodes)


class Writer:
    """A process that commits as fast as it can; its agent's keeper runs in the test."""

    def __init__(self, directory: Path, copies: int, count: int = 200_000) -> None:
        self.board = Board.create()
        fds = (self.board.fd, self.board.bell)
        command = [sys.executable, "-c", WRITER, *map(str, fds), str(count)]
        self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.endpoint = Endpoint(host_id(), "127.0.0.1", 1, self.process.pid, int(self.process.stdout.readline()))
        self.journal = Journal(directory, "node0")
        self.told: list[Sealed] = []
        self.failures: list[BaseException] = []
        self.answered = threading.Event()
        place = ("node0", "127.0.0.1", "token", config_of(copies), self.journal)
        self.keeper = Keeper(NodeContext(*place, self._hear, self.failures.append))
        self.keeper.adopt("node0.0", self.endpoint, self.board)
        self.keeper.follow(plan_of(("node0.0", "node0")))
        self.keeper.recall()  # answered when all orders before it are carried out
        assert self.answered.wait(PATIENCE_S)
        self.answered.clear()
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def _hear(self, message: Message) -> None:
        assert isinstance(message, Sealed)
        self.told.append(message)
        self.answered.set()

    def train_until(self, step: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.board.step < step:
            assert time.monotonic() < deadline_s
            time.sleep(0.0005)

    def end(self) -> tuple[Snapshot, ...]:
        """SIGKILL, whatever it does; then what its agent offers."""
        self.process.kill()
        self.board.await_death()
        self.keeper.ended("node0.0")
        self.keeper.recall()
        assert self.answered.wait(PATIENCE_S)
        self.process.wait()
        return self.told[-1].snapshots


def plan_of(*members: tuple[str, str], generation: int = 1) -> Plan:
    endpoint = Endpoint("host", "127.0.0.1", 1, 2, 3)
    ranks = [Member(rank, worker, node, endpoint, (rank,)) for rank, (worker, node) in enumerate(members)]
    return Plan(generation, tuple(ranks), True)


def read(snapshot: Snapshot) -> ArenaView:
    return ArenaView.open(f"/proc/{snapshot.endpoint.pid}/fd/{snapshot.endpoint.arena_fd}")


@pytest.mark.parametrize("moment_ms", [0, 1, 3, 7, 12, 20])
def test_a_killed_writer_leaves_its_last_step_or_the_one_before(tmp_path: Path, moment_ms: int) -> None:
    writer = Writer(tmp_path, copies=1)
    writer.train_until(3)
    time.sleep(moment_ms / 1000)  # any moment will do: there is nothing to wait for
    snapshots = writer.end()
    newest = max(snapshots, key=lambda snapshot: snapshot.age)
    assert newest.step >= writer.board.step - 1
    for snapshot in snapshots:
        view = read(snapshot)
        assert content(view) == {float(snapshot.step)}
        assert checksum_of(view) == snapshot.checksum
        assert (snapshot.node, snapshot.worker, snapshot.generation) == ("node0", "node0.0", 1)


def test_without_copies_only_what_was_left_is_offered(tmp_path: Path) -> None:
    writer = Writer(tmp_path, copies=0)
    writer.train_until(50)
    for snapshot in writer.end():
        assert snapshot.step >= writer.board.step
        assert checksum_of(read(snapshot)) == snapshot.checksum


def test_what_others_have_overtaken_is_let_go(tmp_path: Path) -> None:
    writer = Writer(tmp_path, copies=1)
    writer.train_until(5)
    writer.end()
    writer.keeper.went_on(writer.board.step + 100)
    writer.answered.clear()
    writer.keeper.recall()
    assert writer.answered.wait(PATIENCE_S)
    assert len(writer.told[-1].snapshots) == 1, "the copy is left, the arena is not"


def test_copies_that_fail_are_written_down_and_tried_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: MemoryTier, source: ArenaView) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(MemoryTier, "save", no_room)
    writer = Writer(tmp_path, copies=1, count=1000)
    writer.train_until(2000)
    assert writer.end() is not None
    failed = [record for record in read_journals(tmp_path) if record.event == Event.COPY_FAILED]
    assert failed
    assert "no room" in failed[0]["reason"]
    assert len(failed) < 200


# -- which nodes copy, and what is read back ----------------------------------------------------------------------


def test_a_state_that_is_to_be_stored_is_waited_for_longer_from_the_first_one_on(tmp_path: Path) -> None:
    """The keeper says which is the next: when it follows a worker, and again with each state that it has seen."""
    owner, board, answered = Owner(), Board.create(), threading.Event()
    config = RunConfig(job=JobSpec("job.py"), memory_copies=0, disk=Tier(target=str(tmp_path / "disk"), every_steps=3))
    place = ("node0", "127.0.0.1", "token", config, Journal(tmp_path, "node0"))
    keeper = Keeper(NodeContext(*place, lambda message: answered.set(), pytest.fail))
    keeper.adopt("node0.0", Endpoint(host_id(), "127.0.0.1", 1, os.getpid(), owner.arena.fd), board)
    keeper.follow(plan_of(("node0.0", "node0"), generation=2))
    keeper.recall()  # answered when all orders before it are carried out
    assert answered.wait(PATIENCE_S)

    def is_due(step: int) -> bool:
        begun_s = time.monotonic()
        board.await_copy(step, 0.0, 0.2)
        return time.monotonic() - begun_s >= 0.2

    assert is_due(3)
    owner.arena.stand_in(2)
    for _ in range(4):
        owner.commit()
    board.announce()
    board.await_copy(5, PATIENCE_S, PATIENCE_S)  # it has seen step 4, and need not see what comes before step 6
    assert is_due(6)


def test_the_lowest_ranks_on_different_nodes_are_copied() -> None:
    plan = plan_of(("b.0", "b"), ("b.1", "b"), ("a.0", "a"), ("c.0", "c"))
    assert keepers(plan, config_of(2)) == {"b": "b.0", "a": "a.0"}
    assert keepers(plan, config_of(0)) == {}
    assert keepers(plan, config_of(9)) == {"b": "b.0", "a": "a.0", "c": "c.0"}


def test_copies_are_kept_in_as_many_racks_as_there_are() -> None:
    """A rack that is lost takes no more of them than it must."""
    plan = plan_of(*((f"node{number}.0", f"node{number}") for number in (1, 0, 3, 2, 5, 4)))
    assert list(keepers(plan, config_of(2, rack_nodes=2))) == ["node1", "node3"]
    assert list(keepers(plan, config_of(3, rack_nodes=2))) == ["node1", "node3", "node5"]
    assert list(keepers(plan, config_of(4, rack_nodes=2))) == ["node1", "node3", "node5", "node0"]
    assert list(keepers(plan, config_of(2, rack_nodes=8))) == ["node1", "node0"]
    assert list(keepers(plan, config_of(2))) == ["node1", "node0"]


def trained(seed: int, steps: int) -> Replica:
    torch.manual_seed(seed)
    model = torch.nn.Linear(300, 7)
    replica = Replica(model, torch.optim.Adam(model.parameters()), None)
    for _ in range(steps):
        with replica.update():
            for parameter in replica.parameters:
                parameter.grad = torch.randn(parameter.shape)
            replica.advance()
    return replica


@pytest.mark.parametrize("place", [None, 0, 5000, -1])
def test_a_copy_is_loaded_only_with_the_checksum_of_its_seal(place: int | None) -> None:
    donor, fresh, tier = trained(1, 3), trained(2, 0), MemoryTier()
    sealed = tier.save(donor.arena)
    view = tier.copies()[0].view
    endpoint = Endpoint(host_id(), "127.0.0.1", 1, os.getpid(), view.fd)
    if place is None:
        pulled = pull(fresh, endpoint, "token", "auto", sealed.checksum)
        assert (pulled.step, pulled.transport) == (3, "shared memory")
        assert fresh.state_digest() == donor.state_digest()
        return
    view.data()[place] ^= 16
    with pytest.raises(Corrupt):
        pull(fresh, endpoint, "token", "auto", sealed.checksum)
    assert fresh.step == -1
    assert fresh.sequence % 2, "half a state can be read"
    view.data()[place] ^= 16
    pull(fresh, endpoint, "token", "auto", sealed.checksum)
    assert fresh.state_digest() == donor.state_digest()


def test_a_damaged_index_is_corruption_not_a_bug_of_the_user() -> None:
    donor, fresh, tier = trained(1, 3), trained(2, 0), MemoryTier()
    sealed = tier.save(donor.arena)
    view = tier.copies()[0].view
    index = view.index_bytes()
    view.bytes[4096 : 4096 + len(index)] = bytes(len(index))
    with pytest.raises(Corrupt):
        pull(fresh, Endpoint(host_id(), "127.0.0.1", 1, os.getpid(), view.fd), "token", "auto", sealed.checksum)
