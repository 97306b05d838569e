"""The trainer of replicated jobs: each step commits on every rank or on none.

    while trainer.step < 1000:
        with trainer.transaction() as step:
            for shard in step.shards(dataset, batch_size=64):
                step.backward(loss(model, shard.batch))

The loop over ``step.shards`` is the step. Its body computes a shard. After the last shard the
gradients are reduced. The optimizer runs if every rank's contribution arrived and is finite. After
a fault the loop continues with the missing shards: a survivor keeps its gradients and repeats only
the reduction. The body may therefore run more than once for a shard. All other user code runs once
per committed step. In a new process the loop begins with a rehearsal of one shard, which leaves no
trace.

-> step/restore.py: which copy a rank reads; step/commit.py: the update; step/inquiry.py: which
rank computed wrongly. coordinator/membership/regroup.py plans the next world.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.errors import BadInput
from chaoskit.runtime.group.collective import GroupFailed
from chaoskit.runtime.group.generations import FirstMove, healing_limit_s, may_appeal
from chaoskit.runtime.group.process_group import Group
from chaoskit.runtime.group.regroup import Dismissed, Formation
from chaoskit.runtime.group.rendezvous import GenerationSuperseded
from chaoskit.runtime.integrity.ballot import gather_unequal
from chaoskit.runtime.integrity.nonfinite_guard import AuditResult, NonFiniteGuard, accuse
from chaoskit.runtime.integrity.rank_checks import RankChecks
from chaoskit.runtime.reduction.choice import CorruptSegment, DoubtfulSum, Reduced
from chaoskit.runtime.state.batch_follows_world import Following
from chaoskit.runtime.state.from_store import pull_stored
from chaoskit.runtime.state.peer import Corrupt, NotComplete, PeerLost, Pulled, pull
from chaoskit.runtime.state.registered import Scheduler
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.sampling import Sampler, seed_everything
from chaoskit.runtime.state.script_writes import ScriptWrite, ScriptWrites
from chaoskit.runtime.step.base_trainer import BaseTrainer
from chaoskit.runtime.step.collectives import Call
from chaoskit.runtime.step.commit import Committer, LeaseOver
from chaoskit.runtime.step.compiling import Compilations
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.inquiry import Inquiry, Round
from chaoskit.runtime.step.restore import StateSource, restore
from chaoskit.runtime.step.shardwork import Shard, ShardWork
from chaoskit.runtime.step.stopwatch import Lap, Stopwatch
from chaoskit.runtime.step.transaction import Transaction
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import GroupBroken, Healed

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # between reads while a peer's script is writing


class TrainingOver(BaseException):
    """Leaves the user's loop because the other ranks have taken the last step.

    It is a ``BaseException``, so that ``except Exception`` in user code does not catch it.

    Args:
        cut_short_by: the worker that returned from its train function where this worker would have
            taken another step. Empty if this worker was behind.
    """

    def __init__(self, cut_short_by: str) -> None:
        super().__init__()
        self.cut_short_by = cut_short_by


class ReplicatedTrainer(BaseTrainer):
    """The trainer of one rank of a replicated job. It is passed to the job's ``train`` function."""

    def __init__(self, worker: WorkerContext) -> None:
        super().__init__(worker)
        self._calls = worker.regrouper.calls
        self._replica: Replica | None = None
        self._rehearsed = False
        self._dataset_size = 0  # samples in the dataset of the current step
        self._began_ns = 0  # monotonic time at which the rehearsal began
        self._has_joined = False  # the reducer uses the formation's group
        self._world_changes = False  # all ranks agreed after the last step that the world changes
        self._failed_heals = 0  # consecutive generations in which no source provided the state
        self._is_stale = False  # the step changed on entry: nothing to compute
        self._entering = -1  # the committed step after which a transaction is being entered
        self._adopted: Pulled | None = None  # the state that was taken over
        self._is_provisional = False  # the state is valid only once the next transaction is entered

    # -- public methods ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._replica.step if self._replica else 0

    @property
    def took_part(self) -> bool:
        """True once the rehearsal in the job's first transaction is over."""
        return self._rehearsed

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Register the objects to train. Call it once, before the first transaction.

        Args:
            model: the same on every rank; build it from ``trainer.seed``.
            optimizer: over the model's parameters. One, or several that take their steps in this
                order.
            scheduler: stepped once a committed step. One, or several.
            clip_norm: largest 2-norm of the reduced gradient; None leaves it as it is.

        Raises:
            BadInput: if the model cannot be trained to the same bits at every world size, or if
                objects are registered already.
        """
        if self._replica is not None:
            raise BadInput("register", type(model).__name__, "call trainer.register once")
        self._replica = Replica(model, optimizer, scheduler)
        if self.config.follow is not None:
            self._replica.following = Following(self.config, self._replica.optimizers)
        self._work = ShardWork(self._replica, self.config)
        self._guard = NonFiniteGuard(self.config)
        self._replica.count_at_entry(True)  # until transactions show that the script writes nothing
        self._writes = ScriptWrites()
        self._writes.watch(self._replica, self._replica.arena)
        self._rank_checks = RankChecks(self._replica, self.config, self._writes)
        self._inquiry = Inquiry(self._worker, self._replica, self._guard, self._rank_checks)
        self._committer = Committer(self._worker, self._replica, self._work, clip_norm)
        self._compilations = Compilations(self._worker.board)
        self._stopwatch = Stopwatch(self._worker.board, self.device)
        self._is_registered = True

    def transaction(self) -> Transaction:
        """Return a context manager for one attempt at the next step.

        The module's docstring has an example.

        Raises:
            BadInput: before :meth:`register`.
        """
        if self._replica is None:
            remedy = "call trainer.register(model=..., optimizer=...) before trainer.transaction()"
            raise BadInput("model", None, remedy)
        return Transaction(self)

    def elastic_event_detected(self) -> bool:
        """Return True if another world will take the next step.

        All ranks get the same answer, including those that leave: from the commit of a step until
        the next transaction is entered. A script that then saves its state and returns ends the run
        at the same step on every rank. The loss of a rank is not announced in this way.
        """
        return self._world_changes

    def finish(self) -> None:
        """Complete the last step after the train function has returned.

        The registered state is then the final state, which peers may take over. Nothing is done
        unless :attr:`took_part`.

        Raises:
            TrainingOver: if the state of another rank had to be taken over, and that rank has
                finished.
            Dismissed, PeerLost: as :meth:`_settle`.
        """
        if self._replica is not None and self._rehearsed:
            self._entering = self.step
            self._complete_step()
            if self._formation is None:
                self._settle()

    # -- shards and samples of one step ------------------------------------------------------------

    @property
    def replica(self) -> Replica:
        """The registered state.

        Raises:
            RuntimeError: before :meth:`register`.
        """
        if self._replica is None:
            raise RuntimeError("no state is registered: call trainer.register first")
        return self._replica

    @property
    def _registered(self) -> Replica:
        return self.replica

    def _own_shards(self) -> tuple[int, ...]:
        """Return the shards that this rank owes to the current step."""
        return self._ownership()[self.rank]

    def _ownership(self) -> list[tuple[int, ...]]:
        """Return the shards of each rank.

        A rank with scheduled batches trains alone and owns every shard.
        """
        if self.config.follow is not None and self.config.follow.schedule:
            return [tuple(range(self._work.shard_count))]
        return [member.shards for member in self._entered_formation.plan.members]

    def _samples(self, sampler: Sampler, shard: int) -> list[int]:
        """Return the indices of the samples of a shard of this step."""
        following = self.replica.following
        if following is None:
            return sampler.samples(self.step, shard)
        return sampler.samples(self.step, shard, following.dealt)

    def _samples_ahead(self, sampler: Sampler, remaining_shards: Sequence[int]) -> list[int]:
        """Return the samples to prefetch, or an empty list if they are not known yet.

        They belong to the first of ``remaining_shards`` or, after the last shard, to this rank's
        first shard of the next step. The next step is not known in a rehearsal, in an inquiry, and
        if the batch follows the world.
        """
        if remaining_shards:
            return self._samples(sampler, remaining_shards[0])
        if not self._computes_step or self.replica.following is not None:
            return []
        return [
            sample
            for shard in self._own_shards()[:1]
            for sample in sampler.samples(self.step + 1, shard)
        ]

    def _missing(self) -> list[int]:
        """Return the shards to compute for the step: one for an audit if due, then own ones."""
        return [
            *self._rank_checks.duty(self._entered_formation.plan, self.rank),
            *self._work.missing(self._own_shards()),
        ]

    def _shards_to_compute(self) -> list[int]:
        """Return the shards that the body of the user's loop must compute now."""
        if self._inquiry.round is not None:
            return self._inquiry.round.shards_for(self.rank)
        return self._missing()

    @property
    def _computes_step(self) -> bool:
        """True if the user's code computes for the step, not for a rehearsal or an inquiry."""
        return self._rehearsed and self._inquiry.round is None

    def _take_step(self, dataset: Any, batch_size: int, prefetch: bool) -> Iterator[Shard]:
        """Yield shards to the user's code until the step is over.

        The step is committed or skipped, or the state of another rank is adopted. Nothing is
        yielded if this transaction has no step left to take.
        """
        if self._over or self._is_stale:
            self._leave_step()
            return
        sampler, step = self._work.sampler(len(dataset), batch_size), self.step
        self._dataset_size = len(dataset)
        if not self._rehearsed:
            yield from self._compute(dataset, sampler, [0], prefetch)
            with self._plain_numbers():
                self._rehearse()
                self._cut(self._settle())
        if 0 < step == self.config.tell_state_at:
            self.journal_state()
        while self.step == step:  # otherwise the step was taken over
            yield from self._compute(dataset, sampler, self._shards_to_compute(), prefetch)
            with self._plain_numbers():
                self._complete()
                if self.step == step:
                    self._cut(self._settle())
        self._leave_step()
        self._worker.board.enter(Phase.OUTSIDE)

    def _leave_step(self) -> None:
        """Mark the loop over the shards as ended, and record the registered state.

        The script goes on after the step, and may write into that state.
        """
        self._over = True
        self._note_state()

    def _note_state(self) -> None:
        """Record the registered state at the moment at which the script goes on.

        Nothing is recorded before the end of the rehearsal.
        """
        if self._rehearsed:
            self._writes.remember()

    def _compute(
        self, dataset: Any, sampler: Sampler, indices: Sequence[int], prefetch: bool
    ) -> Iterator[Shard]:
        """Yield the shards ``indices``, and take in the results of each loop body.

        Args:
            prefetch: fetch the samples that are needed next on a thread.
        """
        work = self._work
        for number, index in enumerate(indices, 1):
            self._stopwatch.start()
            self._enter_phase(Phase.FORWARD)
            samples = self._samples(sampler, index)
            seed_everything(self.seed, self.step, index)
            is_owed = (
                self._computes_step and index in self._own_shards()
            )  # otherwise it is compared
            work.begin(
                index,
                overlap=is_owed,
                launch=is_owed and index == indices[-1] and self._join_early(),
            )
            self._stopwatch.lap(Lap.COMPUTE)
            batch = self._fetch(
                dataset, samples, index, prefetch=prefetch, rehearses=not self._rehearsed
            )
            if prefetch and (samples_ahead := self._samples_ahead(sampler, indices[number:])):
                self._prefetcher.expect(dataset, samples_ahead)
            self._stopwatch.lap(Lap.INPUT)
            yield Shard(index, samples, batch)
            work.end(index)
            if self._inquiry.round is not None:
                self._inquiry.round.record(index, work.contribution)
            elif self._computes_step:
                self._rank_checks.note(index, work.shard_count, work.contribution)
            if is_owed:
                work.keep(index, samples)
                self._stopwatch.count_shard()

    def _enter_phase(self, phase: Phase) -> None:
        """Show the phase on the board, and let a fault strike that is planned for it.

        No fault strikes in a rehearsal or an inquiry.
        """
        self._worker.board.enter(phase)
        if self._computes_step:
            self._stop_for_fault(phase.label, self._entered_formation)

    def _stop_for_fault(self, phase: str, formation: Formation, peer: str = "") -> None:
        """Block here if a fault is planned for this phase, and carry out its act.

        Args:
            peer: the worker from which this one is about to pull.
        """
        self._worker.hooks.reach(phase, self.step, formation.plan, formation.me, self.replica, peer)

    def _backward(self, loss: Tensor) -> None:
        """Run the backward pass of the current shard, shown as a phase of its own."""
        self._enter_phase(Phase.BACKWARD)
        try:
            self._work.backward(self._worker.hooks.injected.loss(loss))
        finally:
            self._worker.board.enter(Phase.FORWARD)

    # -- begin -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a transaction: complete the step before it, and enter the newest membership.

        The state of another rank may be taken over here, at another step. A new process enters no
        membership before its rehearsal is over.

        Raises:
            TrainingOver, Dismissed, PeerLost: as :meth:`_settle`.
        """
        step, self._over, self._has_begun = self.step, False, True
        self._work.abandon()  # shards are left if the user's code caught an exception
        self._calls.close(step)
        if self._rehearsed:
            self._entering = step
            self._complete_step()
            self._cut(self._settle())
            self._entering = -1
        else:
            self._began_ns = time.monotonic_ns()
        self._is_stale = self.step != step
        self._compilations.watch()
        self._worker.board.enter(Phase.FORWARD)

    def _complete_step(self) -> None:
        """Take the registered state as the state of this step, and make it available to peers.

        Called when the script enters the next transaction, or returns. A rank that took the state
        over has run the code after the step a second time. If that code writes into the state, this
        rank gives the state up. It takes the state over again, from a rank that has run the code.
        """
        change, adopted = self._writes.look(), self._adopted
        if adopted is not None:
            self._writes.abstain()
        if adopted is not None and (change or not adopted.complete):
            self._forget_state()
        elif self._has_confirmed(adopted):
            self._publish_step(change)

    def _publish_step(self, change: ScriptWrite) -> None:
        """Make the state of this step available to peers, as the script leaves it.

        It is this rank's own state from here on, and no longer an adopted one.
        """
        replica, self._adopted, self._is_provisional = self.replica, None, False
        was_shown = replica.is_complete
        if change:
            replica.publish_again()
        replica.count_at_entry(self._writes.at_entry)
        replica.enter()
        self._rank_checks.entered(change, self.world)
        if change or not was_shown:
            self._worker.board.announce()

    def _has_confirmed(self, adopted: Pulled | None) -> bool:
        """Report the step of a provisional state. Another state needs no report.

        Return False if the generation is superseded; the state is then given up.
        """
        formation, regrouper = self._formation, self._worker.regrouper
        if adopted is None or not self._is_provisional or formation is None:
            return True
        try:
            with regrouper.advance(formation):
                regrouper.step = self.step
        except GenerationSuperseded:  # the new generation was planned without a state of this rank
            self._forget_state()
            return False
        self._report_state(formation)
        return True

    def _forget_state(self) -> None:
        """Give the state up. This rank gets one in the next membership, or again in this one."""
        self._adopted, self._is_provisional, self._formation = None, False, None
        self.replica.give_up()
        self._worker.regrouper.step = -1

    def _settle(self, *, calling: bool = False) -> Formation:
        """Enter the newest generation, and return its formation once this rank has its state.

        The state of another rank may be taken over, and the user's hooks are called. In a
        collective, a generation of ranks that have finished is returned without being entered.

        Args:
            calling: True in a collective of the user's code. Other ranks may wait in the same
                collective, or have finished and keep its result.

        Raises:
            TrainingOver: if the other ranks have finished.
            Dismissed: if this worker must end.
            PeerLost: if no rank has the state, or no source has provided it in several generations.
                In a collective also if the others went past it, or the source of the state is lost.
        """
        regrouper, board, was_behind = self._worker.regrouper, self._worker.board, False
        while True:
            formation = regrouper.membership_now()
            if formation is None:
                board.enter(Phase.REGROUP)
                formation = self._await_membership()
            self._world_changes &= calling
            if formation is self._formation:
                return formation
            if calling and formation.goal_step > self.step:
                raise PeerLost(
                    f"the other ranks are at step {formation.goal_step}, past a collective that "
                    "this rank is in"
                )
            if calling and self._is_provisional and formation.goal_step != self.step:
                raise PeerLost(
                    "the ranks whose state this rank took over between two steps were lost"
                )
            board.place(formation.plan.generation, formation.me.rank)
            if (first_move := formation.first_move(self.step)) is FirstMove.HEAL:
                was_behind = True
                if not self._heal(formation):
                    continue
                first_move = formation.first_move(self.step)
            if formation.holder is not None and not self._take_results(formation):
                continue
            if first_move is FirstMove.END and calling:
                return formation
            if first_move is FirstMove.END and not self._takes_final_state(formation):
                continue
            if first_move is FirstMove.END:
                self._formation = formation  # a rank that joins late has no formation yet
                raise TrainingOver(
                    "" if was_behind else formation.plan.members[formation.target.rank].worker
                )
            if first_move is FirstMove.FAIL:
                raise PeerLost(
                    "no member has the state: the last rank that had it ended while it was copied"
                )
            self._enter(formation)
            board.enter(Phase.OUTSIDE)  # a hook is user code
            if not self._callbacks.enter(formation.plan, self.step):
                return formation

    def _takes_final_state(self, formation: Formation) -> bool:
        """Return whether this rank, which runs no code after the last step, has its final state.

        If it has, the state is offered to peers. Otherwise it is given up.
        """
        if self._adopted is None:
            return True
        if not self._adopted.complete:
            self._entering = self.step
            self._forget_state()
            return False
        try:
            with self._worker.regrouper.advance(formation):
                self._worker.regrouper.step = self.step
        except GenerationSuperseded:
            self._forget_state()
            return False
        self._publish_step(ScriptWrite.NONE)
        return True

    def _await_membership(self) -> Formation:
        """Wait for the next membership and return it.

        A worker without a place in it waits for its end, or until it is needed again.

        Raises:
            Dismissed: if this worker must end; its hooks were called.
        """
        regrouper = self._worker.regrouper
        regrouper.note_left()
        try:
            return regrouper.membership()
        except Dismissed as order:
            self._callbacks.preempt(order, self.step)
            raise

    def _enter(self, formation: Formation) -> None:
        """Take up the rank and the shards that ``formation`` assigns to this worker.

        Shards that it no longer owes are dropped. The state is reported unless it is provisional.
        """
        self._formation, self._has_joined = formation, False
        self._inquiry.enter()
        self._rank_checks.enter()
        self._cut(formation)
        self._work.keep_only(self._own_shards())
        if not self._is_provisional:
            self._report_state(formation)

    def _report_state(self, formation: Formation) -> None:
        """Report to the node and to the coordinator that this rank has the state of its step."""
        generation = formation.plan.generation
        self.replica.stand_in(generation)
        self._worker.board.announce()
        if generation > 1:
            self._worker.send(Healed(self._worker.name, generation))

    def _cut(self, formation: Formation) -> None:
        """Split the batch of this step into the number of shards that ``formation`` computes.

        If the number changes, all shards that were computed for the step are dropped.
        """
        if self._work.resize(self.config.shards_of(self.step, len(formation.plan.members))):
            self._has_joined = False
            self._rank_checks.forget()

    def _heal(self, formation: Formation) -> bool:
        """Take over the state of a member that is ahead, or of a sealed copy.

        Return False if a newer formation came first, or if no source provided the state. In the
        second case this rank has reported that, and waited for another plan.

        Raises:
            PeerLost: if no source has provided the state in several generations, or if this rank
                has no state of its own.
        """
        if self._restore(formation):
            self._failed_heals = 0
            return True
        self._worker.board.enter(Phase.REGROUP)  # copying has ended: this rank waits
        if self._worker.regrouper.wait_newer(formation, healing_limit_s(formation)):
            return False
        self._failed_heals += 1
        error = PeerLost(
            f"the state of step {formation.goal_step} could not be read from any rank that has it"
        )
        if not may_appeal(self.step, self._failed_heals):
            raise error
        self._leave(formation, error)
        return False

    def _restore(self, formation: Formation) -> bool:
        """Take the state over from a source once its script has stopped writing into it.

        Return False if a newer formation came first, or no source provided the state.
        """
        worker, pause_s = self._worker, _FIRST_PAUSE_S
        pull_from = partial(self._pull, formation)
        worker.board.enter(Phase.RESTORE)
        try:
            return restore(worker, formation, pull_from)
        except NotComplete:
            with worker.board.waiting():  # one phase, so that a deadlock is noticed
                while not worker.regrouper.wait_newer(formation, pause_s):
                    try:
                        return restore(worker, formation, pull_from)
                    except NotComplete:
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return False

    def _pull(self, formation: Formation, source: StateSource) -> Pulled:
        """Replace the state by that of ``source``, and return what was read.

        The members of a newer generation wait meanwhile, so that they do not get the number of a
        step that is being replaced.

        Raises:
            Corrupt: if a copy is damaged, or has weights that are not finite.
            PeerLost: if the source cannot be read. A peer with weights that are not finite is
                accused.
            NotComplete: if the script of the peer may still write into the state.
            GenerationSuperseded: if a newer generation was begun before.
        """
        self._stop_for_fault("restore", formation, source.name)
        worker, replica = self._worker, self.replica
        with worker.regrouper.advance(formation):
            self._forget_step()
            try:
                if source.snapshot is not None and source.snapshot.path:
                    pulled = pull_stored(replica, source.snapshot)
                else:
                    pulled = pull(
                        replica,
                        source.endpoint,
                        worker.token,
                        self.config.transport,
                        source.checksum,
                        entering=self._entering,
                    )
                if not replica.is_finite():
                    replica.step = -1
                    if source.snapshot is not None:
                        raise Corrupt("its weights are not finite")
                    accuse(formation.plan, (source.rank,), worker.name, pulled.step, worker.send)
                    raise PeerLost(f"the weights of rank {source.rank} are not finite")
                self._adopt(pulled)
                return pulled
            finally:
                worker.regrouper.step = -1 if self._is_provisional else replica.step
                self._rank_checks.adopted()

    def _adopt(self, pulled: Pulled) -> None:
        """Record that the state was taken over from a peer or a copy.

        It is this rank's own state at once if the code after its step has run already. Otherwise it
        is provisional until the next transaction is entered, if the script may write into it.
        """
        replica = self.replica
        replica.count_at_entry(replica.at_entry or pulled.at_entry or replica.script_writes)
        # a sealed copy may be from before the script's writes, which this process has not seen
        may_lack_writes = bool(pulled.checksum) and replica.at_entry
        self._adopted = pulled
        self._is_provisional = pulled.at_entry or replica.script_writes or may_lack_writes
        if pulled.step == self._entering:
            self._publish_step(ScriptWrite.NONE)
            self._writes.abstain()

    def _forget_step(self) -> None:
        """Drop everything that was computed for the current step."""
        self._work.forget()
        self._rank_checks.forget()
        self._inquiry.round = None

    # -- finish ------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """End the pass over the shards: conclude a round of the inquiry, or attempt the step."""
        formation = self._entered_formation
        if (open_round := self._inquiry.round) is not None:
            self._conclude(formation, open_round)
        elif not self._missing():  # a failed pass drops the shards that were folded into its sum
            self._attempt(formation)

    def _attempt(self, formation: Formation) -> None:
        """Reduce and commit once, unless the generation is over or an inquiry begins.

        If the collective fails, this rank leaves the generation and waits for the next plan.
        """
        worker = self._worker
        # still shown as computing: a rank that stops here makes the others wait, and is to blame
        self._stop_for_fault(Phase.REDUCE.label, formation)
        self._stopwatch.drain()
        self._announce_contribution(formation)
        self._stopwatch.start()
        try:
            group = worker.regrouper.group(formation)
            self._join(formation, group)
            seal = self._rank_checks.seal(formation.plan, self.rank)
            worker.hooks.injected.before_reduction(group)
            sidecar = self._work.sidecar(self._own_shards(), worker.regrouper.vote, seal)
            reduced = self._work.reduce(
                sidecar, verify=self._rank_checks.verify, arrived=worker.hooks.injected.received
            )
            self._stopwatch.lap(Lap.WAIT)
        except (GenerationSuperseded, GroupFailed, CorruptSegment, DoubtfulSum) as error:
            if isinstance(error, CorruptSegment):
                self._inquiry.note_corrupt_transfer(
                    formation, error, self._work.seals(error.sidecars)
                )
            elif isinstance(error, DoubtfulSum):
                self._inquiry.note_nonfinite_sum(formation)
            self._leave(formation, error)
            return
        if not reduced.finite:
            self._inquiry.open_audit(formation, reduced, self._ownership())
            return
        try:
            if self._inquiry.must_not_commit(formation, self._work.seals(reduced.sidecars)):
                if self._inquiry.round is None:
                    worker.regrouper.wait_newer(formation)
                return
            self._commit(formation, reduced)
        except (GenerationSuperseded, LeaseOver, ConnectionError) as error:
            self._leave(formation, error)
            return
        self._stopwatch.count_step()
        self._world_changes = worker.regrouper.move_on(self._work.lowest_vote(reduced.sidecars))
        worker.regrouper.dispose_retired(self._work.former_buffers())

    def _join(self, formation: Formation, group: Group) -> None:
        """Make the reducer use the group of ``formation``."""
        if not self._has_joined:
            self._work.reducer.begin(group if group.size > 1 else None, self._ownership())
            self._has_joined = True

    def _join_early(self) -> bool:
        """Return whether transfers may start before the backward pass is over.

        The reducer then uses the group of this rank's formation.
        """
        formation = self._formation
        if (
            not self._computes_step
            or self._work.overlap is None
            or formation is None
            or formation.group is None
        ):
            return False
        self._join(formation, formation.group)
        return not formation.broken

    def _announce_contribution(self, formation: Formation) -> None:
        """Write the shards and samples of this rank to the journal before they are reduced."""
        self._worker.board.enter(Phase.REDUCE)
        own_shards = self._own_shards()
        self._worker.journal.write(
            Event.REDUCE,
            step=self.step,
            generation=formation.plan.generation,
            rank=self.rank,
            shards=own_shards,
            samples=self._work.samples(own_shards),
            dataset=self._dataset_size,
        )

    def _commit(self, formation: Formation, reduced: Reduced) -> None:
        """Commit the step with the reduced gradients, and forget its shards.

        Raises:
            GenerationSuperseded, LeaseOver: as :meth:`Committer.commit`.
        """
        self._worker.board.enter(Phase.OPTIMIZER)
        self._stop_for_fault(Phase.OPTIMIZER.label, formation)
        if formation.plan.generation > 1:
            self._stop_for_fault("recommit", formation)
        self._committer.commit(formation, reduced, self._ownership())
        self._forget_step()
        self._rank_checks.committed(reduced.grad_sum, len(formation.plan.members))

    def _leave(self, formation: Formation, error: Exception) -> None:
        """Leave a broken collective: report it, and wait for the plan that explains it.

        Nothing is reported if ``error`` shows that the plan is there already.
        """
        worker = self._worker
        generation = formation.plan.generation
        self._has_joined = False
        worker.board.enter(Phase.REGROUP)
        if not isinstance(error, GenerationSuperseded):
            worker.journal.write(
                Event.QUIESCED,
                generation=generation,
                rank=formation.me.rank,
                error=str(error)[:200],
            )
            worker.send(GroupBroken(worker.name, generation, str(error)[:200]))
        worker.regrouper.give_up(formation)
        worker.regrouper.wait_newer(formation)

    # -- collectives of the user's code ------------------------------------------------------------

    def _make(self, call: Call) -> None:
        """Take part in ``call`` and record its result, unless the world changes meanwhile.

        Raises:
            BadInput: if another rank makes no more calls since this step.
            PeerLost: if the others went past this call, or the source of the state is lost.
        """
        board, step, replica = self._worker.board, self.step, self.replica
        with board.waiting(), replica.calling():
            formation = self._settle(calling=True)
        if self._calls.next_call(step) < len(self._calls.results(step)):
            return  # the result was taken over
        if (past_member := formation.gone_on(step)) is not None:
            raise call.refusal(
                f"rank {past_member.rank} has entered the next step, or finished, without this call"
            )
        if not self._has_state_of_call(formation):
            return
        call.compute(self.rank, self.world)
        with board.waiting(), replica.calling():
            row = call.row(step, self._calls.next_call(step), self.rank, self.world)
            try:
                group = self._worker.regrouper.group(formation)
                rows = gather_unequal(group if group.size > 1 else None, row, self.device)
            except (GenerationSuperseded, GroupFailed) as error:
                self._leave(formation, error)
                return
            self._write_down(formation, step, call.conclude(rows))

    def _has_state_of_call(self, formation: Formation) -> bool:
        """Return whether this rank has the state of the ranks that wait in the same call.

        A rank that took over the state from them has run the code up to the call a second time. If
        that code writes into the state, the state is taken over again here. False means that it
        could not be taken over; this rank has then left the generation.
        """
        if self._adopted is None or self._adopted.complete or not self._writes.peek():
            return True
        with self._worker.board.waiting():
            is_restored = self._restore(formation)
        if not is_restored:
            self._leave(
                formation,
                PeerLost("the ranks whose state this rank took over between two steps were lost"),
            )
            return False
        self._note_state()
        return True

    def _write_down(self, formation: Formation, step: int, result: bytes) -> None:
        """Record the result of a collective, or leave the generation if a newer one was begun.

        The members of the newer generation may have agreed that there is no result.
        """
        try:
            with self._worker.regrouper.advance(formation):
                self._calls.record(step, result)
        except GenerationSuperseded as error:
            self._leave(formation, error)

    def _take_results(self, formation: Formation) -> bool:
        """Take over the results of collectives since the last commit from a rank that has them.

        Return False if a newer formation came first; this rank has then left ``formation``.

        Raises:
            ResultsDiffer: if a call has another result on this rank.
        """
        regrouper = self._worker.regrouper
        self._worker.board.enter(Phase.REGROUP)
        try:
            results = regrouper.results(formation)
            with regrouper.advance(formation):
                self._calls.adopt(self.step, results)
        except GenerationSuperseded as error:
            self._leave(formation, error)
            return False
        return True

    # -- rehearsal ---------------------------------------------------------------------------------

    def _rehearse(self) -> None:
        """Run an update that leaves no trace, and report this worker as ready.

        The update warms up everything that a step needs beyond the shard that was computed.
        """
        replica, worker = self.replica, self._worker
        self._work.require_loss(0)
        replica.rehearse(replica.advance)
        replica.enter()
        for parameter in replica.parameters:
            parameter.grad = None
        self._rehearsed = True
        worker.board.rehearsed(time.monotonic_ns() - self._began_ns)
        worker.report_ready(worker.serve_state(replica))
        worker.board.enter(Phase.REGROUP)

    # -- numbers that are not finite, or corrupt ---------------------------------------------------

    def _conclude(self, formation: Formation, open_round: Round) -> None:
        """Share the findings of a round of the inquiry, and act on the result."""
        self._worker.board.enter(Phase.REDUCE)
        try:
            self._act_on(formation, self._inquiry.exchange_findings(formation, open_round))
        except (GenerationSuperseded, ConnectionError) as error:
            self._leave(formation, error)

    def _act_on(self, formation: Formation, result: AuditResult) -> None:
        """Accuse a rank, skip the batch, or have the step computed again.

        After an accusation, wait for the next plan.

        Raises:
            NonFiniteBatch: if the batch is not finite, and the policy does not allow to skip it.
            JobFailed: if ranks contradict each other, and no vote can decide.
        """
        if result.verdict == "rank":
            self._inquiry.accuse(formation, result.ranks, result.cause)
            self._worker.regrouper.wait_newer(formation)
        elif result.cause == "corrupt":
            self._inquiry.repeat(formation, result)
            self._forget_step()
        elif self._guard.gives_up(self.step, result):
            self._committer.skip(formation, result, self._own_shards())
            self._forget_step()
        else:
            self._forget_step()  # compute the whole step again
