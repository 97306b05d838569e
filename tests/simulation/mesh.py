"""The process group of a generation and its reduction, which completes on some ranks or on all."""

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
    """The contribution of a rank to a step: its state, the sums of its shards, and its vote."""

    state: int
    shards: dict[int, int]
    vote: int


@dataclass
class Round:
    """The reduction of a step.

    Attributes:
        brought: rank -> its contribution.
        spread: number of ranks that have sent their segments.
        done: ranks that have the whole result.
    """

    brought: dict[int, Contribution] = field(default_factory=dict)
    spread: int = 0
    done: set[int] = field(default_factory=set)


class Mesh:
    """All ranks of one generation, connected with each other (``runtime/group/process_group.py`` over gloo).

    Every rank first sends the others what they need to finish their segments, then its own segment.
    If a rank ends or leaves in between, some of the others have the whole result and some do not.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.engine = world.engine
        self.size = len(plan.members)
        self.joined: dict[int, Worker] = {}
        self.broken: set[int] = set()  # ranks that have noticed the end of a connection
        self.whole = True  # no rank has left
        self.rounds: dict[int, Round] = {}
        self._nodes = [member.node for member in plan.members]
        self._held: list[tuple[int, int, Callable[[], None]]] = []  # between two ranks

    def join(self, rank: int, worker: Worker) -> None:
        """Add ``rank``, which knows the addresses of all others."""
        self.joined[rank] = worker
        worker.ends.append(lambda: self.leave(rank))

    def leave(self, rank: int) -> None:
        """Remove ``rank``, as by ``Group.abort`` or the end of the process."""
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
        """Start the reduction of ``step`` on ``rank`` and return it."""
        round_ = self.rounds.setdefault(step, Round())
        round_.brought[rank] = contribution
        if len(round_.brought) == self.size:
            self.world.laws.reduced(self, step, round_)
            for other in tuple(self.joined):
                self._from_all(other, lambda other=other: self._come(other, round_))
        return round_

    def _come(self, rank: int, round_: Round) -> None:
        """Let ``rank`` finish its segments: it has all that it needs for them."""
        worker = self.joined.get(rank)
        if worker is not None:
            worker.after(self.engine.uniform(0.0002, 0.004), self._spread, rank, round_)

    def _spread(self, rank: int, round_: Round) -> None:
        if rank not in self.joined or rank in self.broken:
            return
        round_.spread += 1
        if round_.spread == self.size:
            for other in tuple(self.joined):
                self._from_all(other, lambda other=other: self._soon(self._complete, other, round_))

    def _complete(self, rank: int, round_: Round) -> None:
        worker = self.joined.get(rank)
        if worker is not None and rank not in self.broken:
            round_.done.add(rank)
            worker.run(worker.notify)

    # -- the network -------------------------------------------------------------------------------

    def _soon(self, act: Callable[..., None], *arguments: Any) -> None:
        self.engine.after(self.engine.uniform(0.0002, 0.005), act, *arguments)

    def apart(self, rank: int) -> bool:
        """Return whether ``rank`` cannot reach one of the others."""
        return any(self.world.apart(self._nodes[rank], node) for node in self._nodes)

    def _through(self, source: int, target: int, act: Callable[[], None]) -> None:
        """Call ``act`` as soon as the network lets ``source`` reach ``target``."""
        if self.world.apart(self._nodes[source], self._nodes[target]):
            self._held.append((source, target, act))
        else:
            act()

    def _from_all(self, rank: int, act: Callable[[], None]) -> None:
        """Call ``act`` as soon as the data of all others can reach ``rank``."""
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
        """Retry what waits for the network, which may have healed."""
        held, self._held = self._held, []
        for source, target, act in held:
            self._through(source, target, act)
