"""Copies of the training state in memory go wrong: on the rank's own node, or at the partners that keep some for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence, ReadBack
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target

TIERS = ("memory", "peer", "both")
WAYS = ("bit", "page", "index", "seal")
_AGAIN_S = 0.05  # copies may still be on their way
_PATIENCE_S = 10.0

_SHARDED = 'chaos.run("fsdp", nodes=4, steps=40, options={{"size": "tiny"}}, faults=[{fault}])'


@dataclass(frozen=True, kw_only=True)
class CopyFault(Fault):
    """Base of the faults that strike copies of a rank's state where they lie.

    While the rank stands at its hook no rank commits. The fault waits there until the newest committed state has all
    its copies, and the rank goes on when they were struck: a ``Kill`` of it that comes later in the list finds just
    this. A replicated state is copied now and then (``copies``): if no copy of the newest one is due, the newest that
    is there is struck.
    """

    family: ClassVar[str] = "checkpoint"
    of_runtime: ClassVar[bool] = True
    undo: ClassVar[str] = "nothing is left: the next steps have copies of their own"
    impact: ClassVar[str] = "none, until the state of a lost rank must be read from a copy"

    #: Of a node, for :mod:`chaoskit.daemon.injection`.
    act: ClassVar[str] = ""

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.during is not None:
            raise BadInput(
                "during", self.during, "use at_step or after_s: in a recovery no copies are made"
            )
        if self.at_step == 0:
            raise BadInput(
                "at_step",
                self.at_step,
                "use 1 or more: before the first update there may be no copy",
            )

    def stages(self, target: Target) -> list[tuple[list[str], dict[str, Any]]]:
        """Which nodes are to act, and how; each stage begins when those of the one before have."""
        raise NotImplementedError

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        for nodes, options in self.stages(target):
            while missing := self._missing(target, nodes):
                if target.seconds_since > _PATIENCE_S:
                    break
                for node in missing:
                    target.order(node, self.act, worker=target.worker, step=target.step, **options)
                await target.heard(partial(self._have_answered, target, nodes), within_s=_AGAIN_S)
        target.release()
        if self.is_shown(target):
            struck = {report.node: report.observed for report in target.reports if report.effective}
            yield ReadBack(
                subject=target.rank_process,
                source=", ".join(struck),
                value="; ".join(struck.values()),
            )

    def _have_answered(self, target: Target, nodes: list[str]) -> bool:
        return not self._missing(target, nodes)

    def _missing(self, target: Target, nodes: list[str]) -> list[str]:
        """Which of the nodes have not answered."""
        answered = {report.node for report in target.reports}
        return [node for node in nodes if node not in answered]

    def is_shown(self, target: Target) -> bool:
        """Whether what the nodes read back shows that the copies were struck."""
        return any(report.effective for report in target.reports)


def _others(target: Target) -> list[str]:
    return sorted({*target.places.values()} - {target.node})


@dataclass(frozen=True, kw_only=True)
class CorruptReplica(CopyFault):
    """Change bytes of the copies of a rank's state in memory, as broken memory would.

    Args:
        tier: ``memory`` (those on the rank's own node), ``peer`` (those that other nodes keep for it; in sharded jobs
            only), or ``both``.
        how: ``bit`` and ``page`` change numbers, ``index`` the description of the tensors, ``seal`` the checksum by
            which a copy is known to be complete.
        older: damage the copies of earlier steps, too, not only the newest.
    """

    tier: str = "memory"
    how: str = "bit"
    older: bool = False

    act: ClassVar[str] = "corrupt_copies"
    effect: ClassVar[str] = (
        "complete copies of one rank's state in memory are not what was sealed any more"
    )
    evidence: ClassVar[str] = (
        "bytes of each copy, and its checksum, read back by its node after the act"
    )
    stands_for: ClassVar[str] = "memory that loses bits, and code that writes where it should not"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SYSTEM_MEMORY, incidents.CORRUPTION)
    impact: ClassVar[str] = (
        "a reader of a damaged copy finds its checksum wrong: it is quarantined, and another read"
    )
    sample: ClassVar[Mapping[str, Any]] = {"rank": 0, "at_step": 20}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"tier": tier} for tier in TIERS)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.tier not in TIERS:
            raise BadInput("tier", self.tier, f"use one of {', '.join(TIERS)}")
        if self.how not in WAYS:
            raise BadInput("how", self.how, f"use one of {', '.join(WAYS)}")

    def require(self, config: RunConfig) -> None:
        if self.tier != "memory":
            _require_partners(self, "tier", self.tier, config)
        elif not config.job.sharded:
            _require_copies(self, config)
            if self.how == "seal":
                raise BadInput(
                    "how",
                    self.how,
                    "use 'bit', 'page' or 'index': here the agent itself keeps the seal",
                )

    def stages(self, target: Target) -> list[tuple[list[str], dict[str, Any]]]:
        options = {"how": self.how, "older": self.older, "tiers": ("memory", "peer")}
        own = [target.node] if self.tier != "peer" else []
        return [(own + (_others(target) if self.tier != "memory" else []), options)]


@dataclass(frozen=True, kw_only=True)
class LosePeerCopy(CopyFault):
    """Have the partners of a rank drop what they keep for it. In sharded jobs only.

    Args:
        own: have the rank's own node drop its copies, too. With a ``Kill`` of the rank nothing of its piece is left.
    """

    own: bool = False

    act: ClassVar[str] = "lose_copies"
    effect: ClassVar[str] = "the copies that other nodes keep of one rank's state are gone"
    evidence: ClassVar[str] = "the nodes that had copies are asked for them, and have none"
    stands_for: ClassVar[str] = (
        "partners that run out of memory, or begin anew, while the owner trains on"
    )
    unlisted: ClassVar[str] = (
        "the tables count what ends a job; a copy that is lost does not, until its owner is, too"
    )
    impact: ClassVar[str] = (
        "none, if all is well: the copies are made again; until then the step counts as unprotected"
    )
    example: ClassVar[str] = _SHARDED

    def require(self, config: RunConfig) -> None:
        _require_partners(self, "rank", self.rank, config)

    def stages(self, target: Target) -> list[tuple[list[str], dict[str, Any]]]:
        own = [([target.node], {"tiers": ("memory",)})] if self.own else []
        return [
            *own,
            (_others(target), {"tiers": ("peer",)}),
        ]  # else the owner would send what it still has

    def is_shown(self, target: Target) -> bool:
        dropped = {report.node for report in target.reports if report.effective}
        return bool(dropped - {target.node}) and (target.node in dropped or not self.own)


def _require_partners(fault: Fault, field: str, value: object, config: RunConfig) -> None:
    if not config.job.sharded or config.nodes < 2:
        remedy = "strike a sharded job (one that calls trainer.mesh) on two nodes or more: only there are partners"
        raise BadInput(field, value, f"{remedy} that keep copies for a rank")
    _require_copies(fault, config)


def _require_copies(fault: Fault, config: RunConfig) -> None:
    if not config.memory_copies:
        raise BadInput(
            "memory_copies",
            config.memory_copies,
            f"use 1 or more: {fault.kind} needs copies to strike",
        )
