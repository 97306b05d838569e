"""The size that a world comes to, once nothing happens any more: reckoned here anew, from what was asked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from chaoskit.coordinator.membership import events
from chaoskit.elastic import events as happenings

if TYPE_CHECKING:
    from simulation.processes.node import Agent
    from simulation.troubles.faults import Faults
    from simulation.world import World

#: Longer than a policy of these histories waits, with a lease, a start that hangs, and a test of all links.
SETTLING_S = 12.0
_LOOK_S = 0.5
_LAST_STEPS = 3


class SizeLaw:
    """Hears every event that is remembered, and lets a long history end when the world had time to settle."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked = 0
        self._noticed: dict[str, Agent] = {}
        self._gone_s: dict[
            str, float
        ] = {}  # of these: when they were to be gone, by the earliest notice
        self._began = False  # whether a world has trained
        self._lenders: set[str] = set()  # jobs that have nodes, if there were any to have
        self.checked = False

    def remembered(self, event: events.AnyEvent, now_s: float) -> None:
        """What a coordinator has written down, by the time of its membership."""
        policy = self._world.config.elastic
        match event:
            case events.Elastic(happenings.Scale(_, size)) if (
                policy is not None and size in policy.sizes
            ):
                self._asked = size
            case events.Elastic(happenings.Notice(node, deadline_s)):
                self._noticed[node] = self._world.agents[node]
                self._gone_s[node] = min(deadline_s, self._gone_s.get(node, math.inf))
            case events.Settled():
                self._began = True
            case events.NodeJoined(node) if (
                not self._began and self._gone_s.get(node, now_s + 1.0) <= now_s
            ):
                self._forget(
                    node
                )  # it comes after it was to be gone: that was another one of its name
            case events.Elastic(happenings.Demand(_, job)):
                self._lenders.add(job)
            case events.Elastic(happenings.Returned(job)):
                self._lenders.discard(job)
            case (
                events.NodeLost(node)
                | events.Unfit(node)
                | events.Elastic(happenings.NoticeCancelled(node))
            ):
                self._forget(node)
            case events.LeftOut(nodes):
                for node in nodes:
                    self._forget(node)

    def _forget(self, node: str) -> None:
        """The node is there to stay, or is another machine now."""
        self._noticed.pop(node, None)
        self._gone_s.pop(node, None)

    def watch(self, faults: Faults) -> None:
        """Train on until ``SETTLING_S`` after the last fault, and look then."""
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
        self._look()
        world.steps = world.laws.high + _LAST_STEPS

    @property
    def _is_being_repaired(self) -> bool:
        """Whether a new world forms, or a rank has ended whose node may still be waited for."""
        membership = self._world.coordinator.plane.membership
        dead = any(not self._world.workers[worker].alive for worker in membership.members)
        return dead or membership.is_forming

    def _look(self) -> None:
        world, membership, laws = (
            self._world,
            self._world.coordinator.plane.membership,
            self._world.laws,
        )
        policy, elasticity = world.config.elastic, world.coordinator.plane._elasticity
        if (
            world.record.losses
            or world.barren
            or policy is None
            or elasticity is None
            or elasticity._world is None
        ):
            return
        lent = elasticity._world.lent
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
