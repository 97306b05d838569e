"""Attribute non-finite or corrupt numbers to a rank or a batch by recomputing shards.

Faulty ranks are reported to the coordinator, which replaces them. The remaining ranks and the
replacement execute the step again. A suspicious result is never committed.

-> step/trainer.py computes the shards of a round, and acts on its result.
integrity/nonfinite_guard.py and crosscheck.py are the rounds, integrity/voting.py the votes.
coordinator/handlers/on_worker_lost.py has an accused rank replaced. integrity/ballot.py does all
this for sharded jobs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from chaoskit.errors import JobFailed
from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.integrity.crosscheck import CrossCheck
from chaoskit.runtime.integrity.mistakes import Mistakes
from chaoskit.runtime.integrity.nonfinite_guard import (
    Audit,
    AuditResult,
    NonFiniteGuard,
    accuse,
    built_differently,
    note_corruption,
    undecidable,
)
from chaoskit.runtime.integrity.rank_checks import RankChecks
from chaoskit.runtime.integrity.voting import STATE, RankSeal, blamed, examine
from chaoskit.runtime.reduction.choice import CorruptSegment, Reduced
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.script_writes import Writes
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.vocabulary import Event

_STRIKES = 3  # a rank that was wrong so often, not twice in a row, is replaced as well


#: A round of recomputation: of shards that are not finite, or of a shard that two ranks computed.
Round = Audit | CrossCheck


class _Doubt(NamedTuple):
    """A result that was not finite on this rank, with an unknown cause."""

    formation: Formation
    step: int
    t_ns: int


class Inquiry:
    """The rounds of recomputation of one rank.

    Attributes:
        round: the current round, in which the user's block computes for it alone; None outside one.
    """

    def __init__(
        self,
        worker: WorkerContext,
        replica: Replica,
        guard: NonFiniteGuard,
        rank_checks: RankChecks,
    ) -> None:
        self._worker = worker
        self._replica = replica
        self._guard = guard
        self._rank_checks = rank_checks
        self.round: Round | None = None
        self._opened_rounds = 0  # rounds that all members of this formation have opened
        self._strikes = Mistakes()
        self._doubt: _Doubt | None = None

    def enter(self) -> None:
        """Enter a new formation, and drop the round of the old one.

        A transfer is journalled as damaged if the others have committed the step that was in doubt.
        """
        self.round, self._opened_rounds = None, 0
        if self._doubt is not None and self._replica.step > self._doubt.step:
            self._note_damaged_transfer()

    # -- opening a round ---------------------------------------------------------------------------

    def open_audit(
        self, formation: Formation, reduced: Reduced, ownership: Sequence[tuple[int, ...]]
    ) -> None:
        """Open an audit because gradients of a rank, or their sum, are not finite.

        Each suspicious shard is computed again by another rank. The journal gets a record for each
        rank that owns one.

        Args:
            ownership: the shards of each rank.
        """
        self._doubt = None
        self.round = audit = Audit.open(reduced, ownership)
        self._opened_rounds += 1
        for owner, shards in audit.guilty.items():
            self._worker.journal.write(
                Event.NONFINITE,
                step=self._replica.step,
                generation=formation.plan.generation,
                owner=owner,
                worker=formation.plan.members[owner].worker,
                shards=shards,
            )

    def must_not_commit(self, formation: Formation, seals: Sequence[RankSeal]) -> bool:
        """Return whether this step must not be committed, after comparing the seals of all ranks.

        If a vote finds a corrupt rank, it is accused here. If the two computations of an audited
        shard differ, a round is opened.

        Raises:
            BadInput: if the states differ before the first step, or if the script changed the state
                between two steps, and not alike on all ranks.
            JobFailed: if the ranks contradict each other later, and no vote can decide.
            GenerationSuperseded, ConnectionError: if the formation is over.
        """
        self._note_damaged_transfer()
        self._require_even_writes(formation, seals)
        if suspicion := examine(self._rank_checks.comparable(seals)):
            if not suspicion.ranks and suspicion.what == STATE and self._replica.step == 0:
                raise built_differently(self._replica.model, suspicion.involved)
            verdict = "rank" if suspicion.ranks else "undecided"
            self._note(formation, suspicion.what, suspicion.involved, verdict)
            if not suspicion.ranks:
                raise self._undecidable(
                    f"the {suspicion.what} of ranks {list(suspicion.involved)} differ"
                )
            self.accuse(formation, suspicion.ranks, "corrupt", suspicion.what)
            return True
        pair = self._rank_checks.pair(formation.plan)
        if pair is None or seals[pair.owner].shard == seals[pair.auditor].shard:
            return False
        checksums = {rank: seals[rank].shard for rank in (pair.owner, pair.auditor)}
        self.round = CrossCheck(pair, checksums, len(formation.plan.members))
        self._opened_rounds += 1
        return True

    def _require_even_writes(self, formation: Formation, seals: Sequence[RankSeal]) -> None:
        """Raise BadInput if the script wrote into the state on some ranks only, or differently.

        The ranks exchange digests of their states if their seals show different writes.

        Raises:
            BadInput: as said.
            GenerationSuperseded, ConnectionError: if the formation is over.
        """
        writes = Writes.of([seal.written for seal in seals], [seal.written_state for seal in seals])
        if writes is None:
            return
        step, plan = self._replica.step, formation.plan
        self._opened_rounds += 1
        digest = bytes.fromhex(self._replica.state_digest())
        states = formation.store.exchange(
            plan.generation, f"writes-{self._opened_rounds}", formation.me.rank, digest
        )
        if writes.is_refused(states):
            raise writes.refusal(step)

    def note_corrupt_transfer(
        self, formation: Formation, error: CorruptSegment, seals: Sequence[RankSeal]
    ) -> None:
        """Handle data that arrived corrupt at this rank, which therefore cannot commit the step.

        It is journalled, and its senders are remembered. A rank that fails at sending, or at
        reading, is accused.
        """
        members = formation.plan.members
        sources = [members[rank].worker for rank in error.ranks]
        self._note(
            formation, f"received {error.what}", (formation.me.rank,), "transfer", sources=sources
        )
        self._rank_checks.distrust(sources, self._replica.step)
        if guilty := blamed([seal.complaint - 1 for seal in seals], error.unread):
            self.accuse(formation, guilty, "corrupt", "received data")

    def note_nonfinite_sum(self, formation: Formation) -> None:
        """Note that the sum is not finite on this rank although every summand is.

        The next reduction shows the cause: a damaged transfer to this rank, or an overflow.
        """
        if self._doubt is None or self._doubt.step != self._replica.step:
            self._doubt = _Doubt(formation, self._replica.step, time.monotonic_ns())

    def _note_damaged_transfer(self) -> None:
        """Journal a damaged transfer to this rank: other ranks had a finite sum.

        Do nothing without a doubt, or if this rank has lost the state of that step.
        """
        doubt, self._doubt = self._doubt, None
        if doubt is None or self._replica.step < doubt.step:  # the state of the doubt was lost
            return
        me = doubt.formation.me
        self._note(
            doubt.formation,
            "received gradient",
            (me.rank,),
            "transfer",
            sources=[me.worker],
            doubt=doubt,
        )
        self._rank_checks.distrust([me.worker], doubt.step)

    # -- ending a round ----------------------------------------------------------------------------

    def exchange_findings(self, formation: Formation, open_round: Round) -> AuditResult:
        """End the round: exchange the findings of all ranks, and return the result that follows.

        The result is written to the journal.

        Args:
            open_round: the round that is open.

        Raises:
            GenerationSuperseded, ConnectionError: if the formation is over.
        """
        self.round = None
        finding = open_round.finding(
            self._replica.is_finite(), self._guard.attempts_at(self._replica.step)
        )
        name = f"audit-{self._opened_rounds}"
        findings = formation.store.exchange(
            formation.plan.generation, name, formation.me.rank, finding
        )
        result = open_round.conclude(findings)
        self._worker.journal.write(
            Event.ATTRIBUTED,
            step=self._replica.step,
            generation=formation.plan.generation,
            verdict=result.verdict,
            ranks=result.ranks,
            shards=result.shards,
        )
        if isinstance(open_round, CrossCheck):
            self._note(
                formation,
                f"gradient of shard {result.shards[0]}",
                result.ranks or open_round.pair[1:],
                result.verdict,
            )
        return result

    def repeat(self, formation: Formation, result: AuditResult) -> None:
        """Count the ranks of which a shard was wrong once; the caller computes the step again.

        A rank that was wrong three times, without a hundred good steps in between, is accused.

        Raises:
            JobFailed: if two ranks stand by results that contradict each other.
        """
        if result.verdict == "undecided":
            raise self._undecidable(
                f"two ranks computed different gradients of shard {result.shards[0]}, twice"
            )
        for rank in result.ranks:
            worker = formation.plan.members[rank].worker
            self._strikes.add([worker], self._replica.step)
            if self._strikes.count(worker, self._replica.step) >= _STRIKES:
                self.accuse(formation, (rank,), "corrupt", f"{_STRIKES} gradients")

    def accuse(
        self,
        formation: Formation,
        ranks: Sequence[int],
        cause: str,
        what: str = "gradients or weights",
    ) -> None:
        """Report faulty ranks to the coordinator, which replaces them.

        Args:
            cause: ``nonfinite`` or ``corrupt``.
            what: the numbers that were wrong, in words.
        """
        worker = self._worker
        accuse(
            formation.plan,
            ranks,
            worker.name,
            self._replica.step,
            worker.send,
            cause=cause,
            what=what,
        )

    def _undecidable(self, what: str) -> JobFailed:
        """Return the error for ranks that contradict each other in ``what``."""
        return undecidable(self._replica.step, what, "ranks")

    def _note(
        self,
        formation: Formation,
        what: str,
        ranks: Sequence[int],
        verdict: str,
        *,
        sources: Sequence[str] = (),
        doubt: _Doubt | None = None,
    ) -> None:
        """Write to the journal that ``what`` of each of ``ranks`` is, or may be, corrupt.

        Args:
            sources: the workers from which it came, or may have come.
            doubt: the doubt that is confirmed; its step and time are journalled. None for now.
        """
        step, t_ns = (doubt.step, doubt.t_ns) if doubt is not None else (self._replica.step, None)
        journal, plan = self._worker.journal, formation.plan
        note_corruption(journal, plan, step, what, ranks, verdict, sources=sources, t_ns=t_ns)
