"""Sides of a network fault, and the changes of the traffic between them.

-> substrate/core/traffic.py: the changes as data, and the rules that they lead to.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from chaoskit.errors import BadInput
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Applied
from chaoskit.substrate.core.traffic import Change, Way, between, towards
from chaoskit.vocabulary import HUNG_CAUSES

#: Name of the coordinator as a station of the network, beside the names of nodes.
COORDINATOR = "coordinator"
#: Words for :attr:`Sides.apart_from` that every network fault accepts.
ANY_OTHERS = ("all", "ranks", "coordinator")
_DIRECTIONS = ("both", "in", "out")
#: Causes of the losses of workers that cannot be reached.
CUT_OFF_CAUSES = HUNG_CAUSES | {"node lost", "unreachable"}
#: Description of the undo of a network fault, for the catalogue.
UNDO = "the rule is removed; the network vanishes with the run"
#: Example for the catalogue, on a substrate where each node has a network of its own.
EXAMPLE = """import pytest

from faults import {name}


@pytest.mark.chaos(substrate="netns")
def test_{name}(chaos):
    chaos.run("gpt", nodes=4, steps=60, faults=[{fault}])"""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Two sides of a network, and the direction and duration of the trouble between them.

    These are the parameters that network faults add to those of a fault. A role that stands for
    several ranks, such as ``minority``, gives one fault a rank: each of them is apart from all,
    from each other too. ``side`` keeps several ranks together.

    Args:
        side: further ranks; their nodes are on the same side as that of ``rank``.
        apart_from: ``all`` others and the coordinator, the other ``ranks`` only, the
            ``coordinator`` only, or a tuple of ranks. For :class:`Cut` and :class:`Reset` also the
            ``store`` only, in which the members of a new membership find each other; agents and
            coordinator still reach each other then.
        direction: ``both``, only what comes ``in`` to this side, or only what goes ``out``.
        heal_after_s: seconds after the act at which it ends; None for the end of the run.
    """

    side: tuple[int, ...] = ()
    apart_from: str | tuple[int, ...] = "all"
    direction: str = "both"
    heal_after_s: float | None = None

    def validate_sides(
        self, rank: int | str, nodes: int, others: Sequence[str] = ANY_OTHERS
    ) -> None:
        """Raise BadInput if these sides cannot exist in a run of ``nodes`` nodes.

        Args:
            rank: the rank that the fault strikes.
            others: words that ``apart_from`` accepts beside ranks.
        """
        _require_ranks("side", self.side, nodes)
        if isinstance(self.apart_from, tuple):
            _require_ranks("apart_from", self.apart_from, nodes)
            if both := {rank, *self.side}.intersection(self.apart_from):
                raise BadInput(
                    "apart_from", self.apart_from, f"leave out {sorted(both)}: on this side already"
                )
        elif self.apart_from not in others:
            raise BadInput(
                "apart_from",
                self.apart_from,
                f"use one of {', '.join(others)}, or a tuple of ranks",
            )
        if self.direction not in _DIRECTIONS:
            raise BadInput("direction", self.direction, f"use one of {', '.join(_DIRECTIONS)}")
        if self.heal_after_s is not None:
            require_seconds("heal_after_s", self.heal_after_s, above_0=True)

    def near(self, target: Target) -> list[str]:
        """Return the nodes on the rank's side: the target's, and those of the ranks in ``side``.

        Ranks of ``side`` that no process holds are left out.
        """
        return [target.node, *(target.places[rank] for rank in self.side if rank in target.places)]

    def ways(self, target: Target) -> tuple[Way, ...]:
        """Return the directed paths that are struck, by the nodes that had the ranks at the act."""
        near = self.near(target)
        if isinstance(self.apart_from, tuple):
            far = [target.places[rank] for rank in self.apart_from if rank in target.places]
        else:
            nodes = [node for node in target.cluster.nodes if node not in near]
            far = {"all": [*nodes, COORDINATOR], "ranks": nodes}.get(self.apart_from, [COORDINATOR])
        if self.direction == "both":
            return between(near, far)
        return towards(near, far) if self.direction == "out" else towards(far, near)

    def aim(self, target: Target, outage_s: float | None = None) -> tuple[Way, ...]:
        """Return the paths that are struck, and set the nodes that may be lost by it.

        These are ``target.struck_nodes``.

        Args:
            outage_s: longest time for which nothing gets through; None: until the fault heals.
        """
        if outage_s is None:
            outage_s = math.inf if self.heal_after_s is None else self.heal_after_s
        ways = self.ways(target)
        stations = {station for way in ways for station in way}
        # a node that is silent until its lease ends is lost; of two separated nodes, either may be
        silent = COORDINATOR in stations and outage_s >= _lease_s(target)
        target.struck_nodes = set(self.near(target)) if silent else stations - {COORDINATOR}
        return ways


def named_ranks(fault: Fault) -> tuple[int, ...]:
    """Return the ranks that a fault names: its own, and those of both sides of a partition."""
    ranks = [fault.rank] if isinstance(fault.rank, int) else []
    if isinstance(fault, Sides):
        ranks += fault.side
        ranks += fault.apart_from if isinstance(fault.apart_from, tuple) else ()
    return tuple(dict.fromkeys(ranks))


def _require_ranks(field: str, ranks: Sequence[int], nodes: int) -> None:
    """Raise BadInput if one of these ranks does not exist in a run of ``nodes`` nodes."""
    for rank in ranks:
        if not 0 <= rank < nodes:
            raise BadInput(
                field, ranks, f"use ranks from 0 to {nodes - 1}: the run has {nodes} nodes"
            )


def _lease_s(target: Target) -> float:
    """Return the time after which a silent node is lost, in seconds; 0 for a command."""
    config = target.config
    return config.heartbeat_ms * config.lease_beats / 1000 if config is not None else 0.0


async def change_network(
    target: Target,
    change: Change,
    look: Callable[[Applied], Evidence | None],
    heal_after_s: float | None,
    after_s: float = 0.0,
) -> AsyncGenerator[Evidence]:
    """Change the network until it heals, and yield evidence of the change.

    Evidence that does not come until ``after_s`` after the end never comes.

    Args:
        look: returns evidence from the applied change, or None.
        heal_after_s: seconds after the act at which it heals; None: with the run.
        after_s: seconds after its end in which its effects may still be noticed.
    """
    with target.applied(change) as applied:
        target.release()
        target.last_word = partial(look, applied)
        proof = await target.seen(target.last_word, limit_s=heal_after_s)
        if proof is not None:
            yield proof
        if heal_after_s is None:
            await target.until_end()
        else:
            await target.sleep(heal_after_s - target.seconds_since)
    target.lifted()
    if proof is None and (
        proof := await target.seen(target.last_word, limit_s=target.seconds_since + after_s)
    ):
        yield proof
