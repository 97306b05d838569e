"""Whose fault is a gradient that is not finite: the rank's, or the batch's?

Every rank knows from the reduction which contributions are not finite. Each guilty shard is computed again on another
rank, from the same weights and with the same randomness: finite there, the rank is bad; not finite, the batch is.
A rank whose own weights are not finite is bad whatever it finds.
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


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """What one rank tells the others at the end of an audit.

    Attributes:
        healthy: its own weights are finite.
        attempts: audits of this step that it lived through.
        peaks: recomputed shard -> its largest absolute gradient.
    """

    healthy: bool
    attempts: int
    peaks: dict[int, float]


_findings = msgspec.msgpack.Decoder(Finding)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """``rank``: ``ranks`` compute wrongly. ``batch``: ``shards`` give non-finite values anywhere.

    ``transient``: nobody can be told from the others, and the second attempt was finite; or of two that contradicted
    each other one was wrong once. ``undecided``: they still do, and nobody can say who is right. ``attempts``: audits
    of this step before this one, the same number on every rank. ``cause``: nonfinite or corrupt.
    """

    verdict: Literal["rank", "batch", "transient", "undecided"]
    ranks: tuple[int, ...]
    shards: tuple[int, ...]
    attempts: int = 0
    cause: str = "nonfinite"


@dataclass(slots=True)
class Audit:
    """One round of recomputation. ``guilty``: rank -> suspicious shards; ``auditors``: shard -> who recomputes it."""

    guilty: dict[int, tuple[int, ...]]
    auditors: dict[int, int]
    world: int
    _peaks: dict[int, float] = field(default_factory=dict)

    @classmethod
    def open(cls, reduced: Reduced, ownership: Sequence[tuple[int, ...]]) -> Audit:
        """Assign every guilty shard to the next innocent rank, or to the next rank where none is innocent."""
        world = len(ownership)
        guilty = {owner: tuple(sorted(shards)) for owner, shards in sorted(reduced.guilty.items())}
        if (
            not guilty
        ):  # every contribution is finite, their sum overflows: nobody's hardware is to blame
            guilty = dict(enumerate(ownership))
        innocent = [rank for rank in range(world) if rank not in guilty]
        auditors = {}
        for owner, shards in guilty.items():
            for shard in shards:
                candidates = innocent or [(owner + 1) % world]
                auditors[shard] = candidates[(owner + shard) % len(candidates)]
        return cls(guilty, auditors, world)

    def shards_for(self, rank: int) -> list[int]:
        """What ``rank`` recomputes."""
        return [shard for shard, auditor in self.auditors.items() if auditor == rank]

    def record(self, shard: int, gradients: Sequence[Tensor | None]) -> None:
        """The auditor's own gradients of a guilty shard."""
        peaks = [
            gradient.abs().max().float()
            for gradient in gradients
            if gradient is not None and gradient.numel()
        ]
        self._peaks[shard] = float(torch.stack(peaks).max()) if peaks else 0.0

    def finding(self, healthy: bool, attempts: int) -> bytes:
        """This rank's part of the result, to be exchanged with all others; see :class:`Finding`."""
        return msgspec.msgpack.encode(Finding(healthy, attempts, self._peaks))

    def conclude(self, found: Sequence[bytes]) -> AuditResult:
        """What follows from the findings of all ranks."""
        findings = [_findings.decode(data) for data in found]
        attempts = max(finding.attempts for finding in findings)
        shards = tuple(sorted(self.auditors))
        if broken := tuple(rank for rank, finding in enumerate(findings) if not finding.healthy):
            return AuditResult("rank", broken, shards, attempts)
        peaks = {
            shard: findings[self.auditors[shard]].peaks.get(shard, math.nan) for shard in shards
        }
        if bad := self._bad_shards(peaks):
            return AuditResult("batch", (), bad, attempts)
        verdict: Literal["rank", "transient"] = (
            "rank" if len(self.guilty) < self.world else "transient"
        )
        return AuditResult(verdict, tuple(self.guilty), shards, attempts)

    def _bad_shards(self, peaks: dict[int, float]) -> tuple[int, ...]:
        """Those that are not finite anywhere, or all of a sum that overflows though each of them is finite."""
        if bad := tuple(shard for shard, peak in peaks.items() if not math.isfinite(peak)):
            return bad
        suspects = [
            *self.guilty.values(),
            *([tuple(peaks)] if len(self.guilty) == self.world else []),
        ]
        overflowing = [
            shards for shards in suspects if sum(peaks[shard] for shard in shards) > _LARGEST
        ]
        return tuple(sorted({shard for shards in overflowing for shard in shards}))


class NonFiniteGuard:
    """The policy for bad batches, and the accusation of bad ranks."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._step, self._attempts = -1, 0

    def attempts_at(self, step: int) -> int:
        """How often ``step`` was computed again because of an audit, as far as this rank knows."""
        return self._attempts if step == self._step else 0

    def gives_up(self, step: int, result: AuditResult) -> bool:
        """True: skip the batch. False: compute the step again.

        Raises:
            NonFiniteBatch: if the policy says stop, or its retries are used up.
        """
        self._step, self._attempts = step, result.attempts + 1
        policy = self._config.nonfinite
        if (policy == "retry" or result.verdict == "transient") and self._attempts <= RETRIES:
            return False
        if policy == "skip":
            return True
        raise NonFiniteBatch(
            f"step {step}: shards {list(result.shards)} give non-finite gradients on every rank that computes them "
            f"(policy {policy!r}); mend the data or the learning rate, or use nonfinite='skip'"
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
    """Tell the coordinator which workers must be replaced, as ``what`` of them was non-finite or corrupt."""
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
    """Write down that ``what`` of each of ``ranks`` is corrupt, or may be.

    Args:
        sources: the workers from which it came, or may have come.
        t_ns: when it was found, if not now.
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
    """The end of a job whose ranks contradict each other. ``voters``: what would have had a majority."""
    remedy = f"start again from a checkpoint, on other hardware or with three {voters} or more, which can vote"
    return JobFailed(f"silent corruption at step {step}: {what}, and no vote can decide; {remedy}")


def built_differently(model: nn.Module, ranks: Sequence[int]) -> BadInput:
    """Return the error for a model whose ``ranks`` differ before the first step, none being outvoted."""
    remedy = (
        f"call torch.manual_seed(trainer.seed) before the model is built: weights, buffers or rates "
        f"of ranks {list(ranks)} differ before the first step; if it is seeded, use other hardware"
    )
    return BadInput("model", type(model).__name__, remedy)
