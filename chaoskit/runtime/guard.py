"""Whose fault is a gradient that is not finite: the rank's, or the batch's?

Every rank knows from the reduction which contributions are not finite. Each guilty shard is computed again on another
rank, from the same weights and with the same randomness: finite there, the rank is bad; not finite, the batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from chaoskit.config import RunConfig
from chaoskit.errors import NonFiniteBatch
from chaoskit.messages import Accuse, Message, Plan
from chaoskit.runtime.reduction import Reduced


@dataclass(frozen=True, slots=True)
class AuditResult:
    """``rank``: ``ranks`` compute wrongly. ``batch``: ``shards`` give non-finite values anywhere.

    ``transient``: the only rank there is got finite values at the second attempt.
    """

    verdict: Literal["rank", "batch", "transient"]
    ranks: tuple[int, ...]
    shards: tuple[int, ...]


@dataclass(slots=True)
class Audit:
    """One round of recomputation. ``guilty``: rank -> its suspicious shards; ``auditors``: shard -> who recomputes it."""

    guilty: dict[int, tuple[int, ...]]
    auditors: dict[int, int]
    world: int
    _finite: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def open(cls, reduced: Reduced, plan: Plan) -> Audit:
        """Assign every guilty shard to the next innocent rank, or to the next rank where none is innocent."""
        world = len(plan.members)
        guilty = {owner: tuple(sorted(shards)) for owner, shards in sorted(reduced.guilty.items())}
        if not guilty:  # every contribution is finite, their sum overflows: nobody's hardware is to blame
            guilty = {member.rank: member.shards for member in plan.members}
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
        self._finite[shard] = all(
            bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None
        )

    def findings(self) -> int:
        """Bit i is set when the i-th guilty shard (in ascending order) was recomputed here and is finite."""
        return sum(1 << index for index, shard in enumerate(sorted(self.auditors)) if self._finite.get(shard, False))

    def conclude(self, findings: Sequence[int]) -> AuditResult:
        """What follows from the findings of all ranks."""
        shards = sorted(self.auditors)
        finite = {shard for index, shard in enumerate(shards) if findings[self.auditors[shard]] >> index & 1}
        bad_batch = tuple(shard for shard in shards if shard not in finite)
        if bad_batch:
            return AuditResult("batch", (), bad_batch)
        verdict: Literal["rank", "transient"] = "rank" if self.world > 1 else "transient"
        return AuditResult(verdict, tuple(self.guilty), tuple(shards))


class NonFiniteGuard:
    """The policy for bad batches, and the accusation of bad ranks."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._step = -1
        self.attempts = 0

    def batch_is_bad(self, step: int, result: AuditResult) -> bool:
        """True: skip the batch. False: try it again.

        Raises:
            NonFiniteBatch: if the policy says stop, or its retries are used up.
        """
        if step != self._step:
            self._step, self.attempts = step, 0
        self.attempts += 1
        policy = self._config.nonfinite
        if policy == "skip":
            return True
        if policy == "retry" and self.attempts <= self._config.nonfinite_retries:
            return False
        raise NonFiniteBatch(
            f"step {step}: shards {list(result.shards)} give non-finite gradients on every rank that computes them "
            f"(policy {policy!r}); mend the data or the learning rate, or use nonfinite='skip'"
        )

    def accuse(self, plan: Plan, result: AuditResult, worker: str, step: int, send: Callable[[Message], None]) -> None:
        """Tell the coordinator which workers must be replaced."""
        for rank in result.ranks:
            accused = plan.members[rank].worker
            detail = f"gradients of rank {rank} were not finite at step {step}; another rank found them finite"
            send(Accuse(worker, accused, plan.generation, step, "nonfinite", detail))
