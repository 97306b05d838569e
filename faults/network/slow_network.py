"""Faults ``Delay``, ``Loss`` and ``Bandwidth``: the network is late, lossy or narrow.

-> substrate/network/shaping.py and packet_queue.py delay and narrow; packets.py drops.
-> coordinator/detectors/link_speed.py: how the job finds a slow link.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Counted, Evidence, NetworkPath, RoundTrip
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.network.partitions import drop_packets
from chaoskit.faults.network.sides import CUT_OFF_CAUSES, EXAMPLE, UNDO, Sides, change_network
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.traffic import SHARE_OF, Block, Degrade, Narrow
from chaoskit.substrate.limits import capabilities

_IMPACT = "steps take longer; if a lease ends, the workers of its node are given up"
_ECHOES = 3
_ECHO_S = 1.0  # timeout of a delayed echo
_HEALTHY_S = 0.1  # timeout of an echo before the act, for which the rank waits
_SEEN = 0.8  # share of the delay that an echo must show: timers of the kernel are not exact


@dataclass(frozen=True, kw_only=True)
class Delay(Sides, Fault):
    """Hold up each packet.

    Args:
        delay_ms: delay in milliseconds on each way that is struck.
        jitter_ms: largest difference from the delay, drawn evenly for each packet; at most
            ``delay_ms``.
    """

    delay_ms: float = 20.0
    jitter_ms: float = 0.0

    family: ClassVar[str] = "network"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = CUT_OFF_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (Degrade,)
    effect: ClassVar[str] = "packets between two sides arrive later"
    evidence: ClassVar[str] = "echoes between the nodes take longer by the delay"
    stands_for: ClassVar[str] = "congested links, and links between data centres"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SLOW,)
    impact: ClassVar[str] = _IMPACT
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker", "kubernetes")
    undo: ClassVar[str] = UNDO
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(Degrade)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_sides(self.rank, nodes)
        if not 0 < self.delay_ms < math.inf:
            raise BadInput("delay_ms", self.delay_ms, "use a number of milliseconds above 0")
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise BadInput("jitter_ms", self.jitter_ms, f"use 0 to delay_ms={self.delay_ms:g}")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ways = self.aim(target)
        way = ways[0]
        measure = partial(target.cluster.round_trips_ms, *way, _ECHOES)
        before_ms = max(measure(_HEALTHY_S) or measure(_ECHO_S), default=None)
        change = Degrade(ways=ways, delay_ms=self.delay_ms, jitter_ms=self.jitter_ms)
        with contextlib.ExitStack() as probes:
            probe: EchoProbe | None = None
            late_ms = 0.0

            def look(delay: Applied) -> RoundTrip | None:
                nonlocal probe, late_ms
                if probe is None:
                    limit_s = _ECHO_S + 4 * self.delay_ms / 1000
                    probe = probes.enter_context(
                        contextlib.closing(target.cluster.probe(*way, limit_s))
                    )
                if before_ms is not None and not late_ms:
                    echoes_needed = (
                        1
                        if self.heal_after_s and target.seconds_since >= self.heal_after_s
                        else _ECHOES
                    )
                    late_ms = self._late_ms(probe, before_ms, echoes_needed)
                if before_ms is None or not late_ms or not delay.shown():
                    return None
                probe.close()
                words = f"an echo takes {late_ms:.1f} ms, {before_ms:.1f} ms before; {delay.shown()} packets were held up"
                path = NetworkPath(way)
                echo = "an echo of the kernel"
                return RoundTrip(
                    subject=path, source=echo, before_ms=before_ms, after_ms=late_ms, seen=words
                )

            evidences = change_network(target, change, look, self.heal_after_s)
            async with contextlib.aclosing(evidences):
                async for evidence in evidences:
                    yield evidence

    def _late_ms(self, probe: EchoProbe, before_ms: float, echoes_needed: int) -> float:
        """Return the shortest of the last three round trips if it is longer by the delay; else 0.

        The shortest one counts, because a busy machine makes some echoes late. It is 0, too, while
        fewer than ``echoes_needed`` were answered.
        """
        after = [trip_ms for trip_ms in probe.results_ms() if trip_ms is not None][-_ECHOES:]
        after_ms = min(after, default=0.0)
        late_ms = _SEEN * self.delay_ms * (2 if self.direction == "both" else 1)
        return after_ms if len(after) >= echoes_needed and after_ms - before_ms >= late_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Loss(Sides, Fault):
    """Lose some packets, drawn for each.

    Args:
        share: share of the packets on each way that is struck, above 0 and up to 1.
    """

    share: float = 0.05

    family: ClassVar[str] = "network"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = CUT_OFF_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (Block,)
    effect: ClassVar[str] = "some packets between two sides are lost"
    evidence: ClassVar[str] = (
        "the kernel counts packets that it dropped by the rule, and TCP of the nodes what it sent again"
    )
    stands_for: ClassVar[str] = "dirty fibres, and switches with buffers that overflow"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SWITCH, incidents.NIC)
    impact: ClassVar[str] = _IMPACT
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker", "kubernetes")
    undo: ClassVar[str] = UNDO
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(Block)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_sides(self.rank, nodes)
        require_share("share", self.share)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        change = Block(ways=self.aim(target), share=self.share)
        return drop_packets(target, change, "losses", self.heal_after_s)


@dataclass(frozen=True, kw_only=True)
class Bandwidth(Sides, Fault):
    """Let fewer bits pass.

    Args:
        bits_per_s: number of bits a second that still pass.
        per_peer: the limit holds on each way that is struck; else for all traffic from and to each
            node of this side.
    """

    bits_per_s: float = 100e6
    per_peer: bool = False

    family: ClassVar[str] = "network"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = CUT_OFF_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (Narrow,)
    effect: ClassVar[str] = "the link of one node, or what goes between two, carries fewer bits"
    evidence: ClassVar[str] = "the kernel counts how often it held packets back"
    stands_for: ClassVar[str] = (
        "links that fall back to a lower rate, and neighbours that use them up"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SLOW,)
    impact: ClassVar[str] = _IMPACT
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker")
    undo: ClassVar[str] = UNDO
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(Narrow)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_sides(self.rank, nodes)
        if not 0 < self.bits_per_s < math.inf:
            raise BadInput("bits_per_s", self.bits_per_s, "use a number of bits a second above 0")

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ways = self.aim(target)
        near = tuple(self.near(target))
        change = Narrow(
            bits_per_s=self.bits_per_s, **({"ways": ways} if self.per_peer else {"stations": near})
        )

        def look(narrow: Applied) -> Counted | None:
            packets = narrow.shown()
            words = f"the kernel has held back {packets} packets"
            path = NetworkPath(tuple(sorted({station for way in ways for station in way})))
            return (
                Counted(subject=path, source="the kernel's queue", count=packets, seen=words)
                if packets
                else None
            )

        return change_network(target, change, look, self.heal_after_s)


def require_share(field: str, value: float) -> None:
    """Raise BadInput unless ``value`` is a share that the kernel can draw."""
    if not 1 / SHARE_OF <= value <= 1:
        raise BadInput(field, value, f"use a share from one in {SHARE_OF:,} to 1")
