"""What must hold besides in every history of a replicated job whose state outlives its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chaoskit.coordinator.membership import events
from chaoskit.journal import Record
from chaoskit.runlog.history import History
from chaoskit.runlog.torn import TornWorld, lost_without_reason
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Plan
from simulation.laws.history_laws import Laws

if TYPE_CHECKING:
    from simulation.processes.coordinator import Coordinator
    from simulation.processes.regroup import Formation
    from simulation.processes.replicas import ReplicaWorker
    from simulation.processes.worker import Worker
    from simulation.world import World


class ReplicaLaws(Laws):
    """At most k steps are lost, and only if all ranks ended in one update; and the judge says so.

    Attributes:
        records: what the journals of such a run would hold, as far as the judge of lost steps reads them.
        bereft: a node was lost with a state that no other had.
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
        """A line of a journal."""
        self.records.append(Record(len(self.records), source, event, fields))

    def overtaken(self) -> None:
        self._overtaken = True

    def remembered(self, coordinator: Coordinator, entries: list[Any]) -> None:
        super().remembered(coordinator, entries)
        for entry in entries:
            if isinstance(entry.event, events.NodeLost):
                others = [
                    node for node in coordinator.plane.membership.nodes if node != entry.event.node
                ]
                self.bereft |= self._newest_on([entry.event.node]) > self._newest_on(others) + 1

    def _newest_on(self, nodes: list[str]) -> int:
        """The newest step on these nodes: of workers, also of those that have ended unheard, and of what is kept."""
        keepers = [self._world.agents[node].kept for node in nodes]
        workers = [
            one
            for one in self._world.workers.values()
            if one.agent.kept in keepers and one.board.generation
        ]
        having = [
            one.step
            for one in workers
            if one.alive or (one.name not in one.agent.kept.buried and not one.torn)
        ]
        return max([*having, *(one.step for keeper in keepers for one in keeper.kept)], default=-1)

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
        """A process is gone: was it the last one of a world that ended in one update?"""
        if not worker.updating:
            return
        generation = worker.board.generation
        torn = self._torn.setdefault(generation, {})
        torn[worker.name] = worker.step
        steps = {torn.get(member.worker) for member in self.plans[generation].members}
        if steps == {worker.step}:
            told = {
                record["worker"]: record["every"]
                for record in self.records
                if record.event == Event.COPY_INTERVAL and record["generation"] == generation
            }
            self._worlds.append(TornWorld(generation, worker.step, max(told.values(), default=1)))

    def met(self, formation: Formation) -> None:
        """A generation goes back no further than it must."""
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
        told = lost_without_reason(history, self._world.seams.torn_worlds(self.records))
        due = lost_without_reason(history, [one for one in self._worlds if self._is_told(one)])
        self.repeated = history.repeated_steps()
        self.require(told == due, f"the judge counts {told} lost steps, and not {due}")

    def _is_told(self, torn: TornWorld) -> bool:
        """Whether every keeper has heard how its worker ended: not from an agent that is stopped for good."""
        workers = [self._world.workers[name] for name in self._torn[torn.generation]]
        return all(worker.name in worker.agent.kept.buried for worker in workers)
