"""The laws that must hold at every moment of every history."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from chaoskit.coordinator.membership import events
from chaoskit.vocabulary import Event
from chaoskit.wire import messages
from chaoskit.wire.messages import EndJob, NodeLost, Plan, StartWorker, StopWorker, WorkerLost
from simulation.laws.size_law import SizeLaw
from simulation.network import COORDINATOR
from simulation.processes.worker import GENESIS, advance, gradient

if TYPE_CHECKING:
    from simulation.mesh import Mesh, Round
    from simulation.processes.coordinator import Coordinator
    from simulation.processes.regroup import Formation
    from simulation.processes.worker import Worker
    from simulation.world import World

#: Time after which a worker that was given up must be gone, if its agent is in contact.
STRAY_S = 1.0
#: Time after which nodes that were left out are back in a whole network: one node a test of all
#: links.
RETURN_S = 5.0


class Violation(AssertionError):
    """A law was broken."""


class Laws:
    """Follows all that the cluster does, and raises :class:`Violation` when a law is broken.

    Attributes:
        excused: workers that a fault struck, so their loss is no mistake.
        excused_nodes: nodes that a fault struck; this excuses their workers, too.
        parted: nodes that were cut off from other nodes: of two that cannot reach each other,
            either may be left out.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.excused: set[str] = set()
        self.excused_nodes: set[str] = set()
        self.parted: set[str] = set()
        self.plans: dict[int, Plan] = {}
        self.lost_s: dict[str, float] = {}
        self.ordered: set[str] = set()  # workers that agents were ordered to start
        self.untold: set[str] = set()  # decisions in the log that are in no journal yet
        self.planned: set[int] = set()  # generations whose plan is in a journal
        self.formed: set[int] = set()  # generations in which the members have met
        self.settled: set[int] = set()
        self.end: EndJob | None = None
        self.torn = False  # in the first step, a copy in place broke off: the state was lost with its source
        self.repeated = 0  # committed steps that one generation took again
        self.resized = 0  # number of decisions for a world of other nodes
        self.high = 0  # steps that some rank has committed
        self.size = SizeLaw(world)
        self.keepers: set[str] = set()  # nodes on which some rank has had the state
        self._committers: dict[int, dict[str, int]] = defaultdict(
            dict
        )  # step -> worker -> generation
        self._zombie_commits: dict[str, int] = defaultdict(int)
        self._known: dict[int, set[int]] = defaultdict(
            set, {0: {GENESIS}}
        )  # step -> the right states after it
        self._next: dict[tuple[int, int, int], int] = {}

    def require(self, holds: bool, law: str) -> None:
        """Raise Violation if a law does not hold."""
        if not holds:
            self._world.engine.note(f"VIOLATION: {law}")
            raise Violation(law)

    def is_known(self, state: int, step: int) -> bool:
        """Return whether ``state`` is a right state after ``step`` steps.

        Each step has one right state. If the batch follows the world, there is one for each
        sequence of world sizes up to the step.
        """
        return state in self._known[step]

    def took_step(self, worker: Worker, formation: Formation) -> None:
        """Check that a step was made of the whole batch, and all of it from one right state."""
        step, count = worker.step, self.batch(len(formation.plan.members))
        right = {self._after(state, step - 1, count) for state in self._known[step - 1]}
        self.require(worker.state in right, f"{worker.name} has a wrong state after step {step}")
        self._known[step].add(worker.state)

    def batch(self, world: int) -> int:
        """Return the number of shards of a world's batch, computed independently."""
        config = self._world.config
        return (
            config.shard_count
            if config.follow is None
            else config.shard_count // config.nodes_max * world
        )

    def _after(self, state: int, step: int, count: int) -> int:
        key = (state, step, count)
        if key not in self._next:
            self._next[key] = advance(
                state, {shard: gradient(state, step, shard, count) for shard in range(count)}
            )
        return self._next[key]

    # -- what coordinators do ----------------------------------------------------------------------

    def logged(self, coordinator: Coordinator, entries: list[Any]) -> None:
        """Check that the logged events of a coordinator give up no healthy worker or node."""
        for entry in entries:
            self.untold.update(_lines_of(entry.event))
            self.resized += isinstance(entry.event, events.Resized)
            self.size.logged(entry.event, entry.now_s - entry.lag_s)
            match entry.event:
                case WorkerLost(worker):
                    process = self._world.workers.get(worker)
                    guilty = (
                        worker in self.excused or worker.rpartition(".")[0] in self.excused_nodes
                    )
                    self.require(
                        guilty or process is None or not process.alive,
                        f"{worker} is well and was given up",
                    )
                    self.lost_s.setdefault(worker, self._world.engine.now_s)
                    self.untold.add(f"loss of {worker}")
                case events.LeftOut(nodes):
                    if self._world.haven in nodes:
                        self._world.haven = (
                            ""  # its worker has ended, and the memory tier is not modelled
                        )
                    innocent = [node for node in nodes if node not in self.parted]
                    self.require(
                        not innocent, f"nodes {innocent} reach everybody and were left out"
                    )
                    for name, process in self._world.workers.items():
                        if process.agent.node in nodes:
                            self.lost_s.setdefault(name, self._world.engine.now_s)
                    kept = bool(coordinator.plane.membership.keepers) or self._world.sharded
                    self.require(
                        kept or not self.settled,
                        f"{nodes} were left out, and nobody else has the state",
                    )
                case events.Settled(generation) if generation in self.plans and not self.keepers:
                    self.keepers.update(member.node for member in self.plans[generation].members)
                case events.Resized(_, idle) if self._world.haven in idle:
                    self._world.haven = ""  # no state is kept there any more
                case events.Evicted(node):
                    self._is_kept_without(
                        [name for name in self.ordered if name.rpartition(".")[0] == node],
                        "evicted",
                    )
                    self.gave_up(node)
                    for name in self.ordered:
                        if name.rpartition(".")[0] == node:
                            self.lost_s.setdefault(name, self._world.engine.now_s)
                case NodeLost(node):
                    if self._world.engine.now_s > self._world.agents[node].lease_until_s:
                        self.gave_up(node)
                    self.require(
                        node in self.excused_nodes, f"node {node} is well and was given up"
                    )
                    for name in self.ordered:  # workers that have yet to begin there, too
                        if name.rpartition(".")[0] == node:
                            self.lost_s.setdefault(name, self._world.engine.now_s)

    def _is_kept_without(self, going: list[str], what: str) -> None:
        """Check that workers that must go are not alone with the newest state or the one before.

        A worker that was in no generation has no state, although it counts as many steps as one
        that lost the first step. While the first step is copied in place, the coordinator cannot
        know that the copy broke off.
        """
        if self._world.sharded or not self.high:
            return
        present = [
            worker for worker in self._world.workers.values() if worker.name not in self.lost_s
        ]
        having = {
            worker.name
            for worker in present
            if worker.step >= self.high - 1 and worker.board.generation
        }
        last = bool(having) and having.issubset(going)
        torn = self.high == 1 and any(worker.step < 0 for worker in present)
        self.require(
            not last or torn,
            f"{', '.join(sorted(having))} had step {self.high} alone, and was {what}",
        )

    def gave_up(self, node: str) -> None:
        """Excuse a node with an expired lease: its workers have ended, or commit no more."""
        self.excused_nodes.add(node)
        if self._world.haven == node:
            self._world.haven = ""

    def sent(self, coordinator: Coordinator, node: str, message: messages.Message) -> None:
        """Check a message that a coordinator sends to a node."""
        if isinstance(message, Plan):
            self.require(
                self.end is None, f"generation {message.generation} was published after the end"
            )
            if message != self.plans.get(max(self.plans, default=0)):  # else it is only repeated
                self._published(coordinator, message)
        elif isinstance(message, StartWorker):
            self.ordered.add(message.worker)
            if self._world.log.losses and message.worker not in self._world.workers:
                self.lost_s.pop(
                    message.worker, None
                )  # the name of a worker that never began is used again
            self.require(self.end is None, f"{message.worker} was started after the end")
        elif isinstance(message, StopWorker) and message.cause == "left":
            rank = self.plans[max(self.settled)].member(message.worker) if self.settled else None
            self.require(
                rank is None or self._world.sharded,
                f"{message.worker} was sent away, and others need it",
            )
            if message.worker in self._world.workers:
                self._is_kept_without([message.worker], "sent away")
                self.lost_s.setdefault(message.worker, self._world.engine.now_s)
        elif isinstance(message, EndJob):
            self.require(self.end in (None, message), f"the job ended twice: {self.end}, {message}")
            if self.end is None:
                self.end = message
                self._no_strays(coordinator)

    def _published(self, coordinator: Coordinator, plan: Plan) -> None:
        generation, workers = plan.generation, [member.worker for member in plan.members]
        newest = self._newest(coordinator)
        self.require(
            generation > newest, f"generation {generation} was published after generation {newest}"
        )
        shards = sorted(shard for member in plan.members for shard in member.shards)
        self.require(
            shards == list(range(self.batch(len(workers)))), f"generation {generation}: {shards}"
        )
        self.require(
            len(workers) <= self._most(), f"generation {generation} has {len(workers)} ranks"
        )
        self.require(
            len(set(workers)) == len(workers),
            f"generation {generation} has a worker twice: {workers}",
        )
        now_s = (
            self._world.engine.now_s
        )  # of two that are lost at once, the first leads to a plan with the second
        gone = [worker for worker in workers if self.lost_s.get(worker, now_s) < now_s]
        repeated = (
            generation <= coordinator.inherited
        )  # where no newer one can be: it ends those before
        self.require(repeated or not gone, f"generation {generation} has lost workers: {gone}")
        if newest and not self._world.log.losses:
            self._needed(self.plans[newest], plan)
        self.plans[generation] = plan

    def _most(self) -> int:
        """Return the largest allowed number of ranks."""
        config = self._world.config
        return config.shard_count if config.follow is None else config.nodes_max

    def _newest(self, coordinator: Coordinator) -> int:
        """Return the last generation; without a log, the last one that a connected node knows."""
        if self._world.log.losses:
            return max(
                (self._world.agents[node].generation for node in coordinator.nodes), default=0
            )
        return max(self.plans, default=0)

    def _needed(self, before: Plan, plan: Plan) -> None:
        """Check that a new generation with the same members has a reason.

        The end of a coordinator is no reason to regroup; nor is a report on another generation.
        """
        members = {member.worker for member in before.members}
        loads, then = (
            {member.worker: len(member.shards) for member in plan.members}
            for plan in (before, plan)
        )
        if loads != then and not plan.abort:
            return  # ranks are not equally fast
        if (
            members != {member.worker for member in plan.members}
            or before.generation not in self.settled
        ):
            return
        nodes = {place.node for place in (*before.members, *before.restore)}
        if self.excused & members or nodes & (self.excused_nodes | self.parted):
            return
        whole = self._world.mesh(before).whole
        self.require(
            not whole, f"generation {plan.generation} without need: {before.generation} was well"
        )

    def noted(self, coordinator: Coordinator, event: Event, fields: dict[str, Any]) -> None:
        """Take in a record in the journal of a coordinator."""
        if event == Event.SETTLED:
            self.settled.add(fields["generation"])
            self.untold.discard(f"settled {fields['generation']}")
        elif event == Event.DETECTED:
            self.untold.discard(f"loss of {fields['worker']}")
        elif event == Event.PLAN:
            self.planned.add(fields["generation"])
        elif event in (Event.EVICTED, Event.LEFT_OUT, Event.RETURNED):
            self.untold.discard(f"{event} {fields.get('node', fields.get('nodes'))}")
        elif event == Event.RESIZED:
            self.untold.discard("resized")
        elif event == Event.RECORD_LOST:
            self.require(bool(self._world.log.losses), f"the log was not lost: {fields['detail']}")

    def _no_strays(self, coordinator: Coordinator) -> None:
        world, now_s = self._world, self._world.engine.now_s
        if coordinator.awake_since_s > now_s - STRAY_S:
            return  # it could send no order in this time
        for name, process in world.workers.items():
            agent = process.agent
            calm = (
                agent.line is not None
                and not agent.frozen
                and agent.quiet_since_s < now_s - STRAY_S
            )
            calm &= not world.apart(agent.node, COORDINATOR)
            if process.alive and calm and world.agents[agent.node] is agent:
                gone_s = self.lost_s.get(name, now_s)
                self.require(
                    gone_s > now_s - STRAY_S, f"{name} was given up at {gone_s:.3f} and still runs"
                )

    # -- what workers do ---------------------------------------------------------------------------

    def started(self, worker: Worker) -> None:
        """Check that the name of a new worker is not in use, and add it."""
        self.require(worker.name not in self._world.workers, f"{worker.name} was started twice")
        self._world.workers[worker.name] = worker

    def met(self, formation: Formation) -> None:
        """Check that a generation does not lose a step that one rank committed alone.

        Its members have met, so they know each other's steps.
        """
        target, generation = formation.target.step, formation.plan.generation
        self.formed.add(generation)
        self.require(
            target >= self.high - 1
            or generation
            < max(self.formed)  # a zombie's generation is past: a newer one has begun without it
            or (target < 0 and self.high == 1)  # a copy in place broke off
            or self._newest_is_gone,
            f"generation {generation} goes back to step {target} from {self.high}",
        )

    @property
    def _newest_is_gone(self) -> bool:
        """Return whether all ranks that went on alone are lost. A rank that was to leave is not.

        A rank that was given up with its node is lost, too, if its agent is stopped: nothing can
            read its state.
        """
        living = [
            worker
            for worker in self._world.workers.values()
            if worker.alive and not (worker.name in self.lost_s and worker.agent.frozen)
        ]
        return not self._world.haven and all(worker.step < self.high - 1 for worker in living)

    def reduced(self, mesh: Mesh, step: int, round_: Round) -> None:
        """Check a reduction to which all ranks have contributed."""
        shards = sorted(shard for brought in round_.brought.values() for shard in brought.shards)
        self.require(
            shards == list(range(self.batch(mesh.size))), f"step {step} was made of {shards}"
        )
        newest = max(
            (
                other_generation
                for past in self._committers.values()
                for other_generation in past.values()
            ),
            default=0,
        )
        alone = mesh.plan.generation >= newest or bool(self._world.log.losses)
        alone |= (
            not mesh.whole
        )  # then no rank completes it: one that has left spreads no segment of it
        leases_s = [worker.agent.lease_until_s for worker in mesh.joined.values()]
        alone |= self._world.engine.now_s > max(leases_s, default=0.0)  # then no rank commits it
        self.require(alone, f"generation {mesh.plan.generation} goes on beside {newest}")
        states = {brought.state for brought in round_.brought.values()}
        alike = len(states) == 1 and self.is_known(*states, step)
        self.require(alike, f"step {step} was computed from {len(states)} other states")

    def healed(self, worker: Worker, formation: Formation) -> None:
        """Check the state that a worker has taken over from another."""
        target = formation.target.step
        over = (
            max(self.plans, default=0) > formation.plan.generation
        )  # then its source may have gone on in another one
        right = worker.step == target or (worker.step > target and over)
        self.require(right, f"{worker.name} took step {worker.step}, not {target}")
        self.require(self.is_known(worker.state, worker.step), f"{worker.name} took a wrong state")
        self.keepers.add(worker.agent.node)

    def committed(self, worker: Worker, formation: Formation) -> None:
        """Check a step that a rank has committed."""
        step, generation, name = worker.step, formation.plan.generation, worker.name
        self.took_step(worker, formation)
        for other, other_generation in self._committers[step].items():
            older, newer = min(other_generation, generation), max(other_generation, generation)
            behind = other if other_generation < generation else name
            self.require(
                older == newer or self.plans[newer].member(behind) is None,
                f"step {step} was committed in generations {older} and {newer}, and {behind} is in both",
            )
        if any(
            settled > generation and not self.plans[settled].member(name)
            for settled in self.settled
        ):
            # Its last reduction was over when it was fenced: it may still take that step, like all
            # other ranks.
            self._zombie_commits[name] += 1
            self.require(self._zombie_commits[name] == 1, f"{name} commits although it was fenced")
        self._committers[step][name] = generation
        self.high = max(self.high, step)

    # -- the end -----------------------------------------------------------------------------------

    def judge(self, finished: bool) -> None:
        """Check the end of a history."""
        world = self._world
        self.require(
            finished,
            f"not over after {world.engine.now_s:.0f} s, {world.patience_s:.0f} s after the faults",
        )
        if not world.log.losses:
            self.require(not self.untold, f"no journal tells of: {sorted(self.untold)}")
            unplanned = self.formed - self.planned
            self.require(
                not unplanned, f"no journal tells of the plans of generations {sorted(unplanned)}"
            )
        self._require_all_readmitted()
        end = self.end or world.coordinator.plane.messages_for_observer()[-1]
        assert isinstance(end, EndJob)
        if end.ok:
            self.require(
                self.high == world.steps, f"called done after step {self.high} of {world.steps}"
            )
            return
        reason = end.reason
        if "failure budget" in reason:
            self.require(
                len(self.lost_s) > world.config.max_failures, f"{len(self.lost_s)} losses: {reason}"
            )
        elif "log was lost" in reason:
            self.require(bool(world.log.losses), f"the log was not lost: {reason}")
        elif "every replica was lost" in reason:
            self.require(self._may_be_lost(), f"the state is there: {reason}")
            going = [generation for generation in self.settled if self._goes_on(generation)]
            self.require(
                not going or bool(world.log.losses),
                f"generation {going} goes on unseen: {reason}",
            )
        elif (
            "rank after rank hangs" in reason
        ):  # each of those lost before was judged; the last one is not lost
            self.require(
                bool(self.excused | self.excused_nodes),
                f"no rank hung, and no node was mute: {reason}",
            )
        elif "in a row" in reason:
            self.require(bool(world.barren), f"no worker failed to start: {reason}")
        elif "start-up" in reason:
            struck = self.excused | self.excused_nodes | world.barren.keys()
            late = bool(
                world.log.losses
            )  # the nodes that may still come are waited for, of a start-up of seconds
            late |= (
                world.engine.now_s < world.coordinator.awake_since_s + world.config.startup_s
            )  # it stood still
            self.require(bool(struck) or late, f"no worker failed to start: {reason}")
        else:
            self.require(reason == world.stopped, f"unexpected end: {reason}")

    def _may_be_lost(self) -> bool:
        """Return whether no node that can be reached has the state."""
        return self._world.haven not in self.keepers or (
            self.high <= 1 and (self.torn or self._haven_is_torn)
        )

    @property
    def _haven_is_torn(self) -> bool:
        """True if a copy of the first step broke off on the haven, and no later one was made.

        A rank that finds no other source gives itself up, and need not get a plan before.
        """
        steps = [
            worker.step
            for worker in self._world.workers.values()
            if worker.agent.node == self._world.haven
        ]
        return min(steps, default=0) < 0 and max(steps) < 1

    def _goes_on(self, generation: int) -> bool:
        """Return whether all members of a generation can still commit in it."""
        world, plan = self._world, self.plans[generation]
        workers = [world.workers[member.worker] for member in plan.members]
        able = [worker.alive and not worker.hung and not worker.over for worker in workers]
        leased = all(world.engine.now_s <= worker.agent.lease_until_s for worker in workers)
        return leased and all(able) and world.mesh(plan).whole

    def _require_all_readmitted(self) -> None:
        """Check that no node is left out that has long been able to reach all others."""
        world, now_s = self._world, self._world.engine.now_s
        calm = (
            not world.severed and max(world.healed_s, world.coordinator.began_s) < now_s - RETURN_S
        )
        attached = world.coordinator.nodes
        for node in world.coordinator.plane.membership.left_out if calm else ():
            well = node in attached and world.agents[node].quiet_since_s < now_s - RETURN_S
            self.require(not well, f"{node} reaches everybody and is left out")


def _lines_of(event: events.MembershipEvent) -> list[str]:
    """Return the lines that the journal must have for an event, besides losses."""
    match event:
        case events.Settled(generation):
            return [f"settled {generation}"]
        case events.Evicted(node):
            return [f"{Event.EVICTED} {node}"]
        case events.LeftOut(nodes):
            return [f"{Event.LEFT_OUT} {nodes}"]
        case events.Readmitted(nodes):
            return [f"{Event.RETURNED} {nodes}"]
        case events.Resized():
            return ["resized"]
        case _:
            return []
