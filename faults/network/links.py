"""Faults ``LinkDown`` and ``Flap``: the link of a node goes down, once or again and again.

-> substrate/network/wiring.py takes the link down; substrate/core/echo.py measures the echoes.
-> coordinator/detectors/contact.py: when the silent node is given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import Evidence, NetworkPath, RoundTrip
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.network.sides import COORDINATOR, CUT_OFF_CAUSES, EXAMPLE, UNDO, Sides
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.traffic import Unplug
from chaoskit.substrate.limits import capabilities

_ECHOES = 3  # echoes that must be answered before the act: otherwise another fault may be the cause
_ECHO_S = 0.05  # the kernel answers in less than a millisecond, however busy its processes are


@dataclass(frozen=True, kw_only=True)
class LinkDown(Sides, Fault):
    """Pull the cable of the rank's node.

    Its own link shows no carrier, and the others receive nothing from it.
    """

    family: ClassVar[str] = "network"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = CUT_OFF_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (Unplug,)
    effect: ClassVar[str] = "the link of one node has no carrier; nothing comes in or goes out"
    evidence: ClassVar[str] = "echoes to the node are lost"
    stands_for: ClassVar[str] = "network cards and cables"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.NIC, incidents.SWITCH)
    impact: ClassVar[str] = "the lease of the node ends, and its workers are given up"
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker")
    undo: ClassVar[str] = UNDO
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(Unplug)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_sides(self.rank, nodes)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        self.aim(target)
        return _unplug(target, [(0.0, self.heal_after_s)])


@dataclass(frozen=True, kw_only=True)
class Flap(Sides, Fault):
    """Pull the cable and put it back, again and again.

    Args:
        down_s: seconds for which it is pulled, each time.
        up_s: seconds for which it is back, each time.
        times: number of times that it is pulled.
    """

    down_s: float = 0.1
    up_s: float = 0.2
    times: int = 5

    family: ClassVar[str] = "network"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = CUT_OFF_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (Unplug,)
    effect: ClassVar[str] = "the link of one node comes and goes"
    evidence: ClassVar[str] = "echoes to the node are lost while the link is down"
    stands_for: ClassVar[str] = "network cards and cables"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.NIC, incidents.SWITCH)
    impact: ClassVar[str] = (
        "packets are lost and sent again; if its lease ends, its workers are given up"
    )
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker")
    undo: ClassVar[str] = UNDO
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(Unplug)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_sides(self.rank, nodes)
        require_seconds("down_s", self.down_s, above_0=True)
        require_seconds("up_s", self.up_s, above_0=True)
        if self.times < 1:
            raise BadInput("times", self.times, "use 1 or more")

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        self.aim(target, outage_s=self.down_s)
        period_s = self.down_s + self.up_s
        begins_s = [turn * period_s for turn in range(self.times)]
        return _unplug(target, [(begin_s, begin_s + self.down_s) for begin_s in begins_s])


async def _unplug(
    target: Target, outages: Sequence[tuple[float, float | None]]
) -> AsyncGenerator[Evidence]:
    """Pull the cable of the target's node, and yield evidence once an echo to the node is lost.

    There is no evidence if an echo before the act was lost already.

    Args:
        outages: begin and end of each outage in seconds after the act; None stands for the end of
            the run.
    """
    ends = (COORDINATOR, target.node)
    before_ms = target.cluster.round_trips_ms(*ends, _ECHOES, _ECHO_S)
    with contextlib.ExitStack() as probes:
        probe: EchoProbe | None = None
        for begin_s, end_s in outages:
            if begin_s:
                await target.sleep(begin_s - target.seconds_since)
            with target.applied(Unplug(station=target.node)):
                target.acts()
                if probe is None:
                    target.release()
                    probe = probes.enter_context(
                        contextlib.closing(target.cluster.probe(*ends, _ECHO_S))
                    )
                # the first echo is on its way for a moment
                limit_s = None if end_s is None else max(end_s, target.seconds_since + 2 * _ECHO_S)
                is_lost = _loss_after_now(probe)
                if len(before_ms) == _ECHOES and await target.seen(is_lost, limit_s=limit_s):
                    yield _lost_echo(target, max(before_ms))
                    probe.close()
                    before_ms = ()
                if end_s is None:
                    await target.until_end()
                else:
                    await target.sleep(end_s - target.seconds_since)
            target.lifted()


def _lost_echo(target: Target, before_ms: float) -> RoundTrip:
    """Return evidence that an echo to the target's node was lost.

    ``before_ms`` is the time that it took before.
    """
    words = f"an echo from the coordinator to {target.node} was lost"
    path = NetworkPath((COORDINATOR, target.node))
    return RoundTrip(
        subject=path,
        source="an echo of the kernel",
        before_ms=before_ms,
        after_ms=None,
        seen=words,
    )


def _loss_after_now(probe: EchoProbe) -> Callable[[], bool]:
    """Return a function that returns True once an echo that is sent from now on is lost."""
    before = len(probe.results_ms())
    return lambda: None in probe.results_ms()[before:]
