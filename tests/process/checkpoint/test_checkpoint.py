"""Tests of seals and copies: a copy is complete and verified, or it does not exist."""

from __future__ import annotations

import contextlib
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
from support import ranks
from support.clocks import FakeClock
from support.examples import examples
from support.waiting import LIMIT_S, wait_until

from chaoskit.checkpoint.layout.arena import Arena, ArenaView
from chaoskit.checkpoint.layout.seal import CHUNK_BYTES, Torn, checksum, seal
from chaoskit.checkpoint.memory.tier import MemoryTier
from chaoskit.config import CheckpointTier, Copies, RunConfig
from chaoskit.daemon.keeper_base import NodeContext
from chaoskit.daemon.replica_keeper import ReplicaKeeper, keepers
from chaoskit.job import JobSpec
from chaoskit.journal import Journal, Record, read_journals
from chaoskit.process.linux import host_id
from chaoskit.process.progress_board import Board
from chaoskit.runtime.state.peer import Corrupt, pull
from chaoskit.runtime.state.replica import Replica
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, Member, Message, OfferedSnapshot, Plan, Sealed


class Owner:
    """An arena with one tensor, in which every element is the number of committed steps."""

    def __init__(self, count: int = 1000) -> None:
        self.arena = Arena(8 * count)
        self.slot = self.arena.slot("model/weight", torch.float32, (count,))
        self.arena.set_generation(1)
        self.step = -1
        self.commit()

    def write(self, share: float = 1.0) -> None:
        """Write a part of an update."""
        tensor = self.arena.tensor(self.slot)
        tensor[: int(share * len(tensor))] = float(self.step + 1)

    def commit(self) -> None:
        with self.arena.writing():
            self.write()
            self.step += 1
            self.arena.publish(["model/weight"], b"scalars", self.step)

    def tear(self) -> None:
        """End the writer in the middle of an update."""
        self.arena.begin_write()
        self.write(0.5)


def content(view: ArenaView) -> set[float]:
    return set(torch.frombuffer(bytearray(view.data()), dtype=torch.float32).tolist()) - {0.0} or {
        0.0
    }


def checksum_of(view: ArenaView) -> str:
    return checksum(view.step, view.index_bytes(), view.scalars_bytes(), view.data())


# -- seals -----------------------------------------------------------------------------------------


def test_a_seal_covers_step_index_scalars_and_every_byte() -> None:
    """A change of any part changes the checksum."""
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
    """Equal data has the same checksum, however it is cut into pieces."""
    data = memoryview(os.urandom(CHUNK_BYTES + 12345))
    whole = checksum(3, b"i", b"s", data)
    assert whole == checksum(3, b"i", b"s", memoryview(bytes(data)))
    assert len(whole) == 32


def test_a_torn_state_has_no_seal() -> None:
    """A state in the middle of an update cannot be sealed."""
    owner = Owner()
    owner.tear()
    with pytest.raises(Torn, match="not finished"):
        seal(owner.arena)


# -- the two slots ---------------------------------------------------------------------------------


def test_a_copy_equals_its_source_and_keeps_its_seal_while_the_next_is_made() -> None:
    """A copy that fails does not touch the newest complete one."""
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
        assert checksum_of(copy.view) == sealed.checksum, (
            "a copy that failed has changed the newest one"
        )
        owner.arena.end_write()
        owner.commit()


def test_slots_are_reused_and_grow_with_the_state() -> None:
    """Copies alternate between two slots; a larger state gets larger slots."""
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


def check_copies(tier: MemoryTier) -> list[int]:
    """Check that every byte of each copy belongs to its step; return the steps."""
    for copy in tier.copies():
        assert content(copy.view) == {float(copy.seal.step)}
        assert checksum_of(copy.view) == copy.seal.checksum
    return [copy.seal.step for copy in tier.copies()]


@pytest.mark.parametrize(
    ("moment", "torn"), [("begun", True), ("chunk", True), ("copied", False), ("sealed", False)]
)
def test_a_writer_that_goes_on_during_a_copy_is_noticed(moment: str, torn: bool) -> None:
    """A commit before the copy is complete raises Torn and keeps the previous copy; a later commit
    does no harm.
    """
    owner, reached = Owner(2_000_000), list[str]()

    def go_on(boundary: str) -> None:
        if boundary == moment and boundary not in reached:
            reached.append(boundary)
            owner.commit()

    tier = MemoryTier(go_on)
    moment, boundary_of_commit = "", moment
    tier.save(owner.arena)
    owner.commit()
    moment = boundary_of_commit
    if torn:
        with pytest.raises(Torn, match="step 1 was changed"):
            tier.save(owner.arena)
        assert check_copies(tier) == [0]
    else:
        assert tier.save(owner.arena).step == 1
        assert check_copies(tier) == [1]
    assert reached == [boundary_of_commit]
    assert owner.step == 2
    assert tier.save(owner.arena).step == 2
    assert check_copies(tier) == [2]


def test_a_writer_that_does_not_wait_is_noticed() -> None:
    """A copy that the tier calls complete is of one step, even beside a writer at full speed; an
    overtaken copy is Torn.

    Every second copy begins between two updates, and is held until the writer has made a whole one.
    """
    owner, over, between = Owner(2_000_000), threading.Event(), threading.Lock()
    held = False

    def train() -> None:
        while not over.is_set():
            with between:
                owner.commit()
            time.sleep(0.001)  # so that other threads get the lock

    def hold(boundary: str) -> None:
        if held and boundary == "begun":
            begun = owner.step
            between.release()
            wait_until(lambda: owner.step > begun + 1, "two commits", poll_s=0.001)

    tier = MemoryTier(hold)
    tier.save(owner.arena)
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        for _ in range(6):
            held = True
            between.acquire()
            with pytest.raises(Torn, match="was changed before its copy was complete"):
                tier.save(owner.arena)
            check_copies(tier)
            held = False
            with contextlib.suppress(Torn):
                tier.save(owner.arena)
            check_copies(tier)
    finally:
        over.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def save_without_room(line: ranks.Line) -> None:
    """Save with a limit on file sizes; runs in a process of its own, since the limit is for the
    whole process.
    """
    owner, tier = Owner(), MemoryTier()
    tier.save(owner.arena)
    (copy,) = tier.copies()
    larger = Owner(5_000_000)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="large"):
        tier.save(larger.arena)
    assert tier.copies() == [copy]
    assert check_copies(tier) == [0]


def test_no_room_leaves_the_older_copy() -> None:
    """A copy for which there is no memory raises, and the one before stays."""
    assert ranks.results(1, save_without_room) == [None]


Act = st.sampled_from(["commit", "save", "tear", "mend"])


@settings(max_examples=examples(300), deadline=None, database=None)
@given(st.lists(Act, max_size=30))
def test_whenever_the_writer_ends_the_newest_copy_is_whole_and_a_step_old_at_most(
    acts: list[str],
) -> None:
    """The writer waits for the copy of a step before it begins to write the next one."""
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


# -- the keeper, with writers that are processes ---------------------------------------------------

WRITER = """
import signal, sys
import torch
from chaoskit.checkpoint.layout.arena import Arena
from chaoskit.process.progress_board import Board

board = Board(int(sys.argv[1]), int(sys.argv[2]))
board.sign_on()
count, halt, last = int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
arena = Arena(8 * count)
slot = arena.slot("model/weight", torch.float32, (count,))
with arena.writing():
    arena.tensor(slot).fill_(0.0)
    arena.publish(["model/weight"], b"", 0)
print(arena.fd, flush=True)
sys.stdin.readline()
arena.set_generation(1)
board.place(1, 0)
board.announce()
step = 0
while True:
    board.await_copy(step, 600.0, 600.0)
    if step == last and halt == "between two updates":
        signal.pause()
    with arena.writing():
        arena.tensor(slot)[: count // 2] = float(step + 1)
        if step == last and halt == "in an update":
            signal.pause()
        arena.tensor(slot).fill_(float(step + 1))
        step += 1
        arena.publish(["model/weight"], b"", step)
    board.progress(step, 0.0)
    board.announce()
"""


def config_of(copies: int, rack_nodes: int = 0, rule: Copies = "affordable") -> RunConfig:
    return RunConfig(
        job=JobSpec("job.py"), memory_copies=copies, rack_nodes=rack_nodes, copies=rule
    )


class Writer:
    """A process that commits as fast as it can; its agent's keeper runs in the test.

    Args:
        halt: the place where it stops after ``last`` steps: "between two updates", "in an update",
            or "".
        nodes: the number of nodes of the membership; the other nodes have no keeper.
        rule: the rule that selects the states to copy.
    """

    def __init__(
        self,
        directory: Path,
        copies: int,
        count: int = 200_000,
        halt: str = "",
        last: int = -1,
        nodes: int = 1,
        rule: Copies = "affordable",
    ) -> None:
        self.board = Board.create()
        fds = (self.board.fd, self.board.bell)
        command = [sys.executable, "-c", WRITER, *map(str, fds), str(count), halt, str(last)]
        self.process = subprocess.Popen(
            command, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.endpoint = Endpoint(
            host_id(), "127.0.0.1", 1, self.process.pid, int(self.process.stdout.readline())
        )
        self.journal = Journal(directory, "node0")
        self.answers: list[Sealed] = []
        self.failures: list[BaseException] = []
        self.answered = threading.Event()
        place = ("node0", "127.0.0.1", "token", config_of(copies, rule=rule), self.journal)
        self.keeper = ReplicaKeeper(NodeContext(*place, self._take_answer, self.failures.append))
        self.keeper.adopt("node0.0", self.endpoint, self.board)
        self.keeper.follow(
            plan_of(*((f"node{number}.0", f"node{number}") for number in range(nodes)))
        )
        self.keeper.recall()  # answered when all earlier orders are carried out
        assert self.answered.wait(LIMIT_S)
        self.answered.clear()
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def _take_answer(self, message: Message) -> None:
        assert isinstance(message, Sealed)
        self.answers.append(message)
        self.answered.set()

    def train_until(self, step: int) -> None:
        wait_until(lambda: self.board.step >= step, f"step {step} of the writer", poll_s=0.0005)

    def end(self) -> tuple[OfferedSnapshot, ...]:
        """Kill the writer with SIGKILL; return the snapshots that its agent offers."""
        self.process.kill()
        self.board.await_death()
        self.keeper.ended("node0.0")
        self.keeper.recall()
        assert self.answered.wait(LIMIT_S)
        self.process.wait()
        return self.answers[-1].snapshots


def plan_of(*members: tuple[str, str], generation: int = 1) -> Plan:
    endpoint = Endpoint("host", "127.0.0.1", 1, 2, 3)
    ranks = [
        Member(rank, worker, node, endpoint, (rank,)) for rank, (worker, node) in enumerate(members)
    ]
    return Plan(generation, tuple(ranks), True)


def read(snapshot: OfferedSnapshot) -> ArenaView:
    return ArenaView.open(f"/proc/{snapshot.endpoint.pid}/fd/{snapshot.endpoint.arena_fd}")


def check_snapshots(snapshots: tuple[OfferedSnapshot, ...]) -> None:
    for snapshot in snapshots:
        view = read(snapshot)
        assert content(view) == {float(snapshot.step)}
        assert checksum_of(view) == snapshot.checksum
        assert (snapshot.node, snapshot.worker, snapshot.generation) == ("node0", "node0.0", 1)


@pytest.mark.parametrize("step", [1, 3, 4, 6, 9, 15])
@pytest.mark.parametrize(
    "plan", [{"nodes": 2, "rule": "every_step"}, {"nodes": 1, "rule": "affordable"}], ids=str
)
def test_a_killed_writer_leaves_its_last_step_or_the_one_before(
    tmp_path: Path, step: int, plan: dict[str, Any]
) -> None:
    """If each commit is copied, a killed writer leaves a state that is at most one step old."""
    writer = Writer(tmp_path, copies=1, **plan)
    writer.train_until(step)
    snapshots = writer.end()
    newest = max(snapshots, key=lambda snapshot: snapshot.age)
    assert newest.step >= writer.board.step - 1
    check_snapshots(snapshots)


def in_its_update(writer: Writer, step: int) -> None:
    """Wait until the writer has stopped in the middle of the update after ``step``."""
    writer.train_until(step)
    arena = ArenaView.open(f"/proc/{writer.process.pid}/fd/{writer.endpoint.arena_fd}")
    wait_until(lambda: arena.step == step and arena.sequence % 2, "an update that has begun")


def written(directory: Path, event: Event) -> list[Record]:
    return [record for record in read_journals(directory) if record.event == event]


def test_copies_that_can_be_afforded_are_as_old_as_the_journal_says_at_most(tmp_path: Path) -> None:
    """A writer at full speed waits for each copy that is due, and is killed in an update."""
    writer = Writer(tmp_path, copies=1, nodes=2, halt="in an update", last=700)
    in_its_update(writer, 700)
    (snapshot,) = writer.end()
    check_snapshots((snapshot,))
    intervals = written(tmp_path, Event.COPY_INTERVAL)
    assert intervals[0]["every"] == 1, "no step was measured before the first copy"
    assert snapshot.step > 700 - intervals[-1]["every"]
    assert max(record["every"] for record in intervals) > 10, (
        "each of these steps takes less than a hundred copies"
    )
    assert not written(tmp_path, Event.COPY_FAILED)


def test_a_fault_of_copies_waits_for_the_one_that_is_due_and_for_no_other(tmp_path: Path) -> None:
    """The fault does not wait for a state that was let go: it strikes the newest copy that
    exists.
    """
    writer = Writer(tmp_path, copies=1, nodes=2, halt="between two updates", last=400)
    writer.train_until(400)
    wait_until(
        lambda: not writer.keeper.lacks_copy("node0.0", 400), "the keeper has seen the newest state"
    )
    assert writer.keeper.lacks_copy("node0.0", 401)
    assert not writer.keeper.lacks_copy("node1.0", 401), "another node copies that one"
    (copy,) = writer.keeper.kept_copies("node0.0")
    assert 400 - written(tmp_path, Event.COPY_INTERVAL)[-1]["every"] < copy.seal.step <= 400
    writer.end()


@pytest.mark.parametrize(("halt", "torn"), [("in an update", [50]), ("between two updates", [])])
def test_a_worker_that_ended_in_its_update_is_written_down(
    tmp_path: Path, halt: str, torn: list[int]
) -> None:
    """The record has step and generation, so that the judge knows that the worker's state is of no
    use.
    """
    writer = Writer(tmp_path, copies=1, nodes=2, halt=halt, last=50)
    if torn:
        in_its_update(writer, 50)
    else:
        writer.train_until(50)
    writer.end()
    torn_records = [
        (record["worker"], record["step"], record["generation"])
        for record in written(tmp_path, Event.TORN)
    ]
    assert torn_records == [("node0.0", step, 1) for step in torn]


def test_without_copies_the_state_that_was_left_is_offered(tmp_path: Path) -> None:
    """A writer that is killed between two updates leaves the state of its last step."""
    writer = Writer(tmp_path, copies=0, halt="between two updates", last=50)
    writer.train_until(50)
    snapshots = writer.end()
    assert [snapshot.step for snapshot in snapshots] == [50]
    check_snapshots(snapshots)


def test_without_copies_a_torn_state_is_not_offered(tmp_path: Path) -> None:
    """A writer that is killed in the middle of an update leaves nothing."""
    writer = Writer(tmp_path, copies=0, halt="in an update", last=50)
    in_its_update(writer, 50)
    assert writer.end() == ()


def test_what_others_have_overtaken_is_let_go(tmp_path: Path) -> None:
    """If live workers are ahead, the arena of a dead worker is not offered."""
    writer = Writer(tmp_path, copies=1)
    writer.train_until(5)
    writer.end()
    writer.keeper.went_on(writer.board.step + 100)
    writer.answered.clear()
    writer.keeper.recall()
    assert writer.answered.wait(LIMIT_S)
    assert len(writer.answers[-1].snapshots) == 1, "the copy is left, the arena is not"


def test_copies_that_fail_are_written_down_and_tried_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More commits pass before each further attempt after failures."""

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


# -- which nodes copy, and what is read back -------------------------------------------------------


def test_a_state_that_is_to_be_stored_is_waited_for_longer_from_the_first_one_on(
    tmp_path: Path,
) -> None:
    """The keeper announces the next state to store when it follows a worker, and again with each
    state that it has seen.
    """
    owner, board, answered = Owner(), Board.create(), threading.Event()
    clock = FakeClock()
    hurried = Board(board.fd, now_s=clock.now_s, sleep=clock.sleep)
    config = RunConfig(
        job=JobSpec("job.py"),
        memory_copies=0,
        disk=CheckpointTier(target=str(tmp_path / "disk"), every_steps=3),
    )
    place = ("node0", "127.0.0.1", "token", config, Journal(tmp_path, "node0"))
    keeper = ReplicaKeeper(NodeContext(*place, lambda message: answered.set(), pytest.fail))
    keeper.adopt("node0.0", Endpoint(host_id(), "127.0.0.1", 1, os.getpid(), owner.arena.fd), board)
    keeper.follow(plan_of(("node0.0", "node0"), generation=2))
    keeper.recall()  # answered when all earlier orders are carried out
    assert answered.wait(LIMIT_S)

    def is_due(step: int) -> bool:
        with clock.measured() as waited:
            hurried.await_copy(step, 0.0, 0.2)
        return waited.duration_s >= 0.2

    assert is_due(3)
    owner.arena.set_generation(2)
    for _ in range(4):
        owner.commit()
    board.announce()
    board.await_copy(
        5, LIMIT_S, LIMIT_S
    )  # it has seen step 4, and need not see a state before step 6
    assert is_due(6)


def test_the_lowest_ranks_on_different_nodes_are_copied() -> None:
    """The number of nodes that copy is the number of copies needed, with one worker on each."""
    plan = plan_of(("b.0", "b"), ("b.1", "b"), ("a.0", "a"), ("c.0", "c"))
    assert keepers(plan, config_of(2)) == {"b": "b.0", "a": "a.0"}
    assert keepers(plan, config_of(0)) == {}
    assert keepers(plan, config_of(9)) == {"b": "b.0", "a": "a.0", "c": "c.0"}


def test_copies_are_kept_in_as_many_racks_as_there_are() -> None:
    """The loss of a rack loses as few copies as possible."""
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
    """A changed bit raises Corrupt and leaves the replica incomplete, so that it reads another
    copy.
    """
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
    """An index that cannot be decoded raises Corrupt, like any other damage."""
    donor, fresh, tier = trained(1, 3), trained(2, 0), MemoryTier()
    sealed = tier.save(donor.arena)
    view = tier.copies()[0].view
    index = view.index_bytes()
    view.bytes[4096 : 4096 + len(index)] = bytes(len(index))
    with pytest.raises(Corrupt):
        pull(
            fresh,
            Endpoint(host_id(), "127.0.0.1", 1, os.getpid(), view.fd),
            "token",
            "auto",
            sealed.checksum,
        )
