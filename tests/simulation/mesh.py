"""The process group of a generation and its reduction: in every rank's hands, or broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chaoskit.wire.messages import Plan

if TYPE_CHECKING:
    from simulation.processes.worker import Worker
    from simulation.world import World


@dataclass
class Contribution:
    """What one rank brings to a step: the sums of its shards, each computed from its state, and its vote."""

    state: int
    shards: dict[int, int]
    vote: int


@dataclass
class Round:
    """One step's reduction."""

    brought: dict[int, Contribution] = field(default_factory=dict)
    spread: int = 0
    done: set[int] = field(default_factory=set)


class Mesh:
    """All ranks of one generation, connected with each other (``runtime/group/process_group.py`` over gloo).

    First every rank sends what the others need to finish their segments, then each spreads its own. A rank that ends
    or leaves in between leaves some of the others with everything, and some without.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.engine = world.engine
        self.size = len(plan.members)
        self.joined: dict[int, Worker] = {}
        self.broken: set[int] = set()  # ranks that have seen an end of a connection
        self.whole = True  # nobody has left
        self.rounds: dict[int, Round] = {}
        self._nodes = [member.node for member in plan.members]
        self._held: list[tuple[int, int, Callable[[], None]]] = []  # between two ranks

    def join(self, rank: int, worker: Worker) -> None:
        """``rank`` has found all the others' addresses."""
        self.joined[rank] = worker
        worker.ends.append(lambda: self.leave(rank))

    def leave(self, rank: int) -> None:
        """``Group.abort``, or the end of the process."""
        if self.joined.pop(rank, None) is not None:
            self.whole = False
            for other in tuple(self.joined):
                self._through(rank, other, lambda other=other: self._soon(self._break, other))

    def _break(self, rank: int) -> None:
        worker = self.joined.get(rank)
        if worker is not None and rank not in self.broken:
            self.broken.add(rank)
            worker.run(worker.notify)

    def contribute(self, rank: int, step: int, contribution: Contribution) -> Round:
        """``rank`` starts to reduce ``step``."""
        one = self.rounds.setdefault(step, Round())
        one.brought[rank] = contribution
        if len(one.brought) == self.size:
            self.world.laws.reduced(self, step, one)
            for other in tuple(self.joined):
                self._from_all(other, lambda other=other: self._come(other, one))
        return one

    def _come(self, rank: int, one: Round) -> None:
        """``rank`` has what it needs to finish its segments."""
        worker = self.joined.get(rank)
        if worker is not None:
            worker.after(self.engine.uniform(0.0002, 0.004), self._spread, rank, one)

    def _spread(self, rank: int, one: Round) -> None:
        if rank not in self.joined or rank in self.broken:
            return
        one.spread += 1
        if one.spread == self.size:
            for other in tuple(self.joined):
                self._from_all(other, lambda other=other: self._soon(self._complete, other, one))

    def _complete(self, rank: int, one: Round) -> None:
        worker = self.joined.get(rank)
        if worker is not None and rank not in self.broken:
            one.done.add(rank)
            worker.run(worker.notify)

    # -- the network ----------------------------------------------------------------------------------------------

    def _soon(self, act: Callable[..., None], *arguments: Any) -> None:
        self.engine.after(self.engine.uniform(0.0002, 0.005), act, *arguments)

    def apart(self, rank: int) -> bool:
        """Whether ``rank`` cannot speak to one of the others."""
        return any(self.world.apart(self._nodes[rank], node) for node in self._nodes)

    def _through(self, source: int, target: int, act: Callable[[], None]) -> None:
        """When the network lets it."""
        if self.world.apart(self._nodes[source], self._nodes[target]):
            self._held.append((source, target, act))
        else:
            act()

    def _from_all(self, rank: int, act: Callable[[], None]) -> None:
        """When all others' data can reach ``rank``."""
        away = next(
            (
                other
                for other in range(self.size)
                if self.world.apart(self._nodes[other], self._nodes[rank])
            ),
            -1,
        )
        if away < 0:
            act()
        else:
            self._held.append((away, rank, lambda: self._from_all(rank, act)))

    def release(self) -> None:
        """The network may have healed."""
        held, self._held = self._held, []
        for source, target, act in held:
            self._through(source, target, act)
