"""Attribution of gradients that are not finite, to a rank or to the batch.

The reduction shows every rank which contributions are not finite. Each suspicious shard is computed
again on another rank, from the same weights and with the same randomness. If it is finite there,
the rank is bad; if not, the batch is. A rank with non-finite weights of its own is bad in any case.

-> step/inquiry.py runs the audits, and step/trainer.py acts on their results. An accused rank is
replaced by coordinator/handlers/on_worker_lost.py. integrity/ballot.py: sharded jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, JobFailed, NonFiniteBatch
from chaoskit.journal import Journal
from chaoskit.runtime.reduction.choice import Reduced
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Accuse, Message, Plan

#: Attempts at a step whose numbers are not finite, before policy ``retry`` stops.
RETRIES = 3
_LARGEST = torch.finfo(torch.float32).max


class AuditFinding(msgspec.Struct, frozen=True, array_like=True):
    """The report of one rank at the end of an audit.

    Attributes:
        healthy: its own weights are finite.
        attempts: the number of audits of this step that it took part in.
        peaks: the largest absolute gradient of each recomputed shard.
    """

    healthy: bool
    attempts: int
    peaks: dict[int, float]


_findings = msgspec.msgpack.Decoder(AuditFinding)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of an audit, the same on every rank.

    Attributes:
        verdict: ``rank``: ``ranks`` compute wrongly. ``batch``: ``shards`` give non-finite values
            on any rank. ``transient``: no rank stands out, and the second attempt was finite; or
            one of two ranks that differed was wrong once. ``undecided``: two ranks still differ,
            and no vote decides.
        attempts: the number of audits of this step before this one.
        cause: nonfinite or corrupt.
    """

    verdict: Literal["rank", "batch", "transient", "undecided"]
    ranks: tuple[int, ...]
    shards: tuple[int, ...]
    attempts: int = 0
    cause: str = "nonfinite"


@dataclass(slots=True)
class Audit:
    """A round of recomputation of shards that are not finite, each by another rank.

    Attributes:
        guilty: the suspicious shards of each rank.
        auditors: the rank that recomputes each shard.
        world: the number of ranks.
    """

    guilty: dict[int, tuple[int, ...]]
    auditors: dict[int, int]
    world: int
    _peaks: dict[int, float] = field(default_factory=dict)

    @classmethod
    def open(cls, reduced: Reduced, ownership: Sequence[tuple[int, ...]]) -> Audit:
        """Return an audit that assigns every suspicious shard to another rank.

        This is a rank without suspicious shards or, if there is none, the next rank. All shards are
        suspicious if no contribution is to blame, so that the sum has overflowed.
        """
        world = len(ownership)
        guilty = {owner: tuple(sorted(shards)) for owner, shards in sorted(reduced.guilty.items())}
        if not guilty:  # the sum overflows: no hardware is to blame
            guilty = dict(enumerate(ownership))
        innocent = [rank for rank in range(world) if rank not in guilty]
        auditors = {}
        for owner, shards in guilty.items():
            for shard in shards:
                candidates = innocent or [(owner + 1) % world]
                auditors[shard] = candidates[(owner + shard) % len(candidates)]
        return cls(guilty, auditors, world)

    def shards_for(self, rank: int) -> list[int]:
        """Return the shards that ``rank`` recomputes."""
        return [shard for shard, auditor in self.auditors.items() if auditor == rank]

    def record(self, shard: int, gradients: Sequence[Tensor | None]) -> None:
        """Record this rank's gradients of a shard that it recomputed."""
        peaks = [
            gradient.abs().max().float()
            for gradient in gradients
            if gradient is not None and gradient.numel()
        ]
        self._peaks[shard] = float(torch.stack(peaks).max()) if peaks else 0.0

    def finding(self, healthy: bool, attempts: int) -> bytes:
        """Return this rank's part of the result, an encoded :class:`AuditFinding` for all others."""
        return msgspec.msgpack.encode(AuditFinding(healthy, attempts, self._peaks))

    def conclude(self, encoded: Sequence[bytes]) -> AuditResult:
        """Return the result that follows from the findings of all ranks.

        Args:
            encoded: the :meth:`finding` of each rank.
        """
        decoded = [_findings.decode(encoded) for encoded in encoded]
        attempts = max(finding.attempts for finding in decoded)
        shards = tuple(sorted(self.auditors))
        if unhealthy_ranks := tuple(
            rank for rank, finding in enumerate(decoded) if not finding.healthy
        ):
            return AuditResult("rank", unhealthy_ranks, shards, attempts)
        peaks = {
            shard: decoded[self.auditors[shard]].peaks.get(shard, math.nan) for shard in shards
        }
        if bad_shards := self._bad_shards(peaks):
            return AuditResult("batch", (), bad_shards, attempts)
        verdict: Literal["rank", "transient"] = (
            "rank" if len(self.guilty) < self.world else "transient"
        )
        return AuditResult(verdict, tuple(self.guilty), shards, attempts)

    def _bad_shards(self, peaks: dict[int, float]) -> tuple[int, ...]:
        """Return the shards that are not finite on any rank.

        If a sum overflows although each of its shards is finite, return all of them.
        """
        if bad_shards := tuple(shard for shard, peak in peaks.items() if not math.isfinite(peak)):
            return bad_shards
        suspects = [
            *self.guilty.values(),
            *([tuple(peaks)] if len(self.guilty) == self.world else []),
        ]
        overflowing = [
            shards for shards in suspects if sum(peaks[shard] for shard in shards) > _LARGEST
        ]
        return tuple(sorted({shard for shards in overflowing for shard in shards}))


class NonFiniteGuard:
    """The policy for batches that are not finite, and the attempts of this rank at a step."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._step, self._attempts = -1, 0

    def attempts_at(self, step: int) -> int:
        """Return how often ``step`` was computed again because of an audit, as this rank counts."""
        return self._attempts if step == self._step else 0

    def gives_up(self, step: int, result: AuditResult) -> bool:
        """Return True if the batch must be skipped, and False if the step must be computed again.

        The attempt is counted. A step with a transient result is computed again under every policy,
        as often as with policy ``retry``.

        Raises:
            NonFiniteBatch: if the policy is ``stop`` and the result is not transient, or if the
                retries are used up and the policy is not ``skip``.
        """
        self._step, self._attempts = step, result.attempts + 1
        policy = self._config.nonfinite
        if (policy == "retry" or result.verdict == "transient") and self._attempts <= RETRIES:
            return False
        if policy == "skip":
            return True
        raise NonFiniteBatch(
            f"step {step}: shards {list(result.shards)} give non-finite gradients on every rank that computes them "
            f"(policy {policy!r}); correct the data or the learning rate, or use nonfinite='skip'"
        )


def accuse(
    plan: Plan,
    ranks: Sequence[int],
    worker: str,
    step: int,
    send: Callable[[Message], None],
    *,
    cause: str = "nonfinite",
    what: str = "gradients or weights",
) -> None:
    """Report faulty workers to the coordinator, which replaces them.

    Args:
        ranks: the faulty ranks.
        worker: the worker that reports.
        cause: ``nonfinite`` or ``corrupt``.
        what: the numbers that were wrong, in words.
    """
    wrong = "not finite" if cause == "nonfinite" else "corrupt"
    detail = f"{what} of rank {', '.join(map(str, ranks))} were {wrong} at step {step}"
    send(
        Accuse(
            worker,
            tuple(plan.members[rank].worker for rank in ranks),
            plan.generation,
            step,
            cause,
            detail,
        )
    )


def note_corruption(
    journal: Journal,
    plan: Plan,
    step: int,
    what: str,
    ranks: Sequence[int],
    verdict: str,
    *,
    sources: Sequence[str] = (),
    t_ns: int | None = None,
) -> None:
    """Write to the journal that ``what`` of each of ``ranks`` is, or may be, corrupt.

    Args:
        sources: the workers from which it came, or may have come.
        t_ns: the time of the finding; None for now.
    """
    for rank in ranks:
        journal.write(
            Event.CORRUPT,
            t_ns=t_ns,
            step=step,
            generation=plan.generation,
            what=what,
            worker=plan.members[rank].worker,
            rank=rank,
            verdict=verdict,
            cause="corrupt",
            detail=f"{what} at step {step}: {verdict}",
            sources=list(sources),
        )


def undecidable(step: int, what: str, voters: str) -> JobFailed:
    """Return the error for a job with ranks that contradict each other.

    Args:
        voters: the objects of which three or more would have a majority.
    """
    remedy = f"start again from a checkpoint, on other hardware or with three {voters} or more, which can vote"
    return JobFailed(f"silent corruption at step {step}: {what}, and no vote can decide; {remedy}")


def built_differently(model: nn.Module, ranks: Sequence[int]) -> BadInput:
    """Return the error for a model of which ``ranks`` differ before the first step.

    No vote decides between them.
    """
    remedy = (
        f"call torch.manual_seed(trainer.seed) before the model is built: weights, buffers or rates "
        f"of ranks {list(ranks)} differ before the first step; if it is seeded, use other hardware"
    )
    return BadInput("model", type(model).__name__, remedy)
