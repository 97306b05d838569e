"""The trainer of a job whose state is sharded: no rank can replace another one's state, so all begin anew together.

    mesh = trainer.mesh()
    fully_shard(model, mesh=mesh)
    trainer.register(model=model, optimizer=optimizer)
    while trainer.step < 1000:
        with trainer.transaction() as step:
            for shard in step.shards(dataset, batch_size=64):
                step.backward(loss(model, shard.batch))

Gradients are reduced by the model's own collectives, during the backward pass. A step still commits on every rank or on
none: at its end all ranks tell each other whether their part arrived and is finite, and only then the optimizers run.
Each committed state is copied into memory that outlives the process, and from there to another node. When a rank is
lost, all leave their collectives, and the train function is entered again with new groups, from the newest state of
which every piece is there (:mod:`chaoskit.runtime.worker.entries`).
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
    Row,
    Suspicion,
    gather,
    gather_unequal,
    share,
    whole_step,
)
from chaoskit.runtime.integrity.guard import accuse, built_differently, note_corruption, undecidable
from chaoskit.runtime.integrity.piece_check import PieceCheck
from chaoskit.runtime.integrity.voting import Suspicion as Difference
from chaoskit.runtime.reduction.checksums import checksum
from chaoskit.runtime.state.copies import Copies
from chaoskit.runtime.state.parameter_watch import GatheredWatch, ParameterWatch
from chaoskit.runtime.state.peer import PeerLost
from chaoskit.runtime.state.pieces import NoCopy, Restorer
from chaoskit.runtime.state.registered import Scheduler
from chaoskit.runtime.state.sampling import Sampler, seed_everything
from chaoskit.runtime.state.script_writes import Change, ScriptWrites, Writes
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
from chaoskit.wire.messages import GroupBroken, Healed, Snapshot


class Reentry(BaseException):
    """Leaves the train function, to enter it again; not caught by ``except Exception`` in the user's code."""


class ShardedTrainer(BaseTrainer):
    """One rank's view of one entry of the train function.

    Args:
        formation: the generation to train in; None for the rehearsal, in a world of this process alone.
        group: of that generation.
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
        self._copies, self._compilations, self._writes, self._group = (
            copies,
            compilations,
            writes,
            group,
        )
        self._told = False  # the hooks of this entry, what has led to it
        self._state: ShardedState | None = None
        self._world: World | None = None
        self._clip_norm: float | None = None
        self._shift = (
            0  # places by which ranks have exchanged their shards, to find out who is wrong
        )
        self._began_ns = 0
        self._samplers: dict[tuple[int, int], Sampler] = {}
        self._sampler: Sampler  # of this step
        self._losses: dict[int, Tensor] = {}
        self._samples: dict[int, list[int]] = {}
        self._current = -1  # the shard under way; -1 for one that only keeps the others company
        self._explained = True  # whether nothing but a newer membership ended this entry
        self._all_halt = False  # every rank has said that it is to end after the newest step
        self._committed = (
            False  # whether a step of this entry was: then all that torch remembers has served
        )

    # -- what users call ------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._state.step if self._state else 0

    @property
    def will_restore(self) -> bool:
        """Whether :meth:`register` replaces every weight and buffer: then they need no values before, only memory."""
        return self._formation is not None and bool(self._formation.plan.restore)

    def mesh(self, **sizes: int) -> DeviceMesh:
        """A device mesh over all ranks, for ``fully_shard``.

        Args:
            sizes: its dimensions, the last one varies fastest; -1 stands for what is left. Without any: one dimension
                ``shard``. ``mesh(replicate=2, shard=-1)`` is for HSDP.

        Raises:
            BadInput: if the ranks do not make up such a mesh.
        """
        filled = _fill(sizes or {"shard": -1}, self.world)
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
        """Name what is trained, and take over its state. To be called once in each entry, before the first transaction.

        Args:
            model: sharded over a mesh of :meth:`mesh`.
            optimizer: over the model's parameters, made after they were sharded. One, or several.
            scheduler: stepped once a committed step. One, or several.
            clip_norm: largest 2-norm of the whole reduced gradient; None leaves it as it is.

        Raises:
            BadInput: if the model is not sharded, or is not the one that was trained before.
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
        """One attempt at the next step. See the module's example."""
        if self._state is None:
            raise BadInput(
                "transaction", "", "call trainer.register(model=..., optimizer=...) first"
            )
        return Transaction(self)

    def _obey_halt(self) -> None:
        """Leave the train function if every rank has the order to: a rank alone would leave collectives incomplete."""
        if self._all_halt:
            super()._obey_halt()

    def finish(self) -> None:
        """The train function has returned: what is registered now is the final state."""
        if self._formation is not None:
            self._complete_step(self._formation)

    def elastic_event_detected(self) -> bool:
        """Whether this entry is over, as another world has been planned.

        Ranks learn of it one after the other, and no further step is committed: the next transaction leaves the train
        function, and what was committed is restored in the next entry.
        """
        return self._formation is not None and self._worker.regrouper.is_over(self._formation)

    # -- entry and exit -------------------------------------------------------------------------------------------

    @property
    def state(self) -> ShardedState:
        """What was registered."""
        assert self._state is not None
        return self._state

    @property
    def _registered(self) -> ShardedState:
        return self.state

    @property
    def rehearses(self) -> bool:
        """Whether this entry only warms up."""
        return self._formation is None

    def _open_world(self) -> World:
        formation = self._formation
        store: Store = HashStore()
        if formation is not None:
            assert formation.rendezvous is not None
            store = RendezvousStore(formation.rendezvous, formation.plan.generation)
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
        """Take the newest state of which every piece is there, and hold the boxes of this rank from now on."""
        worker, plan = self._worker, formation.plan
        boxes = gather(self._group, state.boxes_digest())
        different = list(dict.fromkeys(boxes))  # replicas of a shard hold the same piece
        pieces = [different.index(one) for one in boxes]
        number, count = pieces[self.rank], len(different)
        committed_in, sources = 0, list[Snapshot]()
        if self.will_restore:
            worker.board.progress(
                0
            )  # of this entry: whoever waits for this rank has not come further
            worker.board.enter(Phase.RESTORE)
            self._stop_for_fault("restore")
            committed_in, sources = self._restore(formation, state, number, count)
        heir = any(source.worker != worker.name for source in sources)
        self._check = PieceCheck(state, self.config, pieces.count(number), heir=heir)
        self._suspicion = Suspicion(pieces, self.config.hash_every)
        self._committer = ShardedCommitter(
            worker, self._copies, self._writes, state, number, self._check
        )
        self._copies.hold(state, number, count)
        self._copies.go_back(state.step)
        if self.will_restore:
            self._copies.keep(state.step)
            worker.board.progress(state.step)
            worker.board.enter(Phase.REDUCE)
            gather(self._group, b"\1")  # others may still read what this rank is going to overwrite
        with worker.regrouper.advance(formation):
            worker.regrouper.step = state.step
        worker.board.progress(state.step)
        self._copies.begin(state.step, committed_in)
        if plan.generation > 1:
            worker.send(Healed(worker.name, plan.generation))
        self._over = (
            state.step > 0
        )  # behind that step: collectives may be called, also if no other one is to be taken
        worker.board.enter(Phase.OUTSIDE)

    def _restore(
        self, formation: Formation, state: ShardedState, number: int, count: int
    ) -> tuple[int, list[Snapshot]]:
        """Read the pieces of this rank. Gives the generation in which they were committed, and the copies."""
        worker, generation = self._worker, formation.plan.generation
        restorer = Restorer(
            formation.plan.restore,
            node=formation.me.node,
            rank=self.rank,
            token=worker.token,
            transport=self.config.transport,
            failed=partial(report_copy, worker, generation),
        )
        try:
            restorer.restore(state, number, count)
        except NoCopy as error:
            if not worker.regrouper.wait_newer(formation, ENTRY_S):
                raise PeerLost(str(error)) from error
            raise GenerationSuperseded(str(error)) from error
        for snapshot in restorer.read:
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
        return restorer.generation, restorer.read

    def leave(self) -> None:
        """The train function was left: let go of its groups, and of everything that it made."""
        self._prefetcher.forget()
        self._copies.drop()
        self._state = None
        self._losses.clear()
        if self._world is not None:
            self._world.retire(remember=self._explained or self._committed)

    @property
    def _shard_count(self) -> int:
        """Of the global batch."""
        return 1 if self.rehearses else self.config.shard_count

    # -- one attempt ----------------------------------------------------------------------------------------------

    def _mine(self) -> tuple[int, ...]:
        """Shards that this rank computes in this attempt."""
        if self._formation is None:
            return (0,)
        members = self._formation.plan.members
        return members[(self.rank + self._shift) % len(members)].shards

    def _begin(self) -> None:
        self._over, self._has_begun = False, True
        if self._formation is None:
            self._began_ns = time.monotonic_ns()
        else:
            self._complete_step(self._formation)
            if not self._told:
                self._told = True
                self._callbacks.enter(self._formation.plan, self.step)
        self._compilations.watch()
        self._begin_attempt()

    def _complete_step(self, formation: Formation) -> None:
        """What is registered now is the state of this step: the script enters the next transaction, or returns."""
        change = self._writes.look()
        if change is Change.CERTAIN:
            self._check.written()
        if change and not self._committer.awaits_entry:  # the copy was begun while the script wrote
            self._copies.go_back(self.step - 1)
        if change or self._committer.awaits_entry:
            self._copies.begin(self.step, formation.plan.generation)
        self._committer.awaits_entry = False

    def _note_state(self) -> None:
        if self._formation is not None:
            self._writes.remember()

    def _begin_attempt(self) -> None:
        if self._formation is not None and self._formation.broken:
            raise Reentry
        self.state.forget_gradients()
        self._losses.clear()
        self._samples.clear()
        self._worker.board.enter(Phase.FORWARD)

    def _take_step(self, dataset: Any, batch_size: int, prefetch: bool) -> Iterator[Shard]:
        """Give shards to the user's code until the step is committed or skipped; a rehearsal ends the entry."""
        if self._over:
            return
        if not self.rehearses and 0 < self.step == self.config.tell_state_at:
            self.tell_state()
        yield from self._compute(dataset, batch_size, prefetch)
        with self._plain_numbers():
            if (formation := self._formation) is None:
                self._rehearse()
            decided = self._attempt(formation)
        while not decided:
            self._begin_attempt()
            yield from self._compute(dataset, batch_size, prefetch)
            with self._plain_numbers():
                decided = self._attempt(formation)
        self._over = True
        self._note_state()
        self._worker.board.enter(Phase.OUTSIDE)

    def _compute(self, dataset: Any, batch_size: int, prefetch: bool) -> Iterator[Shard]:
        key = (len(dataset), batch_size)
        if key not in self._samplers:
            self._samplers[key] = Sampler(
                len(dataset), batch_size, self.config.shard_count, self.seed
            )
        self._sampler, mine = self._samplers[key], self._mine()
        most = len(mine)
        if self._formation is not None:
            most = max(len(member.shards) for member in self._formation.plan.members)
        for turn in range(
            most
        ):  # as many on every rank: the model's own collectives need all of them
            index = mine[min(turn, len(mine) - 1)]
            self._current = index if turn < len(mine) else -1
            self._enter_phase(Phase.FORWARD)
            samples = self._sampler.samples(self.step, index)
            seed_everything(self.seed, self.step, index)
            batch = self._fetch(
                dataset, samples, index, prefetch=prefetch, rehearses=self.rehearses
            )
            if prefetch and not self.rehearses:
                self._prefetcher.expect(dataset, self._samples_ahead(mine, turn + 1, most))
            self._watch.begin(rehearses=self.rehearses)
            if self.rehearses:
                self._gathered.begin()
            yield Shard(index, samples, batch)
            self._gathered.end()
            self._watch.end()
            if self._current >= 0:
                self._require_loss(index)
                self._samples[index] = samples

    def _samples_ahead(self, mine: Sequence[int], turn: int, most: int) -> list[int]:
        """What is fetched next, unless a rank is lost: of the next turn or, after the last one, the next step."""
        if turn == most:
            return self._sampler.samples(self.step + 1, mine[0])
        return self._sampler.samples(self.step, mine[min(turn, len(mine) - 1)])

    def _require_loss(self, index: int) -> None:
        if index not in self._losses:
            raise BadInput(
                "loss", None, f"call step.backward(loss) for shard {index}: its loop body did not"
            )

    def _backward(self, loss: Tensor) -> None:
        self._enter_phase(Phase.BACKWARD)
        loss = self._worker.hooks.injected.loss(loss)
        index = self._current
        try:
            # the step's gradient is the mean over all shards; the collectives of a sharded model average over ranks
            (loss * (self.world / self._shard_count if index >= 0 else 0.0)).backward()
        finally:
            self._worker.board.enter(Phase.FORWARD)
        if index >= 0:
            detached = loss.detach()
            self._losses[index] = (
                self._losses[index] + detached if index in self._losses else detached
            )

    def _enter_phase(self, phase: Phase) -> None:
        """Show the phase, and let a fault strike that waits for it."""
        self._worker.board.enter(phase)
        if self._formation is not None:
            self._stop_for_fault(phase.label)

    def _stop_for_fault(self, phase: str) -> None:
        formation = self._formation
        assert formation is not None
        self._worker.hooks.reach(phase, self.step, formation.plan, formation.me, self._state)

    def _rehearse(self) -> NoReturn:
        """Every path of a step is warm: leave no trace, and report for duty."""
        state, worker = self.state, self._worker
        if self._clip_norm is not None:
            state.clip_gradients(self._clip_norm)
        with state.running_optimizers():
            state.advance()
        state.scalars()  # refuses state that no other rank could be given
        worker.board.rehearsed(time.monotonic_ns() - self._began_ns)
        self._copies.reserve(state, self.config.nodes)
        raise Reentry

    def _attempt(self, formation: Formation) -> bool:
        """Reduce, and commit or skip; False: the step must be computed again."""
        worker, state = self._worker, self.state
        self._stop_for_fault(Phase.REDUCE.label)
        worker.board.enter(Phase.REDUCE)
        mine = self._mine()
        worker.journal.write(
            Event.REDUCE,
            step=self.step,
            generation=formation.plan.generation,
            rank=self.rank,
            shards=mine,
            samples=[sample for shard in mine for sample in self._samples[shard]],
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
        rows = share(self._group, self._row(formation, gradients))
        if writes := Writes.of([row.written for row in rows]):
            raise writes.refusal(self.step)
        decision = self._suspicion.decide(self.step, owners, rows)
        if decision.verdict == "commit":
            self._commit(formation, rows)
            return True
        return self._object(formation, decision)

    def _row(self, formation: Formation, gradients: list[Tensor]) -> Row:
        losses = [
            float(self._losses[shard]) if shard in self._losses else None
            for shard in range(self.config.shard_count)
        ]
        finite = are_finite(gradients) and are_finite(self._losses.values())
        seal = self._check.seal()
        return Row(
            healthy=finite or self.state.is_finite(),
            finite=finite,
            protected=self._copies.protected(
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
        self._copies.keep(whole_step(self._copies.kept, self.step, [row.protected for row in rows]))
        if self._clip_norm is not None:
            self.state.clip_gradients(
                self._clip_norm
            )  # a collective: not shown as this rank's own work
        self._worker.board.enter(Phase.OPTIMIZER)
        self._stop_for_fault(Phase.OPTIMIZER.label)
        if formation.plan.generation > 1:
            self._stop_for_fault("recommit")
        self._committer.commit(formation, rows)
        self._shift, self._committed = 0, True
        self._all_halt = all(row.halts for row in rows)

    # -- numbers that are not finite, or corrupt --------------------------------------------------------------------

    def _object(self, formation: Formation, decision: Decision) -> bool:
        """Do not commit: compute the step again, have a rank replaced, or skip the batch. Whether it was skipped."""
        if decision.found is not None:
            self._object_to_replicas(formation, decision.verdict, decision.found)
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
                f"step {self.step}: shards {list(decision.shards)} give numbers that are not finite on every rank that "
                f"computes them (policy {self.config.nonfinite!r}); mend the data or the learning rate, or skip"
            )
        mine = [
            sample
            for shard in formation.me.shards
            for sample in self._sampler.samples(self.step, shard)
        ]
        self._committer.skip(formation, decision.shards, mine)
        return True

    def _note_nonfinite(self, formation: Formation, shards: Sequence[int]) -> None:
        """Write down whose losses are not finite. A sum alone tells of no rank: then none is named."""
        found: list[tuple[int | None, str, list[int]]] = [
            (member.rank, member.worker, suspects)
            for member in formation.plan.members
            if (suspects := [shard for shard in member.shards if shard in shards])
        ]
        for owner, name, suspects in found or [(None, "", list(range(self.config.shard_count)))]:
            self._worker.journal.write(
                Event.NONFINITE,
                step=self.step,
                generation=formation.plan.generation,
                owner=owner,
                worker=name,
                shards=suspects,
            )

    def _object_to_replicas(self, formation: Formation, verdict: str, found: Difference) -> None:
        """Replicas of a piece differ: return to have the step computed again, or leave this entry.

        Raises:
            BadInput: if they differ before the first step, and no vote decides which of them is wrong.
            JobFailed: if they do later.
        """
        worker, plan = self._worker, formation.plan
        if verdict == "undecided" and found.what == PIECE_STATE and self.step == 0:
            raise built_differently(self.state.model, found.involved)
        told = {"repeat": "transfer" if found.ranks else "undecided"}.get(verdict, verdict)
        sources = [] if found.ranks else [plan.members[rank].worker for rank in found.involved]
        note_corruption(
            worker.journal, plan, self.step, found.what, found.involved, told, sources=sources
        )
        if verdict == "undecided":
            what = f"the {found.what} of ranks {list(found.involved)} differ, which hold the same piece"
            raise undecidable(self.step, what, "replicas of each piece")
        if verdict == "rank":
            accuse(
                plan,
                found.ranks,
                worker.name,
                self.step,
                worker.send,
                cause="corrupt",
                what=found.what,
            )
            worker.regrouper.wait_newer(formation)
            raise Reentry

    # -- collectives of the user's code -----------------------------------------------------------------------------

    def _make(self, call: Call) -> None:
        """If a rank is lost meanwhile all leave this entry, and nothing of its calls is needed in the next one."""
        step, calls = self.step, self._calls
        call.compute(self.rank, self.world, evenly=True)
        with self._worker.board.waiting():
            row = call.row(step, calls.made(step), self.rank, self.world)
            rows = gather_unequal(self._group, row, self.device)
        calls.record(step, call.conclude(rows))

    # -- losses -----------------------------------------------------------------------------------------------------

    def give_up(self, error: BaseException) -> float:
        """An exception came out of the train function: returns if a newer generation explains it, else raises it.

        Returns:
            How much speaks for trouble of this process: 0 where that generation came first, 1 where it did not. One
            half where another worker reported an error earlier: a rank whose peer has left the group has one, too,
            and may have it before the plan; but the rank in trouble need not be the first to notice.
        """
        formation, worker = self._formation, self._worker
        if formation is None:
            raise error
        over = isinstance(error, (GenerationSuperseded, LeaseOver)) or formation.broken
        self._explained = over
        if not over and not _is_collective(error):
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
        if not worker.regrouper.wait_newer(formation, entry_limit_s(over, self.config)):
            raise error
        if over:
            return 0.0
        return 1.0 if worker.regrouper.breaker_of(formation) in ("", worker.name) else 0.5

    def copy_last(self) -> None:
        """See to it that there is a copy of the last step, if it is to be stored."""
        formation = self._formation
        if formation is not None and self.config.disk is not None:
            self._worker.board.enter(Phase.UNTIMED)
            over = partial(self._worker.regrouper.is_over, formation)
            self._copies.complete(self.step, formation.plan.generation, over)

    def agree_on_end(self) -> tuple[str, str]:
        """SHA-256 over the weights and over the state of all ranks, once every rank has taken the last step."""
        state = self.state
        self._worker.board.enter(Phase.UNTIMED)
        self.tell_state()
        self._worker.board.enter(Phase.REDUCE)
        found = gather(self._group, state.weights_digest() + state.state_digest())
        half = len(found[0]) // 2
        weights, whole = (
            b"".join(one[:half] for one in found),
            b"".join(one[half:] for one in found),
        )
        return hashlib.sha256(weights).hexdigest(), hashlib.sha256(whole).hexdigest()


def _is_collective(error: BaseException) -> bool:
    """Whether the error came from a process group: torch has no type of its own for what gloo raises."""
    import torch.distributed as dist

    return isinstance(error, (dist.DistError, ConnectionError, GroupFailed)) or (
        isinstance(error, RuntimeError)
        and any(word in str(error).lower() for word in ("gloo", "process group", "nccl"))
    )


def _fill(sizes: dict[str, int], world: int) -> dict[str, int]:
    """``sizes`` with -1 filled in, so that they make up ``world``."""
    if world == 1:
        return dict.fromkeys(sizes, 1)  # the rehearsal, or all that is left
    known, open_ones = 1, [name for name, size in sizes.items() if size == -1]
    for size in sizes.values():
        known *= size if size != -1 else 1
    if len(open_ones) > 1 or known < 1 or world % known or (not open_ones and known != world):
        raise BadInput(
            "mesh",
            sizes,
            f"use sizes whose product is {world}, the ranks of the world; one may be -1",
        )
    return {name: world // known if size == -1 else size for name, size in sizes.items()}
