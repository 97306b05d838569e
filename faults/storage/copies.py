"""Faults ``CorruptReplica`` and ``LosePeerCopy``: copies of the state in memory go wrong.

While the rank stands at its hook no rank commits. The fault waits there until the newest committed
state has all its copies, and the rank goes on when they were struck: a ``Kill`` of it that comes
later in the list finds just this. A replicated state is copied now and then (``copies``): if no
copy of the newest one is due, the newest that is there is struck.

-> daemon/injection.py carries out the orders on a node, by daemon/copy_faults.py.
-> checkpoint/memory/stored.py: how a reader notices a damaged copy.
-> checkpoint/peer/copy_placement.py: which nodes keep a copy for a rank.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence, ReadBack
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target

TIERS = ("memory", "peer", "both")
WAYS = ("bit", "page", "index", "seal")
_UNDO = "nothing is left: the next steps have copies of their own"
_AGAIN_S = 0.05  # copies may still be on their way
_PATIENCE_S = 10.0  # since the act

_SHARDED = 'chaos.run("fsdp", nodes=4, steps=40, options={{"size": "tiny"}}, faults=[{fault}])'


class CopyOrder(NamedTuple):
    """An act that nodes carry out on the copies of the target's state.

    Attributes:
        act: name of the act, for :mod:`chaoskit.daemon.injection`.
        nodes: nodes that carry it out.
        options: options of the act.
    """

    act: str
    nodes: list[str]
    options: dict[str, Any]


def _other_nodes(target: Target) -> list[str]:
    """Return the nodes with ranks beside the target's own."""
    return sorted({*target.places.values()} - {target.node})


@dataclass(frozen=True, kw_only=True)
class CorruptReplica(Fault):
    """Change bytes of the copies of a rank's state in memory, as broken memory would.

    Args:
        tier: ``memory`` (those on the rank's own node), ``peer`` (those that other nodes keep for
            it; in sharded jobs only), or ``both``.
        how: ``bit`` and ``page`` change numbers, ``index`` the description of the tensors, ``seal``
            the checksum by which a copy is known to be complete.
        older: damage the copies of earlier steps, too, not only the newest.
    """

    tier: str = "memory"
    how: str = "bit"
    older: bool = False

    family: ClassVar[str] = "checkpoint"
    of_runtime: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
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
    undo: ClassVar[str] = _UNDO
    sample: ClassVar[Mapping[str, Any]] = {"rank": 0, "at_step": 20}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"tier": tier} for tier in TIERS)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        _validate_moment(self)
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

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        options = {"how": self.how, "older": self.older, "tiers": ("memory", "peer")}
        own = [target.node] if self.tier != "peer" else []
        nodes = own + (_other_nodes(target) if self.tier != "memory" else [])
        await _order_in_turn(target, [CopyOrder("corrupt_copies", nodes, options)])
        target.release()
        if effects := _effects_by_node(target):
            yield _read_back(target, effects)


@dataclass(frozen=True, kw_only=True)
class LosePeerCopy(Fault):
    """Let the partners of a rank drop the copies that they keep for it. Only in sharded jobs.

    Args:
        own: the rank's own node drops its copies, too. With a ``Kill`` of the rank nothing of its
            piece is left.
    """

    own: bool = False

    family: ClassVar[str] = "checkpoint"
    of_runtime: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
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
    undo: ClassVar[str] = _UNDO
    example: ClassVar[str] = _SHARDED

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        _validate_moment(self)

    def require(self, config: RunConfig) -> None:
        _require_partners(self, "rank", self.rank, config)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        # in one stage, the owner would send its copies again
        own = [CopyOrder("lose_copies", [target.node], {"tiers": ("memory",)})] if self.own else []
        peers = CopyOrder("lose_copies", _other_nodes(target), {"tiers": ("peer",)})
        await _order_in_turn(target, [*own, peers])
        target.release()
        effects = _effects_by_node(target)
        if effects.keys() - {target.node} and (target.node in effects or not self.own):
            yield _read_back(target, effects)


def _validate_moment(fault: Fault) -> None:
    """Raise BadInput unless copies of the state exist at the moment of the fault."""
    if fault.during is not None:
        raise BadInput(
            "during", fault.during, "use at_step or after_s: in a recovery no copies are made"
        )
    if fault.at_step == 0:
        raise BadInput(
            "at_step",
            fault.at_step,
            "use 1 or more: before the first update there may be no copy",
        )


def _require_partners(fault: Fault, field: str, value: object, config: RunConfig) -> None:
    """Raise BadInput unless other nodes keep copies of a rank's state in memory."""
    if not config.job.sharded or config.nodes < 2:
        remedy = "strike a sharded job (one that calls trainer.mesh) on two nodes or more: only there are partners"
        raise BadInput(field, value, f"{remedy} that keep copies for a rank")
    _require_copies(fault, config)


def _require_copies(fault: Fault, config: RunConfig) -> None:
    """Raise BadInput unless the run keeps copies of the state in memory."""
    if not config.memory_copies:
        raise BadInput(
            "memory_copies",
            config.memory_copies,
            f"use 1 or more: {fault.kind} needs copies to strike",
        )


async def _order_in_turn(target: Target, orders: Sequence[CopyOrder]) -> None:
    """Send orders one after the other: each begins when all nodes have answered the one before.

    An order is repeated until its nodes have answered. 10 s after the act no more orders are sent.
    """
    for act, nodes, options in orders:
        while unanswered := _unanswered(target, nodes):
            if target.seconds_since > _PATIENCE_S:
                break
            for node in unanswered:
                target.order(node, act, worker=target.worker, step=target.step, **options)
            await target.heard(partial(_have_answered, target, nodes), within_s=_AGAIN_S)


def _have_answered(target: Target, nodes: Sequence[str]) -> bool:
    return not _unanswered(target, nodes)


def _unanswered(target: Target, nodes: Sequence[str]) -> list[str]:
    """Return the nodes that have not answered."""
    answered = {report.node for report in target.reports}
    return [node for node in nodes if node not in answered]


def _effects_by_node(target: Target) -> dict[str, str]:
    """Return node -> the description that it read back, for the nodes whose copies were struck."""
    return {report.node: report.observed for report in target.reports if report.effective}


def _read_back(target: Target, effects: Mapping[str, str]) -> ReadBack:
    return ReadBack(
        subject=target.rank_process, source=", ".join(effects), value="; ".join(effects.values())
    )
