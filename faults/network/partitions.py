"""The network between nodes goes wrong: it is cut, silently or loudly, wholly or one way."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from chaoskit.errors import BadInput, HarnessError
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import Counted, Evidence, NetworkPath
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.process.linux import TcpTroubles
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.core.traffic import Block, Change, Way, between, towards
from chaoskit.substrate.limits import capabilities
from chaoskit.vocabulary import HUNG_CAUSES

#: The coordinator's place in the network, beside the nodes'.
COORDINATOR = "coordinator"
_FROM = ("all", "ranks", "coordinator")
_STORE = "store"
_SURE_S = 0.02  # by then the other side has said that it had a segment already
_AFTER_S = 3.0  # after its end in which what it did may still be noticed: a first retry comes after a second
_DIRECTIONS = ("both", "in", "out")
#: For the catalogue: networks are only cut where each node has one.
EXAMPLE = """import pytest

from faults import {name}


@pytest.mark.chaos(substrate="netns")
def test_{name}(chaos):
    chaos.run("gpt", nodes=4, steps=60, faults=[{fault}])"""


@dataclass(frozen=True, kw_only=True)
class NetworkFault(Fault):
    """Base of the faults that change what goes between the rank's node and others.

    A role that stands for several ranks, such as ``minority``, gives one fault a rank: each of them is apart from all,
    from each other too. ``side`` keeps several ranks together.

    Args:
        side: further ranks; their nodes are on the same side as that of ``rank``.
        apart_from: ``all`` others and the coordinator, the other ``ranks`` only, the ``coordinator`` only, or a tuple
            of ranks. For :class:`Cut` and :class:`Reset` also the ``store`` only, in which the members of a new
            membership find each other; agents and coordinator still hear of each other then.
        direction: ``both``, only what comes ``in`` to this side, or only what goes ``out``.
        heal_after_s: when it ends; None: with the run.
    """

    side: tuple[int, ...] = ()
    apart_from: str | tuple[int, ...] = "all"
    direction: str = "both"
    heal_after_s: float | None = None

    family: ClassVar[str] = "network"
    whole_node: ClassVar[bool] = True
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker", "kubernetes")
    undo: ClassVar[str] = "the rule is removed; the network vanishes with the run"
    example: ClassVar[str] = EXAMPLE
    #: The kind of change that it makes.
    makes: ClassVar[type[Change]] = Block
    #: What ``apart_from`` may say beside ranks.
    others: ClassVar[tuple[str, ...]] = _FROM

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(cls.makes)

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (self.makes,)

    @property
    def from_outside(self) -> bool:
        return True

    @property
    def leads_to(self) -> frozenset[str]:
        return HUNG_CAUSES | {"node lost", "unreachable"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        self._validate_ranks("side", self.side, nodes)
        if isinstance(self.apart_from, tuple):
            self._validate_ranks("apart_from", self.apart_from, nodes)
            if both := {self.rank, *self.side}.intersection(self.apart_from):
                raise BadInput(
                    "apart_from", self.apart_from, f"leave out {sorted(both)}: on this side already"
                )
        elif self.apart_from not in self.others:
            raise BadInput(
                "apart_from",
                self.apart_from,
                f"use one of {', '.join(self.others)}, or a tuple of ranks",
            )
        if self.direction not in _DIRECTIONS:
            raise BadInput("direction", self.direction, f"use one of {', '.join(_DIRECTIONS)}")
        if self.heal_after_s is not None:
            require_seconds("heal_after_s", self.heal_after_s, above_0=True)

    def _validate_ranks(self, field: str, ranks: Sequence[int], nodes: int) -> None:
        for rank in ranks:
            if not 0 <= rank < nodes:
                raise BadInput(
                    field, ranks, f"use ranks from 0 to {nodes - 1}: the run has {nodes} nodes"
                )

    def near(self, target: Target) -> list[str]:
        """The nodes on the rank's side."""
        return [target.node, *(target.places[rank] for rank in self.side if rank in target.places)]

    def ways(self, target: Target) -> tuple[Way, ...]:
        """What is struck, by the nodes that have the ranks now."""
        near = self.near(target)
        if isinstance(self.apart_from, tuple):
            far = [target.places[rank] for rank in self.apart_from if rank in target.places]
        else:
            nodes = [node for node in target.cluster.nodes if node not in near]
            far = {"all": [*nodes, COORDINATOR], "ranks": nodes}.get(self.apart_from, [COORDINATOR])
        if self.direction == "both":
            return between(near, far)
        return towards(near, far) if self.direction == "out" else towards(far, near)

    def aim(self, target: Target) -> tuple[Way, ...]:
        """Return the ways that are struck. What may be lost by it are the target's struck nodes from now on."""
        ways = self.ways(target)
        stations = {station for way in ways for station in way}
        # a node that is silent until its lease is over is lost; of two that cannot reach each other either may be
        silent = COORDINATOR in stations and self.outage_s >= _lease_s(target)
        target.struck_nodes = set(self.near(target)) if silent else stations - {COORDINATOR}
        return ways

    async def while_in_force(
        self,
        target: Target,
        change: Change,
        look: Callable[[Applied], Evidence | None],
        after_s: float = 0.0,
    ) -> AsyncGenerator[Evidence]:
        """Change the network until it heals, and wait for evidence of it.

        Args:
            look: for evidence, at what was changed.
            after_s: how long what it did may be noticed after its end.
        """
        with target.applied(change) as applied:
            target.release()
            target.last_word = partial(look, applied)
            seen = await target.seen(target.last_word, limit_s=self.heal_after_s)
            if seen is not None:
                yield seen
            if self.heal_after_s is None:
                await target.until_end()
            else:
                await target.sleep(self.heal_after_s - target.seconds_since)
        target.lifted()
        if seen is None and (
            seen := await target.seen(target.last_word, limit_s=target.seconds_since + after_s)
        ):
            yield seen

    @property
    def outage_s(self) -> float:
        """For how long nothing gets through at a time."""
        return math.inf if self.heal_after_s is None else self.heal_after_s


class TcpWatch:
    """What TCP of some network namespaces notices from now on, by a process in each.

    Args:
        kind: of troubles.
    """

    def __init__(self, processes: Sequence[Process], kind: Literal["losses", "resets"]) -> None:
        self._kind: Literal["losses", "resets"] = kind
        self._processes = processes
        self._before = self._most = self._read()
        self._last = (time.monotonic(), self._before)

    def _read(self) -> list[int]:
        found = [_troubles(process) for process in self._processes]
        return [one.losses if self._kind == "losses" else one.resets for one in found]

    @property
    def noticed(self) -> int:
        """What was noticed so far, in all."""
        return sum(most - before for most, before in zip(self._most, self._before, strict=True))

    def look(self) -> int:
        """Return what was noticed so far, and was still believed a moment later."""
        (last_s, last), now_s, now = self._last, time.monotonic(), self._read()
        if now_s - last_s >= _SURE_S:
            sure = map(min, now, last)
            self._most, self._last = [*map(max, self._most, sure)], (now_s, now)
        return self.noticed


def _troubles(process: Process) -> TcpTroubles:
    """What TCP of its network namespace has noticed; nothing where that cannot be asked any more."""
    try:
        return process.kernel.tcp_troubles(process)
    except HarnessError:
        return TcpTroubles()


@dataclass(frozen=True, kw_only=True)
class LossyNetwork(NetworkFault):
    """Base of the faults by which packets do not arrive: a rule counts them, and TCP of the nodes finds out."""

    #: What TCP notices of it.
    noticed: ClassVar[Literal["losses", "resets"]] = "losses"

    def change(self, target: Target, ways: tuple[Way, ...]) -> Change:
        """What is done to these ways."""
        raise NotImplementedError

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ways = self.aim(target)
        stations = {station for way in ways for station in way}
        watched = [target.cluster.root(node) for node in stations - {COORDINATOR}]
        if COORDINATOR in stations:
            with contextlib.suppress(HarnessError):  # a command has none
                watched.append(target.cluster.coordinator())
        watch = TcpWatch(watched, self.noticed)

        def look(change: Applied) -> Counted | None:
            is_old = (
                bool(target.lifted_ns) and time.monotonic_ns() - target.lifted_ns > _AFTER_S * 1e9
            )
            noticed = (
                watch.noticed if is_old else watch.look()
            )  # what comes long after the end is not its doing
            packets = change.shown() if noticed else 0
            told = f"the kernel has counted {packets} packets that met it, and TCP of the nodes {noticed} {self.noticed}"
            path = NetworkPath(tuple(sorted(stations)))
            return (
                Counted(subject=path, source="TCP of the nodes", count=packets, seen=told)
                if packets
                else None
            )

        async with contextlib.aclosing(
            self.while_in_force(target, self.change(target, ways), look, _AFTER_S)
        ) as story:
            async for seen in story:
                yield seen


def _lease_s(target: Target) -> float:
    config = target.config
    return config.heartbeat_ms * config.lease_beats / 1000 if config is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class _Partition(LossyNetwork):
    """Nothing gets through."""

    others: ClassVar[tuple[str, ...]] = (*_FROM, _STORE)
    loud: ClassVar[bool] = False

    def change(self, target: Target, ways: tuple[Way, ...]) -> Change:
        port = target.cluster.store_port if self.apart_from == _STORE else 0
        return Block(ways=ways, loud=self.loud, port=port)


@dataclass(frozen=True, kw_only=True)
class Cut(_Partition):
    """Lose everything between two sides, in silence: neither hears that the other one is gone."""

    effect: ClassVar[str] = "what is sent between two sides never arrives, and neither side is told"
    evidence: ClassVar[str] = (
        "the kernel counts packets that it dropped by the rule, and TCP of the nodes what it sent again"
    )
    stands_for: ClassVar[str] = "switches and cables that fail without a reset"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SWITCH, incidents.NIC)
    impact: ClassVar[str] = (
        "leases end without a word, and the workers of the silent nodes are given up"
    )


@dataclass(frozen=True, kw_only=True)
class Reset(_Partition):
    """Answer every TCP segment between two sides with a reset: connections break loudly, and none can be made."""

    effect: ClassVar[str] = "connections between two sides break, and new ones are refused"
    evidence: ClassVar[str] = (
        "the kernel counts segments that it answered with a reset, and TCP of the nodes connections that were reset"
    )
    stands_for: ClassVar[str] = "firewalls and load balancers that lose their state"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.INFINIBAND,)
    impact: ClassVar[str] = (
        "connections end at once, and the workers of the nodes behind them are given up"
    )
    loud: ClassVar[bool] = True
    noticed: ClassVar[Literal["losses", "resets"]] = "resets"
