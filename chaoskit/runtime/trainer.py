"""The transactional training step: it commits on every rank or on none, and survives the loss of any of them.

    while trainer.step < 1000:
        with trainer.transaction() as step:
            for shard in step.shards(dataset, batch_size=64):
                step.backward(loss(model, shard.batch))

The block computes; leaving it reduces the gradients and, if every rank's contribution arrived and is finite, runs the
optimizer. After a fault the block is entered again, and ``step.shards`` gives only what is missing: a survivor keeps
the gradients it has, and repeats just the reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.errors import BadInput, JobFailed
from chaoskit.messages import GroupBroken, Healed, Member
from chaoskit.runtime.context import WorkerContext
from chaoskit.runtime.group import Group
from chaoskit.runtime.guard import Audit, AuditResult, NonFiniteGuard
from chaoskit.runtime.peer import PeerLost, Pulled, pull
from chaoskit.runtime.reduction import Reduced
from chaoskit.runtime.regroup import Formation
from chaoskit.runtime.rendezvous import GenerationSuperseded
from chaoskit.runtime.replica import Replica, Scheduler
from chaoskit.runtime.sampling import fetch, seed_everything
from chaoskit.runtime.shardwork import Shard, ShardWork
from chaoskit.runtime.transaction import Transaction
from chaoskit.vocabulary import Event, Phase

_PLAN_S = 2.0  # the loss of a rank leads to a plan much sooner


class TrainingOver(BaseException):
    """The others have taken the last step; leaves the user's loop without being caught by ``except Exception``."""


def this_device(kind: str) -> torch.device:
    """The device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


class Trainer:
    """One rank's view of the run. Handed to the job's ``train`` function.

    Attributes:
        step: committed steps; the same on every rank whenever the user's code runs.
        seed: of the run; seed the building of the model with it.
        device: where model and batches live.
    """

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker
        self.config = worker.config
        self.seed = worker.config.seed
        self.device = this_device(worker.config.device)
        self._replica: Replica | None = None
        self._clip_norm: float | None = None
        self._rehearsed = False
        self._formation: Formation | None = None
        self._joined = False  # whether the reducer uses the formation's group
        self._void = False  # the block computes nothing: the step has changed since the caller decided to enter it
        self._audit: Audit | None = None
        self._audits = 0  # opened in this formation, by all of its members

    # -- what users call ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._replica.step if self._replica else 0

    @property
    def took_part(self) -> bool:
        """Whether the job entered a transaction at all."""
        return self._rehearsed

    @property
    def rank(self) -> int:
        """This process's number in the current world; it can change when ranks are lost."""
        return self._formation.me.rank if self._formation else 0

    @property
    def world(self) -> int:
        """Ranks in the current generation."""
        return len(self._formation.plan.members) if self._formation else 1

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Name what is trained. To be called once, before the first transaction.

        Args:
            model: the same on every rank; build it from ``trainer.seed``.
            optimizer: over the model's parameters.
            scheduler: stepped once a committed step.
            clip_norm: largest 2-norm of the reduced gradient; None leaves it as it is.

        Raises:
            BadInput: if the model cannot be trained to the same bits at every world size.
        """
        if self._replica is not None:
            raise BadInput("register", type(model).__name__, "call trainer.register once")
        self._replica = Replica(model, optimizer, scheduler)
        self._clip_norm = clip_norm
        self._work = ShardWork(self._replica, self.config)
        self._guard = NonFiniteGuard(self.config)

    def transaction(self) -> Transaction:
        """One attempt at the next step. See the module's example."""
        if self._replica is None:
            raise BadInput("transaction", "", "call trainer.register(model=..., optimizer=...) first")
        return Transaction(self)

    @contextmanager
    def long_phase(self, name: str) -> Iterator[None]:
        """Declare work between steps that may take any time, such as an evaluation: it is never called a hang."""
        self._worker.board.enter(Phase.LONG)
        self._worker.journal.write(Event.LONG_PHASE, name=name, step=self.step)
        try:
            yield
        finally:
            self._worker.board.enter(Phase.OUTSIDE)

    # -- the inventory of one step ------------------------------------------------------------------------------

    @property
    def replica(self) -> Replica:
        assert self._replica is not None
        return self._replica

    def _mine(self) -> tuple[int, ...]:
        """Shards that this rank owes to the current step."""
        assert self._formation is not None
        return self._formation.me.shards

    def _missing(self) -> list[int]:
        return self._work.missing(self._mine())

    def _wanted(self) -> list[int]:
        """Shards that the user's block must compute now."""
        if not self._rehearsed:
            return [0]
        if self._void:
            return []
        if self._audit is not None:
            return self._audit.shards_for(self.rank)
        return self._missing()

    @property
    def _counts(self) -> bool:
        """Whether the user's block computes for the step, not for a rehearsal or an audit."""
        return self._rehearsed and self._audit is None

    def _compute_shards(self, dataset: Any, batch_size: int) -> Iterator[Shard]:
        sampler, work = self._work.sampler(len(dataset), batch_size), self._work
        wanted = self._wanted()
        for index in wanted:
            self._enter_phase(Phase.FORWARD)
            samples = sampler.samples(self.step, index)
            seed_everything(self.seed, self.step, index)
            work.begin(index, overlap=self._counts, launch=index == wanted[-1] and self._join_early())
            yield Shard(index, samples, fetch(dataset, samples, self.device))
            work.require_loss(index)
            if self._audit is not None:
                self._audit.record(index, work.gradients)
            elif self._rehearsed:
                work.keep(index, samples)

    def _enter_phase(self, phase: Phase) -> None:
        """Show the phase, and let a fault strike that waits for it."""
        self._worker.board.enter(phase)
        if self._counts:
            self._worker.hooks.reach(phase, self.step, self.rank, self.replica.model)

    def _backward(self, loss: Tensor) -> None:
        self._enter_phase(Phase.BACKWARD)
        self._work.backward(loss)
        self._worker.board.enter(Phase.FORWARD)

    # -- begin --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        step = self.step
        if self._rehearsed:
            self._settle()
        self._void = self.step != step
        self._worker.board.enter(Phase.FORWARD)

    def _settle(self) -> Formation:
        """Stand in the newest generation, at its step.

        Raises:
            TrainingOver: if the others have finished.
        """
        regrouper, board = self._worker.regrouper, self._worker.board
        while True:
            formation = regrouper.membership_now()
            if formation is None:
                board.enter(Phase.REGROUP)
                formation = regrouper.membership()
            if formation is self._formation:
                return formation
            board.place(formation.plan.generation, formation.me.rank)
            if formation.target.step > self.step and not self._heal(formation):
                continue
            if formation.target.done:
                raise TrainingOver
            if formation.target.step < 0:
                raise JobFailed("nobody has the state any more: the last rank that had it ended while it was copied")
            self._enter(formation)
            return formation

    def _enter(self, formation: Formation) -> None:
        """Take up the rank and the shards that ``formation`` gives to this worker."""
        self._formation, self._audit, self._audits, self._joined = formation, None, 0, False
        self._work.keep_only(formation.me.shards)
        generation = formation.plan.generation
        if generation > 1:
            self._worker.send(Healed(self._worker.name, generation))

    def _heal(self, formation: Formation) -> bool:
        """Take the state of a member that is ahead; False if a newer formation came first."""
        worker = self._worker
        worker.board.enter(Phase.RESTORE)
        target = formation.target.step
        ahead = [standing.rank for standing in formation.standings or () if standing.step == target]
        for attempt in range(len(ahead)):
            healer = formation.plan.members[ahead[(formation.me.rank + attempt) % len(ahead)]]
            try:
                pulled = self._pull(formation, healer)
            except GenerationSuperseded:
                worker.board.enter(Phase.REGROUP)
                worker.regrouper.wait_newer(formation)  # it may have broken before there is a plan that says so
                return False
            except PeerLost:
                continue
            worker.board.progress(self.step)
            generation = formation.plan.generation
            worker.journal.write(
                Event.RESTORED,
                generation=generation,
                rank=formation.me.rank,
                step=pulled.step,
                size_bytes=pulled.size_bytes,
                transport=pulled.transport,
                source=healer.worker,
            )
            worker.journal.write(Event.ADOPT, step=self.step, generation=generation, source=healer.worker)
            return True
        if not worker.regrouper.wait_newer(formation, _PLAN_S):
            raise PeerLost(f"the state of step {target} could not be read from any of the ranks {ahead}")
        return False

    def _pull(self, formation: Formation, healer: Member) -> Pulled:
        """Replace the state by that of ``healer``; no newer generation hears of a step that is just changing."""
        regrouper, replica = self._worker.regrouper, self.replica
        with regrouper.advance(formation):
            self._forget_step()
            try:
                pulled = pull(replica, healer.endpoint, self._worker.token, self.config.transport)
                if not replica.is_finite():
                    replica.step = -1
                    accuser = self._worker
                    self._guard.accuse(formation.plan, (healer.rank,), accuser.name, pulled.step, accuser.send)
                    raise PeerLost(f"the weights of rank {healer.rank} are not finite")
                return pulled
            finally:
                regrouper.step = replica.step

    def _forget_step(self) -> None:
        self._work.forget()
        self._audit = None

    # -- finish -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Reduce and commit, or return so that the block is entered again for what is missing."""
        if not self._rehearsed:
            self._rehearse()
            return
        if self._void:
            self._worker.board.enter(Phase.OUTSIDE)
            return
        formation = self._formation
        assert formation is not None
        if self._audit is not None:
            self._conclude_audit(formation, self._audit)
            return
        if missing := self._missing():
            raise BadInput(
                "step.shards", missing, "let the loop over step.shards() run to its end in every transaction"
            )
        while not self._missing():
            step = self.step
            if self._attempt(formation):
                return
            formation = self._settle()
            if self.step != step:
                return

    def _attempt(self, formation: Formation) -> bool:
        """Reduce and commit once. False: the generation is over; try again in the next one."""
        worker = self._worker
        # still shown as computing: who stops before its first transfer keeps the others waiting, and is to blame
        worker.hooks.reach(Phase.REDUCE, self.step, self.rank, self.replica.model)
        self._announce_contribution(formation)
        try:
            self._join(formation, worker.regrouper.group(formation))
            reduced = self._work.reduce(self._work.sidecar(self._mine(), worker.regrouper.vote))
        except (GenerationSuperseded, RuntimeError) as error:
            self._leave(formation, error)
            return False
        if not reduced.finite:
            self._open_audit(formation, reduced)
            return True
        try:
            self._commit(formation, reduced)
        except GenerationSuperseded as error:
            self._leave(formation, error)
            return False
        worker.regrouper.move_on(min(int(sidecar[-1]) for sidecar in reduced.sidecars))
        worker.regrouper.dispose_retired(self._work.reducer.release_abandoned)
        return True

    def _join(self, formation: Formation, group: Group) -> None:
        """Have the reducer use the group of ``formation``."""
        if not self._joined:
            ownership = [member.shards for member in formation.plan.members]
            self._work.reducer.begin(group if group.size > 1 else None, ownership)
            self._joined = True

    def _join_early(self) -> bool:
        """Whether transfers may start before the backward pass is over."""
        formation = self._formation
        if not self._counts or self._work.overlap is None or formation is None or formation.group is None:
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
        )

    def _loss(self, formation: Formation, reduced: Reduced) -> float:
        """Mean over the shards, in their order: the same bits on every rank."""
        owners = {shard: member.rank for member in formation.plan.members for shard in member.shards}
        losses = [float(reduced.sidecars[owners[shard]][shard]) for shard in range(self.config.shard_count)]
        return sum(losses) / len(losses)

    def _commit(self, formation: Formation, reduced: Reduced) -> None:
        worker, replica = self._worker, self.replica
        worker.board.enter(Phase.OPTIMIZER)
        worker.hooks.reach(Phase.OPTIMIZER, self.step, self.rank, replica.model)
        with worker.regrouper.advance(formation):
            self._apply(reduced.gradients)
            worker.regrouper.step = replica.step
        loss = self._loss(formation, reduced)
        worker.board.progress(replica.step, loss)
        worker.journal.write(
            Event.COMMIT,
            step=replica.step - 1,
            generation=formation.plan.generation,
            rank=formation.me.rank,
            world=len(formation.plan.members),
            loss=loss,
            grad_sum=reduced.grad_sum,
        )
        self._forget_step()
        worker.board.enter(Phase.OUTSIDE)

    def _apply(self, gradients: list[Tensor]) -> None:
        replica = self.replica
        for parameter, gradient in zip(replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(replica.parameters, self._clip_norm)
        with replica.update():
            replica.optimizer.step()
            if replica.scheduler is not None:
                replica.scheduler.step()
        for parameter in replica.parameters:
            parameter.grad = None

    def _leave(self, formation: Formation, error: Exception) -> None:
        """Out of a broken collective: report it, and wait for the plan that explains it."""
        worker = self._worker
        generation = formation.plan.generation
        self._joined = False
        worker.board.enter(Phase.REGROUP)
        if not isinstance(error, GenerationSuperseded):
            worker.journal.write(Event.QUIESCED, generation=generation, rank=formation.me.rank, error=str(error)[:200])
            worker.send(GroupBroken(worker.name, generation, str(error)[:200]))
        worker.regrouper.give_up(formation)
        worker.regrouper.wait_newer(formation)

    # -- rehearsal ----------------------------------------------------------------------------------------------

    def _rehearse(self) -> None:
        """The first pass through the block: warms every path of a step, leaves no trace, and reports for duty."""
        replica, worker = self.replica, self._worker
        self._work.require_loss(0)
        with replica.undone_afterwards():
            replica.optimizer.step()
            if replica.scheduler is not None:
                replica.scheduler.step()
        for parameter in replica.parameters:
            parameter.grad = None
        self._rehearsed = True
        worker.ready(worker.share(replica))
        worker.board.enter(Phase.REGROUP)

    # -- non-finite gradients -----------------------------------------------------------------------------------

    def _open_audit(self, formation: Formation, reduced: Reduced) -> None:
        """Somebody's gradients are not finite. Have each guilty shard computed again by an innocent rank."""
        worker = self._worker
        self._audit = Audit.open(reduced, formation.plan)
        self._audits += 1
        for owner, shards in self._audit.guilty.items():
            worker.journal.write(
                Event.NONFINITE,
                step=self.step,
                generation=formation.plan.generation,
                owner=owner,
                worker=formation.plan.members[owner].worker,
                shards=shards,
            )

    def _conclude_audit(self, formation: Formation, audit: Audit) -> None:
        """Share what the auditors found, and act on it."""
        self._worker.board.enter(Phase.REDUCE)
        self._audit = None
        try:
            result = audit.conclude(self._share_findings(formation, audit))
            self._act_on(formation, result)
        except (GenerationSuperseded, ConnectionError) as error:
            self._leave(formation, error)

    def _share_findings(self, formation: Formation, audit: Audit) -> tuple[bytes, ...]:
        assert formation.rendezvous is not None, "a reduction needs a group, and a group a rendezvous"
        finding = audit.finding(self.replica.is_finite(), self._guard.attempts_at(self.step))
        return formation.rendezvous.exchange(formation.plan.generation, f"audit-{self._audits}", self.rank, finding)

    def _act_on(self, formation: Formation, result: AuditResult) -> None:
        self._worker.journal.write(
            Event.ATTRIBUTED,
            step=self.step,
            generation=formation.plan.generation,
            verdict=result.verdict,
            ranks=result.ranks,
            shards=result.shards,
        )
        if result.verdict == "rank":
            self._guard.accuse(formation.plan, result.ranks, self._worker.name, self.step, self._worker.send)
            self._worker.regrouper.wait_newer(formation)
        elif self._guard.gives_up(self.step, result):
            self._skip(formation, result)
        else:
            self._forget_step()  # compute the whole step again
        self._worker.board.enter(Phase.OUTSIDE)

    def _skip(self, formation: Formation, result: AuditResult) -> None:
        """Policy ``skip``: the step counts, its batch is written down as skipped, the weights stay."""
        worker, replica = self._worker, self.replica
        with worker.regrouper.advance(formation):
            with replica.update():
                pass
            worker.regrouper.step = replica.step
        worker.journal.write(
            Event.SKIP,
            step=replica.step - 1,
            generation=formation.plan.generation,
            rank=self.rank,
            world=self.world,
            shards=result.shards,
            samples=self._work.samples(self._mine()),
        )
        worker.board.progress(replica.step, float("nan"))
        self._forget_step()


__all__ = ["Shard", "Trainer", "TrainingOver"]
