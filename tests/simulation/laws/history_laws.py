"""What must hold at every moment of every history."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from chaoskit.coordinator.membership import events
from chaoskit.vocabulary import Event
from chaoskit.wire import messages
from chaoskit.wire.messages import EndJob, Plan, StartWorker, StopWorker
from simulation.laws.size_law import SizeLaw
from simulation.network import COORDINATOR
from simulation.processes.worker import GENESIS, advance, gradient

if TYPE_CHECKING:
    from simulation.mesh import Mesh, Round
    from simulation.processes.coordinator import Coordinator
    from simulation.processes.regroup import Formation
    from simulation.processes.worker import Worker
    from simulation.world import World

#: A worker that was given up must be gone after so long, if its agent can hear.
STRAY_S = 1.0
#: A node that was left out is back so long after the network is whole: one node a test of all links.
RETURN_S = 5.0


class Violation(AssertionError):
    """A law was broken."""


class Laws:
    """Sees everything that the cluster does.

    Attributes:
        excused: workers whose loss has a cause that a fault gave them.
        excused_nodes: the same for nodes, and for every worker there.
        parted: nodes that were cut off from other nodes: of two that cannot reach each other either may be left out.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.excused: set[str] = set()
        self.excused_nodes: set[str] = set()
        self.parted: set[str] = set()
        self.plans: dict[int, Plan] = {}
        self.lost_s: dict[str, float] = {}
        self.ordered: set[str] = set()  # workers that agents were told to start
        self.untold: set[str] = set()  # decisions in the record of which no journal tells yet
        self.planned: set[int] = set()  # generations whose plan is in a journal
        self.formed: set[int] = set()  # generations that some worker has met
        self.settled: set[int] = set()
        self.end: EndJob | None = None
        self.torn = False  # in the first step, a copy in place broke off: the state was lost with its source
        self.repeated = 0  # committed steps that one generation took again
        self.resized = 0  # times that the world was to be another
        self.high = 0  # steps that some rank has committed
        self.size = SizeLaw(world)
        self.keepers: set[str] = set()  # nodes on which some rank has had the state
        self._committers: dict[int, dict[str, int]] = defaultdict(
            dict
        )  # step -> worker -> generation
        self._zombie_commits: dict[str, int] = defaultdict(int)
        self._known: dict[int, set[int]] = defaultdict(
            set, {0: {GENESIS}}
        )  # step -> what there is after so many
        self._next: dict[tuple[int, int, int], int] = {}

    def require(self, holds: bool, law: str) -> None:
        """Break off where a law does not hold."""
        if not holds:
            self._world.engine.note(f"VIOLATION: {law}")
            raise Violation(law)

    def is_known(self, state: int, step: int) -> bool:
        """Whether ``state`` is that of ``step`` steps which nothing ever broke.

        There is one for each step; where the batch follows the world, one for every way there, by sizes of the world.
        """
        return state in self._known[step]

    def took_step(self, worker: Worker, formation: Formation) -> None:
        """The step that was added was made of the whole batch, each shard computed from the same, known state."""
        step, count = worker.step, self.batch(len(formation.plan.members))
        right = {self._after(state, step - 1, count) for state in self._known[step - 1]}
        self.require(worker.state in right, f"{worker.name} has a wrong state after step {step}")
        self._known[step].add(worker.state)

    def batch(self, world: int) -> int:
        """Shards that so many ranks compute; reckoned here anew."""
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

    # -- what coordinators do -------------------------------------------------------------------------------------

    def remembered(self, coordinator: Coordinator, entries: list[Any]) -> None:
        """No healthy worker is given up."""
        for entry in entries:
            self.untold.update(_lines_of(entry.event))
            self.resized += isinstance(entry.event, events.Resized)
            self.size.remembered(entry.event, entry.now_s - entry.lag_s)
            match entry.event:
                case events.WorkerLost(worker):
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
                    self._world.haven = ""  # nothing is kept there any more
                case events.Evicted(node):
                    self._is_kept_without(
                        [name for name in self.ordered if name.rpartition(".")[0] == node],
                        "evicted",
                    )
                    self.gave_up(node)
                    for name in self.ordered:
                        if name.rpartition(".")[0] == node:
                            self.lost_s.setdefault(name, self._world.engine.now_s)
                case events.NodeLost(node):
                    if self._world.engine.now_s > self._world.agents[node].lease_until_s:
                        self.gave_up(node)
                    self.require(
                        node in self.excused_nodes, f"node {node} is well and was given up"
                    )
                    for name in self.ordered:  # also who has yet to begin there
                        if name.rpartition(".")[0] == node:
                            self.lost_s.setdefault(name, self._world.engine.now_s)

    def _is_kept_without(self, going: list[str], what: str) -> None:
        """A worker that is made to go is not the last with the newest state, or one step less: then all can go on.

        A worker that never stood in a generation has no state, although it counts as many steps as one that lost the
        first step. While the first step is copied in place, the coordinator cannot know that the copy broke off.
        """
        if self._world.sharded or not self.high:
            return
        known = [one for one in self._world.workers.values() if one.name not in self.lost_s]
        having = {one.name for one in known if one.step >= self.high - 1 and one.board.generation}
        last = bool(having) and having.issubset(going)
        torn = self.high == 1 and any(one.step < 0 for one in known)
        self.require(
            not last or torn,
            f"{', '.join(sorted(having))} had step {self.high} alone, and was {what}",
        )

    def gave_up(self, node: str) -> None:
        """A node was not heard for as long as its lease: it has ended its workers, or they do not commit any more."""
        self.excused_nodes.add(node)
        if self._world.haven == node:
            self._world.haven = ""

    def sent(self, coordinator: Coordinator, node: str, message: messages.Message) -> None:
        """Decisions leave a coordinator here."""
        if isinstance(message, Plan):
            self.require(
                self.end is None, f"generation {message.generation} was published after the end"
            )
            if message != self.plans.get(max(self.plans, default=0)):  # else it is only said again
                self._published(coordinator, message)
        elif isinstance(message, StartWorker):
            self.ordered.add(message.worker)
            if self._world.record.losses and message.worker not in self._world.workers:
                self.lost_s.pop(
                    message.worker, None
                )  # the name of a worker that never began is given once more
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
        said_again = (
            generation <= coordinator.inherited
        )  # where no newer one can be: it ends those before
        self.require(said_again or not gone, f"generation {generation} has lost workers: {gone}")
        if newest and not self._world.record.losses:
            self._needed(self.plans[newest], plan)
        self.plans[generation] = plan

    def _most(self) -> int:
        """Ranks for which there are shards; a batch that follows the world grows no further than was said."""
        config = self._world.config
        return config.shard_count if config.follow is None else config.nodes_max

    def _newest(self, coordinator: Coordinator) -> int:
        """The last generation that there was; without a record, the last one of which anybody can tell."""
        if self._world.record.losses:
            return max(
                (self._world.agents[node].generation for node in coordinator.nodes), default=0
            )
        return max(self.plans, default=0)

    def _needed(self, before: Plan, plan: Plan) -> None:
        """The end of a coordinator is no reason to regroup; nor is what was said of another generation."""
        members = {member.worker for member in before.members}
        loads, then = (
            {one.worker: len(one.shards) for one in plan.members} for plan in (before, plan)
        )
        if loads != then and not plan.abort:
            return  # ranks are not equally fast
        if (
            members != {member.worker for member in plan.members}
            or before.generation not in self.settled
        ):
            return
        nodes = {one.node for one in (*before.members, *before.restore)}
        if self.excused & members or nodes & (self.excused_nodes | self.parted):
            return
        whole = self._world.mesh(before).whole
        self.require(
            not whole, f"generation {plan.generation} without need: {before.generation} was well"
        )

    def noted(self, coordinator: Coordinator, event: Event, fields: dict[str, Any]) -> None:
        """The journal of a coordinator."""
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
            self.require(
                bool(self._world.record.losses), f"the record was not lost: {fields['detail']}"
            )

    def _no_strays(self, coordinator: Coordinator) -> None:
        world, now_s = self._world, self._world.engine.now_s
        if coordinator.awake_since_s > now_s - STRAY_S:
            return  # it could tell nobody
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

    # -- what workers do ------------------------------------------------------------------------------------------

    def started(self, worker: Worker) -> None:
        """A name means one process."""
        self.require(worker.name not in self._world.workers, f"{worker.name} was started twice")
        self._world.workers[worker.name] = worker

    def met(self, formation: Formation) -> None:
        """The members of a generation know each other's steps: nothing that one rank committed alone can be lost."""
        target, generation = formation.target.step, formation.plan.generation
        self.formed.add(generation)
        self.require(
            target >= self.high - 1
            or generation
            < max(self.formed)  # a zombie hears of the past: a newer one has begun without it
            or (target < 0 and self.high == 1)  # a copy in place broke off
            or self._newest_is_gone,
            f"generation {generation} goes back to step {target} from {self.high}",
        )

    @property
    def _newest_is_gone(self) -> bool:
        """Return whether all ranks that went on alone are lost. A rank that was to leave is not.

        A rank that was given up with its node is lost, too, if its agent is stopped: nothing can read its state.
        """
        living = [
            worker
            for worker in self._world.workers.values()
            if worker.alive and not (worker.name in self.lost_s and worker.agent.frozen)
        ]
        return not self._world.haven and all(worker.step < self.high - 1 for worker in living)

    def reduced(self, mesh: Mesh, step: int, one: Round) -> None:
        """All contributions of a step have come together."""
        shards = sorted(shard for brought in one.brought.values() for shard in brought.shards)
        self.require(
            shards == list(range(self.batch(mesh.size))), f"step {step} was made of {shards}"
        )
        newest = max(
            (theirs for past in self._committers.values() for theirs in past.values()), default=0
        )
        alone = mesh.plan.generation >= newest or bool(self._world.record.losses)
        alone |= (
            not mesh.whole
        )  # then no rank completes it: one that has left spreads no segment of it
        leases_s = [worker.agent.lease_until_s for worker in mesh.joined.values()]
        alone |= self._world.engine.now_s > max(leases_s, default=0.0)  # then no rank commits it
        self.require(alone, f"generation {mesh.plan.generation} goes on beside {newest}")
        states = {brought.state for brought in one.brought.values()}
        alike = len(states) == 1 and self.is_known(*states, step)
        self.require(alike, f"step {step} was computed from {len(states)} other states")

    def healed(self, worker: Worker, formation: Formation) -> None:
        """A worker has taken over the state of another."""
        target = formation.target.step
        over = (
            max(self.plans, default=0) > formation.plan.generation
        )  # then its source may have gone on in another one
        right = worker.step == target or (worker.step > target and over)
        self.require(right, f"{worker.name} took step {worker.step}, not {target}")
        self.require(self.is_known(worker.state, worker.step), f"{worker.name} took a wrong state")
        self.keepers.add(worker.agent.node)

    def committed(self, worker: Worker, formation: Formation) -> None:
        """A rank has taken a step."""
        step, generation, name = worker.step, formation.plan.generation, worker.name
        self.took_step(worker, formation)
        for other, theirs in self._committers[step].items():
            older, newer = min(theirs, generation), max(theirs, generation)
            behind = other if theirs < generation else name
            self.require(
                older == newer or self.plans[newer].member(behind) is None,
                f"step {step} was committed in generations {older} and {newer}, and {behind} is in both",
            )
        if any(
            settled > generation and not self.plans[settled].member(name)
            for settled in self.settled
        ):
            # Its last reduction was over when it was fenced: it may still take that step, like everybody else.
            self._zombie_commits[name] += 1
            self.require(self._zombie_commits[name] == 1, f"{name} commits although it was fenced")
        self._committers[step][name] = generation
        self.high = max(self.high, step)

    # -- the end --------------------------------------------------------------------------------------------------

    def judge(self, finished: bool) -> None:
        """When all is over."""
        world = self._world
        self.require(
            finished,
            f"not over after {world.engine.now_s:.0f} s, {world.patience_s:.0f} s after the faults",
        )
        if not world.record.losses:
            self.require(not self.untold, f"no journal tells of: {sorted(self.untold)}")
            unplanned = self.formed - self.planned
            self.require(
                not unplanned, f"no journal tells of the plans of generations {sorted(unplanned)}"
            )
        self._nobody_stays_outside()
        end = self.end or world.coordinator.plane.picture()[-1]
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
        elif "record was lost" in reason:
            self.require(bool(world.record.losses), f"the record was not lost: {reason}")
        elif "every replica was lost" in reason:
            self.require(self._may_be_lost(), f"the state is there: {reason}")
            going = [generation for generation in self.settled if self._goes_on(generation)]
            self.require(
                not going or bool(world.record.losses),
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
                world.record.losses
            )  # the nodes that may still come are waited for, of a start-up of seconds
            late |= (
                world.engine.now_s < world.coordinator.awake_since_s + world.config.startup_s
            )  # it stood still
            self.require(bool(struck) or late, f"no worker failed to start: {reason}")
        else:
            self.require(reason == world.stopped, f"unexpected end: {reason}")

    def _may_be_lost(self) -> bool:
        """Whether nobody who can be reached has the state."""
        return self._world.haven not in self.keepers or (
            self.high <= 1 and (self.torn or self._haven_is_torn)
        )

    @property
    def _haven_is_torn(self) -> bool:
        """Whether a copy of the first step broke off on the node that no fault strikes, and no later one was made.

        A rank that finds no other source gives itself up. No plan need tell it before that no member has the state.
        """
        steps = [
            worker.step
            for worker in self._world.workers.values()
            if worker.agent.node == self._world.haven
        ]
        return min(steps, default=0) < 0 and max(steps) < 1

    def _goes_on(self, generation: int) -> bool:
        """Whether all members of a generation can still commit in it."""
        world, plan = self._world, self.plans[generation]
        workers = [world.workers[member.worker] for member in plan.members]
        able = [one.alive and not one.hung and not one.over for one in workers]
        leased = all(world.engine.now_s <= one.agent.lease_until_s for one in workers)
        return leased and all(able) and world.mesh(plan).whole

    def _nobody_stays_outside(self) -> None:
        world, now_s = self._world, self._world.engine.now_s
        calm = (
            not world.severed and max(world.healed_s, world.coordinator.began_s) < now_s - RETURN_S
        )
        attached = world.coordinator.nodes
        for node in world.coordinator.plane.membership.left_out if calm else ():
            well = node in attached and world.agents[node].quiet_since_s < now_s - RETURN_S
            self.require(not well, f"{node} reaches everybody and is left out")


def _lines_of(event: events.AnyEvent) -> list[str]:
    """What the journal is to say of an event besides losses."""
    match event:
        case events.Settled(generation):
            return [f"settled {generation}"]
        case events.Evicted(node):
            return [f"{Event.EVICTED} {node}"]
        case events.LeftOut(nodes):
            return [f"{Event.LEFT_OUT} {nodes}"]
        case events.Returned(nodes):
            return [f"{Event.RETURNED} {nodes}"]
        case events.Resized():
            return ["resized"]
        case _:
            return []
