"""The transactional training step: it commits on every rank or on none, and survives the loss of any of them.

    while trainer.step < 1000:
        with trainer.transaction() as step:
            for shard in step.shards(dataset, batch_size=64):
                step.backward(loss(model, shard.batch))

The loop over ``step.shards`` is the step: its body computes a shard, and behind the last one the gradients are reduced
and, if every rank's contribution arrived and is finite, the optimizer runs. After a fault the loop goes on with what is
missing: a survivor keeps the gradients it has, and repeats just the reduction. So the body may run more than once for a
shard; all other code of the user runs once a committed step. In a process that is new the loop begins with a rehearsal
of one shard, which leaves no trace.
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
from chaoskit.runtime.integrity.guard import AuditResult, NonFiniteGuard, accuse
from chaoskit.runtime.integrity.rank_seal import Integrity
from chaoskit.runtime.reduction.choice import CorruptSegment, DoubtfulSum, Reduced
from chaoskit.runtime.state.following import Following
from chaoskit.runtime.state.from_store import pull_stored
from chaoskit.runtime.state.peer import Corrupt, NotComplete, PeerLost, Pulled, pull
from chaoskit.runtime.state.registered import Scheduler
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.sampling import Sampler, seed_everything
from chaoskit.runtime.state.script_writes import Change, ScriptWrites
from chaoskit.runtime.step.base_trainer import BaseTrainer
from chaoskit.runtime.step.collectives import Call
from chaoskit.runtime.step.commit import Committer, LeaseOver
from chaoskit.runtime.step.compiling import Compilations
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.inquiry import Inquiry
from chaoskit.runtime.step.restore import Source, restore
from chaoskit.runtime.step.shardwork import Shard, ShardWork
from chaoskit.runtime.step.stopwatch import Lap, Stopwatch
from chaoskit.runtime.step.transaction import Transaction
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import GroupBroken, Healed

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = (
    0.001,
    0.1,
)  # between two looks at a peer whose script is still writing


class TrainingOver(BaseException):
    """The others have taken the last step; leaves the user's loop without being caught by ``except Exception``.

    Args:
        cut_short_by: the worker that returned from its train function where this one would have taken another step;
            empty where this one was behind.
    """

    def __init__(self, cut_short_by: str) -> None:
        super().__init__()
        self.cut_short_by = cut_short_by


class ReplicatedTrainer(BaseTrainer):
    """One rank's view of the run. Handed to the job's ``train`` function."""

    def __init__(self, worker: WorkerContext) -> None:
        super().__init__(worker)
        self._calls = worker.regrouper.calls
        self._replica: Replica | None = None
        self._rehearsed = False
        self._dataset_size = 0  # of this step
        self._began_ns = 0  # of the rehearsal
        self._joined = False  # whether the reducer uses the formation's group
        self._moves = (
            False  # all ranks have agreed, after the last step, that the next one has another world
        )
        self._unhealed = 0  # generations in a row in which no source has given it the state
        self._void = False  # there is nothing to compute: the step has changed since the caller decided to enter it
        self._entering = -1  # the step behind which a transaction is just being entered
        self._adopted: Pulled | None = (
            None  # of a step whose state was taken over: the code behind it still runs
        )
        self._is_provisional = False  # this state counts only when the next transaction is entered

    # -- what users call ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._replica.step if self._replica else 0

    @property
    def took_part(self) -> bool:
        """Whether the job entered a transaction at all."""
        return self._rehearsed

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Name what is trained. To be called once, before the first transaction.

        Args:
            model: the same on every rank; build it from ``trainer.seed``.
            optimizer: over the model's parameters. One, or several that take their steps in this order.
            scheduler: stepped once a committed step. One, or several.
            clip_norm: largest 2-norm of the reduced gradient; None leaves it as it is.

        Raises:
            BadInput: if the model cannot be trained to the same bits at every world size.
        """
        if self._replica is not None:
            raise BadInput("register", type(model).__name__, "call trainer.register once")
        self._replica = Replica(model, optimizer, scheduler)
        if self.config.follow is not None:
            self._replica.following = Following(self.config, self._replica.optimizers)
        self._work = ShardWork(self._replica, self.config)
        self._guard = NonFiniteGuard(self.config)
        self._replica.count_at_entry(
            True
        )  # until the first transactions have shown that the script writes nothing
        self._writes = ScriptWrites()
        self._writes.watch(self._replica, self._replica.arena)
        self._integrity = Integrity(self._replica, self.config, self._writes)
        self._inquiry = Inquiry(self._worker, self._replica, self._guard, self._integrity)
        self._committer = Committer(self._worker, self._replica, self._work, clip_norm)
        self._compilations = Compilations(self._worker.board)
        self._stopwatch = Stopwatch(self._worker.board, self.device)
        self._is_registered = True

    def transaction(self) -> Transaction:
        """One attempt at the next step. See the module's example."""
        if self._replica is None:
            raise BadInput(
                "transaction", "", "call trainer.register(model=..., optimizer=...) first"
            )
        return Transaction(self)

    def elastic_event_detected(self) -> bool:
        """Whether the next step will be taken by another world, whose ranks do not get together by accident.

        The same on every rank, those that go included: from the commit of a step until the next transaction is
        entered. A script that saves its state and returns then ends the run, at the same step everywhere.
        """
        return self._moves

    def finish(self) -> None:
        """The train function has returned: what is registered now is the final state.

        Raises:
            TrainingOver: if the state of another rank had to be taken over, and that rank has finished.
        """
        if self._replica is not None and self._rehearsed:
            self._entering = self.step
            self._complete_step()
            if self._formation is None:
                self._settle()

    # -- the inventory of one step ------------------------------------------------------------------------------

    @property
    def replica(self) -> Replica:
        assert self._replica is not None
        return self._replica

    @property
    def _registered(self) -> Replica:
        return self.replica

    def _mine(self) -> tuple[int, ...]:
        """Shards that this rank owes to the current step."""
        return self._ownership()[self.rank]

    def _ownership(self) -> list[tuple[int, ...]]:
        """Shards of each rank. One whose batches are scheduled is alone, and has all that there are."""
        assert self._formation is not None
        if self.config.follow is not None and self.config.follow.schedule:
            return [tuple(range(self._work.shard_count))]
        return [member.shards for member in self._formation.plan.members]

    def _samples(self, sampler: Sampler, shard: int) -> list[int]:
        following = self.replica.following
        if following is None:
            return sampler.samples(self.step, shard)
        return sampler.samples(self.step, shard, following.dealt)

    def _samples_ahead(self, sampler: Sampler, rest: Sequence[int]) -> list[int]:
        """What is fetched next, as far as that is known: of the next shard or, after the last one, the next step."""
        if rest:
            return self._samples(sampler, rest[0])
        if not self._counts or self.replica.following is not None:
            return []
        return [
            sample for shard in self._mine()[:1] for sample in sampler.samples(self.step + 1, shard)
        ]

    def _missing(self) -> list[int]:
        assert self._formation is not None
        return [
            *self._integrity.duty(self._formation.plan, self.rank),
            *self._work.missing(self._mine()),
        ]

    def _wanted(self) -> list[int]:
        """Shards that the body of the user's loop must compute now."""
        if self._inquiry.round is not None:
            return self._inquiry.round.shards_for(self.rank)
        return self._missing()

    @property
    def _counts(self) -> bool:
        """Whether the user's code computes for the step, not for a rehearsal or an inquiry."""
        return self._rehearsed and self._inquiry.round is None

    def _take_step(self, dataset: Any, batch_size: int, prefetch: bool) -> Iterator[Shard]:
        """Give shards to the user's code until the step is committed or skipped, or another rank's state adopted."""
        if self._over or self._void:
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
            self.tell_state()
        while (
            self.step == step
        ):  # else this rank has taken the step over, and the code behind it is to run
            yield from self._compute(dataset, sampler, self._wanted(), prefetch)
            with self._plain_numbers():
                self._complete()
                if self.step == step:
                    self._cut(self._settle())
        self._leave_step()
        self._worker.board.enter(Phase.OUTSIDE)

    def _leave_step(self) -> None:
        """The loop over the shards is over: the script goes on behind the step."""
        self._over = True
        self._note_state()

    def _note_state(self) -> None:
        if self._rehearsed:
            self._writes.remember()

    def _compute(
        self, dataset: Any, sampler: Sampler, wanted: Sequence[int], prefetch: bool
    ) -> Iterator[Shard]:
        work = self._work
        for number, index in enumerate(wanted, 1):
            self._stopwatch.start()
            self._enter_phase(Phase.FORWARD)
            samples = self._samples(sampler, index)
            seed_everything(self.seed, self.step, index)
            owed = self._counts and index in self._mine()  # else it is computed to be compared
            work.begin(
                index, overlap=owed, launch=owed and index == wanted[-1] and self._join_early()
            )
            self._stopwatch.lap(Lap.COMPUTE)
            batch = self._fetch(
                dataset, samples, index, prefetch=prefetch, rehearses=not self._rehearsed
            )
            if prefetch and (ahead := self._samples_ahead(sampler, wanted[number:])):
                self._prefetcher.expect(dataset, ahead)
            self._stopwatch.lap(Lap.INPUT)
            yield Shard(index, samples, batch)
            work.end(index)
            if self._inquiry.round is not None:
                self._inquiry.round.record(index, work.contribution)
            elif self._counts:
                self._integrity.note(index, work.shard_count, work.contribution)
            if owed:
                work.keep(index, samples)
                self._stopwatch.count_shard()

    def _enter_phase(self, phase: Phase) -> None:
        """Show the phase, and let a fault strike that waits for it."""
        self._worker.board.enter(phase)
        if self._counts:
            self._stop_for_fault(phase.label, self._formation)

    def _stop_for_fault(self, phase: str, formation: Formation | None, peer: str = "") -> None:
        """Wait here if a fault is planned for this moment."""
        assert formation is not None
        self._worker.hooks.reach(phase, self.step, formation.plan, formation.me, self.replica, peer)

    def _backward(self, loss: Tensor) -> None:
        self._enter_phase(Phase.BACKWARD)
        try:
            self._work.backward(self._worker.hooks.injected.loss(loss))
        finally:
            self._worker.board.enter(Phase.FORWARD)

    # -- begin --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        step, self._over, self._has_begun = self.step, False, True
        self._work.abandon()  # what the transaction before left, if the user's code caught an exception of its loop
        self._calls.close(step)
        if self._rehearsed:
            self._entering = step
            self._complete_step()
            self._cut(self._settle())
            self._entering = -1
        else:
            self._began_ns = time.monotonic_ns()
        self._void = self.step != step
        self._compilations.watch()
        self._worker.board.enter(Phase.FORWARD)

    def _complete_step(self) -> None:
        """What is registered now is the state of this step: the script enters the next transaction, or returns.

        A rank that took the state over has run the code behind the step a second time. If that code writes into the
        state, this rank takes the state over once more, from a rank that is as far.
        """
        change, adopted = self._writes.look(), self._adopted
        if adopted is not None:
            self._writes.abstain()
        if adopted is not None and (change or not adopted.complete):
            self._forget_state()
        elif self._has_confirmed(adopted):
            self._publish_step(change)

    def _publish_step(self, change: Change) -> None:
        replica, self._adopted, self._is_provisional = self.replica, None, False
        was_shown = replica.is_complete
        if change:
            replica.publish_again()
        replica.count_at_entry(self._writes.at_entry)
        replica.enter()
        self._integrity.entered(change, self.world)
        if change or not was_shown:
            self._worker.board.announce()

    def _has_confirmed(self, adopted: Pulled | None) -> bool:
        """Report the step of a state that counts only now, and return whether it could be reported."""
        formation, regrouper = self._formation, self._worker.regrouper
        if adopted is None or not self._is_provisional or formation is None:
            return True
        try:
            with regrouper.advance(formation):
                regrouper.step = self.step
        except GenerationSuperseded:  # which was told that this rank has no state
            self._forget_state()
            return False
        self._stand_in(formation)
        return True

    def _forget_state(self) -> None:
        """Have the next membership, or this one once more, give this rank a state."""
        self._adopted, self._is_provisional, self._formation = None, False, None
        self.replica.give_up()
        self._worker.regrouper.step = -1

    def _settle(self, *, calling: bool = False) -> Formation:
        """Stand in the newest generation, at its step.

        Args:
            calling: in a collective of the user's code, which may be waited for or known by those that have finished.

        Raises:
            TrainingOver: if the others have finished.
        """
        regrouper, board, behind = self._worker.regrouper, self._worker.board, False
        while True:
            formation = regrouper.membership_now()
            if formation is None:
                board.enter(Phase.REGROUP)
                formation = self._await_membership()
            self._moves &= calling
            if formation is self._formation:
                return formation
            if calling and formation.goal_step > self.step:
                raise PeerLost(
                    f"the others have gone on to step {formation.goal_step}, past a collective of this rank"
                )
            if calling and self._is_provisional and formation.goal_step != self.step:
                raise PeerLost(
                    "the ranks whose state this rank took over between two steps were lost"
                )
            board.place(formation.plan.generation, formation.me.rank)
            if (move := formation.first_move(self.step)) is FirstMove.HEAL:
                behind = True
                if not self._heal(formation):
                    continue
                move = formation.first_move(self.step)
            if formation.holder is not None and not self._take_results(formation):
                continue
            if move is FirstMove.END and calling:
                return formation
            if move is FirstMove.END and not self._takes_final_state(formation):
                continue
            if move is FirstMove.END:
                self._formation = formation  # a joiner has been in no other one
                raise TrainingOver(
                    "" if behind else formation.plan.members[formation.target.rank].worker
                )
            if move is FirstMove.FAIL:
                raise PeerLost(
                    "no member has the state: the last rank that had it ended while it was copied"
                )
            self._enter(formation)
            board.enter(Phase.OUTSIDE)  # in the user's code, if there is a hook
            if not self._callbacks.enter(formation.plan, self.step):
                return formation

    def _takes_final_state(self, formation: Formation) -> bool:
        """Return whether this rank, which runs no code behind the last step, has its final state."""
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
        self._publish_step(Change.NONE)
        return True

    def _await_membership(self) -> Formation:
        """Wait for the next world. Where it has no place for this worker: for its end, or to be needed once more."""
        regrouper = self._worker.regrouper
        regrouper.note_left()
        try:
            return regrouper.membership()
        except Dismissed as order:
            self._callbacks.preempt(order, self.step)
            raise

    def _enter(self, formation: Formation) -> None:
        """Take up the rank and the shards that ``formation`` gives to this worker."""
        self._formation, self._joined = formation, False
        self._inquiry.enter()
        self._integrity.enter()
        self._cut(formation)
        self._work.keep_only(self._mine())
        if not self._is_provisional:
            self._stand_in(formation)

    def _stand_in(self, formation: Formation) -> None:
        """Tell the node and the coordinator that this rank has the state of its step."""
        generation = formation.plan.generation
        self.replica.stand_in(generation)
        self._worker.board.announce()
        if generation > 1:
            self._worker.send(Healed(self._worker.name, generation))

    def _cut(self, formation: Formation) -> None:
        """Cut the batch of this step into as many shards as ``formation`` computes."""
        if self._work.resize(self.config.shards_of(self.step, len(formation.plan.members))):
            self._joined = False
            self._integrity.forget()

    def _heal(self, formation: Formation) -> bool:
        """Take the state of a member that is ahead, or a sealed copy; False if a newer formation came first."""
        if self._restore(formation):
            self._unhealed = 0
            return True
        self._worker.board.enter(Phase.REGROUP)  # nothing is copied any more: it waits
        if self._worker.regrouper.wait_newer(formation, healing_limit_s(formation)):
            return False
        self._unhealed += 1
        error = PeerLost(
            f"the state of step {formation.goal_step} could not be read from any rank that has it"
        )
        if not may_appeal(self.step, self._unhealed):
            raise error
        self._leave(formation, error)
        return False

    def _restore(self, formation: Formation) -> bool:
        """Take the state from a source whose script is done with it; False if a newer formation came first."""
        worker, pause_s = self._worker, _FIRST_PAUSE_S
        pull_from = partial(self._pull, formation)
        worker.board.enter(Phase.RESTORE)
        try:
            return restore(worker, formation, pull_from)
        except NotComplete:
            with (
                worker.board.waiting()
            ):  # in one phase: if all ranks wait for each other, that is found
                while not worker.regrouper.wait_newer(formation, pause_s):
                    try:
                        return restore(worker, formation, pull_from)
                    except NotComplete:
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return False

    def _pull(self, formation: Formation, source: Source) -> Pulled:
        """Replace the state by that of ``source``; no newer generation hears of a step that is just changing."""
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
                self._integrity.adopted()

    def _adopt(self, pulled: Pulled) -> None:
        """The state is a peer's. It is this rank's own already if the code behind its step has run."""
        replica = self.replica
        replica.count_at_entry(replica.at_entry or pulled.at_entry or replica.script_writes)
        unknown = (
            bool(pulled.checksum) and replica.at_entry
        )  # a sealed copy, in a process that knows no script
        self._adopted = pulled
        self._is_provisional = pulled.at_entry or replica.script_writes or unknown
        if pulled.step == self._entering:
            self._publish_step(Change.NONE)
            self._writes.abstain()

    def _forget_step(self) -> None:
        self._work.forget()
        self._integrity.forget()
        self._inquiry.round = None

    # -- finish -------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """End what was computed: a round of the inquiry, or the step."""
        formation = self._formation
        assert formation is not None
        if self._inquiry.round is not None:
            self._conclude(formation)
        elif (
            not self._missing()
        ):  # a pass that failed takes the shards with it into whose sum it was folded
            self._attempt(formation)

    def _attempt(self, formation: Formation) -> None:
        """Reduce and commit once, unless the generation is over or an inquiry begins."""
        worker = self._worker
        # still shown as computing: who stops before its first transfer keeps the others waiting, and is to blame
        self._stop_for_fault(Phase.REDUCE.label, formation)
        self._stopwatch.drain()
        self._announce_contribution(formation)
        self._stopwatch.start()
        try:
            group = worker.regrouper.group(formation)
            self._join(formation, group)
            seal = self._integrity.seal(formation.plan, self.rank)
            worker.hooks.injected.before_reduction(group)
            sidecar = self._work.sidecar(self._mine(), worker.regrouper.vote, seal)
            reduced = self._work.reduce(
                sidecar, verify=self._integrity.verify, arrived=worker.hooks.injected.received
            )
            self._stopwatch.lap(Lap.WAIT)
        except (GenerationSuperseded, GroupFailed, CorruptSegment, DoubtfulSum) as error:
            if isinstance(error, CorruptSegment):
                self._inquiry.received(formation, error, self._work.seals(error.sidecars))
            elif isinstance(error, DoubtfulSum):
                self._inquiry.doubts(formation)
            self._leave(formation, error)
            return
        if not reduced.finite:
            self._inquiry.open_audit(formation, reduced, self._ownership())
            return
        try:
            if self._inquiry.objects(formation, self._work.seals(reduced.sidecars)):
                if self._inquiry.round is None:
                    worker.regrouper.wait_newer(formation)
                return
            self._commit(formation, reduced)
        except (GenerationSuperseded, LeaseOver, ConnectionError) as error:
            self._leave(formation, error)
            return
        self._stopwatch.count_step()
        self._moves = worker.regrouper.move_on(self._work.lowest_vote(reduced.sidecars))
        worker.regrouper.dispose_retired(self._work.former_buffers())

    def _join(self, formation: Formation, group: Group) -> None:
        """Have the reducer use the group of ``formation``."""
        if not self._joined:
            self._work.reducer.begin(group if group.size > 1 else None, self._ownership())
            self._joined = True

    def _join_early(self) -> bool:
        """Whether transfers may start before the backward pass is over."""
        formation = self._formation
        if (
            not self._counts
            or self._work.overlap is None
            or formation is None
            or formation.group is None
        ):
            return False
        self._join(formation, formation.group)
        return not formation.broken

    def _announce_contribution(self, formation: Formation) -> None:
        self._worker.board.enter(Phase.REDUCE)
        mine = self._mine()
        self._worker.journal.write(
            Event.REDUCE,
            step=self.step,
            generation=formation.plan.generation,
            rank=self.rank,
            shards=mine,
            samples=self._work.samples(mine),
            dataset=self._dataset_size,
        )

    def _commit(self, formation: Formation, reduced: Reduced) -> None:
        self._worker.board.enter(Phase.OPTIMIZER)
        self._stop_for_fault(Phase.OPTIMIZER.label, formation)
        if formation.plan.generation > 1:
            self._stop_for_fault("recommit", formation)
        self._committer.commit(formation, reduced, self._ownership())
        self._forget_step()
        self._integrity.committed(reduced.grad_sum, len(formation.plan.members))

    def _leave(self, formation: Formation, error: Exception) -> None:
        """Out of a broken collective: report it, and wait for the plan that explains it."""
        worker = self._worker
        generation = formation.plan.generation
        self._joined = False
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

    # -- collectives of the user's code -------------------------------------------------------------------------

    def _make(self, call: Call) -> None:
        board, step, replica = self._worker.board, self.step, self.replica
        with board.waiting(), replica.calling():
            formation = self._settle(calling=True)
        if self._calls.made(step) < len(self._calls.results(step)):
            return  # it was taken over
        if (other := formation.gone_on(step)) is not None:
            raise call.refusal(f"rank {other.rank} has gone on without this one")
        if not self._has_state_of_call(formation):
            return
        call.compute(self.rank, self.world)
        with board.waiting(), replica.calling():
            row = call.row(step, self._calls.made(step), self.rank, self.world)
            try:
                group = self._worker.regrouper.group(formation)
                rows = gather_unequal(group if group.size > 1 else None, row, self.device)
            except (GenerationSuperseded, GroupFailed) as error:
                self._leave(formation, error)
                return
            self._write_down(formation, step, call.conclude(rows))

    def _has_state_of_call(self, formation: Formation) -> bool:
        """Return whether the state is that of the ranks that wait in the same call; False if they were lost.

        A rank that took over the state from them has run the code up to the call a second time. Where that code
        writes into the state, it takes the state over once more here.
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
        """Keep the result, unless a newer generation was begun: its members may have been told that there is none."""
        try:
            with self._worker.regrouper.advance(formation):
                self._calls.record(step, result)
        except GenerationSuperseded as error:
            self._leave(formation, error)

    def _take_results(self, formation: Formation) -> bool:
        """Take over what others have of collectives since the last commit; False if a newer formation came first."""
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

    # -- rehearsal ----------------------------------------------------------------------------------------------

    def _rehearse(self) -> None:
        """Warm what a step needs beyond the shard that was computed, leave no trace, and report for duty."""
        replica, worker = self.replica, self._worker
        self._work.require_loss(0)
        with replica.undone_afterwards():
            replica.advance()
        replica.enter()
        for parameter in replica.parameters:
            parameter.grad = None
        self._rehearsed = True
        worker.board.rehearsed(time.monotonic_ns() - self._began_ns)
        worker.ready(worker.share(replica))
        worker.board.enter(Phase.REGROUP)

    # -- numbers that are not finite, or corrupt ----------------------------------------------------------------

    def _conclude(self, formation: Formation) -> None:
        """Share what was found in a round of the inquiry, and act on it."""
        self._worker.board.enter(Phase.REDUCE)
        try:
            self._act_on(formation, self._inquiry.share(formation))
        except (GenerationSuperseded, ConnectionError) as error:
            self._leave(formation, error)

    def _act_on(self, formation: Formation, result: AuditResult) -> None:
        if result.verdict == "rank":
            self._inquiry.accuse(formation, result.ranks, result.cause)
            self._worker.regrouper.wait_newer(formation)
        elif result.cause == "corrupt":
            self._inquiry.repeat(formation, result)
            self._forget_step()
        elif self._guard.gives_up(self.step, result):
            self._committer.skip(formation, result, self._mine())
            self._forget_step()
        else:
            self._forget_step()  # compute the whole step again
