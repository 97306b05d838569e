"""Uneven work: what follows from how fast the ranks are. Puts pace, balance and stragglers together; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.balance import Balancer
from chaoskit.coordinator.detectors.link_speed import SlowLink, blame
from chaoskit.coordinator.detectors.pace import Pace, Paces
from chaoskit.coordinator.detectors.stragglers import SlowRanks, Straggler, Stragglers
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.outputs import Note
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Beat


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A rank is too slow, and there is somebody to take its place."""

    worker: str
    detail: str


@dataclass(frozen=True, slots=True)
class TryLinks:
    """All wait, and nobody is to blame: these nodes should try their links to each other."""

    nodes: tuple[str, ...]


Decision = Note | events.Rebalanced | GiveUp | TryLinks


class Workload:
    """Hears the beats of a replicated job, and decides who computes how much."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._paces = Paces()
        self._balancer = Balancer()
        self._stragglers = Stragglers()
        self._slow = SlowRanks(config.slow_limit, config.slow_steps)

    def hear(self, beats: Iterable[Beat]) -> None:
        """Beats of live workers."""
        self._paces.hear(beats)

    def look(self, membership: Membership) -> list[Decision]:
        """What is to be told and done, if all ranks have taken a step since the last time."""
        plan = membership.plan
        if plan is None:
            return []
        shares = {member.worker: len(member.shards) for member in plan.members}
        round_ = self._paces.round(shares)
        if round_ is None or not membership.may_rebalance:
            return []
        ranks = {member.worker: member.rank for member in plan.members}
        found = self._stragglers.look(round_, shares)
        decided: list[Decision] = [_tell(one, ranks, self._remark(len(ranks))) for one in found]
        if any(one.kind == "network" for one in found):
            decided.append(TryLinks(tuple(member.node for member in plan.members)))
        for one in self._slow.look(round_):
            if membership.has_substitute(one.worker):
                return [*decided, GiveUp(one.worker, one.detail)]
        if (
            not self._config.balance
            or len(ranks) < 2
            or self._config.shards_of(-1, len(ranks)) <= len(ranks)
        ):
            return decided
        proposal = self._balancer.look(shares, round_.paces)
        if proposal is not None:
            fields = {
                "shares": proposal.shares,
                "gain": round(proposal.gain, 3),
                "step_ms": round(proposal.step_s * 1e3, 2),
                "paces": {worker: _shown(pace) for worker, pace in round_.paces.items()},
            }
            decided += [Note(Event.REBALANCED, fields), events.Rebalanced(proposal.shares)]
        return decided

    def _remark(self, world: int) -> str:
        shards = self._config.shards_of(-1, world)
        if not self._config.balance or shards > world:
            return ""
        return f"; no shard can be moved: shards={shards} for {world} ranks"


def _tell(one: Straggler, ranks: Mapping[str, int], remark: str) -> Note:
    fields: dict[str, Any] = {
        "worker": one.worker,
        "rank": ranks.get(one.worker),
        "kind": one.kind,
        "score": round(one.score, 2),
        "detail": one.detail + (remark if one.worker else ""),
    }
    return Note(Event.STRAGGLER, fields)


def tell_links(links: Sequence[SlowLink]) -> Note:
    """Which links are slow, after all were tried."""
    detail = blame(links) or "no link is slower than the others"
    score = round(max((link.score for link in links), default=1.0), 2)
    return Note(
        Event.STRAGGLER,
        {"worker": "", "rank": None, "kind": "network", "score": score, "detail": detail},
    )


def _shown(pace: Pace) -> dict[str, float]:
    """In milliseconds: of a shard, and of a step."""
    return {
        "compute_ms": round(pace.compute_s * 1e3, 3),
        "input_ms": round(pace.input_s * 1e3, 3),
        "wait_ms": round(pace.wait_s * 1e3, 3),
        "other_ms": round(pace.other_s * 1e3, 3),
        "starved_ms": round(pace.starved_s * 1e3, 3),
    }
