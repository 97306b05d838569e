"""The keeper reports to a worker which of its steps are safe, and the worker waits for the
report.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.waiting import wait_until

from chaoskit.checkpoint.layout.arena import ArenaView
from chaoskit.checkpoint.layout.held import HeldTensor
from chaoskit.checkpoint.memory.slots import Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.checkpoint.peer.server import CopyServer
from chaoskit.config import CheckpointTier, RunConfig
from chaoskit.daemon.keeper_base import NodeContext
from chaoskit.daemon.piece_keeper import PieceKeeper
from chaoskit.job import JobSpec
from chaoskit.journal import Journal, read_journals
from chaoskit.process.linux import host_id
from chaoskit.process.progress_board import Board
from chaoskit.runtime.state.copies import Copies
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, Holding, Member, Message, OfferedSnapshot, Plan, Sealed

HERE = Endpoint("", "127.0.0.1", 0, os.getpid(), -1)


class Worker:
    """A rank on a node, in this process; it has no partners by default."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 1,
        memory_copies: int = 0,
        groups: tuple[tuple[int, ...], ...] = (),
        disk: CheckpointTier | None = None,
    ) -> None:
        self.board, self.told, self._directory = Board.create(), list[Message](), directory
        self.slots, self.weight = Slots(), torch.zeros(1000)
        self.snapshotter = Snapshotter(
            self.slots,
            [HeldTensor("w", self.weight)],
            on_sealed=lambda _: os.eventfd_write(self.board.bell, 1),
        )
        config = RunConfig(
            job=JobSpec("job.py", sharded=True), nodes=nodes, memory_copies=memory_copies, disk=disk
        )
        journal = Journal(directory, "node0")
        context = NodeContext(
            "node0", "127.0.0.1", "token", config, journal, self.told.append, pytest.fail
        )
        self.keeper = PieceKeeper(context)
        self.keeper.adopt("node0.0", HERE, self.board)
        self.keeper.hold(Holding("node0.0", os.getpid(), self.slots.fds, 0, 1, groups))

    def follow(self, generation: int, restore: tuple[OfferedSnapshot, ...] = ()) -> None:
        self.keeper.follow(
            Plan(generation, (Member(0, "node0.0", "node0", HERE, (0,)),), True, restore)
        )

    def commit(self, step: int, generation: int) -> None:
        self.snapshotter.begin(step, generation)
        self.snapshotter.wait()

    def protected(self) -> list[int]:
        return [
            record["step"]
            for record in read_journals(self._directory)
            if record.event == Event.PROTECTED
        ]


def test_what_is_trained_again_is_not_safe(tmp_path: Path) -> None:
    """A step that is trained again in another generation is not safe until its new copy is."""
    worker = Worker(tmp_path)
    worker.follow(1)
    worker.commit(4, 1)
    worker.commit(5, 1)
    wait_until(lambda: worker.board.protected == 5, "the copy of step 5")
    worker.keeper.recall(1)
    wait_until(lambda: len(worker.told) == 1, "the answer to the recall")
    (sealed,) = worker.told
    assert isinstance(sealed, Sealed)
    older = next(copy for copy in sealed.snapshots if copy.step == 4)
    worker.follow(2, (older,))  # the other rank had no copy of step 5
    wait_until(lambda: worker.board.protected == 4, "step 4 to be the newest that is safe")
    worker.snapshotter.forget_after(4)
    worker.commit(5, 2)
    wait_until(lambda: worker.board.protected == 5, "the copy of the new step 5")
    assert len(worker.protected()) >= 2  # reported in each generation
    assert worker.protected()[-1] == 4


def test_a_copy_is_known_by_the_memory_that_holds_it(tmp_path: Path) -> None:
    """The offered port and descriptor do not matter: the memory distinguishes a damaged copy from
    others.
    """
    worker = Worker(tmp_path)
    worker.follow(1)
    worker.commit(4, 1)
    worker.commit(5, 1)
    wait_until(lambda: worker.board.protected == 5, "the copy of step 5")
    answers = []
    for number in (1, 2):
        worker.keeper.recall(number)
        wait_until(lambda: len(worker.told) == 1, "the answer to the recall")
        sealed = worker.told.pop()
        assert isinstance(sealed, Sealed)
        answers.append({copy.step: copy.inode for copy in sealed.snapshots})
    assert answers[0] == answers[1]
    assert answers[0] == {
        step: os.fstat(fd).st_ino for fd in worker.slots.fds for step in (4, 5) if _holds(fd, step)
    }
    assert len({*answers[0].values()}) == 2


def _holds(fd: int, step: int) -> bool:
    view = ArenaView.open(f"/proc/self/fd/{fd}")
    try:
        return bool(view.checksum) and view.step == step
    finally:
        view.close()


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))])
def test_copies_leave_the_parallel_group(
    tmp_path: Path, groups: tuple[tuple[int, ...], ...]
) -> None:
    """Each node has its partner in the other replica if a replica of the state is spread over two
    of four nodes.
    """
    partners = [CopyServer(f"node{number}", "127.0.0.1", "token", 2**30) for number in (1, 2, 3)]
    worker = Worker(tmp_path, nodes=4, memory_copies=1, groups=groups)
    ends = [
        HERE,
        *(
            Endpoint(host_id(), "127.0.0.1", partner.address.port, os.getpid(), -1)
            for partner in partners
        ),
    ]
    members = [
        Member(rank, f"node{rank}.0", f"node{rank}", end, (rank,)) for rank, end in enumerate(ends)
    ]
    worker.keeper.follow(Plan(1, tuple(members), True))
    worker.commit(1, 1)
    wait_until(lambda: worker.board.protected == 1, "the copy of step 1")
    own_group = next(ranks for ranks in groups if 0 in ranks)
    (keeper_rank,) = [rank for rank, partner in enumerate(partners, 1) if partner.holding()]
    assert keeper_rank not in own_group
    for partner in partners:
        partner.close()


def test_a_copy_is_not_safe_before_it_is_known_where_it_belongs(tmp_path: Path) -> None:
    """A rank may seal a copy before the keeper of its node has its plan: a copy on that node alone
    is not safe.
    """
    partner = CopyServer("node1", "127.0.0.1", "token", 2**30)
    worker = Worker(tmp_path, nodes=2, memory_copies=1)
    worker.commit(1, 1)
    for number in (1, 2):  # a notification before the first recall is handled before the second
        worker.keeper.recall(number)
        wait_until(lambda number=number: len(worker.told) == number, "the answer to a recall")
    end = Endpoint(host_id(), "127.0.0.1", partner.address.port, os.getpid(), -1)
    members = (Member(0, "node0.0", "node0", HERE, (0,)), Member(1, "node1.0", "node1", end, (1,)))
    worker.keeper.follow(Plan(1, members, True))
    wait_until(lambda: worker.board.protected == 1, "the copy of step 1")
    words = [
        record
        for record in read_journals(tmp_path)
        if record.event in (Event.PROTECTED, Event.EXPOSED)
    ]
    assert [(record.event, record["nodes"]) for record in words] == [(Event.PROTECTED, ["node1"])]
    partner.close()


def test_copies_of_a_step_are_not_waited_for_when_its_membership_is_over(tmp_path: Path) -> None:
    """A worker waits for the copies of a step until its membership ends, and checks once
    more then.
    """
    board, checks = Board.create(), list[int]()
    copies = Copies("node0.0", board, Journal(tmp_path, "node0.0"), pytest.fail, pytest.fail)

    def arrive() -> bool:
        board.protect(1)
        return False

    def end() -> bool:
        checks.append(2)
        return True

    assert copies.protected_step(1, arrive) == 1, "it looks again"
    assert copies.protected_step(2, end) == 1
    assert checks == [2], "the end was reported: no further wait"


def test_the_last_step_is_copied_when_its_slot_is_free(tmp_path: Path) -> None:
    """A partner still reads the copy that it replaces; training would not have waited for that, its
    end does.
    """
    board, messages, weight = Board.create(), list[Message](), torch.zeros(1000)
    copies = Copies(
        "node0.0", board, Journal(tmp_path, "node0.0"), messages.append, lambda moment: None
    )
    state: Any = SimpleNamespace(
        held=lambda: [HeldTensor("w", weight)],
        scalars=bytes,
        groups=tuple,
        tensors=lambda: [("w", weight)],
    )
    copies.hold(state, 0, 1)
    for step in (1, 2):
        copies.begin(step, 1)
        copies.complete(step, 1, lambda: False)
    copies.keep(1)  # so the slot of step 2 is the next to be written
    (holding,) = messages
    assert isinstance(holding, Holding)
    (path,) = [f"/proc/self/fd/{fd}" for fd in holding.fds if _holds(fd, 2)]
    reader = os.open(path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    copies.begin(3, 1)
    checks: list[bool] = []

    def over() -> bool:
        checks.append(any(_holds(fd, 3) for fd in holding.fds))
        if len(checks) == 2:
            os.close(reader)
        return False

    copies.complete(3, 1, over)
    assert checks[:2] == [False, False]
    assert any(_holds(fd, 3) for fd in holding.fds)
    assert {
        record["step"] for record in read_journals(tmp_path) if record.event == Event.COPY_FAILED
    } == {3}
    copies.drop()


@pytest.mark.parametrize(("worker_at_the_end", "offers"), [("node0.0", True), ("node0.1", False)])
def test_at_the_end_a_node_without_a_member_offers_nothing(
    tmp_path: Path, worker_at_the_end: str, offers: bool
) -> None:
    """The node has no newest membership: by its plan it would store a part of an old state."""
    worker = Worker(
        tmp_path / "journal", disk=CheckpointTier(target=str(tmp_path / "stored"), every_steps=1000)
    )
    worker.follow(1)
    worker.commit(5, 1)
    wait_until(lambda: worker.board.protected == 5, "the copy of step 5")
    worker.keeper.finish(0.0, last=True, workers=(worker_at_the_end,))
    steps = [
        record["step"]
        for record in read_journals(tmp_path / "journal")
        if record.event in (Event.SAVED, Event.SAVE_FAILED)
    ]
    assert steps == [5] * offers


def test_a_state_that_is_there_is_offered_at_once(tmp_path: Path) -> None:
    """A launch that is to end needs the newest step stored, while the next step may take
    for ever.
    """
    worker = Worker(
        tmp_path / "journal", disk=CheckpointTier(target=str(tmp_path / "stored"), every_steps=1000)
    )
    worker.follow(1)
    worker.commit(5, 1)
    wait_until(lambda: worker.board.protected == 5, "the copy of step 5")
    worker.board.progress(5)
    worker.keeper.store(5)

    def offered() -> list[int]:
        records = read_journals(tmp_path / "journal")
        return [
            record["step"] for record in records if record.event in (Event.SAVED, Event.SAVE_FAILED)
        ]

    wait_until(offered, "the snapshot", limit_s=20.0)
    assert offered() == [5]
