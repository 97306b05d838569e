"""Faults ``DataStall`` and ``BadBatch``: batches that come late, or have bad values.

-> runtime/injection/data.py delays or spoils the batch in the worker, and reports it.
-> runtime/integrity/nonfinite_guard.py: how the batch is blamed, and no rank.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence, ReadBack
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.vocabulary import HUNG_CAUSES, LOG_RULE
from chaoskit.wire.messages import ActReport, AtHook

VALUES = ("nan", "inf", "-inf")


@dataclass(frozen=True, kw_only=True)
class DataStall(Fault):
    """Let the next batch of a rank come late.

    Args:
        stall_ms: delay of the batch in milliseconds. Within the limit for hangs no rank may be called hung for it.
    """

    stall_ms: float

    family: ClassVar[str] = "time"
    leads_to: ClassVar[frozenset[str]] = HUNG_CAUSES
    effect: ClassVar[str] = "the next batch of one rank comes late"
    evidence: ClassVar[str] = "the measured time of the fetch"
    stands_for: ClassVar[str] = "slow storage"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MOUNT, incidents.HDFS, incidents.SSD)
    impact: ClassVar[str] = (
        "none is wanted: one step takes longer, and a rank that is blamed for it is a false alarm"
    )
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20, "stall_ms": 50.0}
    undo: ClassVar[str] = "it ends by itself"

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        _validate_phase(self.phase)
        if not 0 < self.stall_ms < 1e6:
            raise BadInput(
                "stall_ms", self.stall_ms, "use more than 0 milliseconds, and less than 1000 s"
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act("stall_fetch", stall_ms=self.stall_ms)
        yield await target.read_back()


@dataclass(frozen=True, kw_only=True)
class BadBatch(Fault):
    """Make the data of one shard of one step bad, whichever rank reads it.

    The batch is to blame, and no rank. Floating-point inputs get the value; without such inputs,
    the loss of this shard gets it, and the evidence says so. Under the policy ``skip`` the step
    counts without an update: compare such a run with no twin (``twin=False``).

    Args:
        rank: without meaning here: every rank that comes to this step reads the same bad data.
        shard: which slice of the global batch.
        value: ``nan``, ``inf`` or ``-inf``.
    """

    rank: int = 0
    shard: int = 0
    value: str = "nan"

    family: ClassVar[str] = "numbers"
    every_rank: ClassVar[bool] = True
    blameless: ClassVar[bool] = True
    #: A log rule may blame the rank.
    leads_to: ClassVar[frozenset[str]] = frozenset({"nonfinite", LOG_RULE})
    effect: ClassVar[str] = "the data of one shard is bad on every rank that reads it"
    evidence: ClassVar[str] = "values that are not finite, counted in the batch before and after"
    stands_for: ClassVar[str] = "broken records and loss spikes"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.NAN,)
    impact: ClassVar[str] = (
        "a contribution is found not finite; another rank computes the shard again, and the batch is blamed, not a rank"
    )
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}
    example: ClassVar[str] = 'chaos.run("gpt", nodes=4, steps=60, twin=False, faults=[{fault}])'
    undo: ClassVar[str] = "nothing is left to undo: the dataset itself is not changed"

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        _validate_phase(self.phase)
        if self.shard < 0:
            raise BadInput("shard", self.shard, "use 0 or more, below the run's number of shards")
        if self.value not in VALUES:
            raise BadInput("value", self.value, f"use one of {', '.join(VALUES)}")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        messages = target.listen(AtHook, ActReport)
        options = {"shard": self.shard, "value": self.value}
        target.act("bad_batch", **options)
        async for message in messages:
            if isinstance(message, AtHook):  # any rank that reads the shard
                target.release_worker(message.worker, "bad_batch", **options)
            elif message.fault == target.fault_id and message.effective:
                yield ReadBack(
                    subject=target.rank_process, source=message.worker, value=message.observed
                )


def _validate_phase(phase: str) -> None:
    """Raise BadInput unless the fault strikes when the batch is fetched, before a forward pass."""
    if phase != "forward":
        raise BadInput("phase", phase, "use 'forward': the batch is fetched at its beginning")
