"""What must hold at every moment of every history."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from chaoskit import messages
from chaoskit.control import membership
from chaoskit.messages import EndJob, Plan, StartWorker
from chaoskit.vocabulary import Event
from simulation.worker import GENESIS, advance, gradient

if TYPE_CHECKING:
    from simulation.coordinator import Coordinator
    from simulation.mesh import Mesh, Round
    from simulation.regroup import Formation
    from simulation.worker import Worker
    from simulation.world import World

#: A worker that was given up must be gone after so long, if its agent can hear.
STRAY_S = 1.0


class Violation(AssertionError):
    """A law was broken."""


class Laws:
    """Sees everything that the cluster does.

    Attributes:
        excused: workers whose loss has a cause that a fault gave them.
        excused_nodes: the same for nodes, and for every worker there.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.excused: set[str] = set()
        self.excused_nodes: set[str] = set()
        self.plans: dict[int, Plan] = {}
        self.lost_s: dict[str, float] = {}
        self.settled: set[int] = set()
        self.end: EndJob | None = None
        self.torn = False  # in the first step, a copy in place broke off: the state was lost with its source
        self.high = 0  # steps that some rank has committed
        self._committers: dict[int, dict[str, int]] = defaultdict(dict)  # step -> worker -> generation
        self._zombie_commits: dict[str, int] = defaultdict(int)
        self._twin = [GENESIS]

    def _require(self, holds: bool, law: str) -> None:
        if not holds:
            self._world.engine.note(f"VIOLATION: {law}")
            raise Violation(law)

    def twin(self, step: int) -> int:
        """The state after ``step`` steps of a run that nothing ever broke."""
        while len(self._twin) <= step:
            state, at = self._twin[-1], len(self._twin) - 1
            shards = range(self._world.config.shard_count)
            self._twin.append(advance(state, {shard: gradient(state, at, shard) for shard in shards}))
        return self._twin[step]

    # -- what coordinators do -------------------------------------------------------------------------------------

    def remembered(self, coordinator: Coordinator, entries: list[Any]) -> None:
        """Nobody innocent is given up."""
        for entry in entries:
            match entry.event:
                case membership.WorkerLost(worker):
                    process = self._world.workers.get(worker)
                    guilty = worker in self.excused or worker.rpartition(".")[0] in self.excused_nodes
                    self._require(guilty or process is None or not process.alive, f"{worker} is well and was given up")
                    self.lost_s.setdefault(worker, self._world.engine.now_s)
                case membership.NodeLost(node):
                    self._require(node in self.excused_nodes, f"node {node} is well and was given up")
                    for name, process in self._world.workers.items():
                        if process.agent.node == node:
                            self.lost_s.setdefault(name, self._world.engine.now_s)

    def sent(self, coordinator: Coordinator, node: str, message: messages.Message) -> None:
        """Decisions leave a coordinator here."""
        if isinstance(message, Plan):
            self._require(self.end is None, f"generation {message.generation} was published after the end")
            if message != self.plans.get(max(self.plans, default=0)):  # else it is only said again
                self._published(coordinator, message)
        elif isinstance(message, StartWorker):
            self._require(self.end is None, f"{message.worker} was started after the end")
        elif isinstance(message, EndJob):
            self._require(self.end in (None, message), f"the job ended twice: {self.end}, {message}")
            if self.end is None:
                self.end = message
                self._no_strays(coordinator)

    def _published(self, coordinator: Coordinator, plan: Plan) -> None:
        generation, workers = plan.generation, [member.worker for member in plan.members]
        newest = max(self.plans, default=0)
        self._require(generation > newest, f"generation {generation} was published after generation {newest}")
        shards = sorted(shard for member in plan.members for shard in member.shards)
        self._require(shards == list(range(self._world.config.shard_count)), f"generation {generation}: {shards}")
        self._require(len(set(workers)) == len(workers), f"generation {generation} has a worker twice: {workers}")
        now_s = self._world.engine.now_s  # of two that are lost at once, the first leads to a plan with the second
        gone = [worker for worker in workers if self.lost_s.get(worker, now_s) < now_s]
        self._require(not gone, f"generation {generation} has lost workers: {gone}")
        if newest:
            self._needed(self.plans[newest], plan)
        self.plans[generation] = plan

    def _needed(self, before: Plan, plan: Plan) -> None:
        """The end of a coordinator is no reason to regroup; nor is what was said of another generation."""
        members = {member.worker for member in before.members}
        if members != {member.worker for member in plan.members} or before.generation not in self.settled:
            return
        if self.excused & members or {member.node for member in before.members} & self.excused_nodes:
            return
        whole = self._world.mesh(before).whole
        self._require(not whole, f"generation {plan.generation} without need: {before.generation} was well")

    def noted(self, coordinator: Coordinator, event: Event, fields: dict[str, Any]) -> None:
        """The journal of a coordinator."""
        if event == Event.SETTLED:
            self.settled.add(fields["generation"])

    def _no_strays(self, coordinator: Coordinator) -> None:
        world, now_s = self._world, self._world.engine.now_s
        for name, process in world.workers.items():
            agent = process.agent
            calm = agent.line is not None and not agent.frozen and agent.quiet_since_s < now_s - STRAY_S
            if process.alive and calm and world.agents[agent.node] is agent:
                gone_s = self.lost_s.get(name, now_s)
                self._require(gone_s > now_s - STRAY_S, f"{name} was given up at {gone_s:.3f} and still runs")

    # -- what workers do ------------------------------------------------------------------------------------------

    def started(self, worker: Worker) -> None:
        """A name means one process."""
        self._require(worker.name not in self._world.workers, f"{worker.name} was started twice")
        self._world.workers[worker.name] = worker

    def met(self, formation: Formation) -> None:
        """The members of a generation know each other's steps: nothing that one rank committed alone can be lost."""
        target, generation = formation.target.step, formation.plan.generation
        self._require(
            target >= self.high - 1
            or generation < max(self.settled, default=generation + 1)  # a zombie hears of the past
            or (target < 0 and self.high == 1),  # a copy in place broke off
            f"generation {generation} goes back to step {target} from {self.high}",
        )

    def reduced(self, mesh: Mesh, step: int, one: Round) -> None:
        """All contributions of a step have come together."""
        shards = sorted(shard for brought in one.brought.values() for shard in brought.shards)
        self._require(shards == list(range(self._world.config.shard_count)), f"step {step} was made of {shards}")
        states = {brought.state for brought in one.brought.values()}
        self._require(states == {self.twin(step)}, f"step {step} was computed from {len(states)} other states")

    def healed(self, worker: Worker, formation: Formation) -> None:
        """A worker has taken over the state of another."""
        target = formation.target.step
        self._require(worker.step == target, f"{worker.name} took step {worker.step}, not {target}")
        self._require(worker.state == self.twin(worker.step), f"{worker.name} took a wrong state")

    def committed(self, worker: Worker, formation: Formation) -> None:
        """A rank has taken a step."""
        step, generation, name = worker.step, formation.plan.generation, worker.name
        self._require(worker.state == self.twin(step), f"{name} has a wrong state after step {step}")
        for other, theirs in self._committers[step].items():
            older, newer = min(theirs, generation), max(theirs, generation)
            behind = other if theirs < generation else name
            self._require(
                older == newer or self.plans[newer].member(behind) is None,
                f"step {step} was committed in generations {older} and {newer}, and {behind} is in both",
            )
        if any(settled > generation and not self.plans[settled].member(name) for settled in self.settled):
            # Its last reduction was over when it was fenced: it may still take that step, like everybody else.
            self._zombie_commits[name] += 1
            self._require(self._zombie_commits[name] == 1, f"{name} commits although it was fenced")
        self._committers[step][name] = generation
        self.high = max(self.high, step)

    # -- the end --------------------------------------------------------------------------------------------------

    def judge(self, finished: bool) -> None:
        """When all is over."""
        world = self._world
        self._require(finished, f"not over after {world.engine.now_s:.0f} s, {world.patience_s:.0f} s after the faults")
        end = self.end or world.coordinator.plane.picture()[-1]
        assert isinstance(end, EndJob)
        if end.ok:
            self._require(self.high == world.steps, f"called done after step {self.high} of {world.steps}")
            return
        reason = end.reason
        if "failure budget" in reason:
            self._require(len(self.lost_s) > world.config.max_failures, f"{len(self.lost_s)} losses: {reason}")
        elif "every replica was lost" in reason:
            survives = world.haven and not (self.torn and self.high <= 1)
            self._require(not survives, f"{world.haven} has the state: {reason}")
        elif "in a row" in reason:
            self._require(bool(world.barren), f"nobody failed to start: {reason}")
        elif "start-up" in reason:
            struck = self.excused | self.excused_nodes | world.barren.keys()
            self._require(bool(struck), f"nobody failed to start: {reason}")
        else:
            self._require(reason == world.stopped, f"unexpected end: {reason}")
