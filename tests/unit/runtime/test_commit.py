"""Conditions for the end of a step on a rank: its copy is complete, and the lease of the node is
not over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from chaoskit.config import RunConfig
from chaoskit.job import resolve_job
from chaoskit.journal import Journal, read_journals
from chaoskit.process.progress_board import Board
from chaoskit.runtime.group.regroup import Formation, Regrouper
from chaoskit.runtime.group.rendezvous import GenerationSuperseded
from chaoskit.runtime.integrity.nonfinite_guard import AuditResult
from chaoskit.runtime.integrity.piece_check import PieceCheck
from chaoskit.runtime.state.copies import Copies
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.script_writes import ScriptWrites
from chaoskit.runtime.state.sharding import ShardedState
from chaoskit.runtime.step.commit import Committer, LeaseOver
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.sharded_commit import ShardedCommitter
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import Endpoint, Member, Message, Plan

ME = Member(0, "node0.0", "node0", Endpoint("", "", 0, os.getpid(), -1), (0,))
FORMATION = Formation(Plan(1, (ME,), abort=False), ME)
LEASES_S = pytest.mark.parametrize(
    ("lease_s", "outcome"), [(-1.0, LeaseOver), (60.0, GenerationSuperseded)]
)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerContext]:
    """Yield a worker with a regrouper that has no membership.

    If it has a lease, it is told next that the membership of the step is over.
    """
    journal, sent = Journal(tmp_path, "node0.0"), list[Message]()
    unused: Any = None
    yield WorkerContext(
        "node0.0",
        RunConfig(job=resolve_job("gpt")),
        journal,
        Board.create(),
        hooks=unused,
        regrouper=Regrouper("node0.0", journal, unused, unused, unused, unused),
        callbacks=unused,
        send=sent.append,
        serve_state=unused,
        report_ready=unused,
        token="",
        host="",
        disk=tmp_path,
    )
    journal.close()
    written = {record.event for record in read_journals(tmp_path)}
    assert not written & {Event.COMMIT, Event.SKIP}, "no step was written down"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Run a process group of this process alone, for a sharded state."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def give_lease(worker: WorkerContext, lease_s: float) -> None:
    worker.board.lease(time.monotonic_ns() + int(lease_s * 1e9))


@LEASES_S
def test_of_a_replica(worker: WorkerContext, lease_s: float, outcome: type[Exception]) -> None:
    model = nn.Linear(2, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), None, shared=False)
    give_lease(worker, lease_s)
    unused: Any = None
    committer = Committer(worker, replica, unused, None)
    with pytest.raises(outcome):
        committer.skip(FORMATION, AuditResult("batch", (), (0,)), [0])
    assert replica.step == 0


@LEASES_S
@pytest.mark.usefixtures("group")
def test_of_a_piece(worker: WorkerContext, lease_s: float, outcome: type[Exception]) -> None:
    model = nn.Linear(2, 1)
    fully_shard(model)
    state = ShardedState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    copies = Copies(worker.name, worker.board, worker.journal, worker.send, lambda boundary: None)
    copies.hold(state, 0, 1)
    give_lease(worker, lease_s)
    check = PieceCheck(state, worker.config, 1, heir=False)
    committer = ShardedCommitter(worker, copies, ScriptWrites(), state, 0, check)
    with pytest.raises(outcome):
        committer.skip(FORMATION, [0], [0])
    copies.drop()
    assert state.step == 0


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_that_waits_for_a_copy_is_not_to_blame(
    worker: WorkerContext, tmp_path: Path, answers: bool
) -> None:
    """The rank may wait for as long as a phase of its own work may last.

    A keeper that never answers is recorded.
    """
    model = nn.Linear(2, 1)
    state = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), None, shared=False)
    state.step = 1
    shown: set[Phase] = set()

    def keep(pause_s: float) -> None:
        shown.add(worker.board.phase)
        worker.board.copied(int(answers))
        time.sleep(pause_s)

    board = Board(worker.board.fd, sleep=keep)
    board.copying(True)
    board.due(1)
    board.enter(Phase.OPTIMIZER)
    unused: Any = None
    committer = Committer(replace(worker, board=board), state, unused, None)
    with pytest.raises(GenerationSuperseded):
        committer.skip(FORMATION, AuditResult("batch", (), (0,)), [0])
    assert shown == {Phase.REDUCE}
    assert board.phase is Phase.OPTIMIZER
    failed = [
        record["step"] for record in read_journals(tmp_path) if record.event == Event.COPY_FAILED
    ]
    assert failed == ([] if answers else [1])
