"""A network that works badly: late, lossy or narrow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.evidence import Counted, Evidence, NetworkPath, RoundTrip
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.network.partitions import LossyNetwork, NetworkFault
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Applied
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.traffic import SHARE_OF, Block, Change, Degrade, Narrow, Way

_ECHOES = 3
_ECHO_S = 1.0  # of an echo that is held up
_HEALTHY_S = 0.1  # of one that is not: the rank waits meanwhile
_SEEN = 0.8  # share of the delay that an echo must show: timers of the kernel are not exact


@dataclass(frozen=True, kw_only=True)
class BadNetwork(NetworkFault):
    """Base of the faults that let packets through, but not well."""

    impact: ClassVar[str] = (
        "steps take longer; if a lease ends, the workers of its node are given up"
    )
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

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ways = self.aim(target)
        place = ways[0]
        measure = partial(target.cluster.round_trips_ms, *place, _ECHOES)
        before_ms = max(measure(_HEALTHY_S) or measure(_ECHO_S), default=None)
        change = Degrade(ways=ways, delay_ms=self.delay_ms, jitter_ms=self.jitter_ms)
        with contextlib.ExitStack() as asked:
            probe: EchoProbe | None = None
            late_ms = 0.0

            def look(delay: Applied) -> RoundTrip | None:
                nonlocal probe, late_ms
                if probe is None:
                    limit_s = _ECHO_S + 4 * self.delay_ms / 1000
                    probe = asked.enter_context(
                        contextlib.closing(target.cluster.probe(*place, limit_s))
                    )
                if before_ms is not None and not late_ms:
                    least = (
                        1
                        if self.heal_after_s and target.seconds_since >= self.heal_after_s
                        else _ECHOES
                    )
                    late_ms = self._late_ms(probe, before_ms, least)
                if before_ms is None or not late_ms or not delay.shown():
                    return None
                probe.close()
                told = f"an echo takes {late_ms:.1f} ms, {before_ms:.1f} ms before; {delay.shown()} packets were held up"
                path = NetworkPath(place)
                echo = "an echo of the kernel"
                return RoundTrip(
                    subject=path, source=echo, before_ms=before_ms, after_ms=late_ms, seen=told
                )

            async with contextlib.aclosing(self.while_in_force(target, change, look)) as story:
                async for seen in story:
                    yield seen

    def _late_ms(self, probe: EchoProbe, before_ms: float, least: int) -> float:
        """What all echoes take at least, if that is longer by the delay than any took before; 0 if not.

        A busy machine makes some of them late.
        """
        after = [one for one in probe.results_ms() if one is not None][-_ECHOES:]
        after_ms = min(after, default=0.0)
        late_ms = _SEEN * self.delay_ms * (2 if self.direction == "both" else 1)
        return after_ms if len(after) >= least and after_ms - before_ms >= late_ms else 0.0


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
    stands_for: ClassVar[str] = "dirty fibres, and switches with buffers that overflow"
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
    stands_for: ClassVar[str] = (
        "links that fall back to a lower rate, and neighbours that use them up"
    )
    makes: ClassVar[type[Change]] = Narrow
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker")

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 0 < self.bits_per_s < math.inf:
            raise BadInput("bits_per_s", self.bits_per_s, "use a number of bits a second above 0")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ways = self.aim(target)
        near = tuple(self.near(target))
        change = Narrow(
            bits_per_s=self.bits_per_s, **({"ways": ways} if self.per_peer else {"stations": near})
        )

        def look(narrow: Applied) -> Counted | None:
            packets = narrow.shown()
            told = f"the kernel has held back {packets} packets"
            path = NetworkPath(tuple(sorted({station for way in ways for station in way})))
            return (
                Counted(subject=path, source="the kernel's queue", count=packets, seen=told)
                if packets
                else None
            )

        async with contextlib.aclosing(self.while_in_force(target, change, look)) as story:
            async for seen in story:
                yield seen


def require_share(field: str, value: float) -> None:
    """Refuse what is no share, or one that is never drawn. Raises BadInput."""
    if not 1 / SHARE_OF <= value <= 1:
        raise BadInput(field, value, f"use a share from one in {SHARE_OF:,} to 1")
