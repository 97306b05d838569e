"""Who is in: the pure state machine that turns joins and losses into generations.

Who has the state of the training decides what may be published. Until the first generation settles nobody has trained:
every worker builds the same weights from the seed, and fresh ones may replace all. From then on the members of that
generation hold the state; a worker that joins later holds it once it is :class:`Healed`. When no holder is left, every
node is asked for sealed copies, and fresh workers begin with the newest ones; without any the job is lost. Workers that
end before they are ready spend no part of the failure budget once the job trains: they are started again, ever more
slowly. A generation must therefore be reported :class:`Settled` before any of its members may commit a step. A report
may be lost with its node, though: if the members have met, the others count from then on as if it had settled.

When a node has seen a generation of which nothing is known, the record of the run was lost. Nobody can tell any more
who held the state: all workers of before are given up, and fresh ones begin with the newest sealed copies. When a node
has started more workers than are known, the record has lost its end.

A world that is resized moves at a step boundary: who leaves it is a member until then, and is lost only once all others
have met without it.

The state of a sharded job is in pieces, one a rank. Then all members together hold it, or nobody does: with one rank
the state is lost, and every generation but the first begins with sealed copies of all pieces.
"""

from __future__ import annotations

import math

from chaoskit.config import RunConfig
from chaoskit.control.assignment import fit, name_order, reassign, seat
from chaoskit.control.events import (
    Action,
    AnyEvent,
    Evicted,
    Finish,
    Fit,
    GenerationSeen,
    Healed,
    JobFailed,
    LeftOut,
    NodeJoined,
    NodeLost,
    Publish,
    Rebalanced,
    Recall,
    Resized,
    Resumes,
    Returned,
    Sealed,
    SetAside,
    Settled,
    SourceFailed,
    Stalled,
    StartWorker,
    StopWorker,
    Tick,
    Unfit,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)
from chaoskit.control.revival import GATHER_S, Revival
from chaoskit.control.strikes import Strikes
from chaoskit.messages import Endpoint, Member, Plan, Snapshot

#: Once nobody is left who holds the state, a member that is taking it over has this long to say that it does.
HEALING_S = 2.0
#: Pause before a worker is started again when two or more in a row did not become ready; doubled each time.
PAUSE_S = 0.25
PAUSE_MAX_S = 30.0
#: The first start waits so long for nodes on probation to prove themselves; they take some tenths of a second.
PROOF_S = 2.0
#: When nobody can train, so many starts in a row that come to nothing end the job.
STARTS_MAX = 8


class Membership:
    """Keeps ``nodes`` members and ``spares`` spares going, one generation after the other."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._size = config.nodes  # of the full world
        self._idle: set[str] = set()  # nodes that are to have no workers
        self._nodes: list[str] = []  # live, in order of joining
        self._started: dict[str, int] = {}  # node -> workers ever started there
        self._hosts: dict[str, str] = {}  # live worker -> node
        self._begun_s: dict[str, float] = {}  # workers that are not ready yet -> when their start was decided
        self._ready: dict[str, Endpoint] = {}
        self._holders: set[str] = set()
        self._healed: set[str] = set()  # members of a sharded job that have their piece, until all have
        self._growing = False  # a sharded job, once it is known what all can begin with
        self._may_train = False  # members of a sharded job, in the last generation
        self._done: set[str] = set()
        self._entered: set[str] = set()  # members that stand in the last generation
        self._plan: Plan | None = None
        # Ranks and shards follow from the last generation that worked: a survivor has gradients of those shards only.
        self._base: Plan | None = None
        self._launched = False
        self._trained = False
        self._settled = False
        self._stalled_generation = 0
        self._losses = 0
        self._shares: dict[str, int] = {}  # worker -> shards, once ranks were found not to be equally fast
        self._strikes = Strikes(config.strikes_max, config.strike_window_s)
        self._silent: dict[str, float] = {}  # lost nodes that may come back with what they keep -> until when
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
        self._revival = Revival()
        self._ready_s = -math.inf  # when the last worker became ready
        self._failure = ""
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
        members = self._plan.members if self._plan else ()
        return tuple(member.worker for member in members if member.worker in self._hosts)

    @property
    def crew(self) -> tuple[str, ...]:
        """The members, and those who leave at a step boundary that not all are known to have passed."""
        leavers = self._plan.leavers if self._plan and not self._settled else ()
        return (*self.members, *(worker for worker in leavers if worker in self._hosts))

    @property
    def _crew_size(self) -> int:
        """How many the crew were when the last plan was published."""
        return self.world + (len(self._plan.leavers) if self._plan and not self._settled else 0)

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
        return tuple(sorted((worker for worker in self._ready if worker not in crew), key=name_order))

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

        Without any it is every node: each may have a copy of it.
        """
        workers = self._holders or self.crew
        if not workers and self._trained:
            return frozenset(self._nodes)
        return frozenset(self._hosts[worker] for worker in workers)

    @property
    def fingerprint(self) -> str:
        """What the numbers of this run depend on; "" while no worker was ready."""
        return self._fingerprint

    @property
    def worked(self) -> int:
        """Number of the last generation in which all members have met, or of the first one."""
        return self._base.generation if self._base else 0

    @property
    def settled(self) -> bool:
        """Whether every member of the last plan has built its group."""
        return self._settled

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
        """Whether the generation of a sharded job is over, and the next waits for pieces or for workers."""
        return self._config.job.sharded and self._plan is not None and self._stalled_generation == self.generation

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self._finished

    @property
    def may_rebalance(self) -> bool:
        """Whether shards can be moved between the members: all train, and no other membership is to come soon."""
        stable = self._settled and self._is_complete and not self._done and not self._revival.active
        entered = self.generation == 1 or self._entered.issuperset(self.members)  # else see _may_move
        starting = len(self.members) < self._size and bool(self._begun_s)
        leaving = any(self._hosts[worker] in self._idle for worker in self.members)
        moving = starting or leaving or self._may_move()
        return stable and entered and not moving and not self._config.job.sharded and not self._finished

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
        """Workers that should be ready by now. None before anybody trains: the first start has a limit of its own."""
        if not self._trained:
            return ()
        limit_s = self._config.startup_s
        return tuple(worker for worker, begun_s in self._begun_s.items() if now_s - begun_s > limit_s)

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

    def outlives(self, worker: str) -> bool:
        """Whether training goes on even if ``worker`` fails in a way that would repeat on every rank."""
        return self._trained and worker not in self.members

    def handle(self, event: AnyEvent, now_s: float) -> list[Action]:
        """Take in one event. The start-up time counts from the first call."""
        if self._finished:
            return []
        self._deadline_s = min(self._deadline_s, now_s + self._config.startup_s)
        chores = self._take_in(event, now_s)
        if self._config.job.sharded:
            self._look_at_pieces()
        chores += self._recall(now_s)
        decision = self._decide(now_s)
        if isinstance(decision, Finish):
            self._finished = True
            return [decision]
        return [decision, *chores] if decision else chores

    # -- events ---------------------------------------------------------------------------------------------------

    def _take_in(self, event: AnyEvent, now_s: float) -> list[Action]:
        match event:
            case NodeJoined(node, _, started) if node not in self._nodes:
                self._nodes.append(node)
                self._silent.pop(node, None)
                self._started[node] = max(self._started.get(node, 0), started)
                self._launched |= self._may_start(now_s)
                return self._start_missing([], now_s)
            case NodeLost(node, _, met, silent) if node in self._nodes:
                self._nodes.remove(node)
                if silent:  # its agent ends when its own lease is over
                    self._silent[node] = now_s + self._config.coordinator_outage_s
                self._left_out.discard(node)
                self._idle.discard(node)
                self._forget_fitness(node)
                self._revival.lose_node(node, now_s)
                workers = [worker for worker, host in self._hosts.items() if host == node]
                self._losses += sum(self._costs(worker) for worker in workers)
                self._doubt(workers if met else [])
                return [*self._strike(node, now_s), *self._lose(workers, "node lost", now_s)]
            case LeftOut(nodes):
                self._left_out.update(nodes)
                workers = [worker for worker, host in self._hosts.items() if host in nodes]
                self._losses += sum(self._costs(worker) for worker in workers)
                self._doubt(workers)
                return self._lose(workers, "unreachable", now_s)
            case Returned(nodes):
                self._left_out.difference_update(nodes)
                return self._start_missing([], now_s)
            case Unfit(node):
                self._unfit.add(node)
                self._on_probation.discard(node)
                self._launched |= self._may_start(now_s)
                workers = [worker for worker, host in self._hosts.items() if host == node]
                self._doubt(workers)
                return self._lose(workers, "unfit", now_s)
            case Fit(node) if node not in self._config.quarantined:
                self._unfit.discard(node)
                self._on_probation.discard(node)
                self._launched |= self._may_start(now_s)
                return self._start_missing([], now_s)
            case Resized(size, idle):
                self._size, self._idle = size, set(idle)
                return self._vacate(now_s)
            case Evicted(node):
                workers = [worker for worker, host in self._hosts.items() if host == node]
                self._doubt(workers)
                return self._lose(workers, "evicted", now_s)
            case WorkerLost(worker, cause) if worker in self._hosts:
                self._count_loss(worker, now_s)
                if self._config.job.sharded:
                    self._doubt([worker])
                if event.aside or cause == "slow":
                    self._strikes.condemn(self._hosts[worker])
                return [*self._strike(self._hosts[worker], now_s), *self._lose([worker], "lost", now_s)]
            case WorkerReady(worker, node, endpoint, fingerprint) if self._hosts.get(worker) == node:
                self._ready.setdefault(worker, endpoint)
                self._begun_s.pop(worker, None)
                self._fingerprint = self._fingerprint or fingerprint
                self._failed_starts, self._start_after_s, self._ready_s = 0, now_s, now_s
                return self._start_missing([], now_s)
            case Settled(generation) if self._plan and generation == self._plan.generation:
                if not self._trained and not self._plan.restore:
                    self._holders.update(self.members)
                leavers = self.crew[len(self.members) :]
                self._trained = self._settled = True
                self._base = self._plan
                return self._lose(list(leavers), "left", now_s)
            case Healed(worker) | WorkerDone(worker) if worker in self.members:
                (self._healed if self._config.job.sharded else self._holders).add(worker)
                self._entered.add(worker)
                self._done.update([worker] if isinstance(event, WorkerDone) else [])
            case Sealed(node, snapshots, number, committed):
                self._revival.answer(node, snapshots, now_s, number=number, committed=committed)
            case SourceFailed(snapshot, corrupt):
                restoring = self._is_restoring()
                self._revival.fail(snapshot, corrupt, now_s)
                if self._config.job.sharded and restoring and not self._is_restoring():
                    # A rank has no piece, so none will train in this generation. What it lacks may have been
                    # overwritten by what is newer.
                    self._stalled_generation, self._may_train = self.generation, False
                    self._revival.ask_again()
            case Rebalanced(shares) if self.may_rebalance:
                self._shares = dict(shares)
            case Stalled(generation):
                self._stalled_generation = generation
                if self._config.job.sharded:
                    self._doubt(list(self.members))
            case JobFailed(reason):
                self._failure = reason
            case GenerationSeen(generation, node, started):
                self._lose_record(generation, node, started)
            case Resumes(generation):
                self._floor, self._record_lost, self._trained, self._resumes = generation, True, True, True
            case Tick():
                self._launched |= self._may_launch(now_s) if self._record_lost else self._may_start(now_s)
                return self._start_missing([], now_s)
        return []

    def _lose_record(self, generation: int, node: str, started: int) -> None:
        """There is a past of which nothing is known. It can be made up for until a world begins without it."""
        without = ""
        if started > self._started.get(node, started):
            if self._plan or self._hosts:  # some of these workers may be others than they seem
                without = f"{node} has started {started} workers, and {self._started[node]} of them are known"
            self._started[node] = started
        if generation > self.newest_known:
            if self._plan or (self._hosts and not self._record_lost):
                without = f"a node has seen generation {generation}, and workers were started without knowing of it"
            self._floor, self._record_lost, self._trained = generation, True, True
        if without:
            self._failure = f"the coordinator's record was lost: {without}"

    def _forget_fitness(self, node: str) -> None:
        """Whoever comes under this name next looks at itself anew. What the run was told of it stays."""
        config = self._config
        if node in config.quarantined:
            return
        self._unfit.discard(node)
        if node in config.on_probation:
            self._unfit.add(node)
            self._on_probation.add(node)

    def _may_start(self, now_s: float) -> bool:
        """Whether a run without a past has its nodes, and those on probation have had their time."""
        if len(self._nodes) < self._config.nodes or self._record_lost:
            return False
        self._full_s = min(self._full_s, now_s)
        return self._on_probation.isdisjoint(self._nodes) or now_s >= self._full_s + PROOF_S

    def _may_launch(self, now_s: float) -> bool:
        """After a loss of the record: all nodes that come have joined by now, and workers are spread over them.

        Not as many need come as there were: the copies are with those that do.
        """
        enough = len(self._nodes) >= self._config.nodes
        return enough or (self._revival.active and not self._revival.is_asking(now_s))

    def _strike(self, node: str, now_s: float) -> list[Action]:
        return [SetAside(node)] if self._strikes.strike(node, now_s) else []

    def _costs(self, worker: str) -> bool:
        """Whether the loss of ``worker`` spends a part of the failure budget."""
        return worker in self._ready or not self._trained

    def _count_loss(self, worker: str, now_s: float) -> None:
        if self._costs(worker):
            self._losses += 1
            return
        self._failed_starts += 1
        if self._failed_starts > 1:
            self._start_after_s = now_s + min(PAUSE_MAX_S, PAUSE_S * 2.0 ** (self._failed_starts - 2))

    def _doubt(self, workers: list[str]) -> None:
        """These are lost, and cannot say any more whether the first generation settled: the others may have trained.

        A replica that has shows it, and the others follow. Ranks that hold pieces would all begin anew.
        """
        if not self._trained and not set(workers).isdisjoint(self.members):
            assert self._base is not None
            old = [worker for worker in self.members if self._base.member(worker)]
            self._trained = True
            if not self._config.job.sharded:
                self._holders.update(old or self.members)  # who came later has taken nothing over that we know of

    def _vacate(self, now_s: float) -> list[Action]:
        """End what is on nodes that are to idle, but for members: these leave at a step boundary.

        Members of a sharded job cannot: what they hold is restored from its copies.
        """
        sharded, crew = self._config.job.sharded, set(self.crew)
        leaving = [worker for worker, node in self._hosts.items() if node in self._idle and worker not in crew]
        leaving += self._going if sharded else []
        if sharded:
            self._doubt(leaving)
        return self._lose(leaving, "left", now_s)

    def _look_at_pieces(self) -> None:
        """Of a sharded state, whether all members hold it together. If not, all of them must begin anew."""
        members = set(self.members)
        if not self._trained or self._plan is None:
            return
        over = not self._is_complete or self._stalled_generation == self.generation
        if self._growing and not over and not self._is_wanting:  # who was to come is lost, or not wanted: all train on
            self._growing, self._may_train, self._holders = False, True, members
        elif over or self._growing or self._may_grow():
            self._growing = not over
            self._holders, self._healed = set(), set()
            if over:
                self._stalled_generation = self.generation
            if not self._is_complete:
                self._done = set()  # the last steps must be taken again
            if self._may_train:  # though nobody has said so yet: what was known to be stored is too old
                self._may_train = False
                self._revival.end()
        elif self._healed >= members:
            self._holders = members

    def _may_grow(self) -> bool:
        """Whether the world is not full, though it could be, and no member is at its end."""
        return self._settled and not self._done and self._is_wanting and not self._revival.active

    @property
    def _is_wanting(self) -> bool:
        """Whether there are fewer members than there should be, and somebody who could be one."""
        return len(self.members) < self._size and bool(self.spares)

    def _may_move(self) -> bool:
        """Whether another world is wanted, and all ranks will come to a step boundary where they can leave this one."""
        if not self._settled or self._done or self._revival.active:
            return False
        if self._going and self.generation > 1 and not self._entered.issuperset(self.members):
            return False  # who hangs on its way into this generation would never come to a boundary, and not be blamed
        next_world = self._next_world(abort=False)
        return set(next_world) != set(self.members) and len(next_world) >= self._config.least_world

    def _next_world(self, *, abort: bool) -> list[str]:
        """Who has a rank in the next generation.

        Where a rank was lost, those who are to leave go along once more: they may have gone furthest. Else one of them
        stays if nobody else has the state, until somebody has taken it over.
        """
        crew, going = self.crew, self._going
        kept = [worker for worker in crew if worker not in going]
        if abort:
            kept, needed = [*crew], going
        elif self._holders.isdisjoint(kept):
            needed = [worker for worker in going if worker in self._holders][:1]
            kept += needed
        else:
            needed = []
        room = min(self._size + len(needed), self._config.shard_count) - len(kept)
        spares = self._willing(room)
        seats = [(member.worker, member.node) for member in self._base.members] if self._base else []
        members = {worker: self._hosts[worker] for worker in kept}
        return seat(seats, members, spares, len(kept) + max(0, room))

    def _willing(self, wanted: int) -> dict[str, str]:
        """Spare -> its node; those on nodes that are set aside only where there are not enough others."""
        spares = {worker: self._hosts[worker] for worker in self.spares if self._hosts[worker] not in self._idle}
        trusted = self._strikes.trusted(self._nodes)
        good = {worker: node for worker, node in spares.items() if node in trusted}
        return good if len(good) >= wanted else spares

    @property
    def _going(self) -> list[str]:
        """Whom of the crew nobody wants: those on nodes that are to idle, and who is too many, first beside another."""
        going = [worker for worker in self.crew if self._hosts[worker] in self._idle]
        kept = [worker for worker in self.crew if worker not in going]
        while len(kept) > self._size:
            hosts = [self._hosts[worker] for worker in kept]
            _, surplus = max((hosts.count(host), index) for index, host in enumerate(hosts))
            going.append(kept.pop(surplus))
        return going

    def _lose(self, workers: list[str], cause: str, now_s: float) -> list[Action]:
        nodes = [self._hosts.pop(worker) for worker in workers]
        for worker in workers:
            self._ready.pop(worker, None)
            self._begun_s.pop(worker, None)
            self._holders.discard(worker)
            self._done.discard(worker)
        return [*(StopWorker(worker, cause) for worker in workers), *self._start_missing(nodes, now_s)]

    def _start_missing(self, lost_on: list[str], now_s: float) -> list[Action]:
        """Start what is missing from the target, each worker where the fewest live, rather where one was lost."""
        starts: list[Action] = []
        kept_out = self._left_out | self._idle | self._unfit
        trusted = self._strikes.trusted([node for node in self._nodes if node not in kept_out])
        if now_s < self._start_after_s:
            return starts
        target = self._size + self._config.spares if self._launched and trusted else 0
        there = sum(node not in self._idle for node in self._hosts.values())  # who leaves may wait for its successor
        for index in range(target - there):
            hosts, lost_here = list(self._hosts.values()), lost_on[index : index + 1]
            node = min(trusted, key=lambda node: (hosts.count(node), node not in lost_here))
            number = self._started.get(node, 0)
            self._started[node] = number + 1
            self._hosts[f"{node}.{number}"] = node
            self._begun_s[f"{node}.{number}"] = now_s
            starts.append(StartWorker(node, f"{node}.{number}"))
        return starts

    # -- decisions ------------------------------------------------------------------------------------------------

    def _decide(self, now_s: float) -> Publish | Finish | None:
        if self._failure:
            return Finish(False, self._failure)
        members = self.members
        # A joiner of a generation that never settled has done nothing that it could finish.
        trainees = [worker for worker in members if self._settled or (self._base and self._base.member(worker))]
        if trainees and self._done.issuperset(trainees):
            return Finish(True, "every rank committed the last step")
        if self._losses > self._config.max_failures:
            budget = f"max_failures={self._config.max_failures}"
            return Finish(False, f"the failure budget is spent: {self._losses} workers were lost, {budget}")
        if not self._plan and not self._record_lost:
            return self._begin(now_s)
        if not self._trained and not self._nodes and now_s >= self._deadline_s:  # all were lost in the first regroup
            return Finish(False, self._late())
        if self._failed_starts >= STARTS_MAX and len(members) < self._config.least_world:
            return Finish(False, f"{self._failed_starts} workers in a row ended before they were ready: {self._left()}")
        if self._revival.active:
            return self._revive(now_s)
        if not self._plan:  # nobody is there who could be asked for copies
            late = now_s >= self._deadline_s
            return Finish(False, f"the coordinator's record was lost: {self._late()}") if late else None
        if len(self.crew) < self._crew_size or self._stalled_generation == self.generation:
            return self._regroup(abort=True)
        if self._may_move() and not self._config.job.sharded:  # there all begin anew, once it is known with what
            return self._regroup(abort=False)
        if self.may_rebalance and self._wants_other_shares():
            return self._regroup(abort=False)
        return None

    def _wants_other_shares(self) -> bool:
        """Whether the members of the last plan have not as many shards as they should."""
        assert self._plan is not None
        loads = {member.worker: len(member.shards) for member in self._plan.members}
        fitted = fit(self._shares, self.members, self._config.shard_count)
        return max(loads.values()) - min(loads.values()) > 1 if fitted is None else fitted != loads

    def _left(self) -> str:
        return f"{len(self.members)} ranks are left, min_world={self._config.least_world}"

    def _begin(self, now_s: float) -> Publish | Finish | None:
        config, ready = self._config, sorted(self._ready, key=name_order)
        hosts = [self._hosts[worker] for worker in ready]
        full = len(ready) >= self._size and len(set(hosts)) >= min(self._size, len(set(self._hosts.values())))
        if not full and now_s < self._deadline_s:
            return None
        if len(ready) < config.least_world:
            return Finish(False, self._late())
        return self._publish(self._first_world(), abort=True)

    def _late(self) -> str:
        found = f"{len(self._nodes)} of {self._config.nodes} nodes joined, {len(self._ready)} workers are ready"
        unfit = [node for node in self._nodes if node in self._unfit]
        found += f"; not fit to train: {', '.join(unfit)}" if unfit else ""
        return f"start-up took longer than startup_s={self._config.startup_s:g}: {found}"

    def _first_world(self) -> list[str]:
        """Ready workers, by rank, where no world was before: as many nodes as possible have one."""
        ready = sorted(self._ready, key=name_order)
        hosts = [self._hosts[worker] for worker in ready]
        order = {worker: self._nodes.index(host) for worker, host in zip(ready, hosts, strict=True)}
        turns = {worker: index - hosts.index(hosts[index]) for index, worker in enumerate(ready)}
        chosen = sorted(ready, key=lambda worker: (turns[worker], order[worker]))[: self._size]
        return sorted(chosen, key=lambda worker: order[worker])

    def _recall(self, now_s: float) -> list[Action]:
        """Ask every node for sealed copies, once the last holder of the state is lost."""
        if self._trained and not self._holders and (self._plan or self._nodes):
            if self._config.job.sharded and self._should_ask_again(now_s):
                self._revival.ask_again()
            nodes = self._revival.begin(self._nodes, now_s)
            return [Recall(node, self._revival.number) for node in nodes]
        self._revival.end()
        return []

    def _should_ask_again(self, now_s: float) -> bool:
        """Whether what is known of a sharded state is too little, or too old to go back to.

        Members of a world that grows train on while they are asked, and may have answered between different steps; so
        may those with whom a lost one is still in contact. Copies that were under way are complete a little later.
        """
        revival = self._revival
        if self._is_restoring() or not self._nodes:  # asking nobody would leave no trace in the record
            return False
        if revival.outdated:
            return True
        if not self._has_answers(now_s) or not revival.is_stale(now_s):
            return False
        if revival.awaits_reach:
            return revival.is_due(now_s)
        if revival.snapshots:
            return not self._awaits_workers(now_s)
        return self._growing or revival.bare_s(now_s) < HEALING_S

    def _has_answers(self, now_s: float) -> bool:
        """Whether enough is known to decide. Members of a world that grows train on: what they have is what counts."""
        if not self._revival.is_asking(now_s):
            return True
        hosts = {self._hosts[worker] for worker in self.members}
        return self._growing and bool(self._revival.snapshots) and self._revival.has_heard(hosts)

    @property
    def _is_complete(self) -> bool:
        """Whether all members of the last plan live."""
        return self._plan is not None and len(self.members) == self.world

    def _may_begin_anew(self) -> bool:
        """Whether a sharded job of which nothing complete is stored has not come further than its first step.

        Then who is left of its first generation has little to lose, and everybody builds the same weights.
        """
        plan, revival = self._plan, self._revival
        hosts = {self._hosts[worker] for worker in self.members}
        first = self._config.job.sharded and plan is not None and not plan.restore
        return first and bool(hosts) and revival.has_heard(hosts) and revival.is_virgin

    def _revive(self, now_s: float) -> Publish | Finish | None:
        """Begin again with the newest sealed copies; without any, a member may still be taking the state over."""
        revival, startup_s, lost = self._revival, self._config.startup_s, "every replica was lost"
        if self._resumes and not self._plan:
            lost = "nothing that is stored could be restored"
        elif not self._plan:
            lost = f"the coordinator's record was lost, and {lost}"
        if not self._has_answers(now_s):
            return None
        if not revival.snapshots and not self._may_begin_anew():
            stored = self._config.disk is not None and (not self._nodes or revival.owed)
            if stored and revival.waited_s(now_s) < startup_s:
                return None  # a node that comes back sees what is stored
            if self._growing:
                return None  # they train on, and are asked again
            if self._config.job.sharded and not revival.has_heard(self._nodes):
                return None  # who is silent for too long is lost
            if revival.awaits_reach and not self._is_fruitless(now_s):
                return None
            if any(now_s < until_s for until_s in self._silent.values()):
                return None
            if self.members and revival.bare_s(now_s) < HEALING_S:
                return None
            return Finish(False, f"{lost}: no live worker has the state of the training, and no node a complete copy")
        if self._is_fruitless(now_s):
            return Finish(False, f"{lost}: nobody took over a sealed copy in startup_s={startup_s:g}")
        if self._is_restoring() or revival.awaits_reach or self._awaits_workers(now_s):
            return None
        return self._regroup(abort=True, restore=revival.restore(now_s))

    def _is_fruitless(self, now_s: float) -> bool:
        """Whether nobody takes a copy over. Of pieces all must be: one that hangs at it is replaced in between."""
        if self._config.job.sharded:
            return self._revival.fruitless_s(now_s) > 2 * self._config.startup_s
        return self._revival.waited_s(now_s) > self._config.startup_s

    def _awaits_workers(self, now_s: float) -> bool:
        """Whether a world that begins with copies should be larger than the workers that are ready allow."""
        if len(self._ready) < self._config.least_world:
            return True
        missing = min(self._size, len(self._hosts)) - len(self._ready)
        patience_s = self._config.replacement_s if self._config.job.sharded else 0.0
        if self._resumes and not self._plan:
            patience_s = self._config.startup_s / 2  # all of them start just now
        return missing > 0 and (self._revival.waited_s(now_s) < patience_s or now_s < self._ready_s + GATHER_S)

    def _is_restoring(self) -> bool:
        """Whether the members of the last plan can still begin with the copies that it names, or anew."""
        plan = self._plan
        if plan is None or self._stalled_generation == plan.generation or self._growing or not self._is_complete:
            return False
        return self._revival.serves(plan) if plan.restore else self._may_train

    def _regroup(self, *, abort: bool, restore: tuple[Snapshot, ...] = ()) -> Publish | None:
        workers = self._next_world(abort=abort) if self._base else self._first_world()
        if len(workers) < self._config.least_world:
            return None
        leavers = () if abort else tuple(worker for worker in self.crew if worker not in workers)
        return self._publish(workers, abort=abort, restore=restore, leavers=leavers)

    def _publish(
        self, workers: list[str], *, abort: bool, restore: tuple[Snapshot, ...] = (), leavers: tuple[str, ...] = ()
    ) -> Publish:
        previous = {member.worker: member.shards for member in self._base.members} if self._base else {}
        shares = fit(self._shares, workers, self._config.shard_count)
        shards = reassign(previous, workers, self._config.shard_count, shares)
        self._plan = Plan(
            generation=self.newest_known + 1,
            members=tuple(
                Member(rank, worker, self._hosts[worker], self._ready[worker], shards[worker])
                for rank, worker in enumerate(workers)
            ),
            abort=abort,
            restore=restore,
            leavers=leavers,
        )
        self._base = self._base or self._plan
        self._settled, self._entered = False, set()
        if self._config.job.sharded:  # whoever had a piece in the generation before takes it over anew
            self._healed, self._done = set(), set()
            self._may_train, self._growing = True, False
        return Publish(self._plan)
