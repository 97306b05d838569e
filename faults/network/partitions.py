"""Faults ``Cut`` and ``Reset``: two sides of a network exchange nothing any more.

-> faults/network/sides.py: which nodes are on which side.
-> substrate/network/wiring.py makes the rules; substrate/kubernetes/pods/network.py in pods.
-> coordinator/detectors/contact.py and links.py: which side the job gives up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from chaoskit.errors import HarnessError
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Counted, Evidence, NetworkPath
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.network.sides import (
    ANY_OTHERS,
    COORDINATOR,
    CUT_OFF_CAUSES,
    EXAMPLE,
    UNDO,
    Sides,
    change_network,
)
from chaoskit.faults.target import Target
from chaoskit.process.linux import TcpTroubles
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.core.traffic import Block
from chaoskit.substrate.limits import capabilities

_STORE = "store"
_OTHERS = (*ANY_OTHERS, _STORE)
_SURE_S = 0.02  # a peer reports within this time that a repeated segment had arrived already
_AFTER_S = 3.0  # its effects may be noticed so long after its end: a first retry comes after 1 s


class TcpWatch:
    """Counts of losses or resets that TCP notices from now on, in some network namespaces.

    Each namespace is read through a process in it. One that cannot be read any more adds nothing.

    Args:
        processes: one process in each namespace.
        kind: kind of the counted events.

    Raises:
        HarnessError: if a namespace cannot be read at first. NodeUnreachable if a node does not
            answer.
    """

    def __init__(self, processes: Sequence[Process], kind: Literal["losses", "resets"]) -> None:
        self._kind: Literal["losses", "resets"] = kind
        self._processes = processes
        # zeros here would make each event since the namespace began count
        first = [process.kernel.tcp_troubles(process) for process in processes]
        self._before = self._most = self._events(first)
        self._last = (time.monotonic(), self._before)

    def _read(self) -> list[int]:
        """Return the number of events in each namespace since its beginning."""
        return self._events([_troubles(process) for process in self._processes])

    def _events(self, troubles: Sequence[TcpTroubles]) -> list[int]:
        """Return the numbers of events of the watched kind."""
        return [counts.losses if self._kind == "losses" else counts.resets for counts in troubles]

    @property
    def noticed(self) -> int:
        """The number of confirmed events in all namespaces, as of the last :meth:`look`."""
        return sum(most - before for most, before in zip(self._most, self._before, strict=True))

    def look(self) -> int:
        """Read the counts, and return the number of events that a second count confirmed.

        Two counts are at least 20 ms apart, since TCP may take a loss back.
        """
        (last_s, last), now_s, now = self._last, time.monotonic(), self._read()
        if now_s - last_s >= _SURE_S:
            sure = map(min, now, last)
            self._most, self._last = [*map(max, self._most, sure)], (now_s, now)
        return self.noticed


def _troubles(process: Process) -> TcpTroubles:
    """Return the TCP counts of the process's namespace; zeros if it cannot be read any more."""
    try:
        return process.kernel.tcp_troubles(process)
    except HarnessError:
        return TcpTroubles()


@dataclass(frozen=True, kw_only=True)
class Cut(Sides, Fault):
    """Lose everything between two sides, in silence.

    Neither side learns that the other one is gone.
    """

    family: ClassVar[str] = "network"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = CUT_OFF_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (Block,)
    effect: ClassVar[str] = "what is sent between two sides never arrives, and neither side is told"
    evidence: ClassVar[str] = (
        "the kernel counts packets that it dropped by the rule, and TCP of the nodes what it sent again"
    )
    stands_for: ClassVar[str] = "switches and cables that fail without a reset"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SWITCH, incidents.NIC)
    impact: ClassVar[str] = (
        "leases end without a word, and the workers of the silent nodes are given up"
    )
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker", "kubernetes")
    undo: ClassVar[str] = UNDO
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(Block)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_sides(self.rank, nodes, _OTHERS)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ways = self.aim(target)
        change = Block(ways=ways, port=_port(self.apart_from, target))
        return drop_packets(target, change, "losses", self.heal_after_s)


@dataclass(frozen=True, kw_only=True)
class Reset(Sides, Fault):
    """Answer every TCP segment between two sides with a reset.

    Connections break loudly, and none can be made.
    """

    family: ClassVar[str] = "network"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = CUT_OFF_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (Block,)
    effect: ClassVar[str] = "connections between two sides break, and new ones are refused"
    evidence: ClassVar[str] = (
        "the kernel counts segments that it answered with a reset, and TCP of the nodes connections that were reset"
    )
    stands_for: ClassVar[str] = "firewalls and load balancers that lose their state"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.INFINIBAND,)
    impact: ClassVar[str] = (
        "connections end at once, and the workers of the nodes behind them are given up"
    )
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker", "kubernetes")
    undo: ClassVar[str] = UNDO
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(Block)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self.validate_sides(self.rank, nodes, _OTHERS)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ways = self.aim(target)
        change = Block(ways=ways, loud=True, port=_port(self.apart_from, target))
        return drop_packets(target, change, "resets", self.heal_after_s)


def _port(apart_from: str | tuple[int, ...], target: Target) -> int:
    """Return the port of the store if only that is cut off; else 0, for all ports."""
    return target.cluster.store_port if apart_from == _STORE else 0


def drop_packets(
    target: Target,
    change: Block,
    noticed: Literal["losses", "resets"],
    heal_after_s: float | None,
) -> AsyncGenerator[Evidence]:
    """Drop packets until the network heals, and yield evidence of the drops.

    The evidence needs both: the rule has counted packets, and TCP of the nodes has noticed losses
    or resets. Without both until 3 s after the end there is none.

    Args:
        change: the paths, and the packets on them that are dropped.
        noticed: kind of event by which TCP notices it.
        heal_after_s: seconds after the act at which the network heals; None: with the run.
    """
    stations = {station for way in change.ways for station in way}
    watched = [target.cluster.root(node) for node in stations - {COORDINATOR}]
    if COORDINATOR in stations:
        with contextlib.suppress(HarnessError):  # a command has no coordinator
            watched.append(target.cluster.coordinator())
    watch = TcpWatch(watched, noticed)

    def look(applied: Applied) -> Counted | None:
        is_old = bool(target.lifted_ns) and time.monotonic_ns() - target.lifted_ns > _AFTER_S * 1e9
        events = watch.noticed if is_old else watch.look()  # later events have other causes
        packets = applied.shown() if events else 0
        words = f"the kernel has counted {packets} packets that met it, and TCP of the nodes {events} {noticed}"
        path = NetworkPath(tuple(sorted(stations)))
        return (
            Counted(subject=path, source="TCP of the nodes", count=packets, seen=words)
            if packets
            else None
        )

    return change_network(target, change, look, heal_after_s, _AFTER_S)
