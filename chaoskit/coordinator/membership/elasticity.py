"""The elastic policy of a run beside its membership: the wanted size of the world.

A pure state machine, which takes in every event after the membership. The size that the policy
decides is compared with the size that the membership has. So a decision that was lost on the way,
for example with a coordinator, is made again.

-> elastic/policy.py decides the size and the nodes; elastic/settings.py: the settings.
coordinator/commit.py carries the decisions out; coordinator/handlers/on_size_request.py: requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.elastic.decisions import Answer, Decision, Evict, ResizeWorld
from chaoskit.elastic.policy import PolicyWorld
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.wire.messages import (
    LendNodes,
    NodeLost,
    NoticeCancelled,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
)


class Elasticity:
    """The elastic policy of one run.

    The policy's world begins once the first ranks train. Nodes, notices and requests that come
    before are kept, and are taken in then.

    Args:
        world: makes the policy's world from the policy and its first nodes.
    """

    def __init__(
        self,
        policy: ElasticPolicy,
        world: Callable[[ElasticPolicy, Iterable[str]], PolicyWorld] = PolicyWorld,
    ) -> None:
        self._policy, self._make_world = policy, world
        self._world: PolicyWorld | None = None
        self._nodes: dict[str, None] = {}  # that there were when the world began
        self._early_requests: list[
            tuple[events.SizeRequest, float]
        ] = []  # requests and their times
        self._leaving: dict[str, tuple[float, str]] = {}  # node -> by when, and why
        self._answers: dict[str, Answer] = {}
        self._requested_size = 0
        self._reason = ""  # of the last resize
        self._swap_by_s: float | None = None  # until then, a leaver may stay for its successor

    @property
    def requested_size(self) -> int:
        """The size of the last accepted request for a size; 0 without one."""
        return self._requested_size

    @property
    def lent(self) -> Mapping[str, str] | None:
        """Node that is lent -> the job that has it; None before the policy begins."""
        return self._world.lent if self._world is not None else None

    def farewell(self, node: str, now_s: float) -> tuple[float, str]:
        """Return how many seconds the workers of a leaving or evicted node may run on, and why.

        Return 0 and "" for any other node.
        """
        by_s, reason = self._leaving.get(node, (now_s, ""))
        return max(0.0, by_s - now_s), reason

    def next_s(self) -> float:
        """Return the time at which a :class:`~chaoskit.coordinator.membership.events.PolicyTick` is
        due; infinity for never.
        """
        return self._world.next_s() if self._world is not None else float("inf")

    def take_in(
        self, event: events.MembershipEvent, membership: Membership, now_s: float
    ) -> list[Decision]:
        """Return the decisions of the policy on an event that ``membership`` has taken in.

        The decisions include answers to requests, which the policy remembers. There are none before
        the first ranks train.

        Args:
            now_s: time of the membership, for which no time passes between coordinators.
        """
        if self._world is None:
            if isinstance(event, events.Settled):
                return self._begin(now_s)
            self._keep(event, membership, now_s)
            return []
        decisions = self._pass_on(self._world, event, membership, now_s)
        for node in sorted(self._leaving):
            if not membership.workers_on(node):
                self._leaving.pop(node, None)
                decisions += self._note(self._world.node_left(node, now_s))
        return decisions

    def wanted_resize(self, membership: Membership) -> events.Resized | None:
        """Return the size and the idle nodes that the membership should have; None if it has them.

        None is returned before the first ranks train, too.
        """
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

    # -- before the first ranks train --------------------------------------------------------------

    def _keep(self, event: events.MembershipEvent, membership: Membership, now_s: float) -> None:
        """Keep the nodes and requests of an event for the beginning of the policy's world."""
        for node in _arrived_nodes(event, membership):
            self._nodes[node] = None
            self._forget_notices(node, now_s)
        for node in _lost_nodes(event):
            self._nodes.pop(node, None)
            self._forget_notices(node, math.inf)
        if isinstance(event, NoticeCancelled):
            self._drop_notices(event.node)
        elif isinstance(event, events.SizeRequest):
            self._early_requests.append((event, now_s))

    def _forget_notices(self, node: str, now_s: float) -> None:
        """Drop the notices of a node if the machine of one of them was to be gone by ``now_s``.

        The node is another machine then, and none of its notices holds.
        """
        deadlines_s = [
            _deadline_s(request, received_s)
            for request, received_s in self._early_requests
            if isinstance(request, SpotNotice) and request.node == node
        ]
        if any(deadline_s <= now_s for deadline_s in deadlines_s):
            self._drop_notices(node)

    def _drop_notices(self, node: str) -> None:
        self._early_requests = [
            (request, received_s)
            for request, received_s in self._early_requests
            if not (isinstance(request, SpotNotice) and request.node == node)
        ]

    def _begin(self, now_s: float) -> list[Decision]:
        self._world = self._make_world(self._policy, self._nodes)
        decisions = self._note(self._world.tick(now_s))
        for request, received_s in self._early_requests:
            decisions += self._request(self._world, request, received_s, now_s)
        return decisions

    # -- afterwards --------------------------------------------------------------------------------

    def _pass_on(
        self,
        world: PolicyWorld,
        event: events.MembershipEvent,
        membership: Membership,
        now_s: float,
    ) -> list[Decision]:
        """Report an event to the policy's world, and return its decisions."""
        decisions: list[Decision] = []
        for node in _arrived_nodes(event, membership):
            decisions += self._note(world.node_arrived(node, now_s))
        for node in _lost_nodes(event):
            decisions += self._note(world.node_lost(node, now_s))
        if isinstance(event, events.PolicyTick):
            decisions += self._note(world.tick(now_s))
        elif isinstance(event, events.SizeRequest):
            decisions += self._request(world, event, now_s, now_s)
        return decisions

    def _request(
        self, world: PolicyWorld, request: events.SizeRequest, received_s: float, now_s: float
    ) -> list[Decision]:
        """Pass a request to the policy's world, and return its decisions.

        A request that is sent again, because a coordinator ended meanwhile, gets the same answer.
        """
        match request:
            case ScaleTo(name) | LendNodes(name) if name and name in self._answers:
                return [self._answers[name]]
            case ScaleTo(name, size, asked_by):
                decisions = self._note(world.scale(name, size, asked_by, now_s))
                if self._answers[name].accepted:
                    self._requested_size = size
                return decisions
            case LendNodes(name, job, nodes, grace_s):
                return self._note(world.lend(name, job, nodes, grace_s, now_s))
            case SpotNotice(node):
                return self._note(world.notice(node, _deadline_s(request, received_s), now_s))
            case NoticeCancelled(node):
                return self._note(world.cancel_notice(node, now_s))
            case ReturnNodes(job):
                return self._note(world.give_back(job, now_s))

    def _note(self, decisions: list[Decision]) -> list[Decision]:
        """Remember answers, leaving nodes and the reason of ``decisions``, and return these."""
        for decision in decisions:
            if isinstance(decision, ResizeWorld):
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
            else:
                self._answers[decision.request] = decision
        return decisions


def _arrived_nodes(event: events.MembershipEvent, membership: Membership) -> Iterable[str]:
    """Return the nodes that can be used from ``event`` on."""
    match event:
        case events.NodeJoined(node) | events.Fit(node):
            is_usable = node in membership.nodes and node not in membership.unfit
            return [node] if is_usable else []
        case events.Readmitted(nodes):
            return nodes
    return []


def _lost_nodes(event: events.MembershipEvent) -> Iterable[str]:
    """Return the nodes that cannot be used any more from ``event`` on."""
    match event:
        case NodeLost(node) | events.Unfit(node):
            return [node]
        case events.LeftOut(nodes):
            return nodes
    return []


def _deadline_s(notice: SpotNotice, received_s: float) -> float:
    """Return the time at which the node of a notice is taken away."""
    return received_s + max(0.0, notice.grace_s)
