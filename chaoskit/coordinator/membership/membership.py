"""Who is in: the pure state machine that turns joins and losses into generations.

Each class that it is built on has one part of it and uses only those below: what is known (``roll.py``), who works
where (``staffing.py``), who is in the next world (``succession.py``), how it begins when nobody has the state
(``renewal.py``). Here is what each event does, and what is decided then.

Who has the state of the training decides what may be published. Until the first generation settles nobody has trained:
every worker builds the same weights from the seed, and fresh ones may replace all. From then on the members of that
generation hold the state; a worker that joins later holds it once it is :class:`Healed`. A generation must therefore be
reported :class:`Settled` before any of its members may commit a step. A report may be lost with its node, though: if
the members have met, the others count from then on as if it had settled.

When a node has seen a generation of which nothing is known, the record of the run was lost. Nobody can tell any more
who held the state: all workers of before are given up, and fresh ones begin with the newest sealed copies. When a node
has started more workers than are known, the record has lost its end.
"""

from __future__ import annotations

import math

from chaoskit.coordinator.membership.assignment import name_order
from chaoskit.coordinator.membership.events import (
    Action,
    AnyEvent,
    Behind,
    Convicted,
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
    Resized,
    Resumes,
    Returned,
    Sealed,
    Settled,
    SourceFailed,
    Stalled,
    Tick,
    Unfit,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)
from chaoskit.coordinator.membership.renewal import Renewal
from chaoskit.plaintext import plural
from chaoskit.vocabulary import EXITED, SLOW

#: When nobody can train, so many starts in a row that come to nothing end the job.
STARTS_MAX = 8


class Membership(Renewal):
    """Keeps ``nodes`` members and ``spares`` spares going, one generation after the other."""

    def handle(self, event: AnyEvent, now_s: float) -> list[Action]:
        """Take in one event. The start-up time counts from the first call."""
        if self._finished:
            return []
        self._deadline_s = min(self._deadline_s, now_s + self._config.startup_s)
        chores = self._take_in(event, now_s)
        if self._swap_by_s is not None and now_s >= self._swap_by_s:
            self._swap_by_s = None
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
            case NodeJoined() | Returned() | Fit():
                return self._gain(event, now_s)
            case NodeLost() | LeftOut() | Unfit() | Evicted():
                return self._part_with(event, now_s)
            case WorkerReady() | WorkerLost() | Healed() | WorkerDone():
                return self._hear_of_worker(event, now_s)
            case Settled() | Stalled():
                return self._hear_of_generation(event, now_s)
            case Sealed() | SourceFailed() | Convicted():
                self._hear_of_copies(event, now_s)
            case Resized(size, idle, _, swap_by_s):
                self._size, self._idle, self._swap_by_s = size, set(idle), swap_by_s
                return self._vacate(now_s)
            case Rebalanced(shares) if self.may_rebalance:
                self._shares = dict(shares)
            case Behind(worker) if worker in self.parting and self._holders.intersection(
                self.members
            ):
                return self._lose([worker], "left", now_s)
            case JobFailed(reason):
                self._failure = reason
            case GenerationSeen(generation, node, started):
                self._lose_record(generation, node, started)
            case Resumes(generation):
                self._floor, self._record_lost, self._trained, self._resumes = (
                    generation,
                    True,
                    True,
                    True,
                )
            case Tick():
                self._launched |= (
                    self._may_launch(now_s) if self._record_lost else self._may_start(now_s)
                )
                return self._start_missing([], now_s)
        return []

    def _gain(self, event: NodeJoined | Returned | Fit, now_s: float) -> list[Action]:
        """There is a node more that may have workers."""
        match event:
            case NodeJoined(node, _, started, proves) if node not in self._nodes:
                self._nodes.append(node)
                self._strikes.meet(node, event.machine)
                if proves:
                    self._unfit.add(node)
                    self._on_probation.add(node)
                self._silent.pop(node, None)
                self._started[node] = max(self._started.get(node, 0), started)
                self._launched |= self._may_start(now_s)
            case Returned(nodes):
                self._left_out.difference_update(nodes)
            case Fit(node) if node not in self._config.quarantined:
                self._unfit.discard(node)
                self._on_probation.discard(node)
                self._launched |= self._may_start(now_s)
            case _:
                return []
        return self._start_missing([], now_s)

    def _part_with(self, event: NodeLost | LeftOut | Unfit | Evicted, now_s: float) -> list[Action]:
        """A node is lost, or is to have no workers any more."""
        match event:
            case NodeLost(node, _, met, silent) if node in self._nodes:
                self._nodes.remove(node)
                if silent:  # its agent ends when its own lease is over
                    self._silent[node] = now_s + self._config.coordinator_outage_s
                self._left_out.discard(node)
                self._idle.discard(node)
                self._forget_fitness(node)
                self._revival.lose_node(node, now_s)
                self._losses += self._costs_of_nodes([node], now_s)
                strikes = self._strike(node, now_s)
                return [*strikes, *self._lose_nodes([node], "node lost", now_s, doubt=met)]
            case LeftOut(nodes):
                self._left_out.update(nodes)
                self._losses += self._costs_of_nodes(nodes, now_s)
                return self._lose_nodes(nodes, "unreachable", now_s)
            case Unfit(node):
                self._unfit.add(node)
                self._on_probation.discard(node)
                self._launched |= self._may_start(now_s)
                return self._lose_nodes([node], "unfit", now_s)
            case Evicted(node):
                return self._lose_nodes([node], "evicted", now_s)
        return []

    def _hear_of_worker(
        self, event: WorkerReady | WorkerLost | Healed | WorkerDone, now_s: float
    ) -> list[Action]:
        match event:
            case WorkerLost(worker, cause) if worker in self._hosts:
                self._note_trained(event.trained_in)
                self._last_loss = (
                    f"{worker}: {event.detail}" if event.detail else f"{worker}: {cause}"
                )
                if worker in self.members and cause in (EXITED, "raised"):
                    self._ended_ranks.add(worker)
                self._count_loss(worker, cause, now_s)
                if self._config.job.sharded:
                    self._doubt([worker])
                if event.aside or cause == SLOW:
                    self._strikes.condemn(self._hosts[worker])
                return [
                    *self._strike(self._hosts[worker], now_s),
                    *self._lose([worker], "lost", now_s),
                ]
            case WorkerReady(worker, node, endpoint, fingerprint) if (
                self._hosts.get(worker) == node
            ):
                self._ready.setdefault(worker, endpoint)
                self._begun_s.pop(worker, None)
                self._fingerprint = self._fingerprint or fingerprint
                self._failed_starts, self._start_after_s, self._ready_s = 0, now_s, now_s
                return self._start_missing([], now_s)
            case WorkerDone(worker) if worker in self.crew[len(self.members) :]:
                self._done.add(
                    worker
                )  # it says so once, and is a member again if another rank is lost
            case Healed(worker) | WorkerDone(worker) if worker in self.members:
                stood_in = (event.generation if isinstance(event, Healed) else 0) or self.generation
                if stood_in >= self._trained_in:  # else others have trained without it since then
                    (self._healed if self._config.job.sharded else self._holders).add(worker)
                self._stood_in[worker] = max(stood_in, self._stood_in.get(worker, 0))
                self._entered.update([worker] if stood_in == self.generation else [])
                self._done.update([worker] if isinstance(event, WorkerDone) else [])
        return []

    def _hear_of_generation(self, event: Settled | Stalled, now_s: float) -> list[Action]:
        match event:
            case Settled(generation, ended) if self._plan and generation == self._plan.generation:
                if not self._trained and not self._plan.restore:
                    self._holders.update(self.members)
                leavers = self.crew[len(self.members) :]
                self._trained = self._settled = True
                self._base = self._plan
                self._forget_outlived()
                # where all scripts return at this step, those that leave may still save what they have
                are_last = bool(ended) and self._holders.intersection(self.members).issubset(ended)
                self._parting = leavers if self._are_done or are_last else ()
                return [] if self._parting else self._lose(list(leavers), "left", now_s)
            case Settled(generation):
                self._note_trained(generation)
            case Stalled(generation):
                self._stalled_generation = generation
                if self._config.job.sharded:
                    self._doubt(list(self.members))
        return []

    def _hear_of_copies(self, event: Sealed | SourceFailed | Convicted, now_s: float) -> None:
        match event:
            case Sealed(node, snapshots, number, committed):
                self._revival.answer(node, snapshots, now_s, number=number, committed=committed)
            case SourceFailed(snapshot, corrupt):
                restoring = self._is_restoring()
                self._revival.fail(snapshot, corrupt, now_s)
                if restoring and not self._is_restoring():
                    # A rank has no piece, so none will train in this generation. What it lacks may have been
                    # overwritten by what is newer.
                    self._begin_with_others()
            case Convicted(workers):
                named = (
                    {snapshot.worker for snapshot in self._plan.restore} if self._plan else set()
                )
                restoring = self._is_restoring()
                self._revival.convict(workers)
                if restoring and named.intersection(workers):
                    self._begin_with_others()

    def _begin_with_others(self) -> None:
        """Members of a sharded job cannot, or must not, begin with the copies that their plan names."""
        if self._config.job.sharded:
            self._stalled_generation, self._may_train = self.generation, False
            self._revival.ask_again()

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

    # -- decisions ------------------------------------------------------------------------------------------------

    @property
    def _are_done(self) -> bool:
        """Whether every member committed the last step.

        A joiner of a generation that never settled has done nothing that it could finish.
        """
        trainees = [
            worker
            for worker in self.members
            if self._settled or (self._base and self._base.member(worker))
        ]
        return bool(trainees) and self._done.issuperset(trainees)

    def _end(self, now_s: float) -> Finish | None:
        """The end of the job, once those that leave are done as well, or their time is over."""
        self._over_s = min(self._over_s, now_s)
        is_late = now_s >= self._over_s + self._limits.farewell_of(self._config)
        if is_late or self._done.issuperset(self.crew[len(self.members) :]):
            return Finish(True, "every rank committed the last step")
        return None

    def _decide(self, now_s: float) -> Publish | Finish | None:
        if self._failure:
            return Finish(False, self._failure)
        members = self.members
        if self._are_done:
            return self._end(now_s)
        self._over_s = math.inf
        if self._losses > self._config.max_failures:
            budget = f"max_failures={self._config.max_failures}"
            spent = f"the failure budget is spent: {self._losses} workers were lost, {budget}"
            return Finish(False, spent + self._last())
        if not self._plan and not self._record_lost:
            return self._begin(now_s)
        if (
            not self._trained and not self._nodes and now_s >= self._deadline_s
        ):  # all were lost in the first regroup
            return Finish(False, self._late())
        if self._failed_starts >= STARTS_MAX and len(members) < self._config.least_world:
            ended = f"{self._failed_starts} workers in a row ended before they were ready: {self._left()}"
            return Finish(False, ended + self._last())
        if self._revival.active:
            return self._revive(now_s)
        if not self._plan:  # nobody is there who could be asked for copies
            late = now_s >= self._deadline_s
            return (
                Finish(False, f"the coordinator's record was lost: {self._late()}")
                if late
                else None
            )
        if self._is_short_of_workers or self._stalled_generation == self.generation:
            return self._regroup(abort=True)
        if (
            self._may_move() and not self._config.job.sharded
        ):  # there all begin anew, once it is known with what
            return self._regroup(abort=False)
        if self.may_rebalance and self._wants_other_shares():
            return self._regroup(abort=False)
        return None

    def _begin(self, now_s: float) -> Publish | Finish | None:
        config, ready = self._config, sorted(self._ready, key=name_order)
        hosts = [self._hosts[worker] for worker in ready]
        full = len(ready) >= self._size and len(set(hosts)) >= min(
            self._size, len(set(self._hosts.values()))
        )
        if not full and now_s < self._deadline_s:
            return None
        if len(ready) < config.least_world:
            return Finish(False, self._late())
        return self._publish(self._first_world(), abort=True)

    def _late(self) -> str:
        workers = plural(len(self._ready), "worker is", "workers are")
        found = (
            f"{len(self._nodes)} of {plural(self._config.nodes, 'node')} joined, {workers} ready"
        )
        unfit = [node for node in self._nodes if node in self._unfit]
        found += f"; not fit to train: {', '.join(unfit)}" if unfit else ""
        return (
            f"start-up took longer than startup_s={self._config.startup_s:g}: {found}{self._last()}"
        )

    def _last(self) -> str:
        return f"; the last one that was lost is {self._last_loss}" if self._last_loss else ""

    def _left(self) -> str:
        return f"{plural(len(self.members), 'rank is', 'ranks are')} left, min_world={self._config.least_world}"
