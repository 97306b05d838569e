"""What a keeper tells a worker of its copies: never that a step is safe which is trained again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chaoskit.checkpoint.held import HeldTensor
from chaoskit.checkpoint.slots import Slots
from chaoskit.checkpoint.snapshotter import Snapshotter
from chaoskit.config import JobSpec, RunConfig
from chaoskit.control.keeping import NodeContext
from chaoskit.control.pieces import PieceKeeper
from chaoskit.journal import Journal, read_journals
from chaoskit.messages import Endpoint, Holding, Member, Message, Plan, Sealed, Snapshot
from chaoskit.runtime.board import Board
from chaoskit.vocabulary import Event

WAIT_S = 20.0
HERE = Endpoint("", "127.0.0.1", 0, os.getpid(), -1)


class Worker:
    """One rank on a node without partners, in this process."""

    def __init__(self, directory: Path) -> None:
        self.board, self.told, self._directory = Board.create(), list[Message](), directory
        self.slots, self.weight = Slots.in_memory(), torch.zeros(1000)
        self.snapshotter = Snapshotter(
            self.slots, [HeldTensor("w", self.weight)], sealed=lambda _: os.eventfd_write(self.board.bell, 1)
        )
        config = RunConfig(job=JobSpec("job.py", sharded=True), nodes=1, memory_copies=0)
        journal = Journal(directory, "node0")
        context = NodeContext("node0", "127.0.0.1", "token", config, journal, self.told.append, pytest.fail)
        self.keeper = PieceKeeper(context)
        self.keeper.adopt("node0.0", HERE, self.board)
        self.keeper.hold(Holding("node0.0", os.getpid(), self.slots.fds, 0, 1))

    def follow(self, generation: int, restore: tuple[Snapshot, ...] = ()) -> None:
        self.keeper.follow(Plan(generation, (Member(0, "node0.0", "node0", HERE, (0,)),), True, restore))

    def commit(self, step: int, generation: int) -> None:
        self.snapshotter.begin(step, generation)
        self.snapshotter.wait()

    def protected(self) -> list[int]:
        return [one["step"] for one in read_journals(self._directory) if one.event == Event.PROTECTED]


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_what_is_trained_again_is_not_safe(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.follow(1)
    worker.commit(4, 1)
    worker.commit(5, 1)
    eventually(lambda: worker.board.protected == 5)
    worker.keeper.recall(1)
    eventually(lambda: len(worker.told) == 1)
    (sealed,) = worker.told
    assert isinstance(sealed, Sealed)
    older = next(copy for copy in sealed.snapshots if copy.step == 4)
    worker.follow(2, (older,))  # another rank had no copy of step 5
    eventually(lambda: worker.board.protected == 4)
    worker.snapshotter.forget_after(4)
    worker.commit(5, 2)
    eventually(lambda: worker.board.protected == 5)
    assert len(worker.protected()) >= 2  # told in each generation
    assert worker.protected()[-1] == 4
