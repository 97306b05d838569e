"""A rank without a source of the newer state: it does not give up the state that it has."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nodes.network import HOST, refusing
from support.waiting import LIMIT_S, wait_until
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, though not in __all__
from torch.utils.data import TensorDataset

from chaoskit.config import RunConfig
from chaoskit.job import resolve_job
from chaoskit.journal import Journal, read_journals
from chaoskit.process.progress_board import Board
from chaoskit.runtime.group.generations import MemberProgress
from chaoskit.runtime.group.process_group import Group
from chaoskit.runtime.group.regroup import Regrouper
from chaoskit.runtime.group.rendezvous import GenerationSuperseded
from chaoskit.runtime.step.callbacks import Callbacks
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.hooks import Hooks
from chaoskit.runtime.step.trainer import ReplicatedTrainer
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, GroupBroken, Member, Message, Plan

NOWHERE = Endpoint("", "", 0, 0, -1)


class Rendezvous:
    """The coordinator's store, in which rank 1 reports that it has committed a step, and then is
    lost.
    """

    def exchange(self, generation: int, name: str, rank: int, value: bytes) -> tuple[bytes, ...]:
        return (value, MemberProgress(1, 1, False).encode()) if generation == 1 else (value,)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def train(trainer: ReplicatedTrainer, raised: list[BaseException]) -> None:
    """Train a step of the job, after the rehearsal."""
    data = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
    model = nn.Linear(2, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        while trainer.step < 1:
            with trainer.transaction() as step:
                for shard in step.shards(data, batch_size=1):
                    inputs, targets = shard.batch
                    step.backward(nn.functional.mse_loss(model(inputs), targets))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
        raised.append(error)


def test_a_rank_that_cannot_be_healed_keeps_its_state_for_the_next_plan(tmp_path: Path) -> None:
    """The only member that has the newer state is lost, and no plan follows for long: the rank
    waits, and trains on.

    An error at this point would end the rank, and with it the last state.
    """
    sent: list[Message] = []
    raised: list[BaseException] = []
    ended = threading.Event()
    journal, board = Journal(tmp_path, "node0.0"), Board.create()

    def build(rendezvous: Any, plan: Plan, me: Member) -> Group:
        if len(plan.members) > 1:
            ended.wait()  # rank 1 does not join its group any more
        return Group(HashStore(), 0, 1, torch.device("cpu"), address=HOST, timeout_s=LIMIT_S)

    regrouper = Regrouper(
        "node0.0",
        journal,
        Rendezvous,
        build,
        lambda generation: None,
        lambda generation, detail: None,
    )
    worker = WorkerContext(
        "node0.0",
        RunConfig(job=resolve_job("gpt"), nodes=1, shards=1),
        journal,
        board,
        hooks=Hooks("node0.0", None, board, journal),
        regrouper=regrouper,
        callbacks=Callbacks(journal, board),
        send=sent.append,
        serve_state=lambda replica: NOWHERE,
        report_ready=lambda endpoint: None,
        token="",
        host=HOST,
        disk=tmp_path,
    )
    trainer = ReplicatedTrainer(worker)
    me = Member(0, "node0.0", "node0", NOWHERE, (0,))
    with refusing() as held:  # the address of a rank that has ended
        endpoint = Endpoint("another host", HOST, held.getsockname()[1], 0, -1)
        regrouper.offer(Plan(1, (me, Member(1, "node1.0", "node1", endpoint, ())), abort=True))
        thread = threading.Thread(target=train, args=(trainer, raised), daemon=True)
        thread.start()
        wait_until(
            lambda: raised or any(isinstance(message, GroupBroken) for message in sent),
            "the rank to give up",
        )
    assert not raised
    assert trainer.step == 0
    regrouper.offer(Plan(2, (me,), abort=True))
    thread.join(LIMIT_S)
    ended.set()
    assert not thread.is_alive()
    assert not raised
    assert trainer.step == 1
    journal.close()


def test_a_rank_that_is_told_to_go_before_its_step_boundary_has_left(tmp_path: Path) -> None:
    """The members of the next world need not wait for it to begin that world: its agent may receive
    the order first.
    """
    journal, ended = Journal(tmp_path, "node0.0"), threading.Event()

    def build(rendezvous: Any, plan: Plan, me: Member) -> Group:
        ended.wait()
        raise RuntimeError("the test is over")

    regrouper = Regrouper(
        "node0.0",
        journal,
        Rendezvous,
        build,
        lambda generation: None,
        lambda generation, detail: None,
    )
    me, other = (
        Member(rank, f"node{rank}.0", f"node{rank}", NOWHERE, (rank,)) for rank in range(2)
    )
    regrouper.offer(Plan(1, (me, other), abort=True))
    regrouper.offer(Plan(2, (other,), abort=False, leavers=("node0.0",)))
    regrouper.note_left()  # the rank may be a member again before it comes to the boundary
    assert list(read_journals(tmp_path)) == []
    for _ in range(2):
        regrouper.note_left(ordered=True)
    (record,) = read_journals(tmp_path)
    assert (record.event, record["generation"], record["rank"]) == (Event.LEFT, 2, 0)
    ended.set()
    journal.close()


def test_a_group_that_is_built_too_late_is_closed(tmp_path: Path) -> None:
    """Another plan came while the group was built: no step will use the group, and its sockets must
    be closed.
    """
    journal, closed = Journal(tmp_path, "node0.0"), threading.Event()
    me = Member(0, "node0.0", "node0", NOWHERE, (0,))

    class Noting(Group):
        """A group that records its end."""

        def close(self) -> None:
            super().close()
            closed.set()

    def build(rendezvous: Any, plan: Plan, me: Member) -> Group:
        if plan.generation > 1:
            raise RuntimeError("the test is over")
        group = Noting(HashStore(), 0, 1, torch.device("cpu"), address=HOST, timeout_s=LIMIT_S)
        regrouper.offer(Plan(2, (me,), abort=True))
        return group

    regrouper = Regrouper(
        "node0.0",
        journal,
        Rendezvous,
        build,
        lambda generation: None,
        lambda generation, detail: None,
    )
    regrouper.offer(Plan(1, (me, Member(1, "node1.0", "node1", NOWHERE, ())), abort=True))
    wait_until(closed.is_set, "the end of the group")
    journal.close()


def test_a_group_that_cannot_be_built_is_reported_whatever_the_reason(tmp_path: Path) -> None:
    """The report comes for every error; the worker would otherwise be ended two seconds later for
    not following the plan.
    """
    journal, failed = Journal(tmp_path, "node0.0"), list[tuple[int, str]]()
    me = Member(0, "node0.0", "node0", NOWHERE, (0,))

    def build(rendezvous: Any, plan: Plan, me: Member) -> Group:
        raise ValueError("a group of no ranks")

    regrouper = Regrouper(
        "node0.0",
        journal,
        Rendezvous,
        build,
        lambda generation: None,
        lambda *reason: failed.append(reason),
    )
    regrouper.offer(Plan(1, (me,), abort=True))
    formation = regrouper.membership()
    wait_until(lambda: failed, "a report of the failure")
    assert failed == [(1, "ValueError: a group of no ranks")]
    with pytest.raises(GenerationSuperseded):
        regrouper.group(formation)
    journal.close()
