"""The additional laws for every history of a sharded job."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from chaoskit.wire.messages import EndJob, Message, Plan
from simulation.laws.history_laws import Laws
from simulation.processes.sharded import SILENT_S

if TYPE_CHECKING:
    from simulation.mesh import Mesh, Round
    from simulation.processes.coordinator import Coordinator
    from simulation.processes.pieces import Age, Copy
    from simulation.processes.regroup import Formation
    from simulation.processes.worker import Worker
    from simulation.world import World

#: Committed steps that may be taken again: ranks may differ by one step, and a copy may be under
#: way.
LOST_STEPS_MAX = 1
#: A node that has been in contact for so long without a break has had time to report its copies.
CALM_S = 0.5


class ShardedLaws(Laws):
    """The laws of a sharded job, in which the ranks must take over their pieces together."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._begun: dict[
            int, tuple[int, int]
        ] = {}  # generation -> step and state with which its first member began
        self.unreadable: set[int] = set()  # generations in which a copy could not be read
        self.stored_at_end: Age | None = None
        self._taken: dict[int, set[str]] = defaultdict(
            set
        )  # generation -> workers that have taken over a piece

    # -- where a generation begins -----------------------------------------------------------------

    def _published(self, coordinator: Coordinator, plan: Plan) -> None:
        super()._published(coordinator, plan)
        ages = [snapshot.age for snapshot in plan.restore]
        step = max(ages)[0] if ages else 0
        anew = not plan.restore and bool(self.settled)
        self.require(
            not anew or self.high <= 2,
            f"generation {plan.generation} begins anew after step {self.high}",
        )
        cuts = {snapshot.pieces for snapshot in plan.restore if snapshot.age == max(ages)}
        self.require(
            len(cuts) <= 1,
            f"generation {plan.generation} begins with pieces that were cut in two ways",
        )
        stored = self.newest_stored(coordinator)
        behind = stored[0] - step if stored else 0
        allowed = LOST_STEPS_MAX if plan.restore else 0
        if self._grows(plan):  # all train on until they get the plan
            allowed = self.high if self._world.latency_s else LOST_STEPS_MAX + 1
        self.repeated = max(self.repeated, self.high - step)
        self.require(
            behind <= allowed,
            f"generation {plan.generation} goes back to step {step}, all of {stored} is stored",
        )

    def _grows(self, plan: Plan) -> bool:
        before = self.plans.get(plan.generation - 1)
        return before is not None and all(
            self._world.workers[member.worker].alive for member in before.members
        )

    def _needed(self, before: Plan, plan: Plan) -> None:
        sources = {snapshot.node for snapshot in before.restore}
        if before.generation not in self.unreadable and not sources & self.excused_nodes:
            super()._needed(before, plan)

    def newest_stored(self, coordinator: Coordinator) -> Age | None:
        """Return the age of the newest state of which nodes that can be asked keep every piece."""
        pieces_of: dict[tuple[Age, int], set[int]] = defaultdict(set)
        for node in coordinator.nodes:
            if self._can_be_asked(node):
                for _, copy in self._world.agents[node].kept.all():
                    if not copy.corrupt:
                        pieces_of[copy.age, copy.pieces].add(copy.piece)
        whole = [age for (age, pieces), present in pieces_of.items() if len(present) == pieces]
        return max(whole, default=None)

    def _can_be_asked(self, node: str) -> bool:
        """Return whether a node and the network are well, and have been for ``CALM_S``."""
        world, agent = self._world, self._world.agents[node]
        since_s = world.engine.now_s - CALM_S
        well = (
            agent.alive
            and not agent.frozen
            and agent.line is not None
            and agent.quiet_since_s < since_s
        )
        network = not world.severed and (not self.parted or world.healed_s < since_s - SILENT_S)
        return well and network and world.coordinator.awake_since_s < since_s

    def read(self, worker: Worker, copies: list[Copy]) -> None:
        """Check that the copies from which a rank restores make up one state."""
        states = {(copy.age, copy.state, copy.pieces) for copy in copies}
        self.require(len(states) == 1, f"{worker.name} makes one state of {len(states)}")

    def took_over(self, worker: Worker, formation: Formation) -> None:
        """Check the state that a rank has taken over and is going to train on."""
        generation, own = formation.plan.generation, (worker.step, worker.state)
        begun = self._begun.setdefault(generation, own)
        self.require(
            begun == own, f"generation {generation} begins with steps {begun[0]} and {worker.step}"
        )
        self.require(self.is_known(worker.state, worker.step), f"{worker.name} took a wrong state")
        self._taken[generation].add(worker.name)
        self.keepers.add(worker.agent.node)

    def met(self, formation: Formation) -> None:
        """Check nothing: all ranks begin with stored pieces, whatever their steps before."""

    def reduced(self, mesh: Mesh, step: int, round_: Round) -> None:
        generation = mesh.plan.generation
        if step < 0:
            return
        missing = {member.worker for member in mesh.plan.members} - self._taken[generation]
        self.require(
            not missing, f"generation {generation} trains, and {sorted(missing)} have no piece"
        )
        if step <= self._world.steps:
            super().reduced(mesh, step, round_)

    def committed(self, worker: Worker, formation: Formation) -> None:
        step, generation, name = worker.step, formation.plan.generation, worker.name
        self.took_step(worker, formation)
        self.require(
            generation >= self._committers[step].get(name, 0),
            f"{name} goes back to generation {generation}",
        )
        self._committers[step][name] = generation
        self.high = max(self.high, step)

    def healed_stale(self, generation: int, workers: set[str]) -> None:
        """Check that workers that count as healed have taken over a piece in ``generation``."""
        wrong = workers - self._taken[generation]
        self.require(not wrong, f"{sorted(wrong)} count as healed in generation {generation}")

    # -- the end -----------------------------------------------------------------------------------

    def _goes_on(self, generation: int) -> bool:
        mesh = self._world.mesh(self.plans[generation])
        if len(self._taken[generation]) < mesh.size:
            return False
        return super()._goes_on(generation) and not any(
            mesh.apart(rank) for rank in range(mesh.size)
        )

    def _may_be_lost(self) -> bool:
        return self.stored_at_end is None

    def sent(self, coordinator: Coordinator, node: str, message: Message) -> None:
        if isinstance(message, EndJob) and self.end is None:
            self.stored_at_end = self.newest_stored(coordinator)
        super().sent(coordinator, node, message)
