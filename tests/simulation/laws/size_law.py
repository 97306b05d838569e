"""The law on the size of a world once nothing happens, computed from the requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from chaoskit.coordinator.membership import events
from chaoskit.wire.messages import (
    LendNodes,
    NodeLost,
    NoticeCancelled,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
)

if TYPE_CHECKING:
    from simulation.processes.node import Agent
    from simulation.troubles.faults import Faults
    from simulation.world import World

#: Time for a world to settle: it covers the waits of a policy, a lease, a hanging start, and tests
#: of links.
SETTLING_S = 12.0
_LOOK_S = 0.5
_LAST_STEPS = 3


class SizeLaw:
    """Follows every event of the log, and ends a long history once the world had time to settle."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked = 0
        self._noticed: dict[str, Agent] = {}
        self._gone_s: dict[str, float] = {}  # node with a notice -> when it was to be gone
        self._began = False  # a world has trained
        self._lenders: set[str] = set()  # jobs that may have borrowed nodes
        self.checked = False

    def logged(self, event: events.MembershipEvent, now_s: float) -> None:
        """Take in an event that a coordinator has logged, with the time of its membership."""
        policy = self._world.config.elastic
        match event:
            case ScaleTo(_, size) if policy is not None and size in policy.sizes:
                self._asked = size
            case SpotNotice(node, grace_s):
                self._noticed[node] = self._world.agents[node]
                deadline_s = now_s + max(0.0, grace_s)
                self._gone_s[node] = min(deadline_s, self._gone_s.get(node, math.inf))
            case events.Settled():
                self._began = True
            case events.NodeJoined(node) if (
                not self._began and self._gone_s.get(node, now_s + 1.0) <= now_s
            ):
                self._forget(
                    node
                )  # it comes after its deadline: the notice was for an earlier node of this name
            case LendNodes(_, job):
                self._lenders.add(job)
            case ReturnNodes(job):
                self._lenders.discard(job)
            case NodeLost(node) | events.Unfit(node) | NoticeCancelled(node):
                self._forget(node)
            case events.LeftOut(nodes):
                for node in nodes:
                    self._forget(node)

    def _forget(self, node: str) -> None:
        """Forget the notice of a node that stays, or is another machine now."""
        self._noticed.pop(node, None)
        self._gone_s.pop(node, None)

    def watch(self, faults: Faults) -> None:
        """Let the job train until ``SETTLING_S`` after the last fault, then check the size."""
        world = self._world
        if world.over():
            return
        since_s = max(
            faults.last_s,
            world.healed_s,
            world.coordinator.began_s,
            world.coordinator.awake_since_s,
        )
        if world.engine.now_s < since_s + SETTLING_S:
            world.engine.after(_LOOK_S, self.watch, faults)
            return
        if self._is_being_repaired:  # the patience of the history is for that
            world.engine.after(_LOOK_S, self.watch, faults)
            return
        self._check()
        world.steps = world.laws.high + _LAST_STEPS

    @property
    def _is_being_repaired(self) -> bool:
        """True if a new world forms, or a rank has ended and its node may still come back."""
        membership = self._world.coordinator.plane.membership
        dead = any(not self._world.workers[worker].alive for worker in membership.members)
        return dead or membership.is_forming

    def _check(self) -> None:
        world, membership, laws = (
            self._world,
            self._world.coordinator.plane.membership,
            self._world.laws,
        )
        policy, lent = world.config.elastic, world.coordinator.plane.lent
        if world.log.losses or world.barren or policy is None or lent is None:
            return
        laws.require(
            self._lenders.issuperset(lent.values()),
            f"nodes are lent to jobs that gave them back: {lent}",
        )
        there = set(membership.nodes) - set(membership.left_out) - membership.unfit
        going = {node for node, agent in self._noticed.items() if world.agents[node] is agent}
        room = policy.fit(min(len(there - going - lent.keys()), self._asked or policy.sizes[-1]))
        if not room:
            return  # the world is empty, or lives on nodes with a notice
        self.checked = True
        ranks = laws.plans[max(laws.plans)].members
        laws.require(
            len(ranks) == room,
            f"{len(ranks)} ranks train where there is room for {room}: {sorted(there)}",
        )
