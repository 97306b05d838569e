"""Which workers are started where, and what the loss of a worker or of its node means.

Workers that end before they are ready spend no part of the failure budget once the job trains: they are started again,
ever more slowly.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from chaoskit.coordinator.membership.events import Action, SetAside, StartWorker, StopWorker
from chaoskit.coordinator.membership.roll import Roll
from chaoskit.vocabulary import SUSPECTED_CAUSES

#: Pause before a worker is started again when two or more in a row did not become ready; doubled each time.
PAUSE_S = 0.25
PAUSE_MAX_S = 30.0
#: The first start waits so long for nodes on probation to prove themselves; they take some tenths of a second.
PROOF_S = 2.0


class Staffing(Roll):
    """Keeps as many workers going as ranks and spares are wanted, on nodes that can be trusted with them."""

    # -- starts ---------------------------------------------------------------------------------------------------

    def _start_missing(self, lost_on: list[str], now_s: float) -> list[Action]:
        """Start what is missing from the target, each worker where the fewest live, rather where one was lost."""
        starts: list[Action] = []
        kept_out = self._left_out | self._idle | self._unfit
        trusted = self._strikes.trusted([node for node in self._nodes if node not in kept_out])
        if now_s < self._start_after_s:
            return starts
        target = self._size + self._config.spares if self._launched and trusted else 0
        there = sum(
            node not in self._idle for node in self._hosts.values()
        )  # who leaves may wait for its successor
        for index in range(target - there):
            hosts, lost_here = list(self._hosts.values()), lost_on[index : index + 1]
            node = min(trusted, key=lambda node: (hosts.count(node), node not in lost_here))
            number = self._started.get(node, 0)
            self._started[node] = number + 1
            self._hosts[f"{node}.{number}"] = node
            self._begun_s[f"{node}.{number}"] = now_s
            starts.append(StartWorker(node, f"{node}.{number}"))
        return starts

    def _may_start(self, now_s: float) -> bool:
        """Whether a run without a past has its nodes, and those on probation have had their time."""
        if len(self._nodes) < self._config.nodes or self._record_lost:
            return False
        self._full_s = min(self._full_s, now_s)
        return self._on_probation.isdisjoint(self._nodes) or now_s >= self._full_s + PROOF_S

    def _may_launch(self, now_s: float) -> bool:
        """After a loss of the record: all nodes that come have joined by now, and workers are spread over them.

        Not as many need come as there were: the copies are with those that do.
        """
        enough = len(self._nodes) >= self._config.nodes
        return enough or (self._revival.active and not self._revival.is_asking(now_s))

    def _forget_fitness(self, node: str) -> None:
        """Whoever comes under this name next looks at itself anew. What the run was told of it stays."""
        config = self._config
        if node in config.quarantined:
            return
        self._unfit.discard(node)
        if node in config.on_probation:
            self._unfit.add(node)
            self._on_probation.add(node)

    # -- losses ---------------------------------------------------------------------------------------------------

    def _lose(self, workers: list[str], cause: str, now_s: float) -> list[Action]:
        nodes = [self._hosts.pop(worker) for worker in workers]
        for worker, node in zip(workers, nodes, strict=True):
            if self._plan is not None and self._plan.member(worker) is not None:
                if self._config.job.sharded:
                    self._revival.lose_member(now_s)
                else:
                    self._revival.ask_anew(node)  # it may have had the state, and leaves it there
            self._ready.pop(worker, None)
            self._begun_s.pop(worker, None)
            self._holders.discard(worker)
            self._stood_in.pop(worker, None)
            self._done.discard(worker)
        return [
            *(StopWorker(worker, cause) for worker in workers),
            *self._start_missing(nodes, now_s),
        ]

    def _lose_nodes(
        self, nodes: Collection[str], cause: str, now_s: float, *, doubt: bool = True
    ) -> list[Action]:
        """All workers of ``nodes`` are lost; ``doubt``: they may have met in their generation, and cannot say so."""
        workers = self._staff(nodes)
        self._doubt(workers if doubt else [])
        return self._lose(workers, cause, now_s)

    def _staff(self, nodes: Collection[str]) -> list[str]:
        """Live workers of ``nodes``, in order of their start."""
        return [worker for worker, host in self._hosts.items() if host in nodes]

    def _vacate(self, now_s: float) -> list[Action]:
        """End what is on nodes that are to idle, but for members: these leave at a step boundary.

        Members of a sharded job cannot: what they hold is restored from its copies.
        """
        sharded = self._config.job.sharded
        leaving = self._policies.leaving_at_once(self._hosts, self._idle, set(self.crew))
        leaving += self._going if sharded else []
        if sharded:
            self._doubt(leaving)
        return self._lose(leaving, "left", now_s)

    def _strike(self, node: str, now_s: float) -> list[Action]:
        return [SetAside(node)] if self._strikes.strike(node, now_s) else []

    def _costs(self, worker: str) -> bool:
        """Return whether the loss of ``worker`` spends a part of the failure budget."""
        return worker in self._ready or not self._trained

    def _costs_of_nodes(self, nodes: Collection[str], now_s: float) -> int:
        """Return the part of the failure budget that the loss of ``nodes`` with their workers spends.

        A start that was decided at this very moment was not ordered yet, and spends nothing: of two nodes that are lost
        together, the first has workers started on the second.
        """
        ordered = (
            worker for worker in self._staff(nodes) if self._begun_s.get(worker, -math.inf) < now_s
        )
        return sum(self._costs(worker) for worker in ordered)

    def _count_loss(self, worker: str, cause: str, now_s: float) -> None:
        if self._costs(worker):
            self._losses += not (self._trained and cause in SUSPECTED_CAUSES)
            return
        self._failed_starts += 1
        if self._failed_starts > 1:
            self._start_after_s = now_s + min(
                PAUSE_MAX_S, PAUSE_S * 2.0 ** (self._failed_starts - 2)
            )

    def _note_trained(self, generation: int) -> None:
        """A rank committed a step in ``generation``, of which it is not known that it settled.

        All its members had the state then. Other workers lack at least that step, unless they took the state over in a
        later generation: one that was to leave has become a member again because the others could not say that they
        went on without it.
        """
        members = self._unsettled.get(generation)
        if members is None or self._config.job.sharded or generation == self.generation:
            return
        self._trained, self._trained_in = True, max(self._trained_in, generation)
        later = {worker for worker, stood_in in self._stood_in.items() if stood_in > generation}
        self._holders = {worker for worker in self._hosts if worker in members} | (
            self._holders & later
        )

    def _forget_outlived(self) -> None:
        """The last generation has worked. Those before it count while a holder may not have stood in a later one.

        It has what it had as a member of an earlier one, until it has taken over what the others committed without it.
        """
        oldest = min(
            (self._stood_in.get(worker, 0) for worker in self._holders), default=self.generation
        )
        self._unsettled = {
            one: members
            for one, members in self._unsettled.items()
            if oldest < one < self.generation
        }

    def _doubt(self, workers: list[str]) -> None:
        """These are lost, and cannot say any more whether the first generation settled: the others may have trained.

        A replica that has shows it, and the others follow. Ranks that hold pieces would all begin anew.
        """
        if not self._trained and not set(workers).isdisjoint(self.members):
            assert self._base is not None
            old = [worker for worker in self.members if self._base.member(worker)]
            self._trained = True
            if not self._config.job.sharded:
                self._holders.update(
                    old or self.members
                )  # who came later has taken nothing over that we know of
