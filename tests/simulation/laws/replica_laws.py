"""The additional laws for every history of a replicated job of which the nodes keep the states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chaoskit.journal import Record
from chaoskit.runlog.history import History
from chaoskit.runlog.torn import TornWorld, lost_without_reason
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import NodeLost, Plan
from simulation.laws.history_laws import Laws

if TYPE_CHECKING:
    from simulation.processes.coordinator import Coordinator
    from simulation.processes.regroup import Formation
    from simulation.processes.replicas import ReplicaWorker
    from simulation.processes.worker import Worker
    from simulation.world import World


class ReplicaLaws(Laws):
    """The laws on lost steps: at most k, and only if all ranks ended in one update.

    Attributes:
        records: the records that the journals of such a run would hold for the judge of lost steps.
        bereft: a node was lost with a state that no other node had.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.records: list[Record] = []
        self.bereft = False
        self._overtaken = False  # a copy was not made: more than k steps may be at risk
        self._torn: dict[
            int, dict[str, int]
        ] = {}  # generation -> worker -> steps when it ended in its update
        self._worlds: list[TornWorld] = []
        self._judged: set[int] = set()

    def write(self, event: Event, source: str, **fields: Any) -> None:
        """Write a record to the journals."""
        self.records.append(Record(len(self.records), source, event, fields))

    def overtaken(self) -> None:
        """Note that a copy was not made, as its source went on."""
        self._overtaken = True

    def logged(self, coordinator: Coordinator, entries: list[Any]) -> None:
        super().logged(coordinator, entries)
        for entry in entries:
            if isinstance(entry.event, NodeLost):
                others = [
                    node for node in coordinator.plane.membership.nodes if node != entry.event.node
                ]
                self.bereft |= self._newest_on([entry.event.node]) > self._newest_on(others) + 1

    def _newest_on(self, nodes: list[str]) -> int:
        """Return the newest step on these nodes, of their workers or of a kept state.

        Workers of which the keeper has not noticed the end count, too.
        """
        keepers = [self._world.agents[node].kept for node in nodes]
        workers = [
            worker
            for worker in self._world.workers.values()
            if worker.agent.kept in keepers and worker.board.generation
        ]
        having = [
            worker.step
            for worker in workers
            if worker.alive or (worker.name not in worker.agent.kept.buried and not worker.torn)
        ]
        return max(
            [*having, *(state.step for keeper in keepers for state in keeper.kept)], default=-1
        )

    def _published(self, coordinator: Coordinator, plan: Plan) -> None:
        super()._published(coordinator, plan)
        self.write(
            Event.PLAN,
            "coordinator",
            generation=plan.generation,
            members=[{"worker": member.worker} for member in plan.members],
        )

    def committed(self, worker: Worker, formation: Formation) -> None:
        super().committed(worker, formation)
        numbers = {
            "step": worker.step - 1,
            "generation": formation.plan.generation,
            "loss": 1.0,
            "grad_sum": 1.0,
        }
        self.write(Event.COMMIT, worker.name, **numbers)

    def ended(self, worker: ReplicaWorker) -> None:
        """Note the end of a process, and the end of its world if all ended in the same update."""
        if not worker.updating:
            return
        generation = worker.board.generation
        torn = self._torn.setdefault(generation, {})
        torn[worker.name] = worker.step
        steps = {torn.get(member.worker) for member in self.plans[generation].members}
        if steps == {worker.step}:
            intervals = {
                record["worker"]: record["every"]
                for record in self.records
                if record.event == Event.COPY_INTERVAL and record["generation"] == generation
            }
            self._worlds.append(
                TornWorld(generation, worker.step, max(intervals.values(), default=1))
            )

    def met(self, formation: Formation) -> None:
        """Check that a generation goes back no further than it must."""
        goal, generation = formation.goal_step, formation.plan.generation
        self.formed.add(generation)
        zombie = generation < max(self.formed)
        begins_anew = goal <= 0 and self.high <= 1
        if goal >= self.high - 1 or zombie or begins_anew or self.bereft or self._overtaken:
            return
        torn = [
            world for world in self._worlds if world.generation < generation and goal <= world.step
        ]
        what = f"generation {generation} goes back to step {goal} from {self.high}"
        self.require(bool(torn), what)
        self.require(
            torn[-1].step - goal < torn[-1].every, f"{what}, more than k={torn[-1].every} steps"
        )

    def healed(self, worker: Worker, formation: Formation) -> None:
        goal = formation.goal_step
        over = max(self.plans, default=0) > formation.plan.generation
        self.require(
            worker.step == goal or (worker.step > goal and over),
            f"{worker.name} took step {worker.step}",
        )
        self.require(self.is_known(worker.state, worker.step), f"{worker.name} took a wrong state")
        self.keepers.add(worker.agent.node)

    def _may_be_lost(self) -> bool:
        now_s = self._world.engine.now_s
        agents = [agent for agent in self._world.agents.values() if agent.alive]
        there = any(
            agent.kept.kept for agent in agents if not agent.frozen or now_s <= agent.lease_until_s
        )
        return not there or bool(
            self.excused
        )  # a rank that hangs in its restore holds up all others

    def judge(self, finished: bool) -> None:
        super().judge(finished)
        history = History(self.records)
        counted = lost_without_reason(history, self._world.seams.torn_worlds(self.records))
        due = lost_without_reason(
            history, [torn for torn in self._worlds if self._is_noticed(torn)]
        )
        self.repeated = history.repeated_steps()
        self.require(counted == due, f"the judge counts {counted} lost steps, and not {due}")

    def _is_noticed(self, torn: TornWorld) -> bool:
        """Return whether every keeper has noticed the end of its worker.

        An agent that is stopped for good does not report it.
        """
        workers = [self._world.workers[name] for name in self._torn[torn.generation]]
        return all(worker.name in worker.agent.kept.buried for worker in workers)
