"""How large the world shall be, and who is in it: a state machine without a clock.

``handle(event, now_s)`` answers with decisions, each with its reason for the journal; ``next_s()`` says when it wants
a :class:`Tick`. Whoever carries the decisions out tells what came of it: :class:`Left`, :class:`Lost`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from chaoskit.elastic.events import (
    Answer,
    Arrived,
    Decision,
    Demand,
    Event,
    Evict,
    Leave,
    Left,
    Lost,
    Notice,
    NoticeCancelled,
    Resize,
    Returned,
    Scale,
    Tick,
)
from chaoskit.elastic.settings import ElasticPolicy, validate_policy
from chaoskit.errors import BadInput
from chaoskit.plaintext import plural

#: Of a notice's time: a world too small without the node keeps it for this share of it, and then it must leave; ...
_HOLD_SHARE = 0.5
#: ... a node that has not left by this share is made to, so that it is out before the machine is, ...
_DRAIN_SHARE = 0.8
#: ... and its workers may say goodbye until this share.
_FAREWELL_SHARE = 0.9


@dataclass(slots=True)
class _Node:
    cost: float
    arrival: int
    member: bool = False
    lent_to: str = ""
    leave_by_s: float = math.inf  # finite: it is leaving
    hold_until_s: float = math.inf  # finite: it had a notice
    drain_by_s: float = math.inf
    farewell_by_s: float = -math.inf


class World:
    """Sizes and members of a job's world.

    Args:
        policy: checked again.
        nodes: that are there at the start; the first :class:`Tick` takes as many as are allowed.

    Raises:
        BadInput: see :func:`chaoskit.elastic.settings.validate_policy`.
    """

    def __init__(self, policy: ElasticPolicy, nodes: Iterable[str] = ()) -> None:
        validate_policy(policy)
        self.policy = policy
        self.size = 0
        self.target = policy.sizes[-1]
        self._nodes: dict[str, _Node] = {}
        self._arrivals = 0
        self._snoozed_until_s = -math.inf
        self._room_since_s: float | None = None
        self._vacant = 0
        self._vacant_until_s = math.inf
        for node in nodes:
            self._arrive(Arrived(node))

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the world, in the order of their arrival."""
        return tuple(name for name, node in self._nodes.items() if node.member)

    @property
    def lent(self) -> dict[str, str]:
        """The nodes that jobs of higher priority have, each with its job."""
        return {name: node.lent_to for name, node in self._nodes.items() if node.lent_to}

    def next_s(self) -> float:
        """When to call with a :class:`Tick`; infinity for never."""
        moments = [node.leave_by_s for node in self._nodes.values()]
        moments += [node.hold_until_s for node in self._nodes.values() if node.member]
        if self._vacant:
            moments.append(self._vacant_until_s)
        if self._room_since_s is not None:
            moments.append(self._growth_s(self._room_since_s))
        return min(moments, default=math.inf)

    def handle(self, event: Event, now_s: float) -> list[Decision]:
        """What follows from ``event``; ``now_s`` never falls.

        Raises:
            BadInput: for an event that makes no sense, such as a demand for no nodes.
        """
        decisions: list[Decision] = []
        hurried: list[Leave] = []
        leave_by_s = now_s + self.policy.graceful_shutdown_timeout_s
        match event:
            case Scale():
                cause = f"{event.asked_by or 'a request'} asked for {plural(event.size, 'node')}"
                decisions.append(self._scale(event, now_s))
            case Arrived():
                cause = f"{event.node} arrived"
                self._arrive(event)
            case Lost():
                cause = f"{event.node} was lost"
                self._lose(event.node, now_s)
            case Left():
                cause = f"{event.node} has left"
                if event.node in self._nodes:
                    self._nodes[event.node].leave_by_s = math.inf
            case Notice():
                cause = f"{event.node} will be taken away"
                hurried = self._notice(event, now_s)
            case NoticeCancelled():
                cause = f"{event.node} is not taken away after all"
                self._take_back(event.node, now_s)
            case Demand():
                cause = f"{event.job} has priority"
                leave_by_s = min(leave_by_s, now_s + event.grace_s)
                decisions.append(self._lend(event))
            case Returned():
                cause = f"{event.job} gave its nodes back"
                for node in self._nodes.values():
                    if node.lent_to == event.job:
                        node.lent_to = ""
            case Tick():
                cause = ""
        decisions += self._evict(now_s)  # first: a node that is out may be in the next world
        decisions += self._replan(cause, hurried, leave_by_s, now_s)
        return decisions + self._evict(now_s)  # those who were given no time

    # -- events ---------------------------------------------------------------------------------------------------

    def _arrive(self, event: Arrived) -> None:
        known = self._nodes.get(event.node)
        if known is None:
            self._arrivals += 1
            self._nodes[event.node] = _Node(event.cost, self._arrivals)
        else:
            known.cost, known.lent_to = event.cost, ""

    def _lose(self, name: str, now_s: float) -> None:
        node = self._nodes.pop(name, None)
        if node is None or not node.member:
            return
        if not self._vacant:
            self._vacant_until_s = now_s + self.policy.faulty_scale_down_timeout_s
        self._vacant += 1

    def _notice(self, event: Notice, now_s: float) -> list[Leave]:
        """The node's new time to leave, if it is leaving already."""
        node = self._nodes.get(event.node)
        if node is None:
            return []
        left_s = max(0.0, event.deadline_s - now_s)
        node.hold_until_s = min(node.hold_until_s, now_s + _HOLD_SHARE * left_s)
        if now_s + _DRAIN_SHARE * left_s < node.drain_by_s:
            node.drain_by_s, node.farewell_by_s = (
                now_s + _DRAIN_SHARE * left_s,
                now_s + _FAREWELL_SHARE * left_s,
            )
        if not node.drain_by_s < node.leave_by_s < math.inf:
            return []
        node.leave_by_s = node.drain_by_s
        return [Leave(event.node, node.drain_by_s)]

    def _take_back(self, name: str, now_s: float) -> None:
        """There was a notice, and the node stays: it may be used again, at once."""
        node = self._nodes.get(name)
        if node is None or node.hold_until_s == math.inf:
            return
        node.hold_until_s, node.drain_by_s, node.farewell_by_s = math.inf, math.inf, -math.inf
        if not node.lent_to:
            node.leave_by_s = math.inf
        self._room_since_s = now_s - self.policy.scaling_timeout_s  # it is no new capacity

    def _scale(self, event: Scale, now_s: float) -> Answer:
        if event.size not in self.policy.sizes:
            return Answer(
                event.request,
                False,
                f"{event.size} is no allowed size: use {self.policy.sizes_in_words}",
            )
        self.target = event.size
        room = self.policy.fit(min(self.target, len(self._usable(now_s))))
        if room < event.size:
            return Answer(
                event.request, True, f"there is room for {room}: it grows when nodes come"
            )
        if room > self.size:
            self._room_since_s = now_s - self.policy.scaling_timeout_s  # who asks has waited enough
            if self.size and now_s < self._snoozed_until_s:
                return Answer(
                    event.request,
                    True,
                    f"it grows in {self._snoozed_until_s - now_s:g} s: it has just grown",
                )
        return Answer(event.request, True, f"its size will be {event.size}")

    def _lend(self, event: Demand) -> Answer:
        if event.nodes < 1:
            raise BadInput("nodes", event.nodes, "ask for 1 or more")
        if not event.grace_s >= 0:
            raise BadInput("grace_s", event.grace_s, "use 0 or more")
        healthy = [node for node in self._nodes.values() if self._healthy(node)]
        # The smallest world must go on, unless it cannot already.
        free = max(0, len(healthy) - self.policy.sizes[0]) if self.size else len(healthy)
        cheapest = sorted(healthy, key=lambda node: (node.member, node.cost, -node.arrival))[
            : min(free, event.nodes)
        ]
        for node in cheapest:
            node.lent_to = event.job
        names = tuple(
            name for name, node in self._nodes.items() if any(node is one for one in cheapest)
        )
        if len(names) < event.nodes:
            rest = (
                f"only {len(names)} of {event.nodes}: the smallest world is {self.policy.sizes[0]}"
            )
            return Answer(event.request, bool(names), rest, names)
        return Answer(event.request, True, f"{', '.join(names)}: yours once they have left", names)

    # -- decisions ------------------------------------------------------------------------------------------------

    def _healthy(self, node: _Node) -> bool:
        return not node.lent_to and node.leave_by_s == math.inf and node.hold_until_s == math.inf

    def _usable(self, now_s: float) -> list[str]:
        """The nodes that can be in the world, best first. Those with a notice only if it could not train without."""
        usable = [name for name, node in self._nodes.items() if self._healthy(node)]
        if not self.policy.fit(len(usable)):
            usable += [
                name
                for name, node in self._nodes.items()
                if node.member and not node.lent_to and now_s < node.hold_until_s < math.inf
            ]
        # Members stay before others come; of the members the costly ones, of the others those that came first.
        return sorted(usable, key=lambda name: self._worth(self._nodes[name]), reverse=True)

    def _worth(self, node: _Node) -> tuple[bool, bool, float, int]:
        healthy = node.hold_until_s == math.inf
        return healthy, node.member, node.cost if node.member else 0.0, -node.arrival

    def _growth_s(self, since_s: float) -> float:
        return max(since_s + self.policy.scaling_timeout_s, self._snoozed_until_s)

    def _next_size(self, usable: int, now_s: float) -> int:
        best = self.policy.fit(min(usable, self.target))
        if best <= self.size:
            self._room_since_s = None
        if not self.size:
            return best
        if best > self.size:
            if self._room_since_s is None:
                self._room_since_s = now_s
            return best if now_s >= self._growth_s(self._room_since_s) else self.size
        waits = now_s < self._vacant_until_s and usable + self._vacant >= self.size <= self.target
        return self.size if waits else best

    def _replan(
        self, cause: str, hurried: list[Leave], leave_by_s: float, now_s: float
    ) -> list[Decision]:
        usable = self._usable(now_s)
        old_size, old = self.size, set(self.members)
        self.size = self._next_size(len(usable), now_s)
        if self.size > old_size:
            self._room_since_s = None
            self._snoozed_until_s = now_s + self.policy.scale_up_snooze_time_s
        new = set(usable[: self.size])
        self._vacant = min(self._vacant, self.size - len(new))
        if not self._vacant:
            self._vacant_until_s = math.inf
        leaves, swap_by_s = list(hurried), None
        for name in sorted(old - new):
            node = self._nodes[name]
            node.member, node.leave_by_s = False, min(leave_by_s, node.drain_by_s)
            leaves.append(Leave(name, node.leave_by_s))
            if new - old:
                hold_s = min(node.hold_until_s, now_s + _HOLD_SHARE * (node.leave_by_s - now_s))
                swap_by_s = hold_s if swap_by_s is None else min(hold_s, swap_by_s)
        for name in new:
            self._nodes[name].member = True
        if self.size == old_size and new == old and not hurried:
            return []
        joins = tuple(name for name in self.members if name not in old)
        reason = _resize_sentence(cause, old_size, self.size)
        return [Resize(self.size, self.members, joins, tuple(leaves), reason, swap_by_s)]

    def _evict(self, now_s: float) -> list[Decision]:
        """Ends the stay of nodes whose time to leave is over."""
        late = [name for name, node in self._nodes.items() if node.leave_by_s <= now_s]
        for name in late:
            self._nodes[name].leave_by_s = math.inf
        by_s = {name: max(now_s, self._nodes[name].farewell_by_s) for name in late}
        return [Evict(name, "it has not left in time", by_s[name]) for name in late]


def _resize_sentence(cause: str, before: int, after: int) -> str:
    """``node2 was lost, so the world changes from 4 nodes to 3``. ``cause`` is empty where a wait ended."""
    if not cause and not before:
        cause = "enough nodes are there"
    elif not cause:
        cause = f"the wait for {'more nodes' if after > before else 'a replacement'} is over"
    if not before:
        return f"{cause}, so training runs on {plural(after, 'node')}"
    if not after:
        return f"{cause}, so training waits for more nodes"
    if after == before:
        return f"{cause}, and the world stays at {plural(after, 'node')}"
    return f"{cause}, so the world changes from {plural(before, 'node')} to {after}"
