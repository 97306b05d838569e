"""The newest membership as the harness hears of it, to find the process that a fault is meant for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from chaoskit.wire.messages import Heartbeat, Plan, WorkerLost, WorkerReady


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a rank."""

    worker: str
    node: str
    rank: int
    pid: int


class Roster:
    """Listens to everything the coordinator says."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._places: dict[str, tuple[str, int]] = {}  # worker -> node and pid
        self._lost: set[str] = set()
        self.step = 0  # committed by the rank that is furthest
        self.first_commit_s: float | None = (
            None  # when the first committed step was heard of, on the monotonic clock
        )

    def hear(self, message: Any) -> None:
        """Take in one message."""
        match message:
            case Plan():
                self._plan = message
            case WorkerReady(worker, node, endpoint):
                self._places[worker] = (node, endpoint.pid)
            case WorkerLost(worker):
                self._lost.add(worker)
            case Heartbeat(_, beats):
                self.step = max([self.step, *(beat.step for beat in beats)])
                if self.first_commit_s is None and any(beat.commits for beat in beats):
                    self.first_commit_s = time.monotonic()

    @property
    def generation(self) -> int:
        """Of the newest membership; 0 before the first."""
        return self._plan.generation if self._plan else 0

    @property
    def places(self) -> dict[int, str]:
        """Rank -> node, in the newest membership."""
        return {member.rank: member.node for member in self._plan.members} if self._plan else {}

    def holder(self, rank: int | str) -> Holder | None:
        """The holder of ``rank``, or of the role ``most_shards``; None if it is known to be lost."""
        if self._plan is None:
            return None
        number = self._plan.heaviest if isinstance(rank, str) else rank
        member = next((member for member in self._plan.members if member.rank == number), None)
        if member is None or member.worker in self._lost:
            return None
        return Holder(member.worker, member.node, member.rank, member.endpoint.pid)

    def is_lost(self, worker: str) -> bool:
        """Whether ``worker`` was given up."""
        return worker in self._lost

    def member(self, worker: str) -> Holder | None:
        """``worker``, if it has a rank and is not known to be lost."""
        member = self._plan.member(worker) if self._plan else None
        return None if member is None else self.holder(member.rank)

    def rank_of(self, worker: str) -> int | None:
        """The rank of ``worker`` in the newest membership, lost or not; None if it has none."""
        member = self._plan.member(worker) if self._plan else None
        return None if member is None else member.rank

    def pid_of(self, worker: str) -> int | None:
        """The process that ``worker`` is; None until it has reported for duty."""
        return self._places[worker][1] if worker in self._places else None

    def node_of(self, worker: str) -> str:
        """Where ``worker`` runs; by its name until it has reported for duty."""
        return self._places[worker][0] if worker in self._places else worker.rpartition(".")[0]
