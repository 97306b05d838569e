"""The decisions that follow from the speed of the ranks: shares, lines of the journal, evictions.

It combines the pace, the balancer and the detectors of stragglers. Pure.

-> coordinator/detectors/stragglers.py: when a rank is slow; balance.py: when shards move.
coordinator/handlers/on_workload.py carries the decisions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.balance import Balancer
from chaoskit.coordinator.detectors.link_speed import SlowLink, blame
from chaoskit.coordinator.detectors.pace import Paces, RankPace
from chaoskit.coordinator.detectors.stragglers import SlowRanks, Straggler, Stragglers
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.regroup import may_rebalance
from chaoskit.coordinator.outputs import WriteRecord
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Beat


@dataclass(frozen=True, slots=True)
class GiveUpStraggler:
    """The decision to give up a worker that is too slow, as a substitute can take its place.

    ``detail`` has the measurements, in words.
    """

    worker: str
    detail: str


@dataclass(frozen=True, slots=True)
class TryLinks:
    """The decision to test the links between these nodes, as no rank is to blame."""

    nodes: tuple[str, ...]


Decision = WriteRecord | events.Rebalanced | GiveUpStraggler | TryLinks


class Workload:
    """Beats of a replicated job, and decisions on the shards and the stragglers among its ranks."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._paces = Paces()
        self._balancer = Balancer()
        self._stragglers = Stragglers()
        self._slow = SlowRanks(config.slow_limit, config.slow_steps)

    def hear(self, beats: Iterable[Beat]) -> None:
        """Take in beats of live workers."""
        self._paces.hear(beats)

    def look(self, membership: Membership) -> list[Decision]:
        """Return the decisions, once all ranks have taken a step since the last call; else none.

        There are none while shards cannot be moved, for example before a generation has settled. A
        straggler is given up only if another node has a spare. No shards are moved in a call that
        gives a straggler up.
        """
        plan = membership.plan
        if plan is None:
            return []
        shares = {member.worker: len(member.shards) for member in plan.members}
        round_ = self._paces.round(shares)
        if round_ is None or not may_rebalance(membership):
            return []
        ranks = {member.worker: member.rank for member in plan.members}
        stragglers = self._stragglers.look(round_, shares)
        decisions: list[Decision] = [
            _line_of(straggler, ranks, self._remark(len(ranks))) for straggler in stragglers
        ]
        if any(straggler.kind == "network" for straggler in stragglers):
            decisions.append(TryLinks(tuple(member.node for member in plan.members)))
        for straggler in self._slow.look(round_):
            if membership.has_substitute(straggler.worker):
                return [*decisions, GiveUpStraggler(straggler.worker, straggler.detail)]
        if (
            not self._config.balance
            or len(ranks) < 2
            or self._config.shards_of(-1, len(ranks)) <= len(ranks)
        ):
            return decisions
        proposal = self._balancer.look(shares, round_.paces)
        if proposal is not None:
            fields = {
                "shares": proposal.shares,
                "gain": round(proposal.gain, 3),
                "step_ms": round(proposal.step_s * 1e3, 2),
                "paces": {worker: _pace_fields(pace) for worker, pace in round_.paces.items()},
            }
            decisions += [WriteRecord(Event.REBALANCED, fields), events.Rebalanced(proposal.shares)]
        return decisions

    def _remark(self, world: int) -> str:
        """Return a remark for the details of stragglers if shards cannot be moved, else ""."""
        shards = self._config.shards_of(-1, world)
        if not self._config.balance or shards > world:
            return ""
        return f"; no shard can be moved: shards={shards} for {world} ranks"


def _line_of(straggler: Straggler, ranks: Mapping[str, int], remark: str) -> WriteRecord:
    """Return the line of the journal about a straggler.

    Args:
        remark: appended to the detail of a slow rank.
    """
    fields: dict[str, Any] = {
        "worker": straggler.worker,
        "rank": ranks.get(straggler.worker),
        "kind": straggler.kind,
        "score": round(straggler.score, 2),
        "detail": straggler.detail + (remark if straggler.worker else ""),
    }
    return WriteRecord(Event.STRAGGLER, fields)


def tell_links(links: Sequence[SlowLink]) -> WriteRecord:
    """Return the line of the journal about the slow links, after all links were tested."""
    detail = blame(links) or "no link is slower than the others"
    score = round(max((link.score for link in links), default=1.0), 2)
    return WriteRecord(
        Event.STRAGGLER,
        {"worker": "", "rank": None, "kind": "network", "score": score, "detail": detail},
    )


def _pace_fields(pace: RankPace) -> dict[str, float]:
    """Return the fields of a pace for the journal, in milliseconds."""
    return {
        "compute_ms": round(pace.compute_s * 1e3, 3),
        "input_ms": round(pace.input_s * 1e3, 3),
        "wait_ms": round(pace.wait_s * 1e3, 3),
        "other_ms": round(pace.other_s * 1e3, 3),
        "starved_ms": round(pace.starved_s * 1e3, 3),
    }
