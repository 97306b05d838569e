"""A network that works badly: late, lossy or narrow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.substrate.echo import EchoProbe
from chaoskit.substrate.traffic import SHARE_OF, Block, Change, Degrade, Narrow, Way
from faults import incidents
from faults.base import Target
from faults.incidents import IncidentKind
from faults.network import LossyNetwork, NetworkFault

_ECHOES = 3
_ECHO_S = 1.0  # of an echo that is held up
_HEALTHY_S = 0.1  # of one that is not: the rank waits meanwhile
_SEEN = 0.8  # share of the delay that an echo must show: timers of the kernel are not exact


@dataclass(frozen=True, kw_only=True)
class BadNetwork(NetworkFault):
    """Base of the faults that let packets through, but not well."""

    impact: ClassVar[str] = "steps take longer; if a lease ends, the workers of its node are given up"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SLOW,)


@dataclass(frozen=True, kw_only=True)
class Delay(BadNetwork):
    """Hold up each packet.

    Args:
        delay_ms: on each way that is struck.
        jitter_ms: drawn evenly for each packet, up to so much more or less.
    """

    delay_ms: float = 20.0
    jitter_ms: float = 0.0

    effect: ClassVar[str] = "packets between two sides arrive later"
    evidence: ClassVar[str] = "echoes between the nodes take longer by the delay"
    stands_for: ClassVar[str] = "congested links, and links between data centres"
    makes: ClassVar[type[Change]] = Degrade

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 0 < self.delay_ms < math.inf:
            raise BadInput("delay_ms", self.delay_ms, "use a number of milliseconds above 0")
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise BadInput("jitter_ms", self.jitter_ms, f"use 0 to delay_ms={self.delay_ms:g}")

    def change(self, target: Target, ways: tuple[Way, ...]) -> Change:
        return Degrade(ways=ways, delay_ms=self.delay_ms, jitter_ms=self.jitter_ms)

    def prepare(self, target: Target) -> None:
        source, other = target.notes["ways"][0]
        measure = partial(target.cluster.round_trips_ms, source, other, _ECHOES)
        target.notes["before_ms"] = measure(_HEALTHY_S) or measure(_ECHO_S)

    def impose(self, target: Target) -> None:
        super().impose(target)
        source, other = target.notes["ways"][0]
        target.notes["probe"] = target.cluster.probe(source, other, _ECHO_S + 4 * self.delay_ms / 1000)

    def lift(self, target: Target) -> None:
        if "seen" not in target.notes and "change" in target.notes:
            self._look(target, least=1)
        target.notes["probe"].close()
        super().lift(target)

    def shown(self, target: Target) -> str | None:
        if "seen" not in target.notes and "change" in target.notes:
            self._look(target, least=_ECHOES)
        if "seen" not in target.notes:
            return None
        return f"{target.notes['seen']}; {self.packets(target)} packets were held up"

    def _look(self, target: Target, least: int) -> None:
        """Note that all echoes take longer by the delay than any did before: a busy machine makes some of them late."""
        probe: EchoProbe = target.notes["probe"]
        after = [one for one in probe.results_ms() if one is not None][-_ECHOES:]
        before = target.notes["before_ms"]
        if len(after) < least or not before:
            return
        before_ms, after_ms = max(before), min(after)
        if after_ms - before_ms >= _SEEN * self.delay_ms * (2 if self.direction == "both" else 1):
            target.notes["seen"] = f"an echo takes {after_ms:.1f} ms, {before_ms:.1f} ms before"
            probe.close()


@dataclass(frozen=True, kw_only=True)
class Loss(LossyNetwork):
    """Lose some packets, drawn for each.

    Args:
        share: of the packets on each way that is struck.
    """

    share: float = 0.05

    effect: ClassVar[str] = "some packets between two sides are lost"
    evidence: ClassVar[str] = (
        "the kernel counts packets that it dropped by the rule, and TCP of the nodes what it sent again"
    )
    impact: ClassVar[str] = BadNetwork.impact
    stands_for: ClassVar[str] = "dirty fibres, and switches whose buffers overflow"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SWITCH, incidents.NIC)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_share("share", self.share)

    def change(self, target: Target, ways: tuple[Way, ...]) -> Change:
        return Block(ways=ways, share=self.share)


@dataclass(frozen=True, kw_only=True)
class Bandwidth(BadNetwork):
    """Let fewer bits pass.

    Args:
        bits_per_s: that still pass.
        per_peer: on each way that is struck; else from each node of this side in all, and to it.
    """

    bits_per_s: float = 100e6
    per_peer: bool = False

    effect: ClassVar[str] = "the link of one node, or what goes between two, carries fewer bits"
    evidence: ClassVar[str] = "the kernel counts how often it held packets back"
    stands_for: ClassVar[str] = "links that fall back to a lower rate, and neighbours that use them up"
    makes: ClassVar[type[Change]] = Narrow

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 0 < self.bits_per_s < math.inf:
            raise BadInput("bits_per_s", self.bits_per_s, "use a number of bits a second above 0")

    def change(self, target: Target, ways: tuple[Way, ...]) -> Change:
        if self.per_peer:
            return Narrow(bits_per_s=self.bits_per_s, ways=ways)
        return Narrow(bits_per_s=self.bits_per_s, stations=tuple(self.near(target)))

    def shown(self, target: Target) -> str | None:
        packets = self.packets(target)
        return f"the kernel has held back {packets} packets" if packets else None


def require_share(field: str, value: float) -> None:
    """Refuse what is no share, or one that is never drawn. Raises BadInput."""
    if not 1 / SHARE_OF <= value <= 1:
        raise BadInput(field, value, f"use a share from one in {SHARE_OF:,} to 1")
