"""A node's link goes down, once or again and again."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.substrate.echo import EchoProbe
from chaoskit.substrate.traffic import Change, Unplug, Way
from faults import incidents
from faults.base import Target, require_seconds
from faults.incidents import IncidentKind
from faults.network import COORDINATOR, NetworkFault

_ECHOES = 3  # that must be answered before: else another fault may be what is seen
_ECHO_S = 0.05  # the kernel answers in less than a millisecond, however busy its processes are


@dataclass(frozen=True, kw_only=True)
class LinkDown(NetworkFault):
    """Pull the cable of the rank's node: its own link shows no carrier, the others hear nothing."""

    effect: ClassVar[str] = "the link of one node has no carrier; nothing comes in or goes out"
    evidence: ClassVar[str] = "echoes to the node are lost"
    stands_for: ClassVar[str] = "network cards and cables"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.NIC, incidents.SWITCH)
    impact: ClassVar[str] = "the lease of the node ends, and its workers are given up"
    makes: ClassVar[type[Change]] = Unplug

    def change(self, target: Target, ways: tuple[Way, ...]) -> Change:
        return Unplug(station=target.node)

    def prepare(self, target: Target) -> None:
        target.notes["heard"] = target.cluster.round_trips_ms(COORDINATOR, target.node, _ECHOES, _ECHO_S)

    def impose(self, target: Target) -> None:
        super().impose(target)
        if "probe" not in target.notes:
            target.notes["probe"] = target.cluster.probe(COORDINATOR, target.node, _ECHO_S)
        target.notes["down_s"], target.notes["known"] = time.monotonic(), len(target.notes["probe"].results_ms())

    def lift(self, target: Target) -> None:
        self._look(target)
        is_early = time.monotonic() < target.notes["down_s"] + 2 * _ECHO_S
        if "change" in target.notes and "lost" not in target.notes and is_early:
            return  # the first echo is on its way; it is lifted the next time
        super().lift(target)

    def _look(self, target: Target) -> None:
        """Note an echo that was lost while the link was down, where echoes had been answered before."""
        probe: EchoProbe = target.notes["probe"]
        is_down = "change" in target.notes and len(target.notes["heard"]) == _ECHOES
        if is_down and None in probe.results_ms()[target.notes["known"] :]:
            probe.close()
            target.notes["lost"] = True

    def shown(self, target: Target) -> str | None:
        self._look(target)
        return f"an echo from the coordinator to {target.node} was lost" if "lost" in target.notes else None


@dataclass(frozen=True, kw_only=True)
class Flap(LinkDown):
    """Pull the cable and put it back, again and again.

    Args:
        down_s: for how long it is pulled.
        up_s: for how long it is back.
        times: how often.
    """

    down_s: float = 0.1
    up_s: float = 0.2
    times: int = 5

    effect: ClassVar[str] = "the link of one node comes and goes"
    evidence: ClassVar[str] = "echoes to the node are lost while the link is down"
    impact: ClassVar[str] = "packets are lost and sent again; if its lease ends, its workers are given up"

    @property
    def outage_s(self) -> float:
        return self.down_s

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("down_s", self.down_s, above_0=True)
        require_seconds("up_s", self.up_s, above_0=True)
        if self.times < 1:
            raise BadInput("times", self.times, "use 1 or more")

    def next_act_s(self, target: Target) -> float:
        turn, within_s = divmod(target.seconds_since, self.down_s + self.up_s)
        if turn >= self.times:
            return math.inf
        return turn * (self.down_s + self.up_s) + self.down_s + (self.up_s if within_s >= self.down_s else 0.0)

    def again(self, target: Target, message: Any) -> bool:
        period_s = self.down_s + self.up_s
        turn, within_s = divmod(target.seconds_since, period_s)
        down = turn < self.times and within_s < self.down_s
        if down and "change" not in target.notes:
            self.impose(target)
        elif not down:
            self.lift(target)
        return False
