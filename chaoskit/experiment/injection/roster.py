"""The newest membership as the harness knows it, used to find the process that a fault strikes.

-> coordinator/membership/: where ranks are assigned and losses decided; the harness only follows.
"""

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
    """The ranks, workers and processes of a job, from the messages of its coordinator.

    Attributes:
        step: the highest number of committed steps in any heartbeat; 0 before the first.
        first_commit_s: the monotonic time at which the first heartbeat with a committed step came;
            None before.
    """

    def __init__(self) -> None:
        self._newest_plan: Plan | None = None
        self._nodes_and_pids: dict[str, tuple[str, int]] = {}  # worker -> node and pid
        self._lost_workers: set[str] = set()
        self.step = 0
        self.first_commit_s: float | None = None

    def hear(self, message: Any) -> None:
        """Update the roster from a plan, a loss, a heartbeat or a worker that is ready.

        Other messages are ignored. A worker that is lost stays lost.
        """
        match message:
            case Plan():
                self._newest_plan = message
            case WorkerReady(worker, node, endpoint):
                self._nodes_and_pids[worker] = (node, endpoint.pid)
            case WorkerLost(worker):
                self._lost_workers.add(worker)
            case Heartbeat(_, beats):
                self.step = max([self.step, *(beat.step for beat in beats)])
                if self.first_commit_s is None and any(beat.commits for beat in beats):
                    self.first_commit_s = time.monotonic()

    @property
    def generation(self) -> int:
        """The generation of the newest membership; 0 before the first."""
        return self._newest_plan.generation if self._newest_plan else 0

    @property
    def places(self) -> dict[int, str]:
        """Rank -> node, in the newest membership."""
        return (
            {member.rank: member.node for member in self._newest_plan.members}
            if self._newest_plan
            else {}
        )

    def holder(self, rank: int | str) -> Holder | None:
        """Return the process with a rank in the newest membership, or None.

        None is also returned if that process is known to be lost.

        Args:
            rank: the number of the rank; any text stands for the rank with most shards.
        """
        if self._newest_plan is None:
            return None
        rank_number = self._newest_plan.heaviest if isinstance(rank, str) else rank
        member = next(
            (member for member in self._newest_plan.members if member.rank == rank_number), None
        )
        if member is None or member.worker in self._lost_workers:
            return None
        return Holder(member.worker, member.node, member.rank, member.endpoint.pid)

    def is_lost(self, worker: str) -> bool:
        """Return whether the coordinator has reported that ``worker`` is lost."""
        return worker in self._lost_workers

    def member(self, worker: str) -> Holder | None:
        """Return ``worker``'s process if it has a rank in the newest membership and is not lost.

        Otherwise None is returned.
        """
        member = self._newest_plan.member(worker) if self._newest_plan else None
        return None if member is None else self.holder(member.rank)

    def rank_of(self, worker: str) -> int | None:
        """Return the rank of ``worker`` in the newest membership, lost or not, or None."""
        member = self._newest_plan.member(worker) if self._newest_plan else None
        return None if member is None else member.rank

    def pid_of(self, worker: str) -> int | None:
        """Return the process id of ``worker``, or None until the worker is ready."""
        return self._nodes_and_pids[worker][1] if worker in self._nodes_and_pids else None

    def node_of(self, worker: str) -> str:
        """Return the node of ``worker``; before the worker is ready, the node in its name."""
        return (
            self._nodes_and_pids[worker][0]
            if worker in self._nodes_and_pids
            else worker.rpartition(".")[0]
        )
