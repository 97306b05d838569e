"""Size and nodes of the world: a state machine without a clock.

Each method that reports an event, or passes a request, returns the decisions that follow, each with
its reason for the journal. ``next_s()`` returns the time at which :meth:`PolicyWorld.tick` is due.
The caller carries the decisions out and reports the results: :meth:`PolicyWorld.node_left`,
:meth:`PolicyWorld.node_lost`.

-> coordinator/membership/elasticity.py: the caller in a run; elastic/settings.py: the settings.
coordinator/membership/next_world.py: which workers of the nodes get a rank. elastic/scaling.py: the
learning rate that follows the size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chaoskit.elastic.decisions import Answer, Decision, Evict, Leave, ResizeWorld
from chaoskit.elastic.settings import ElasticPolicy, validate_policy
from chaoskit.errors import BadInput
from chaoskit.plaintext import plural

#: Shares of the time of a notice. A world that is too small without the node keeps it so long; ...
_HOLD_SHARE = 0.5
#: ... a node that has not left is evicted at this share, so that it is out before the machine is;
#: ...
_DRAIN_SHARE = 0.8
#: ... and its workers may run for their own preparations until this share.
_FAREWELL_SHARE = 0.9


@dataclass(slots=True)
class _Node:
    """A node that exists, in the world or not.

    Attributes:
        cost: cost of its leaving; the least costly nodes leave first.
        arrival: number of its arrival, from 1.
        member: it is in the world.
        lent_to: the job of higher priority that has it; "" for none.
        leave_by_s: time of its eviction; infinity if it is not to leave.
        hold_until_s: time until which a world that is too small keeps it in spite of a notice;
            infinity without a notice.
        drain_by_s: time of its eviction by a notice; infinity without a notice.
        farewell_by_s: time until which evicted workers may run on by a notice.
    """

    cost: float
    arrival: int
    member: bool = False
    lent_to: str = ""
    leave_by_s: float = math.inf
    hold_until_s: float = math.inf
    drain_by_s: float = math.inf
    farewell_by_s: float = -math.inf


class PolicyWorld:
    """Size and members of a job's world.

    Its times come from the caller, in seconds on one clock.

    Args:
        policy: the policy, which is validated again.
        nodes: nodes that exist at the start; the first :meth:`tick` takes as many as are
            allowed.

    Attributes:
        size: number of nodes of the world; 0 while it waits for enough nodes.
        target: the size to aim at, from the last request; the largest one before.

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
        self._vacant_places = 0
        self._vacant_until_s = math.inf
        for node in nodes:
            self._add(node)

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the world, in the order of their arrival."""
        return tuple(name for name, node in self._nodes.items() if node.member)

    @property
    def lent(self) -> dict[str, str]:
        """The nodes that jobs of higher priority have -> their jobs."""
        return {name: node.lent_to for name, node in self._nodes.items() if node.lent_to}

    def next_s(self) -> float:
        """Return the time at which :meth:`tick` is due; infinity for never."""
        moments = [node.leave_by_s for node in self._nodes.values()]
        moments += [node.hold_until_s for node in self._nodes.values() if node.member]
        if self._vacant_places:
            moments.append(self._vacant_until_s)
        if self._room_since_s is not None:
            moments.append(self._growth_s(self._room_since_s))
        return min(moments, default=math.inf)

    # -- events and requests -----------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Decision]:
        """Return the decisions that are due at ``now_s``, without any other event."""
        return self._decide("", now_s)

    def scale(self, request: str, size: int, asked_by: str, now_s: float) -> list[Decision]:
        """Aim at a world of ``size`` nodes from now on, as far as there are as many.

        The first decision is the :class:`Answer` to ``request``. It is a refusal if ``size`` is not
        among the sizes of the policy.

        Args:
            request: unique name of the request, for the answer.
            asked_by: the source of the request, for the reason of a resize; "" for none.
        """
        cause = f"{asked_by or 'a request'} asked for {plural(size, 'node')}"
        return [self._scale(request, size, now_s), *self._decide(cause, now_s)]

    def node_arrived(self, name: str, now_s: float, cost: float = 0.0) -> list[Decision]:
        """Take in a node that can be used. A known node is not lent any more.

        ``cost``: cost of its leaving; the least costly nodes leave first.
        """
        self._add(name, cost)
        return self._decide(f"{name} arrived", now_s)

    def node_lost(self, name: str, now_s: float) -> list[Decision]:
        """Remove a node, with or without a request to leave.

        The place of a member is kept for a replacement, for ``faulty_scale_down_timeout_s``.
        """
        node = self._nodes.pop(name, None)
        if node is not None and node.member:
            if not self._vacant_places:
                self._vacant_until_s = now_s + self.policy.faulty_scale_down_timeout_s
            self._vacant_places += 1
        return self._decide(f"{name} was lost", now_s)

    def node_left(self, name: str, now_s: float) -> list[Decision]:
        """Note that a node has left the world as requested. It still exists, and can be used."""
        if name in self._nodes:
            self._nodes[name].leave_by_s = math.inf
        return self._decide(f"{name} has left", now_s)

    def notice(self, name: str, deadline_s: float, now_s: float) -> list[Decision]:
        """Have a node leave that will be taken away at ``deadline_s``.

        A world that would be too small without the node keeps it for half of that time. An unknown
        node is ignored.
        """
        return self._decide(
            f"{name} will be taken away",
            now_s,
            hurried_leaves=self._notice(name, deadline_s, now_s),
        )

    def cancel_notice(self, name: str, now_s: float) -> list[Decision]:
        """Keep a node that is not taken away after all. It may be used again at once.

        A node without a notice is unchanged.
        """
        node = self._nodes.get(name)
        if node is not None and node.hold_until_s < math.inf:
            node.hold_until_s, node.drain_by_s, node.farewell_by_s = math.inf, math.inf, -math.inf
            if not node.lent_to:
                node.leave_by_s = math.inf
            # the node is no new capacity
            self._room_since_s = now_s - self.policy.scaling_timeout_s
        return self._decide(f"{name} is not taken away after all", now_s)

    def lend(
        self, request: str, job: str, nodes: int, grace_s: float, now_s: float
    ) -> list[Decision]:
        """Lend so many nodes to a job of higher priority, which waits for them up to ``grace_s``.

        The first decision is the :class:`Answer` to ``request``. It may name fewer nodes: the
        smallest world goes on. Without any node, it is a refusal.

        Raises:
            BadInput: for fewer than 1 node, and for a grace below 0.
        """
        reply = self._lend(request, job, nodes, grace_s)
        return [reply, *self._decide(f"{job} has priority", now_s, grace_s=grace_s)]

    def give_back(self, job: str, now_s: float) -> list[Decision]:
        """Take back all nodes that ``job`` has."""
        for node in self._nodes.values():
            if node.lent_to == job:
                node.lent_to = ""
        return self._decide(f"{job} gave its nodes back", now_s)

    def _add(self, name: str, cost: float = 0.0) -> None:
        node = self._nodes.get(name)
        if node is None:
            self._arrivals += 1
            self._nodes[name] = _Node(cost, self._arrivals)
        else:
            node.cost, node.lent_to = cost, ""

    def _notice(self, name: str, deadline_s: float, now_s: float) -> list[Leave]:
        """Set the times of a notice.

        Return the new time to leave of a node that leaves already, if it is earlier; else an empty
        list. An unknown node changes nothing.
        """
        node = self._nodes.get(name)
        if node is None:
            return []
        remaining_s = max(0.0, deadline_s - now_s)
        node.hold_until_s = min(node.hold_until_s, now_s + _HOLD_SHARE * remaining_s)
        if now_s + _DRAIN_SHARE * remaining_s < node.drain_by_s:
            node.drain_by_s, node.farewell_by_s = (
                now_s + _DRAIN_SHARE * remaining_s,
                now_s + _FAREWELL_SHARE * remaining_s,
            )
        if not node.drain_by_s < node.leave_by_s < math.inf:
            return []
        node.leave_by_s = node.drain_by_s
        return [Leave(name, node.drain_by_s)]

    def _scale(self, request: str, size: int, now_s: float) -> Answer:
        if size not in self.policy.sizes:
            return Answer(
                request,
                False,
                f"{size} is no allowed size: use {self.policy.sizes_in_words}",
            )
        self.target = size
        room = self.policy.fit(min(self.target, len(self._usable(now_s))))
        if room < size:
            return Answer(request, True, f"there is room for {room}: it grows when nodes come")
        if room > self.size:
            self._room_since_s = now_s - self.policy.scaling_timeout_s  # no waiting
            if self.size and now_s < self._snoozed_until_s:
                return Answer(
                    request,
                    True,
                    f"it grows in {self._snoozed_until_s - now_s:g} s: it has just grown",
                )
        return Answer(request, True, f"its size will be {size}")

    def _lend(self, request: str, job: str, nodes: int, grace_s: float) -> Answer:
        if nodes < 1:
            raise BadInput("nodes", nodes, "ask for 1 or more")
        if not grace_s >= 0:
            raise BadInput("grace_s", grace_s, "use 0 or more")
        healthy = [node for node in self._nodes.values() if self._healthy(node)]
        # the smallest world must go on, unless it cannot already
        lendable_count = max(0, len(healthy) - self.policy.sizes[0]) if self.size else len(healthy)
        cheapest = sorted(healthy, key=lambda node: (node.member, node.cost, -node.arrival))[
            : min(lendable_count, nodes)
        ]
        for node in cheapest:
            node.lent_to = job
        names = tuple(
            name for name, node in self._nodes.items() if any(node is cheap for cheap in cheapest)
        )
        if len(names) < nodes:
            rest = f"only {len(names)} of {nodes}: the smallest world is {self.policy.sizes[0]}"
            return Answer(request, bool(names), rest, names)
        return Answer(request, True, f"{', '.join(names)}: yours once they have left", names)

    # -- decisions ---------------------------------------------------------------------------------

    def _decide(
        self,
        cause: str,
        now_s: float,
        *,
        grace_s: float = math.inf,
        hurried_leaves: Sequence[Leave] = (),
    ) -> list[Decision]:
        """Return the decisions that follow from the nodes and requests as they are now.

        Args:
            cause: the first part of the reason; "" if a wait has ended.
            grace_s: the time that leaving nodes get, if it is below that of the policy.
            hurried_leaves: new times to leave of nodes that leave already.
        """
        leave_by_s = now_s + min(self.policy.graceful_shutdown_timeout_s, grace_s)
        decisions = self._evict(now_s)  # before the plan: an evicted node may be in the next world
        decisions += self._replan(cause, list(hurried_leaves), leave_by_s, now_s)
        return decisions + self._evict(now_s)  # nodes that were given no time to leave

    def _healthy(self, node: _Node) -> bool:
        return not node.lent_to and node.leave_by_s == math.inf and node.hold_until_s == math.inf

    def _usable(self, now_s: float) -> list[str]:
        """Return the nodes that can be in the world, best first.

        Nodes with a notice count only if the world could not train without them.
        """
        usable_nodes = [name for name, node in self._nodes.items() if self._healthy(node)]
        if not self.policy.fit(len(usable_nodes)):
            usable_nodes += [
                name
                for name, node in self._nodes.items()
                if node.member and not node.lent_to and now_s < node.hold_until_s < math.inf
            ]
        # members come before others: the costly ones first, of the others those that came first
        return sorted(usable_nodes, key=lambda name: self._worth(self._nodes[name]), reverse=True)

    def _worth(self, node: _Node) -> tuple[bool, bool, float, int]:
        healthy = node.hold_until_s == math.inf
        return healthy, node.member, node.cost if node.member else 0.0, -node.arrival

    def _growth_s(self, since_s: float) -> float:
        return max(since_s + self.policy.scaling_timeout_s, self._snoozed_until_s)

    def _next_size(self, usable_count: int, now_s: float) -> int:
        """Return the size of the world with ``usable_count`` nodes.

        It grows only after the waits of the policy, and shrinks only once the places of lost
        members are no longer kept.
        """
        best_size = self.policy.fit(min(usable_count, self.target))
        if best_size <= self.size:
            self._room_since_s = None
        if not self.size:
            return best_size
        if best_size > self.size:
            if self._room_since_s is None:
                self._room_since_s = now_s
            return best_size if now_s >= self._growth_s(self._room_since_s) else self.size
        keeps_places = (
            now_s < self._vacant_until_s
            and usable_count + self._vacant_places >= self.size <= self.target
        )
        return self.size if keeps_places else best_size

    def _replan(
        self, cause: str, hurried_leaves: list[Leave], leave_by_s: float, now_s: float
    ) -> list[Decision]:
        """Choose size and members anew. Return the resize in a list, or none if nothing changes."""
        usable_nodes = self._usable(now_s)
        old_size, old_members = self.size, set(self.members)
        self.size = self._next_size(len(usable_nodes), now_s)
        if self.size > old_size:
            self._room_since_s = None
            self._snoozed_until_s = now_s + self.policy.scale_up_snooze_time_s
        new_members = set(usable_nodes[: self.size])
        self._vacant_places = min(self._vacant_places, self.size - len(new_members))
        if not self._vacant_places:
            self._vacant_until_s = math.inf
        leaves, swap_by_s = list(hurried_leaves), None
        for name in sorted(old_members - new_members):
            node = self._nodes[name]
            node.member, node.leave_by_s = False, min(leave_by_s, node.drain_by_s)
            leaves.append(Leave(name, node.leave_by_s))
            if new_members - old_members:
                hold_s = min(node.hold_until_s, now_s + _HOLD_SHARE * (node.leave_by_s - now_s))
                swap_by_s = hold_s if swap_by_s is None else min(hold_s, swap_by_s)
        for name in new_members:
            self._nodes[name].member = True
        if self.size == old_size and new_members == old_members and not hurried_leaves:
            return []
        joins = tuple(name for name in self.members if name not in old_members)
        reason = _resize_sentence(cause, old_size, self.size)
        return [ResizeWorld(self.size, self.members, joins, tuple(leaves), reason, swap_by_s)]

    def _evict(self, now_s: float) -> list[Decision]:
        """Evict the nodes that have used up their time to leave."""
        late_nodes = [name for name, node in self._nodes.items() if node.leave_by_s <= now_s]
        for name in late_nodes:
            self._nodes[name].leave_by_s = math.inf
        by_s = {name: max(now_s, self._nodes[name].farewell_by_s) for name in late_nodes}
        return [Evict(name, "it has not left in time", by_s[name]) for name in late_nodes]


def _resize_sentence(cause: str, before: int, after: int) -> str:
    """Return a sentence such as ``node2 was lost, so the world changes from 4 nodes to 3``.

    ``cause`` is empty if a wait has ended.
    """
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
