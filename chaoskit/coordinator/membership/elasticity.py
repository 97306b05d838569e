"""How large the world of a run shall be: feeds its elastic policy with what happens to the run. A pure state machine.

It sees every event that the membership takes in, and after that one. What it wants is compared with what the membership
has: so whatever was lost on the way, as with a coordinator, is wanted again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TypeGuard

from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.happenings import happenings_of
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.elastic import events as happenings
from chaoskit.elastic.events import Answer, Decision, Evict, Resize
from chaoskit.elastic.policy import World
from chaoskit.elastic.settings import ElasticPolicy


class Elasticity:
    """The policy's world begins once the first ranks train; what happens before is taken in then.

    Args:
        happenings_of: what the policy is told of an event, by the live nodes and those that are not fit.
    """

    def __init__(
        self,
        policy: ElasticPolicy,
        happenings_of: Callable[
            [events.AnyEvent, Collection[str], Collection[str]], list[happenings.Event]
        ] = happenings_of,
    ) -> None:
        self._policy, self._happenings_of = policy, happenings_of
        self._world: World | None = None
        self._nodes: dict[str, None] = {}  # that there were when the world began
        self._early: list[happenings.Event] = []
        self._leaving: dict[str, tuple[float, str]] = {}  # node -> by when, and why
        self._answers: dict[str, Answer] = {}
        self._wanted = 0
        self._reason = ""  # of the last resize
        self._swap_by_s: float | None = None  # until then who leaves may stay for its successor

    @property
    def wanted(self) -> int:
        """The size that somebody has asked for last; 0 while nobody has."""
        return self._wanted

    def farewell(self, node: str, now_s: float) -> tuple[float, str]:
        """How many seconds the workers of a node that leaves or is evicted may take before they end, and why."""
        by_s, reason = self._leaving.get(node, (now_s, ""))
        return max(0.0, by_s - now_s), reason

    def next_s(self) -> float:
        """When to take in a :class:`chaoskit.elastic.events.Tick`; infinity for never."""
        return self._world.next_s() if self._world is not None else float("inf")

    def take_in(
        self, event: events.AnyEvent, membership: Membership, now_s: float
    ) -> list[Decision]:
        """What the policy says to an event that ``membership`` has taken in.

        ``now_s``: of the membership, for which no time passes between coordinators.
        """
        if self._world is None and isinstance(event, events.Settled):
            return self._begin(now_s)
        decisions: list[Decision] = []
        for happening in self._happenings_of(event, membership.nodes, membership.unfit):
            decisions += self._tell(happening, now_s)
        for node in sorted(self._leaving):
            if not membership.workers_on(node):
                self._leaving.pop(node, None)
                decisions += self._tell(happenings.Left(node), now_s)
        return decisions

    def wish(self, membership: Membership) -> events.Resized | None:
        """What the membership should be told, if that is not what it knows."""
        if self._world is None:
            return None
        members = self._world.members
        size = max(len(members), self._policy.sizes[0])
        idle = (
            frozenset(membership.nodes).difference(members)
            if self._world.size
            else frozenset[str]()
        )
        if (size, idle) == (membership.size, membership.idle):
            return None
        return events.Resized(size, tuple(sorted(idle)), self._reason, self._swap_by_s)

    def _begin(self, now_s: float) -> list[Decision]:
        self._world = World(self._policy, self._nodes)
        decisions = self._tell(happenings.Tick(), now_s)
        for happening in self._early:
            decisions += self._tell(happening, now_s)
        return decisions

    def _tell(self, happening: happenings.Event, now_s: float) -> list[Decision]:
        if self._world is None:
            self._collect(happening, now_s)
            return []
        request = getattr(happening, "request", "")
        if (
            request and request in self._answers
        ):  # asked again, as a coordinator has ended meanwhile
            return [self._answers[request]]
        decisions = self._world.handle(happening, now_s)
        for decision in decisions:
            if isinstance(decision, Resize):
                self._leaving |= {
                    leave.node: (leave.by_s, decision.reason) for leave in decision.leaves
                }
                for node in decision.members:
                    self._leaving.pop(node, None)
                self._reason = decision.reason
                if decision.leaves:
                    self._swap_by_s = decision.swap_by_s
            elif isinstance(decision, Evict):
                self._leaving[decision.node] = decision.by_s, decision.reason
            elif isinstance(decision, Answer):
                self._answers[decision.request] = decision
                if isinstance(happening, happenings.Scale) and decision.accepted:
                    self._wanted = happening.size
        return decisions

    def _collect(self, happening: happenings.Event, now_s: float) -> None:
        match happening:
            case happenings.Arrived(node):
                self._nodes[node] = None
                self._forget_notices(node, now_s)
            case happenings.Lost(node):
                self._nodes.pop(node, None)
                self._forget_notices(node, math.inf)
            case happenings.NoticeCancelled(node):
                self._early = [one for one in self._early if not _is_notice_of(one, node)]
            case _:
                self._early.append(happening)

    def _forget_notices(self, node: str, now_s: float) -> None:
        """A machine that was to be gone by ``now_s`` was another one of that name: none of its notices holds."""
        notices = [one for one in self._early if _is_notice_of(one, node)]
        if any(one.deadline_s <= now_s for one in notices):
            self._early = [one for one in self._early if one not in notices]


def _is_notice_of(happening: happenings.Event, node: str) -> TypeGuard[happenings.Notice]:
    return isinstance(happening, happenings.Notice) and happening.node == node
