"""A node's link goes down, once or again and again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import require_seconds
from chaoskit.faults.evidence import Evidence, NetworkPath, RoundTrip
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.network.partitions import COORDINATOR, NetworkFault
from chaoskit.faults.target import Target
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.traffic import Change, Unplug

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
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker")

    @property
    def outages(self) -> tuple[tuple[float, float | None], ...]:
        """When the link is down, from and until so many seconds after the act; None: to the end of the run."""
        return ((0.0, self.heal_after_s),)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        self.aim(target)
        place = (COORDINATOR, target.node)
        answered = target.cluster.round_trips_ms(
            *place, _ECHOES, _ECHO_S
        )  # while it is up, for comparison
        with contextlib.ExitStack() as asked:
            probe: EchoProbe | None = None
            for begin_s, end_s in self.outages:
                if begin_s:
                    await target.sleep(begin_s - target.seconds_since)
                with target.applied(Unplug(station=target.node)):
                    target.acts()
                    if probe is None:
                        target.release()
                        probe = asked.enter_context(
                            contextlib.closing(target.cluster.probe(*place, _ECHO_S))
                        )
                    # the first echo is on its way for a moment
                    limit_s = (
                        None if end_s is None else max(end_s, target.seconds_since + 2 * _ECHO_S)
                    )
                    if len(answered) == _ECHOES and await target.seen(
                        _lost(probe), limit_s=limit_s
                    ):
                        yield self._evidence(target, max(answered))
                        probe.close()
                        answered = ()
                    if end_s is None:
                        await target.until_end()
                    else:
                        await target.sleep(end_s - target.seconds_since)
                target.lifted()

    def _evidence(self, target: Target, before_ms: float) -> RoundTrip:
        told = f"an echo from the coordinator to {target.node} was lost"
        path = NetworkPath((COORDINATOR, target.node))
        return RoundTrip(
            subject=path,
            source="an echo of the kernel",
            before_ms=before_ms,
            after_ms=None,
            seen=told,
        )


def _lost(probe: EchoProbe) -> Callable[[], bool]:
    """Gives whether an echo that is sent from now on is lost."""
    known = len(probe.results_ms())
    return lambda: None in probe.results_ms()[known:]


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
    impact: ClassVar[str] = (
        "packets are lost and sent again; if its lease ends, its workers are given up"
    )

    @property
    def outage_s(self) -> float:
        return self.down_s

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("down_s", self.down_s, above_0=True)
        require_seconds("up_s", self.up_s, above_0=True)
        if self.times < 1:
            raise BadInput("times", self.times, "use 1 or more")

    @property
    def outages(self) -> tuple[tuple[float, float | None], ...]:
        period_s = self.down_s + self.up_s
        return tuple((turn * period_s, turn * period_s + self.down_s) for turn in range(self.times))
