"""Whose numbers are wrong? Opens rounds of recomputation, and names the culprits to the coordinator.

A rank that is to blame is replaced, and the step is executed again by those who are left and the newcomer: nothing that
is under suspicion is committed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from chaoskit.errors import JobFailed
from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.integrity.crosscheck import CrossCheck
from chaoskit.runtime.integrity.guard import (
    Audit,
    AuditResult,
    NonFiniteGuard,
    accuse,
    built_differently,
    note_corruption,
    undecidable,
)
from chaoskit.runtime.integrity.mistakes import Mistakes
from chaoskit.runtime.integrity.rank_seal import Integrity
from chaoskit.runtime.integrity.voting import STATE, Seal, blamed, examine
from chaoskit.runtime.reduction.choice import CorruptSegment, Reduced
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.script_writes import Writes
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.vocabulary import Event

_STRIKES = 3  # a rank that was wrong so often, though never twice in a row, is replaced, too


class _Doubt(NamedTuple):
    """A result that was not finite on this rank, and nobody knows yet why."""

    formation: Formation
    step: int
    t_ns: int


class Inquiry:
    """The rounds of one rank. ``round``: the one under way, in which the user's block computes for it alone."""

    def __init__(
        self, worker: WorkerContext, replica: Replica, guard: NonFiniteGuard, integrity: Integrity
    ) -> None:
        self._worker, self._replica, self._guard, self._integrity = (
            worker,
            replica,
            guard,
            integrity,
        )
        self.round: Audit | CrossCheck | None = None
        self._opened = 0  # in this formation, by all of its members
        self._strikes = Mistakes()
        self._doubt: _Doubt | None = None

    def enter(self) -> None:
        """A new formation: what was under way in the old one is void."""
        self.round, self._opened = None, 0
        if self._doubt is not None and self._replica.step > self._doubt.step:
            self._others_were_fine()

    # -- what gives reason to ask -------------------------------------------------------------------------------

    def open_audit(
        self, formation: Formation, reduced: Reduced, ownership: Sequence[tuple[int, ...]]
    ) -> None:
        """Somebody's gradients, or their sum, are not finite. Have each guilty shard computed again by an innocent
        rank. ``ownership``: the shards of each rank."""
        self._doubt = None
        self.round = audit = Audit.open(reduced, ownership)
        self._opened += 1
        for owner, shards in audit.guilty.items():
            self._worker.journal.write(
                Event.NONFINITE,
                step=self._replica.step,
                generation=formation.plan.generation,
                owner=owner,
                worker=formation.plan.members[owner].worker,
                shards=shards,
            )

    def objects(self, formation: Formation, seals: Sequence[Seal]) -> bool:
        """Whether this step must not be committed now: somebody is accused, or a round is open.

        Raises:
            BadInput: if the states differ before the first step, or if the script changed the state between two
                steps, and not alike on all ranks.
            JobFailed: if the ranks contradict each other later, and no vote can decide.
            GenerationSuperseded, ConnectionError: if the formation is over.
        """
        self._others_were_fine()
        self._require_even_writes(formation, seals)
        if suspicion := examine(self._integrity.comparable(seals)):
            if not suspicion.ranks and suspicion.what == STATE and self._replica.step == 0:
                raise built_differently(self._replica.model, suspicion.involved)
            verdict = "rank" if suspicion.ranks else "undecided"
            self._note(formation, suspicion.what, suspicion.involved, verdict)
            if not suspicion.ranks:
                raise self._hopeless(
                    f"the {suspicion.what} of ranks {list(suspicion.involved)} differ"
                )
            self.accuse(formation, suspicion.ranks, "corrupt", suspicion.what)
            return True
        pair = self._integrity.pair(formation.plan)
        if pair is None or seals[pair.owner].shard == seals[pair.auditor].shard:
            return False
        first = {rank: seals[rank].shard for rank in (pair.owner, pair.auditor)}
        self.round = CrossCheck(pair, first, len(formation.plan.members))
        self._opened += 1
        return True

    def _require_even_writes(self, formation: Formation, seals: Sequence[Seal]) -> None:
        writes = Writes.of([seal.written for seal in seals], [seal.written_state for seal in seals])
        if writes is None:
            return
        assert formation.rendezvous is not None, (
            "a reduction needs a group, and a group a rendezvous"
        )
        step, plan = self._replica.step, formation.plan
        self._opened += 1
        digest = bytes.fromhex(self._replica.state_digest())
        states = formation.rendezvous.exchange(
            plan.generation, f"writes-{self._opened}", formation.me.rank, digest
        )
        if writes.is_refused(states):
            raise writes.refusal(step)

    def received(self, formation: Formation, error: CorruptSegment, seals: Sequence[Seal]) -> None:
        """This rank lacks what others have and must not commit. Who cannot send, or read, is accused."""
        members = formation.plan.members
        sources = [members[rank].worker for rank in error.ranks]
        self._note(
            formation, f"received {error.what}", (formation.me.rank,), "transfer", sources=sources
        )
        self._integrity.distrust(sources, self._replica.step)
        if guilty := blamed([seal.complaint - 1 for seal in seals], error.unread):
            self.accuse(formation, guilty, "corrupt", "received data")

    def doubts(self, formation: Formation) -> None:
        """The sum is not finite on this rank, and none of those that were added is to blame."""
        if self._doubt is None or self._doubt.step != self._replica.step:
            self._doubt = _Doubt(formation, self._replica.step, time.monotonic_ns())

    def _others_were_fine(self) -> None:
        """The step of the doubt had a finite sum: what this rank received had been damaged on its way."""
        doubt, self._doubt = self._doubt, None
        if doubt is None or self._replica.step < doubt.step:  # of a state that was lost
            return
        me = doubt.formation.me
        self._note(
            doubt.formation,
            "received gradient",
            (me.rank,),
            "transfer",
            sources=[me.worker],
            since=doubt,
        )
        self._integrity.distrust([me.worker], doubt.step)

    # -- what comes of it ---------------------------------------------------------------------------------------

    def share(self, formation: Formation) -> AuditResult:
        """End the round: exchange what was found, and say what follows.

        Raises:
            GenerationSuperseded, ConnectionError: if the formation is over.
        """
        current, self.round = self.round, None
        assert current is not None
        assert formation.rendezvous is not None, (
            "a reduction needs a group, and a group a rendezvous"
        )
        finding = current.finding(
            self._replica.is_finite(), self._guard.attempts_at(self._replica.step)
        )
        name = f"audit-{self._opened}"
        found = formation.rendezvous.exchange(
            formation.plan.generation, name, formation.me.rank, finding
        )
        result = current.conclude(found)
        self._worker.journal.write(
            Event.ATTRIBUTED,
            step=self._replica.step,
            generation=formation.plan.generation,
            verdict=result.verdict,
            ranks=result.ranks,
            shards=result.shards,
        )
        if isinstance(current, CrossCheck):
            self._note(
                formation,
                f"gradient of shard {result.shards[0]}",
                result.ranks or current.pair[1:],
                result.verdict,
            )
        return result

    def repeat(self, formation: Formation, result: AuditResult) -> None:
        """A shard was computed wrongly once: the step is computed again. Who is wrong again and again is accused.

        Raises:
            JobFailed: if two ranks stand by results that contradict each other.
        """
        if result.verdict == "undecided":
            raise self._hopeless(
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
        """Tell the coordinator whom to replace."""
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

    def _hopeless(self, what: str) -> JobFailed:
        return undecidable(self._replica.step, what, "ranks")

    def _note(
        self,
        formation: Formation,
        what: str,
        ranks: Sequence[int],
        verdict: str,
        *,
        sources: Sequence[str] = (),
        since: _Doubt | None = None,
    ) -> None:
        step, t_ns = (since.step, since.t_ns) if since is not None else (self._replica.step, None)
        journal, plan = self._worker.journal, formation.plan
        note_corruption(journal, plan, step, what, ranks, verdict, sources=sources, t_ns=t_ns)
