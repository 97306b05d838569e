"""The memory tier of a replicated job: states of ended workers, and copies by the real budget.

It stands for ``daemon/replica_keeper.py``, with the real :class:`CopyBudget`, in a process beside
the agent's: an agent that stands still delays its orders, but no copy. A copy takes time; it is
dropped if its source goes on meanwhile. The state of an ended worker is whole unless it ended while
it wrote it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaoskit.daemon.copy_budget import CopyBudget
from chaoskit.daemon.replica_keeper import keepers
from chaoskit.runtime.step.restore import StateSource, sources
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import (
    Endpoint,
    Healed,
    OfferedSnapshot,
    Plan,
    Recall,
    Sealed,
    SourceFailed,
)
from simulation.engine import Process, Wish, until
from simulation.processes.regroup import Formation, LeaseOver
from simulation.processes.worker import SILENT_S, PeerLost, Worker, advance

if TYPE_CHECKING:
    from simulation.laws.history_laws import Laws
    from simulation.laws.replica_laws import ReplicaLaws
    from simulation.processes.node import Agent
    from simulation.world import World

#: ``commit._COPY_WAIT_S`` and ``commit._DUE_COPY_WAIT_S``
COPY_WAIT_S, DUE_COPY_WAIT_S = 0.02, 0.5
#: Time for which a rank waits in its update for all that shall end there.
DOOM_S = 0.2
#: ``agent._BURIAL_S``
BURIAL_S = 1.0
_LOCAL_S = 0.0003


@dataclass(eq=False)
class Kept:
    """A whole state on a node: a copy, or the state of an ended worker."""

    worker: str
    step: int
    generation: int
    state: int

    @property
    def age(self) -> tuple[int, int]:
        """The step and the generation of the state."""
        return self.step, self.generation


class ReplicaKeeper(Process):
    """The model of ``ReplicaKeeper``, and of its agent's orders, which come in their order.

    Attributes:
        buried: workers of which it knows the end.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent.engine, f"keeper of {agent.name}")
        agent.ends.append(self.kill)
        self._agent, self._world = agent, agent.world
        self.budget: CopyBudget = agent.world.seams.budget()
        self.source = ""
        self.copy: Kept | None = None
        self._former: Kept | None = None  # in the other slot, where it can still be read
        self.left: Kept | None = None
        self.buried: set[str] = set()
        self._plan: Plan | None = None
        self._told_interval = 0, 0
        self._busy = self._rung = False
        self._numbers: dict[Kept, int] = {}

    @property
    def kept(self) -> list[Kept]:
        """The states that can be offered."""
        return [state for state in (self.copy, self.left) if state is not None]

    # -- orders ------------------------------------------------------------------------------------

    def follow(self, plan: Plan) -> None:
        """Follow a new membership of the agent."""
        self.after(_LOCAL_S, self._follow, plan)

    def ended(self, name: str) -> None:
        """Take in the end of a worker, which the agent has noticed."""
        self.after(_LOCAL_S, self._ended, name)

    def went_on(self, step: int) -> None:
        """Take in that a live worker of this node has committed ``step`` steps."""
        self.after(_LOCAL_S, self._forget_older, step)

    def recall(self, order: Recall, until_s: float | None = None) -> None:
        """Offer all states once no worker can write to them any more, like ``Agent._recall``."""
        until_s = self.engine.now_s + BURIAL_S if until_s is None else until_s
        if (
            any(charge.lingers for charge in self._agent.charges.values())
            and self.engine.now_s < until_s
        ):
            self._agent.after(0.001, self.recall, order, until_s)
        else:
            self.after(_LOCAL_S, self._recall, order)

    # -- copies ------------------------------------------------------------------------------------

    def _follow(self, plan: Plan) -> None:
        if self._plan is not None and plan.generation <= self._plan.generation:
            return  # it is only repeated
        self._plan, self._told_interval = plan, (0, 0)
        chosen = keepers(plan, self._world.config).get(self._agent.node, "")
        self.source = (
            chosen if chosen in self._world.workers and self._world.workers[chosen].alive else ""
        )
        self.budget.begin(alone=len({member.node for member in plan.members}) == 1)
        if self.source:
            worker = self._of_source()
            worker.due = 0
            if worker.state_generation == plan.generation:
                self._rang(worker)

    def _of_source(self) -> ReplicaWorker:
        worker = self._world.workers[self.source]
        assert isinstance(worker, ReplicaWorker)
        return worker

    def ring(self, worker: ReplicaWorker) -> None:
        """Take in that a worker has a new state."""
        self.after(_LOCAL_S, self._rang, worker)

    def _rang(self, worker: ReplicaWorker) -> None:
        if worker.name != self.source:
            return
        if self._busy:
            self._rung = True
        elif not self.budget.wants(worker.step, worker.state_generation, self.engine.now_s):
            self._answer(worker)
        elif self.copy is not None and (self.copy.worker, self.copy.step) == (
            worker.name,
            worker.step,
        ):
            self._made(worker, worker.step, None)
        else:
            self._busy = True
            state = Kept(worker.name, worker.step, worker.state_generation, worker.state)
            took_s = self.engine.uniform(0.001, 0.01)
            self.after(took_s, self._finish, worker, state, worker.writes, took_s, self._plan)

    def _finish(
        self, worker: ReplicaWorker, state: Kept, writes: int, took_s: float, plan: Plan
    ) -> None:
        self._busy = False
        whole = writes == worker.writes and not writes % 2
        if whole:
            self._former, self.copy = self.copy, state
        if plan is not self._plan:
            pass  # the budget is that of another membership by now
        elif whole:
            self._made(worker, state.step, took_s)
        else:
            self.budget.failed(state.step)
            self._world.laws.overtaken()
            self._answer(worker)
        if self._rung and self.source:
            self._rung = False
            self._rang(self._of_source())

    def _made(self, worker: ReplicaWorker, step: int, took_s: float | None) -> None:
        self.budget.copied(step, took_s and took_s * self._world.copy_cost)
        interval = worker.state_generation, self.budget.every
        if interval != self._told_interval:
            self._told_interval = interval
            fields = {"worker": self.source, "step": step, "generation": worker.state_generation}
            self._laws.write(
                Event.COPY_INTERVAL, self._agent.node, every=self.budget.every, **fields
            )
        self._answer(worker)

    def _answer(self, worker: ReplicaWorker) -> None:
        worker.due, worker.copied = (
            self.budget.due,
            max(self.budget.seen, self.budget.skipped_until),
        )
        worker.run(worker.notify)

    @property
    def _laws(self) -> ReplicaLaws:
        laws: Laws = self._world.laws
        from simulation.laws.replica_laws import ReplicaLaws

        assert isinstance(laws, ReplicaLaws)
        return laws

    # -- what outlives a worker --------------------------------------------------------------------

    def _ended(self, name: str) -> None:
        worker = self._world.workers.get(name)
        self.buried.add(name)
        self.source = "" if name == self.source else self.source
        if not isinstance(worker, ReplicaWorker) or not worker.state_generation:
            return
        if worker.torn:
            if worker.state_generation == worker.board.generation:
                fields = {
                    "worker": name,
                    "step": worker.board.step,
                    "generation": worker.state_generation,
                }
                self._laws.write(Event.TORN, self._agent.node, **fields)
            return
        left = Kept(name, worker.step, worker.state_generation, worker.state)
        if self.left is None or self.left.age <= left.age:
            self.left = left

    def _forget_older(self, step: int) -> None:
        if self.left is not None and self.left.step < step:
            self.left = None

    def _recall(self, order: Recall) -> None:
        offers = tuple(self._offer(state) for state in self.kept)
        self._agent.after(
            _LOCAL_S, self._agent.tell, Sealed(self._agent.node, offers, order.number)
        )

    def _offer(self, state: Kept) -> OfferedSnapshot:
        number = self._numbers.setdefault(state, len(self._numbers))  # stands for its descriptor
        where = Endpoint("host", "", 0, self._agent.pid, number)
        return OfferedSnapshot(
            self._agent.node,
            state.worker,
            *state.age,
            1,
            format(state.state, "x"),
            where,
            inode=number + 1,
        )

    def read(self, snapshot: OfferedSnapshot) -> Kept | None:
        """Return the state that was offered as ``snapshot``, or None if it is gone."""
        states = [*self.kept, *([self._former] if self._former is not None else [])]
        matches = [
            state for state in states if self._numbers.get(state) == snapshot.endpoint.arena_fd
        ]
        return matches[0] if matches and snapshot.endpoint.pid == self._agent.pid else None


@dataclass(eq=False)
class Doom:
    """A fault by which ranks of a world end in one update, all at the same moment.

    Args:
        spared: number of ranks that do not. They commit the step, and are lost with their nodes at
            that moment.
    """

    spared: int
    generation: int = 0
    step: int = -1
    victims: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    standing: int = 0
    over: bool = False

    def takes(self, worker: ReplicaWorker, formation: Formation) -> bool:
        """Return whether ``worker`` is to end in its update. The first call chooses the update."""
        plan = formation.plan
        if not self.victims and not self.over and len(plan.members) > self.spared:
            self.generation, self.step = plan.generation, worker.step
            names = [member.worker for member in plan.members]
            place = len(names) - self.spared  # the last one: the first ones copy
            self.victims, self.others = tuple(names[:place]), tuple(names[place:])
        own = (plan.generation, worker.step) == (self.generation, self.step)
        return not self.over and own and worker.name in self.victims


class ReplicaWorker(Worker):
    """A worker of which the state outlives it.

    Attributes:
        writes: a counter that is odd while its state is written.
        updating: it is in an update of the training, not in a restore.
        state_generation: the generation that trains on its state; 0 before the first.
        copied, due: words of its board.
    """

    def __init__(self, world: World, agent: Agent, name: str) -> None:
        self.writes, self.updating = 0, False
        self.state_generation = 0
        self.copied, self.due = -1, 0
        super().__init__(world, agent, name)
        self.ends.append(lambda: world.laws.ended(self))

    @property
    def torn(self) -> bool:
        """True while its state is written, or if it ended meanwhile."""
        return bool(self.writes % 2)

    def _stand_in(self, formation: Formation) -> None:
        self.state_generation = formation.plan.generation
        self._ring()
        if formation.plan.generation > 1:
            self.send(Healed(self.name, formation.plan.generation))

    def _ring(self) -> None:
        self.agent.kept.ring(self)

    def _sources(self, formation: Formation) -> list[StateSource]:
        return sources(formation)

    def _pull(self, formation: Formation, source: StateSource) -> Generator[Wish, None, None]:
        snapshot = source.snapshot
        self.writes += 1
        try:
            if snapshot is None:
                yield from super()._pull(formation, source)
            else:
                with self.regrouper.advance(formation):
                    yield from self._read(snapshot)
                    self.regrouper.course.step = self.step
                self.world.laws.healed(self, formation)
        except PeerLost:
            if self.step >= 0:
                self.writes += 1
            raise
        self.writes += 1

    def _read(self, snapshot: OfferedSnapshot) -> Generator[Wish, None, None]:
        self._work = {}
        yield self.engine.uniform(0.002, 0.06)
        keeper = self.world.agents[snapshot.node].kept
        if keeper.frozen:
            yield from until(self, lambda: not keeper.frozen, SILENT_S)
        kept = keeper.read(snapshot) if keeper.alive and not keeper.frozen else None
        if kept is None:
            self.send(SourceFailed(self.name, snapshot, False, "gone"))
            raise PeerLost(snapshot.node)
        self.step, self.state = kept.step, kept.state

    def _commit(
        self, formation: Formation, reduced: tuple[dict[int, int], int]
    ) -> Generator[Wish, None, None]:
        sums, vote = reduced
        self.enter(Phase.OPTIMIZER)
        step = self.step
        limit_s = DUE_COPY_WAIT_S if 0 < self.due <= step else COPY_WAIT_S
        if self.agent.kept.source == self.name:
            yield from until(self, lambda: self.copied >= step, limit_s)
        if self.engine.now_s > self.agent.lease_until_s:
            self.world.laws.excused_nodes.add(self.agent.node)
            raise LeaseOver("the lease of this node has run out")
        with self.regrouper.advance(formation):
            self.writes, self.updating = self.writes + 1, True
            yield self.engine.uniform(0.0005, 0.005)
            yield from self._meet_doom(formation)
            self.state = advance(self.state, sums)
            self.step += 1
            self.regrouper.course.step = self.step
            self.writes, self.updating = self.writes + 1, False
        self.world.laws.committed(self, formation)
        self.board.step, self._work = self.step, {}
        self.board.commits += 1
        self.board.trained_in = self.board.generation
        self._ring()
        self.enter(Phase.OUTSIDE)
        self.regrouper.move_on(vote)

    def _meet_doom(self, formation: Formation) -> Generator[Wish, None, None]:
        doom = self.world.doom
        if doom is None or not doom.takes(self, formation):
            return
        doom.standing += 1
        world, spared = self.world, [self.world.workers[name] for name in doom.others]
        ready = yield from until(
            self,
            lambda: (
                doom.standing == len(doom.victims)
                and all(worker.step > doom.step for worker in spared)
            ),
            DOOM_S,
        )
        if ready and not doom.over:
            doom.over = True
            world.carry_out(doom)
            yield lambda: False
        doom.over = True
