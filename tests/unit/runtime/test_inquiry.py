"""Accusations by a rank that cannot read the news of all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chaoskit.config import RunConfig
from chaoskit.job import resolve_job
from chaoskit.journal import Journal, read_journals
from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.integrity.nonfinite_guard import NonFiniteGuard
from chaoskit.runtime.integrity.rank_checks import RankChecks
from chaoskit.runtime.integrity.voting import RankSeal
from chaoskit.runtime.reduction.choice import CorruptSegment
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.script_writes import ScriptWrites
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.inquiry import Inquiry
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Accuse, Endpoint, Member, Message, Plan

WORLD, ME = 4, 3


@pytest.mark.parametrize(
    ("complaints", "unread", "accused"),
    [
        ([2, 2, -1, -1], (), ["w2"]),
        ([2, -1, -1, -1], (), ["w0"]),  # all other ranks read rank 2 well
        ([2, 2, -1, -1], (1,), []),  # rank 0 seems to be the only one
        ([2, -1, -1, -1], (1,), []),
        ([2, 2, -1, 2], (1,), ["w2"]),
    ],
)
def test_who_cannot_read_all_complaints_accuses_only_whom_two_name(
    tmp_path: Path, complaints: list[int], unread: tuple[int, ...], accused: list[str]
) -> None:
    """The complaint of a rank is unknown if its news arrive damaged; this differs from no
    complaint.
    """
    sent: list[Message] = []
    config, journal = RunConfig(job=resolve_job("gpt")), Journal(tmp_path, "w3")
    unused: Any = _Unused()
    context = WorkerContext(
        f"w{ME}",
        config,
        journal,
        unused,
        unused,
        unused,
        unused,
        sent.append,
        unused,
        unused,
        token="",
        host="",
        disk=tmp_path,
    )
    model = nn.Linear(2, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), None, shared=False)
    inquiry = Inquiry(
        context, replica, NonFiniteGuard(config), RankChecks(replica, config, ScriptWrites())
    )
    endpoint = Endpoint("", "", 0, 0, -1)
    members = tuple(
        Member(rank, f"w{rank}", f"node{rank}", endpoint, (rank,)) for rank in range(WORLD)
    )
    seals = [
        RankSeal() if rank in unread else RankSeal(complaint=1 + named)
        for rank, named in enumerate(complaints)
    ]
    damaged = CorruptSegment(unread or (2,), torch.zeros(WORLD, 1, dtype=torch.float64), unread)
    inquiry.note_corrupt_transfer(
        Formation(Plan(1, members, abort=False), members[ME]), damaged, seals
    )
    journal.close()
    assert [message.accused for message in sent if isinstance(message, Accuse)] == (
        [tuple(accused)] if accused else []
    )
    assert [
        record["worker"] for record in read_journals(tmp_path) if record.event == Event.CORRUPT
    ] == [f"w{ME}"]


class _Unused:
    """A connection of the worker that must not be used here."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")
