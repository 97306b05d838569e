"""Who is in, and what is known of them: the state of a membership, and the questions that it answers.

It only answers: all that changes it is in the classes above, the last of which is
:class:`chaoskit.coordinator.membership.membership.Membership`.
"""

from __future__ import annotations

import math

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership.assignment import name_order
from chaoskit.coordinator.membership.limits import LIMITS, Limits
from chaoskit.coordinator.membership.policies import POLICIES, Policies
from chaoskit.coordinator.membership.revival import Revival
from chaoskit.coordinator.membership.strikes import Strikes
from chaoskit.wire.messages import Endpoint, Plan


class Roll:
    """Nodes, the workers that live on them, and which of these have a rank, are spare, or have the state."""

    def __init__(
        self, config: RunConfig, *, policies: Policies = POLICIES, limits: Limits = LIMITS
    ) -> None:
        self._config, self._policies, self._limits = config, policies, limits
        self._size = config.nodes  # of the full world
        self._idle: set[str] = set()  # nodes that are to have no workers
        self._swap_by_s: float | None = (
            None  # until then who goes may stay for who is started in its place
        )
        self._nodes: list[str] = []  # live, in order of joining
        self._started: dict[str, int] = {}  # node -> workers ever started there
        self._hosts: dict[str, str] = {}  # live worker -> node
        self._begun_s: dict[
            str, float
        ] = {}  # workers that are not ready yet -> when their start was decided
        self._ready: dict[str, Endpoint] = {}
        self._holders: set[str] = set()
        self._healed: set[str] = (
            set()
        )  # members of a sharded job that have their piece, until all have
        self._growing = False  # a sharded job, once it is known what all can begin with
        self._may_train = False  # members of a sharded job, in the last generation
        self._done: set[str] = set()
        self._parting: tuple[
            str, ...
        ] = ()  # leavers of a generation that has settled, which stay for now
        self._over_s = math.inf  # when all members had committed the last step
        self._entered: set[str] = set()  # members that stand in the last generation
        self._stood_in: dict[
            str, int
        ] = {}  # live worker -> the newest generation in which it is known to have stood
        #: Generations of which it is not known that they worked, while a holder may lack what was committed there.
        self._unsettled: dict[int, frozenset[str]] = {}  # -> their members
        self._trained_in = (
            0  # of these, the newest one in which a rank is known to have committed a step
        )
        self._plan: Plan | None = None
        # Ranks and shards follow from the last generation that worked: a survivor has gradients of those shards only.
        self._base: Plan | None = None
        self._launched = False
        self._trained = False
        self._settled = False
        self._stalled_generation = 0
        self._losses = 0
        self._shares: dict[
            str, int
        ] = {}  # worker -> shards, once ranks were found not to be equally fast
        self._strikes = Strikes(config.strikes_max)
        self._silent: dict[
            str, float
        ] = {}  # lost nodes that may come back with what they keep -> until when
        self._left_out: set[str] = set()  # nodes that cannot reach all others
        self._unfit = {*config.quarantined, *config.on_probation}
        self._on_probation = set(config.on_probation).difference(config.quarantined)
        self._full_s = math.inf  # when as many nodes had joined as the world is to have
        self._fingerprint = ""  # of the first worker that was ready
        self._floor = 0  # a generation that somebody has seen
        self._record_lost = False  # there is a past, but no plan of it: also where a job is resumed
        self._resumes = False
        self._failed_starts = 0  # in a row
        self._start_after_s = -math.inf  # a clock may read anything, also less than 0
        self._revival = Revival(limits, policies.restorable)
        self._ready_s = -math.inf  # when the last worker became ready
        self._failure = ""
        self._ended_ranks: set[str] = (
            set()
        )  # members whose processes ended: why may be heard after their loss
        self._last_loss = ""  # worker and detail of the last one that was lost, in words
        self._deadline_s = math.inf
        self._finished = False

    @property
    def generation(self) -> int:
        """Number of the last published plan; 0 before the first."""
        return self._plan.generation if self._plan else 0

    @property
    def newest_known(self) -> int:
        """The highest generation of which anybody has told; as a rule the last one that was published."""
        return max(self.generation, self._floor)

    @property
    def plan(self) -> Plan | None:
        """The last published plan."""
        return self._plan

    @property
    def world(self) -> int:
        """Ranks in the last published plan."""
        return len(self._plan.members) if self._plan else 0

    @property
    def members(self) -> tuple[str, ...]:
        """Live workers that have a rank, by rank."""
        hosts, members = self._hosts, self._plan.members if self._plan else ()
        return tuple([member.worker for member in members if member.worker in hosts])

    @property
    def crew(self) -> tuple[str, ...]:
        """The members, and the leavers that are still waited for.

        Those are all leavers until all members are known to have passed the step boundary at which these leave. At the
        end of the job, and where no member with the state lives, they stay.
        """
        if not self._plan or not self._plan.leavers:
            return self.members
        leavers = self._parting if self._settled else self._plan.leavers
        return (*self.members, *(worker for worker in leavers if worker in self._hosts))

    @property
    def parting(self) -> tuple[str, ...]:
        """Those that leave when the job is at its end, and are waited for."""
        return self.crew[len(self.members) :] if self._settled else ()

    @property
    def _is_short_of_workers(self) -> bool:
        """True if the last plan lacks a worker: a member, or a leaver while its generation has not settled."""
        if self._plan is None or self._settled:
            return len(self.members) < self.world
        return len(self.crew) < self.world + len(self._plan.leavers)

    @property
    def _going(self) -> list[str]:
        """Whom of the crew nobody wants: those on nodes that are to idle, and who is too many, first beside another."""
        crew = self.crew
        going = [worker for worker in crew if self._hosts[worker] in self._idle]
        kept = [worker for worker in crew if worker not in going]
        while len(kept) > self._size:
            hosts = [self._hosts[worker] for worker in kept]
            _, surplus = max((hosts.count(host), index) for index, host in enumerate(hosts))
            going.append(kept.pop(surplus))
        return going

    @property
    def _is_complete(self) -> bool:
        """Whether all members of the last plan live."""
        return self._plan is not None and len(self.members) == self.world

    @property
    def _is_wanting(self) -> bool:
        """Whether there are fewer members than there should be, and somebody who could be one."""
        return len(self.members) < self._size and bool(self.spares)

    @property
    def size(self) -> int:
        """Ranks that the world shall have."""
        return self._size

    @property
    def idle(self) -> frozenset[str]:
        """Nodes that are to have no workers."""
        return frozenset(self._idle)

    @property
    def spares(self) -> tuple[str, ...]:
        """Ready workers without a rank, by name."""
        crew = self.crew
        return tuple(
            sorted((worker for worker in self._ready if worker not in crew), key=name_order)
        )

    @property
    def is_starting(self) -> bool:
        """Whether a worker is being started, and no spare is ready."""
        return bool(self._begun_s) and not self.spares

    @property
    def nodes(self) -> tuple[str, ...]:
        """Live nodes, in order of joining."""
        return tuple(self._nodes)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Nodes that get no workers because they cannot reach all others."""
        return tuple(sorted(self._left_out))

    @property
    def unfit(self) -> frozenset[str]:
        """Nodes that get no workers because something is wrong with them, or was, and they have not proved themselves.

        Those that the run was told to do without are among them, whether they have come or not.
        """
        return frozenset(self._unfit)

    @property
    def on_probation(self) -> frozenset[str]:
        """Of these, the nodes that may still prove themselves."""
        return frozenset(self._on_probation)

    @property
    def keepers(self) -> frozenset[str]:
        """Nodes of the live workers that have the state of the training, or may have it by now and cannot say so.

        Not of those that leave, while a member has it: the members can train on without them. For the same reason not
        of one that was to leave, and is a member again, before it has taken the state over. Without any it is every
        node: each may have a copy of it.
        """
        members = self._holders.intersection(self.members)
        level = {worker for worker in members if not self._may_be_behind(worker)}
        workers = level or members or self._holders or self.crew
        if not workers and self._trained:
            return frozenset(self._nodes)
        return frozenset(self._hosts[worker] for worker in workers)

    def _may_be_behind(self, worker: str) -> bool:
        """Whether others may have committed steps without ``worker`` since it is known to have had the state."""
        stood_in = self._stood_in.get(worker, 0)
        return any(
            one > stood_in and worker not in members for one, members in self._unsettled.items()
        )

    @property
    def fingerprint(self) -> str:
        """What the numbers of this run depend on; "" while no worker was ready."""
        return self._fingerprint

    @property
    def worked(self) -> int:
        """Number of the last generation in which all members have met, or of the first one."""
        return self._base.generation if self._base else 0

    def may_have_worked(self, generation: int) -> bool:
        """Whether it matters that some rank has committed a step in ``generation``, and is not known yet."""
        if self._finished or generation not in self._unsettled:
            return False
        return generation == self.generation or (
            generation > self._trained_in and not self._config.job.sharded
        )

    @property
    def settled(self) -> bool:
        """Whether every member of the last plan has built its group."""
        return self._settled

    @property
    def is_forming(self) -> bool:
        """Whether the next generation has yet to work, or copies of the state to be found."""
        return not self._finished and (not self._settled or self._revival.active)

    @property
    def is_short(self) -> bool:
        """Whether a rank is missing, and there is no new generation: too few are left, or nobody has the state."""
        return not self._finished and len(self.members) < self.world

    @property
    def revives(self) -> bool:
        """Whether nobody has the state, and enough workers are ready to begin again with copies of it."""
        config = self._config
        enough = self._size if config.replacement_s else config.least_world
        return self._revival.active and len(self._ready) >= enough

    @property
    def is_gathering(self) -> bool:
        """Whether the last generation is over, and the next one waits for copies or for workers."""
        return self._plan is not None and self._stalled_generation == self.generation

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self._finished

    def has_substitute(self, worker: str) -> bool:
        """Whether a spare on another node, that is not set aside, could take the rank of ``worker``."""
        nodes = {self._hosts[spare] for spare in self.spares} - {self._hosts[worker]} - self._idle
        return bool(nodes.intersection(self._strikes.trusted(self._nodes)))

    def started_on(self, node: str) -> int | None:
        """Workers that ``node`` has ever started, as far as is known here; None if nothing is known of the node."""
        return self._started.get(node)

    def workers_on(self, node: str) -> frozenset[str]:
        """Live workers of ``node``, and those that are to be started there."""
        return frozenset(worker for worker, host in self._hosts.items() if host == node)

    def host_of(self, worker: str) -> str | None:
        """The node of a live worker; None once it is lost."""
        return self._hosts.get(worker)

    def overdue(self, now_s: float) -> tuple[str, ...]:
        """Workers that should be ready by now. None before the first plan: the first start has a limit of its own."""
        if not self._trained and self._plan is None:
            return ()
        limit_s = self._config.startup_s
        return tuple(
            worker for worker, begun_s in self._begun_s.items() if now_s - begun_s > limit_s
        )

    def is_ready(self, worker: str) -> bool:
        """Whether ``worker`` lives and can take a rank, or has one."""
        return worker in self._ready

    def asks(self, node: str) -> bool:
        """Whether ``node`` still owes an answer to :class:`Recall`."""
        return self._revival.asks(node)

    @property
    def question(self) -> int:
        """Number of the last :class:`Recall`."""
        return self._revival.number

    def is_convicted(self, worker: str) -> bool:
        """Whether the numbers of ``worker`` were found corrupt."""
        return self._revival.is_convicted(worker)

    def outlives(self, worker: str) -> bool:
        """Whether training goes on even if ``worker`` fails in a way that would repeat on every rank."""
        return self._trained and worker not in self.members and worker not in self._ended_ranks
