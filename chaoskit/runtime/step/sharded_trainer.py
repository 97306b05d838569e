"""The trainer of sharded jobs: after a loss all ranks enter the train function again.

    mesh = trainer.mesh()
    fully_shard(model, mesh=mesh)
    trainer.register(model=model, optimizer=optimizer)
    while trainer.step < 1000:
        with trainer.transaction() as step:
            for shard in step.shards(dataset, batch_size=64):
                step.backward(loss(model, shard.batch))

No rank can replace the state of another one. Gradients are reduced by the model's own collectives
during the backward pass. A step still commits on every rank or on none. At its end all ranks
exchange whether their part arrived and is finite, and only then the optimizers run. Each committed
state is copied into memory that outlives the process, and from there to another node. When a rank
is lost, all ranks leave their collectives. The train function is then entered again with new
groups, from the newest state of which every piece exists (:mod:`chaoskit.runtime.worker.entries`).

-> integrity/ballot.py: commit, repeat, or blame a rank. state/copies.py: copies in memory;
daemon/piece_keeper.py sends them to other nodes. state/pieces.py: which copies a rank reads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public, though not in __all__
from torch.distributed.device_mesh import DeviceMesh

from chaoskit.errors import BadInput, NonFiniteBatch
from chaoskit.runtime.group.collective import GroupFailed
from chaoskit.runtime.group.generations import ENTRY_S, entry_limit_s
from chaoskit.runtime.group.process_group import Group
from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.group.rendezvous import GenerationSuperseded, RendezvousStore
from chaoskit.runtime.group.world import World
from chaoskit.runtime.integrity.ballot import (
    DIGEST,
    PIECE_STATE,
    Decision,
    RankOrBatch,
    Row,
    exchange_rows,
    gather,
    gather_unequal,
    whole_step,
)
from chaoskit.runtime.integrity.nonfinite_guard import (
    accuse,
    built_differently,
    note_corruption,
    undecidable,
)
from chaoskit.runtime.integrity.piece_check import PieceCheck
from chaoskit.runtime.integrity.voting import SuspectRanks
from chaoskit.runtime.reduction.checksums import checksum
from chaoskit.runtime.state.copies import Copies
from chaoskit.runtime.state.parameter_watch import GatheredWatch, ParameterWatch
from chaoskit.runtime.state.peer import PeerLost
from chaoskit.runtime.state.pieces import NoCopy, Restorer
from chaoskit.runtime.state.registered import Scheduler
from chaoskit.runtime.state.sampling import Sampler, seed_everything
from chaoskit.runtime.state.script_writes import ScriptWrite, ScriptWrites, Writes
from chaoskit.runtime.state.sharding import ShardedState, are_finite, local_memory
from chaoskit.runtime.step.base_trainer import BaseTrainer
from chaoskit.runtime.step.collectives import Call
from chaoskit.runtime.step.commit import LeaseOver
from chaoskit.runtime.step.compiling import Compilations
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.restore import report_copy
from chaoskit.runtime.step.sharded_commit import ShardedCommitter
from chaoskit.runtime.step.shardwork import Shard
from chaoskit.runtime.step.transaction import Transaction
from chaoskit.vocabulary import Event, Phase
from chaoskit.wire.messages import GroupBroken, Healed, OfferedSnapshot


class Reentry(BaseException):
    """Leaves the train function in order to enter it again.

    It is a ``BaseException``, so that ``except Exception`` in user code does not catch it.
    """


class ShardedTrainer(BaseTrainer):
    """The trainer of one rank of a sharded job, for one entry of the train function.

    Args:
        formation: the generation to train in; None for the rehearsal, in a world of this process
            alone.
        group: the process group of that generation.
    """

    def __init__(
        self,
        worker: WorkerContext,
        copies: Copies,
        compilations: Compilations,
        writes: ScriptWrites,
        formation: Formation | None,
        group: Group | None,
    ) -> None:
        super().__init__(worker, formation)
        self._copies = copies
        self._compilations = compilations
        self._writes = writes
        self._group = group
        self._hooks_called = False  # the hooks of this entry were called
        self._state: ShardedState | None = None
        self._world: World | None = None
        self._clip_norm: float | None = None
        self._shift = 0  # ranks have exchanged shards by so many places, to find the faulty rank
        self._began_ns = 0
        self._samplers: dict[tuple[int, int], Sampler] = {}
        self._sampler: Sampler  # of the current step
        self._losses: dict[int, Tensor] = {}
        self._samples: dict[int, list[int]] = {}
        self._current_shard = -1  # the current shard; -1 for a pass only for other ranks
        self._ended_by_membership = True  # only a newer membership ended this entry
        self._all_halt = False  # every rank has the order to end after the newest step
        self._has_committed = False  # a step of this entry was committed: torch's caches are valid

    # -- public methods ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._state.step if self._state else 0

    @property
    def will_restore(self) -> bool:
        """True if :meth:`register` replaces every weight and buffer.

        They then need memory but no values.
        """
        return self._formation is not None and bool(self._formation.plan.restore)

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Return a device mesh over all ranks, for ``fully_shard``.

        Args:
            sizes: its dimensions, the last one varies fastest; -1 stands for what is left. Without
                sizes there is one dimension ``shard``. ``mesh(replicate=2, shard=-1)`` is for HSDP.

        In a world of one rank, such as the rehearsal, each dimension has size 1.

        Raises:
            BadInput: if the ranks do not make up such a mesh.
            GenerationSuperseded: if a newer generation was begun meanwhile.
        """
        filled = _fill_open_size(sizes or {"shard": -1}, self.world)
        if self._world is None:
            self._world = self._open_world()
        return self._world.mesh(filled)

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: Any,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Register the objects to train, and take over their state.

        Call it once in each entry, before the first transaction.

        Args:
            model: sharded over a mesh of :meth:`mesh`.
            optimizer: over the model's parameters, made after they were sharded. One, or several.
            scheduler: stepped once a committed step. One, or several.
            clip_norm: largest 2-norm of the whole reduced gradient; None leaves it as it is.

        Raises:
            BadInput: if the model is not sharded, or is not the one that was trained before, or if
                objects are registered already.
            PeerLost: if no copy of some piece of the state can be read.
            GenerationSuperseded: if a newer generation was begun meanwhile.
            RuntimeError: if a rank is lost meanwhile.
        """
        if self._state is not None:
            raise BadInput("register", type(model).__name__, "call trainer.register once")
        self._state, self._clip_norm = ShardedState(model, optimizer, scheduler), clip_norm
        self._writes.watch(self._state)
        self._is_registered = True
        self._watch = ParameterWatch(model, memory=local_memory)
        self._gathered = GatheredWatch(model)
        if self._formation is not None:
            self._take_over(self._formation, self._state)

    def transaction(self) -> Transaction:
        """Return a context manager for one attempt at the next step.

        The module's docstring has an example.

        Raises:
            BadInput: before :meth:`register`.
        """
        if self._state is None:
            remedy = "call trainer.register(model=..., optimizer=...) before trainer.transaction()"
            raise BadInput("model", None, remedy)
        return Transaction(self)

    def _obey_halt(self) -> None:
        """Leave the train function, by TrainingHalted, if every rank has the order to end.

        A rank that left alone would leave collectives incomplete.
        """
        if self._all_halt:
            super()._obey_halt()

    def finish(self) -> None:
        """Complete the last step after the train function has returned.

        The registered state is then the final state. It is copied again if the script has changed
        it. Nothing is done in a rehearsal.
        """
        if self._formation is not None:
            self._complete_step(self._formation)

    def elastic_event_detected(self) -> bool:
        """Return True if this entry is over because another world has been planned.

        Ranks learn of it at different times, and no further step is committed. The next transaction
        leaves the train function, and the next entry restores the committed state.
        """
        return self._formation is not None and self._worker.regrouper.is_over(self._formation)

    # -- entry and exit ----------------------------------------------------------------------------

    @property
    def state(self) -> ShardedState:
        """The registered state.

        Raises:
            RuntimeError: before :meth:`register`, and after :meth:`leave`.
        """
        if self._state is None:
            raise RuntimeError("no state is registered: call trainer.register first")
        return self._state

    @property
    def _registered(self) -> ShardedState:
        return self.state

    @property
    def rehearses(self) -> bool:
        """True if this entry is only a rehearsal."""
        return self._formation is None

    def _open_world(self) -> World:
        """Open and return the groups of this entry: of its generation, or of this process alone.

        Raises:
            GenerationSuperseded: if a newer generation was begun meanwhile.
        """
        formation = self._formation
        store: Store = HashStore()
        if formation is not None:
            store = RendezvousStore(formation.store, formation.plan.generation)
        timeout_s = self.config.collective_timeout_s
        world = World(
            store,
            self.rank,
            self.world,
            self.device,
            address=self._worker.host,
            timeout_s=timeout_s,
            waiting=self._worker.board.waiting,
        )
        if formation is not None and not self._worker.regrouper.attach(formation, world.leave):
            world.leave()
            raise GenerationSuperseded(
                "a newer generation was begun while the groups of this one were built"
            )
        return world

    def _take_over(self, formation: Formation, state: ShardedState) -> None:
        """Take over the newest state of which every piece exists, and find this rank's piece.

        All ranks compare the layout of their pieces first. Ranks with equal layouts are replicas of
        a piece. The parts of this trainer that need the piece are made here, and a first copy of
        the state is begun.

        Raises:
            GenerationSuperseded: if a newer generation was begun meanwhile.
            PeerLost: if no copy of some piece can be read.
            RuntimeError: if a rank is lost meanwhile.
        """
        worker, plan = self._worker, formation.plan
        digests = gather(self._group, state.boxes_digest())
        layouts = list(dict.fromkeys(digests))  # replicas of a shard hold the same piece
        pieces = [layouts.index(digest) for digest in digests]
        piece_number, piece_count = pieces[self.rank], len(layouts)
        committed_in, sources = 0, list[OfferedSnapshot]()
        if self.will_restore:
            worker.board.progress(0)  # of this entry: ranks that wait for this one are no further
            worker.board.enter(Phase.RESTORE)
            self._stop_for_fault("restore")
            committed_in, sources = self._restore(formation, state, piece_number, piece_count)
        is_heir = any(source.worker != worker.name for source in sources)
        self._piece_check = PieceCheck(state, self.config, pieces.count(piece_number), heir=is_heir)
        self._rank_or_batch = RankOrBatch(pieces, self.config.hash_every)
        self._committer = ShardedCommitter(
            worker, self._copies, self._writes, state, piece_number, self._piece_check
        )
        self._copies.hold(state, piece_number, piece_count)
        self._copies.go_back(state.step)
        if self.will_restore:
            self._copies.keep(state.step)
            worker.board.progress(state.step)
            worker.board.enter(Phase.REDUCE)
            gather(self._group, b"\1")  # other ranks may still read this memory
        with worker.regrouper.advance(formation):
            worker.regrouper.step = state.step
        worker.board.progress(state.step)
        self._copies.begin(state.step, committed_in)
        if plan.generation > 1:
            worker.send(Healed(worker.name, plan.generation))
        self._over = state.step > 0  # after that step: collectives may be called
        worker.board.enter(Phase.OUTSIDE)

    def _restore(
        self, formation: Formation, state: ShardedState, piece_number: int, piece_count: int
    ) -> tuple[int, list[OfferedSnapshot]]:
        """Read the pieces of this rank into ``state``, and journal the copies that were read.

        Return the generation in which they were committed, and the copies.

        Raises:
            GenerationSuperseded: if some piece cannot be read, and a newer generation was begun.
            PeerLost: if some piece cannot be read.
        """
        worker, generation = self._worker, formation.plan.generation
        restorer = Restorer(
            formation.plan.restore,
            node=formation.me.node,
            rank=self.rank,
            token=worker.token,
            transport=self.config.transport,
            report_failure=partial(report_copy, worker, generation),
        )
        try:
            restorer.restore(state, piece_number, piece_count)
        except NoCopy as error:
            if not worker.regrouper.wait_newer(formation, ENTRY_S):
                raise PeerLost(str(error)) from error
            raise GenerationSuperseded(str(error)) from error
        for snapshot in restorer.copies_read:
            worker.journal.write(
                Event.RESTORED,
                generation=generation,
                rank=self.rank,
                step=snapshot.step,
                size_bytes=snapshot.size_bytes,
                transport=self.config.transport,
                source=f"{snapshot.tier} of {snapshot.node}",
                checksum=snapshot.checksum,
            )
        worker.journal.write(
            Event.ADOPT, step=restorer.step, generation=generation, source="copies of every piece"
        )
        return restorer.generation, restorer.copies_read

    def leave(self) -> None:
        """Release the groups and all objects of this entry after the train function was left."""
        self._prefetcher.forget()
        self._copies.drop()
        self._state = None
        self._losses.clear()
        if self._world is not None:
            self._world.retire(keep_caches=self._ended_by_membership or self._has_committed)

    @property
    def _shard_count(self) -> int:
        """The number of shards of the global batch."""
        return 1 if self.rehearses else self.config.shard_count

    # -- one attempt -------------------------------------------------------------------------------

    def _own_shards(self) -> tuple[int, ...]:
        """Return the shards that this rank computes in this attempt."""
        if self._formation is None:
            return (0,)
        members = self._formation.plan.members
        return members[(self.rank + self._shift) % len(members)].shards

    def _begin(self) -> None:
        """Begin a transaction: complete the step before it, and call the hooks of a new entry.

        Raises:
            Reentry: if the generation of this entry is broken.
        """
        self._over, self._has_begun = False, True
        if self._formation is None:
            self._began_ns = time.monotonic_ns()
        else:
            self._complete_step(self._formation)
            if not self._hooks_called:
                self._hooks_called = True
                self._callbacks.enter(self._formation.plan, self.step)
        self._compilations.watch()
        self._begin_attempt()

    def _complete_step(self, formation: Formation) -> None:
        """Take the registered state as that of this step: the script goes on, or returns.

        If the script has changed the state since the commit, it is copied again. If its copy was
        postponed to this moment, the copy begins.
        """
        change = self._writes.look()
        if change is ScriptWrite.CERTAIN:
            self._piece_check.written()
        if change and not self._committer.awaits_entry:  # the copy is inconsistent
            self._copies.go_back(self.step - 1)
        if change or self._committer.awaits_entry:
            self._copies.begin(self.step, formation.plan.generation)
        self._committer.awaits_entry = False

    def _note_state(self) -> None:
        """Record the registered state at the moment at which the script goes on.

        Nothing is recorded in a rehearsal.
        """
        if self._formation is not None:
            self._writes.remember()

    def _begin_attempt(self) -> None:
        """Drop the results of an earlier attempt at this step, and its gradients.

        Raises:
            Reentry: if the generation of this entry is broken.
        """
        if self._formation is not None and self._formation.broken:
            raise Reentry
        self.state.forget_gradients()
        self._losses.clear()
        self._samples.clear()
        self._worker.board.enter(Phase.FORWARD)

    def _take_step(self, dataset: Any, batch_size: int, prefetch: bool) -> Iterator[Shard]:
        """Yield shards to the user's code until the step is committed or skipped.

        Nothing is yielded if the loop of this transaction has ended already.

        Raises:
            Reentry: at the end of a rehearsal, and as :meth:`_attempt`.
        """
        if self._over:
            return
        if not self.rehearses and 0 < self.step == self.config.tell_state_at:
            self.journal_state()
        yield from self._compute(dataset, batch_size, prefetch)
        with self._plain_numbers():
            if (formation := self._formation) is None:
                self._rehearse()
            is_decided = self._attempt(formation)
        while not is_decided:
            self._begin_attempt()
            yield from self._compute(dataset, batch_size, prefetch)
            with self._plain_numbers():
                is_decided = self._attempt(formation)
        self._over = True
        self._note_state()
        self._worker.board.enter(Phase.OUTSIDE)

    def _compute(self, dataset: Any, batch_size: int, prefetch: bool) -> Iterator[Shard]:
        """Yield this rank's shards, as many on every rank.

        A rank with fewer shards repeats its last one, and drops the results.

        Raises:
            BadInput: if the loop body of a shard has computed no loss, or has written into a
                parameter.
        """
        key = (len(dataset), batch_size)
        if key not in self._samplers:
            self._samplers[key] = Sampler(
                len(dataset), batch_size, self.config.shard_count, self.seed
            )
        self._sampler, own_shards = self._samplers[key], self._own_shards()
        pass_count = len(own_shards)
        if self._formation is not None:
            pass_count = max(len(member.shards) for member in self._formation.plan.members)
        # as many passes on every rank: the model's collectives need all ranks
        for pass_number in range(pass_count):
            index = own_shards[min(pass_number, len(own_shards) - 1)]
            self._current_shard = index if pass_number < len(own_shards) else -1
            self._enter_phase(Phase.FORWARD)
            samples = self._sampler.samples(self.step, index)
            seed_everything(self.seed, self.step, index)
            batch = self._fetch(
                dataset, samples, index, prefetch=prefetch, rehearses=self.rehearses
            )
            if prefetch and not self.rehearses:
                self._prefetcher.expect(
                    dataset, self._samples_ahead(own_shards, pass_number + 1, pass_count)
                )
            self._watch.begin(rehearses=self.rehearses)
            if self.rehearses:
                self._gathered.begin()
            yield Shard(index, samples, batch)
            self._gathered.end()
            self._watch.end()
            if self._current_shard >= 0:
                self._require_loss(index)
                self._samples[index] = samples

    def _samples_ahead(
        self, own_shards: Sequence[int], pass_number: int, pass_count: int
    ) -> list[int]:
        """Return the samples to prefetch for a pass, or for the next step after the last pass.

        They are not used if a rank is lost meanwhile.

        Args:
            pass_number: the pass, from 0; ``pass_count`` for the first pass of the next step.
        """
        if pass_number == pass_count:
            return self._sampler.samples(self.step + 1, own_shards[0])
        return self._sampler.samples(self.step, own_shards[min(pass_number, len(own_shards) - 1)])

    def _require_loss(self, index: int) -> None:
        """Raise BadInput if the loop body of a shard has computed no loss."""
        if index not in self._losses:
            raise BadInput(
                "loss", None, f"call step.backward(loss) for shard {index}: its loop body did not"
            )

    def _backward(self, loss: Tensor) -> None:
        """Run the backward pass of the current shard, and add ``loss`` to those of the shard.

        In a pass only for other ranks, the gradients are zeros and the loss is not counted.
        """
        self._enter_phase(Phase.BACKWARD)
        loss = self._worker.hooks.injected.loss(loss)
        index = self._current_shard
        try:
            # the gradient is the mean over all shards; the model's collectives average over ranks
            (loss * (self.world / self._shard_count if index >= 0 else 0.0)).backward()
        finally:
            self._worker.board.enter(Phase.FORWARD)
        if index >= 0:
            detached = loss.detach()
            self._losses[index] = (
                self._losses[index] + detached if index in self._losses else detached
            )

    def _enter_phase(self, phase: Phase) -> None:
        """Show the phase on the board, and let a fault strike that is planned for it."""
        self._worker.board.enter(phase)
        if self._formation is not None:
            self._stop_for_fault(phase.label)

    def _stop_for_fault(self, phase: str) -> None:
        """Block here if a fault is planned for this phase, and carry out its act."""
        formation = self._entered_formation
        self._worker.hooks.reach(phase, self.step, formation.plan, formation.me, self._state)

    def _rehearse(self) -> NoReturn:
        """End the rehearsal once every path of a step is warm.

        Raises:
            Reentry: always.
        """
        state, worker = self.state, self._worker
        if self._clip_norm is not None:
            state.clip_gradients(self._clip_norm)
        with state.running_optimizers():
            state.advance()
        state.scalars()  # raises for state that cannot be given to another rank
        worker.board.rehearsed(time.monotonic_ns() - self._began_ns)
        self._copies.reserve(state, self.config.nodes)
        raise Reentry

    def _attempt(self, formation: Formation) -> bool:
        """Exchange reports, and commit or skip the step. Return False if it must be computed again.

        Raises:
            BadInput: if the script has not written the same into the state on all ranks.
            RuntimeError: if a rank is lost meanwhile.
            GenerationSuperseded, LeaseOver: as :meth:`ShardedCommitter.commit`.
            Reentry, NonFiniteBatch, JobFailed: as :meth:`_reject_step`.
        """
        worker, state = self._worker, self.state
        self._stop_for_fault(Phase.REDUCE.label)
        worker.board.enter(Phase.REDUCE)
        own_shards = self._own_shards()
        worker.journal.write(
            Event.REDUCE,
            step=self.step,
            generation=formation.plan.generation,
            rank=self.rank,
            shards=own_shards,
            samples=[sample for shard in own_shards for sample in self._samples[shard]],
            dataset=self._sampler.size,
        )
        if self._group is not None:
            worker.hooks.injected.before_reduction(self._group)
        members = formation.plan.members
        owners = [
            members[(rank + self._shift) % len(members)].shards for rank in range(len(members))
        ]
        gradients = state.gradients()
        worker.hooks.injected.received(gradients)
        rows = exchange_rows(self._group, self._row(formation, gradients))
        if writes := Writes.of([row.written for row in rows]):
            raise writes.refusal(self.step)
        decision = self._rank_or_batch.decide(self.step, owners, rows)
        if decision.verdict == "commit":
            self._commit(formation, rows)
            return True
        return self._reject_step(formation, decision)

    def _row(self, formation: Formation, gradients: list[Tensor]) -> Row:
        """Return the report of this rank on the step, which all ranks exchange."""
        losses = [
            float(self._losses[shard]) if shard in self._losses else None
            for shard in range(self.config.shard_count)
        ]
        is_finite = are_finite(gradients) and are_finite(self._losses.values())
        seal = self._piece_check.seal()
        return Row(
            healthy=is_finite or self.state.is_finite(),
            finite=is_finite,
            protected_step=self._copies.protected_step(
                self.step, lambda: self._worker.regrouper.is_over(formation)
            ),
            digest=checksum(self.state.piece_gradients()) % DIGEST,
            state=seal.state % DIGEST,
            torn=bool(seal.torn),
            heir=bool(seal.heir),
            written=self._writes.word % DIGEST,
            halts=self._worker.halt.is_due(self.step + 1),
            losses=losses,
        )

    def _commit(self, formation: Formation, rows: Sequence[Row]) -> None:
        """Commit the step: keep the copies that every piece has, clip, and run the optimizers.

        Raises:
            RuntimeError: if a rank is lost while the gradients are clipped.
            GenerationSuperseded, LeaseOver: as :meth:`ShardedCommitter.commit`.
        """
        self._copies.keep(
            whole_step(self._copies.kept, self.step, [row.protected_step for row in rows])
        )
        if self._clip_norm is not None:
            self.state.clip_gradients(self._clip_norm)  # a collective, not this rank's own work
        self._worker.board.enter(Phase.OPTIMIZER)
        self._stop_for_fault(Phase.OPTIMIZER.label)
        if formation.plan.generation > 1:
            self._stop_for_fault("recommit")
        self._committer.commit(formation, rows)
        self._shift, self._has_committed = 0, True
        self._all_halt = all(row.halts for row in rows)

    # -- numbers that are not finite, or corrupt ---------------------------------------------------

    def _reject_step(self, formation: Formation, decision: Decision) -> bool:
        """Compute the step again, have a rank replaced, or skip the batch.

        Return True if the batch was skipped, and False if the step must be computed again.

        Raises:
            Reentry: if a rank was accused.
            BadInput, JobFailed: if replicas of a piece differ, and no vote decides.
            NonFiniteBatch: if a batch is not finite on any rank, and the policy is not ``skip``.
        """
        if decision.mismatch is not None:
            self._reject_replicas(formation, decision.verdict, decision.mismatch)
            return False
        worker, generation = self._worker, formation.plan.generation
        if decision.verdict == "repeat":
            if decision.shift:
                self._note_nonfinite(formation, decision.shards)
            self._shift = decision.shift
            return False
        self._shift = decision.shift
        worker.journal.write(
            Event.ATTRIBUTED,
            step=self.step,
            generation=generation,
            verdict=decision.verdict,
            ranks=decision.ranks,
            shards=decision.shards,
        )
        if decision.verdict == "rank":
            accuse(formation.plan, decision.ranks, worker.name, self.step, worker.send)
            worker.regrouper.wait_newer(formation)
            raise Reentry
        if self.config.nonfinite != "skip":
            raise NonFiniteBatch(
                f"step {self.step}: shards {list(decision.shards)} give non-finite numbers on every "
                f"rank that computes them (policy {self.config.nonfinite!r}); correct the data or "
                "the learning rate, or use nonfinite='skip'"
            )
        samples = [
            sample
            for shard in formation.me.shards
            for sample in self._sampler.samples(self.step, shard)
        ]
        self._committer.skip(formation, decision.shards, samples)
        return True

    def _note_nonfinite(self, formation: Formation, shards: Sequence[int]) -> None:
        """Write the ranks with losses that are not finite to the journal.

        If only the sum is not finite, no rank is named.
        """
        owners: list[tuple[int | None, str, list[int]]] = [
            (member.rank, member.worker, suspects)
            for member in formation.plan.members
            if (suspects := [shard for shard in member.shards if shard in shards])
        ]
        for owner, name, suspects in owners or [(None, "", list(range(self.config.shard_count)))]:
            self._worker.journal.write(
                Event.NONFINITE,
                step=self.step,
                generation=formation.plan.generation,
                owner=owner,
                worker=name,
                shards=suspects,
            )

    def _reject_replicas(self, formation: Formation, verdict: str, mismatch: SuspectRanks) -> None:
        """Handle replicas that differ: return to compute the step again, or leave this entry.

        Raises:
            BadInput: if they differ before the first step, and no vote decides which of them is
                wrong.
            JobFailed: if they differ later, and no vote decides.
            Reentry: if a rank was accused.
        """
        worker, plan = self._worker, formation.plan
        if verdict == "undecided" and mismatch.what == PIECE_STATE and self.step == 0:
            raise built_differently(self.state.model, mismatch.involved)
        outcome = {"repeat": "transfer" if mismatch.ranks else "undecided"}.get(verdict, verdict)
        sources = (
            [] if mismatch.ranks else [plan.members[rank].worker for rank in mismatch.involved]
        )
        note_corruption(
            worker.journal,
            plan,
            self.step,
            mismatch.what,
            mismatch.involved,
            outcome,
            sources=sources,
        )
        if verdict == "undecided":
            ranks = list(mismatch.involved)
            what = f"ranks {ranks} hold the same piece, and their {mismatch.what} differ"
            raise undecidable(self.step, what, "replicas of each piece")
        if verdict == "rank":
            accuse(
                plan,
                mismatch.ranks,
                worker.name,
                self.step,
                worker.send,
                cause="corrupt",
                what=mismatch.what,
            )
            worker.regrouper.wait_newer(formation)
            raise Reentry

    # -- collectives of the user's code ------------------------------------------------------------

    def _make(self, call: Call) -> None:
        """Exchange the contributions to ``call``, and record the result.

        If a rank is lost meanwhile, all ranks leave this entry. The next entry needs none of its
        calls.
        """
        step, calls = self.step, self._calls
        call.compute(self.rank, self.world, evenly=True)
        with self._worker.board.waiting():
            row = call.row(step, calls.next_call(step), self.rank, self.world)
            rows = gather_unequal(self._group, row, self.device)
        calls.record(step, call.conclude(rows))

    # -- losses ------------------------------------------------------------------------------------

    def give_up(self, error: BaseException) -> float:
        """Handle an exception that came out of the train function.

        Return once a newer generation is begun, or this worker must end. Raise the exception in a
        rehearsal, if no collective is to blame, or if no generation follows in time.

        Returns:
            The weight of the evidence that this process is at fault. It is 0 if the end of the
            generation or of the lease came first. It is one half if another worker reported an
            error of this generation first, else 1. If a peer has left the group, a rank gets an
            error as well, maybe before the plan. But the faulty rank need not be the first to
            notice.
        """
        formation, worker = self._formation, self._worker
        if formation is None:
            raise error
        ended_by_membership = (
            isinstance(error, (GenerationSuperseded, LeaseOver)) or formation.broken
        )
        self._ended_by_membership = ended_by_membership
        if not ended_by_membership and not _is_collective_error(error):
            raise error
        worker.board.enter(Phase.REGROUP)
        generation = formation.plan.generation
        if not isinstance(error, GenerationSuperseded) and worker.regrouper.dismissal is None:
            detail = str(error)[:200]
            worker.journal.write(
                Event.QUIESCED, generation=generation, rank=self.rank, error=detail
            )
            worker.send(GroupBroken(worker.name, generation, detail))
        worker.regrouper.give_up(formation)
        if not worker.regrouper.wait_newer(
            formation, entry_limit_s(ended_by_membership, self.config)
        ):
            raise error
        if ended_by_membership:
            return 0.0
        return 1.0 if worker.regrouper.first_reporter(formation) in ("", worker.name) else 0.5

    def copy_last(self) -> None:
        """Complete a copy of the last step if snapshots are stored on disk.

        The copy may be missing afterwards: the wait has a limit, and ends with the generation.
        """
        formation = self._formation
        if formation is not None and self.config.disk is not None:
            self._worker.board.enter(Phase.UNTIMED)
            is_over = partial(self._worker.regrouper.is_over, formation)
            self._copies.complete(self.step, formation.plan.generation, is_over)

    def agree_on_end(self) -> tuple[str, str]:
        """Exchange digests once every rank has taken the last step, and journal the state.

        Return two SHA-256 digests in hexadecimal digits: of the weights, and of the whole state of
        all ranks. Raise RuntimeError if a rank is lost meanwhile.
        """
        state = self.state
        self._worker.board.enter(Phase.UNTIMED)
        self.journal_state()
        self._worker.board.enter(Phase.REDUCE)
        digests = gather(self._group, state.weights_digest() + state.state_digest())
        half = len(digests[0]) // 2
        weights = b"".join(digest[:half] for digest in digests)
        whole_states = b"".join(digest[half:] for digest in digests)
        return hashlib.sha256(weights).hexdigest(), hashlib.sha256(whole_states).hexdigest()


def _is_collective_error(error: BaseException) -> bool:
    """Return whether the error came from a process group. Torch has no error type for gloo."""
    import torch.distributed as dist

    return isinstance(error, (dist.DistError, ConnectionError, GroupFailed)) or (
        isinstance(error, RuntimeError)
        and any(word in str(error).lower() for word in ("gloo", "process group", "nccl"))
    )


def _fill_open_size(sizes: dict[str, int], world: int) -> dict[str, int]:
    """Return ``sizes`` with -1 filled in, so that their product is ``world``.

    Raises:
        BadInput: if that is not possible.
    """
    if world == 1:
        return dict.fromkeys(sizes, 1)  # the rehearsal, or the last rank
    product, open_names = 1, [name for name, size in sizes.items() if size == -1]
    for size in sizes.values():
        product *= size if size != -1 else 1
    if (
        len(open_names) > 1
        or product < 1
        or world % product
        or (not open_names and product != world)
    ):
        raise BadInput(
            "mesh",
            sizes,
            f"use sizes whose product is {world}, the ranks of the world; one may be -1",
        )
    return {name: world // product if size == -1 else size for name, size in sizes.items()}
