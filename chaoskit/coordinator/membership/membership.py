"""The membership of a job: its state, and properties that are derived from it.

Only :func:`~chaoskit.coordinator.membership.handle.handle` changes it: it takes in an event and
returns the actions that follow.

The workers that have the state of the training decide which plans may be published. No worker has
trained until the first generation settles: every worker builds the same weights from the seed, and
fresh workers may replace all of them. From then on the members of that generation hold the state. A
worker that joins later holds the state once it is
:class:`~chaoskit.coordinator.membership.events.Healed`. So a generation must be reported
:class:`~chaoskit.coordinator.membership.events.Settled` before any of its members may commit a
step. The report may be lost with its node: once the members have met, the generation counts as
settled when one of them is lost.

-> coordinator/membership/apply.py: the changes by each event; coordinator/membership/decide.py: the
next plan or the end; coordinator/membership/state.py: the data.
coordinator/membership/elasticity.py: the wanted size under an elastic policy.
"""

from __future__ import annotations

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership.assignment import name_order
from chaoskit.coordinator.membership.copy_search import CopySearch
from chaoskit.coordinator.membership.limits import LIMITS, Limits
from chaoskit.coordinator.membership.policies import POLICIES, Policies
from chaoskit.coordinator.membership.state import (
    Failures,
    Generations,
    LiveWorkers,
    Nodes,
    RunStatus,
    TargetWorld,
    Training,
)
from chaoskit.coordinator.membership.strikes import Strikes
from chaoskit.wire.messages import Plan


class Membership:
    """Nodes and their live workers: those with a rank, the spares, and those that have the state.

    Args:
        config: settings of the run.
        policies: pure decisions, which tests replace.
        limits: time limits that are no settings.
    """

    def __init__(
        self, config: RunConfig, *, policies: Policies = POLICIES, limits: Limits = LIMITS
    ) -> None:
        self.config, self.policies, self.limits = config, policies, limits
        self.target = TargetWorld(size=config.nodes)
        self.known_nodes = Nodes(
            strikes=Strikes(config.strikes_max),
            unfit={*config.quarantined, *config.on_probation},
            on_probation=set(config.on_probation).difference(config.quarantined),
        )
        self.workers = LiveWorkers()
        self.failures = Failures()
        self.generations = Generations()
        self.training = Training()
        self.search = CopySearch(limits, policies.restorable)
        self.status = RunStatus()

    # -- generations -------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The last published plan; None before the first one."""
        return self.generations.plan

    @property
    def generation(self) -> int:
        """The number of the last published plan; 0 before the first one."""
        return self.generations.number

    @property
    def newest_known(self) -> int:
        """The newest known generation: the last planned one, or one that nodes or snapshots show.

        Nodes show a later one after a loss of the log, snapshots in a resumed job.
        """
        return max(self.generation, self.status.past_generation)

    @property
    def world(self) -> int:
        """The number of ranks in the last published plan."""
        return len(self.plan.members) if self.plan else 0

    @property
    def worked(self) -> int:
        """The number of the last generation in which all members have met, or of the first one.

        It is 0 before the first plan.
        """
        return self.generations.base.generation if self.generations.base else 0

    @property
    def settled(self) -> bool:
        """True if every member of the last plan has built its group."""
        return self.generations.settled

    @property
    def is_over(self) -> bool:
        """True if the last generation cannot continue, so that another one must be planned.

        Also true before the first plan.
        """
        return self.generations.stalled == self.generation

    @property
    def is_gathering(self) -> bool:
        """True if the last generation is over, and the next one waits for copies or for workers."""
        return self.plan is not None and self.is_over

    @property
    def is_forming(self) -> bool:
        """True if the next generation has yet to work, or copies of the state are searched for.

        False once the end of the job is decided.
        """
        return not self.finished and (not self.settled or self.search.active)

    @property
    def finished(self) -> bool:
        """True if the end of the job is decided."""
        return self.status.finished

    def may_have_worked(self, generation: int) -> bool:
        """Return whether the report of a step committed in ``generation`` changes the membership.

        It does if that generation is not known to have settled, and no newer one has trained. In a
        sharded job, the last generation alone counts.
        """
        if self.finished or generation not in self.generations.unsettled:
            return False
        return generation == self.generation or (
            generation > self.training.newest and not self.is_sharded
        )

    # -- ranks -------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds a piece of the state of the training."""
        return self.config.job.sharded

    @property
    def members(self) -> tuple[str, ...]:
        """Live workers that have a rank, by rank."""
        hosts, members = self.workers.hosts, self.plan.members if self.plan else ()
        return tuple([member.worker for member in members if member.worker in hosts])

    @property
    def crew(self) -> tuple[str, ...]:
        """The members by rank, then the leavers that are still waited for.

        All leavers are waited for until all members are known to have passed the step boundary at
        which these leave. At the end of the job, and if no member with the state lives, they stay.
        """
        if not self.plan or not self.plan.leavers:
            return self.members
        leavers = self.generations.leavers_at_end if self.settled else self.plan.leavers
        return (*self.members, *(worker for worker in leavers if worker in self.workers.hosts))

    @property
    def leavers(self) -> tuple[str, ...]:
        """The workers of the crew that are not members."""
        return self.crew[len(self.members) :]

    @property
    def leavers_at_end(self) -> tuple[str, ...]:
        """Leavers of a settled generation that wait for the end of the job; empty before that."""
        return self.leavers if self.settled else ()

    @property
    def departing(self) -> list[str]:
        """Workers of the crew to remove: those on idle nodes, then the surplus.

        The surplus is taken first from nodes with several workers.
        """
        crew, hosts = self.crew, self.workers.hosts
        departing = [worker for worker in crew if hosts[worker] in self.target.idle]
        kept = [worker for worker in crew if worker not in departing]
        while len(kept) > self.target.size:
            nodes = [hosts[worker] for worker in kept]
            _, surplus = max((nodes.count(node), index) for index, node in enumerate(nodes))
            departing.append(kept.pop(surplus))
        return departing

    @property
    def are_done(self) -> bool:
        """True if every member committed the last step; False without members.

        Workers that joined in a generation that never settled have nothing to finish.
        """
        base = self.generations.base
        trainees = [
            worker for worker in self.members if self.settled or (base and base.member(worker))
        ]
        return bool(trainees) and self.training.done.issuperset(trainees)

    @property
    def is_complete(self) -> bool:
        """True if all members of the last plan live."""
        return self.plan is not None and len(self.members) == self.world

    @property
    def is_short(self) -> bool:
        """True if a rank is missing and no new generation is planned yet.

        Too few workers are left, or none has the state.
        """
        return not self.finished and len(self.members) < self.world

    @property
    def lacks_workers(self) -> bool:
        """True if a member of the last plan was lost, or a leaver before the generation settled."""
        if self.plan is None or self.settled:
            return len(self.members) < self.world
        return len(self.crew) < self.world + len(self.plan.leavers)

    @property
    def could_grow(self) -> bool:
        """True if there are fewer members than wanted, and a spare."""
        return len(self.members) < self.target.size and bool(self.spares)

    @property
    def size(self) -> int:
        """The number of ranks that is wanted."""
        return self.target.size

    # -- workers -----------------------------------------------------------------------------------

    @property
    def spares(self) -> tuple[str, ...]:
        """Ready workers that are neither members nor leavers of the crew, by name."""
        crew = self.crew
        return tuple(
            sorted((worker for worker in self.workers.ready if worker not in crew), key=name_order)
        )

    @property
    def usable_spares(self) -> dict[str, str]:
        """Spare -> its node, without spares on nodes that are to idle."""
        hosts, idle = self.workers.hosts, self.target.idle
        return {worker: hosts[worker] for worker in self.spares if hosts[worker] not in idle}

    @property
    def is_starting(self) -> bool:
        """True if a worker is being started, and no spare is ready."""
        return bool(self.workers.begun_s) and not self.spares

    def is_ready(self, worker: str) -> bool:
        """Return whether ``worker`` lives and can take a rank, or has one."""
        return worker in self.workers.ready

    def has_substitute(self, worker: str) -> bool:
        """Return whether a spare could take the rank of ``worker``.

        It must be on another node that is neither idle nor set aside.
        """
        hosts = self.workers.hosts
        nodes = {hosts[spare] for spare in self.spares} - {hosts[worker]} - self.target.idle
        return bool(nodes.intersection(self.known_nodes.trusted(self.known_nodes.live)))

    def host_of(self, worker: str) -> str | None:
        """Return the node of a live worker; None once the worker is lost."""
        return self.workers.hosts.get(worker)

    def workers_on(self, node: str) -> frozenset[str]:
        """Return the live workers of ``node``, and those that are to be started there."""
        return frozenset(self.workers.on([node]))

    def overdue(self, now_s: float) -> tuple[str, ...]:
        """Return the workers that are not ready ``startup_s`` after the decision to start them.

        There are none before the first plan of a new run, as ``startup_s`` limits that start as a
        whole.
        """
        if not self.training.begun and self.plan is None:
            return ()
        limit_s = self.config.startup_s
        return tuple(
            worker for worker, begun_s in self.workers.begun_s.items() if now_s - begun_s > limit_s
        )

    def trains_on_without(self, worker: str) -> bool:
        """Return whether training continues although the script of ``worker`` has failed.

        It does once ranks have trained, if the worker has no rank, and did not end by itself while
        it had one. Its error then does not show that every rank would fail.
        """
        return (
            self.training.begun
            and worker not in self.members
            and worker not in self.workers.ended_ranks
        )

    @property
    def fingerprint(self) -> str:
        """Description of all that the numbers of this run depend on, from the first ready worker.

        It is "" before a worker was ready.
        """
        return self.workers.fingerprint

    # -- nodes -------------------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[str, ...]:
        """Live nodes, in order of joining."""
        return tuple(self.known_nodes.live)

    @property
    def idle(self) -> frozenset[str]:
        """Nodes that are to have no workers."""
        return frozenset(self.target.idle)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Nodes that get no workers because they cannot reach all others."""
        return tuple(sorted(self.known_nodes.left_out))

    @property
    def unfit(self) -> frozenset[str]:
        """Nodes that get no workers because of their health, and have not proved themselves since.

        Nodes that the settings of the run exclude are among them, also before they have joined.
        """
        return frozenset(self.known_nodes.unfit)

    @property
    def on_probation(self) -> frozenset[str]:
        """Unfit nodes that may still prove themselves."""
        return frozenset(self.known_nodes.on_probation)

    def started_on(self, node: str) -> int | None:
        """Return how many workers ``node`` has ever started; None for an unknown node."""
        return self.known_nodes.started.get(node)

    # -- state of the training ---------------------------------------------------------------------

    @property
    def keepers(self) -> frozenset[str]:
        """Nodes of live workers that have the state of the training, or may have it unreported.

        Leavers do not count while a member has the state, because the members can train on without
        them. Nor does a leaver that is a member again, before it has taken the state over. Before
        ranks have trained, the nodes of the crew count. Later, every node counts if no such worker
        is left: each may have a copy.
        """
        members = self.training.holders.intersection(self.members)
        members_up_to_date = {worker for worker in members if not self._may_be_behind(worker)}
        workers = members_up_to_date or members or self.training.holders or self.crew
        if not workers and self.training.begun:
            return frozenset(self.nodes)
        return frozenset(self.workers.hosts[worker] for worker in workers)

    def _may_be_behind(self, worker: str) -> bool:
        """Return whether other ranks may have trained without ``worker`` since it had the state."""
        stood_in = self.training.stood_in.get(worker, 0)
        unsettled = self.generations.unsettled.items()
        return any(number > stood_in and worker not in members for number, members in unsettled)

    @property
    def can_begin_with_copies(self) -> bool:
        """True if no worker has the state, and enough workers are ready to begin with copies."""
        needed_count = self.target.size if self.config.replacement_s else self.config.least_world
        return self.search.active and len(self.workers.ready) >= needed_count

    def awaits_answer_of(self, node: str) -> bool:
        """Return whether ``node`` was asked for its copies and has not answered that question."""
        return self.search.awaits_answer_of(node)

    @property
    def question_number(self) -> int:
        """The number of the last question about copies; -1 before the first one."""
        return self.search.number

    def is_convicted(self, worker: str) -> bool:
        """Return whether the numbers of ``worker`` were found corrupt."""
        return self.search.copies.is_convicted(worker)
