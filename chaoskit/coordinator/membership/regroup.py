"""The way from one generation to the next: conditions for another world, its workers, its plan.

A world that is resized moves at a step boundary. A worker that leaves is in the crew until then,
and is removed only once all others have met without it.

-> coordinator/membership/next_world.py chooses the workers, coordinator/membership/assignment.py
their ranks and shards. coordinator/membership/decide.py decides when; coordinator/effects.py
publishes the plan; runtime/group/regroup.py: the move of a worker.
"""

from __future__ import annotations

from chaoskit.coordinator.membership.assignment import fit, name_order
from chaoskit.coordinator.membership.events import Publish
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.next_world import Candidates, prefer_trusted
from chaoskit.wire.messages import Member, OfferedSnapshot, Plan

# -- conditions ------------------------------------------------------------------------------------


def may_move(membership: Membership) -> bool:
    """Return whether the world should move to other workers at the next step boundary.

    Other workers must be wanted, all ranks must train, and the new world must be large enough.
    """
    training, departing = membership.training, membership.departing
    if not membership.settled or training.done or membership.search.active:
        return False
    if awaits_successors(membership):
        return False
    if not departing and not membership.could_grow:  # a quick answer for most events
        return False
    entered = membership.generations.entered.issuperset(membership.members)
    if departing and membership.generation > 1 and not entered:
        return False  # a rank that hangs on its way into this generation reaches no boundary
    workers = next_workers(membership, abort=False)
    return set(workers) != set(membership.members) and len(workers) >= membership.config.least_world


def awaits_successors(membership: Membership) -> bool:
    """Return whether departing workers stay for now because their successors are being started.

    Then the world moves once, instead of first to a smaller size.
    """
    target, departing = membership.target, membership.departing
    if target.swap_by_s is None or not departing:
        return False
    room = target.size - (len(membership.crew) - len(departing))
    hosts, trusted = (
        membership.workers.hosts,
        membership.known_nodes.trusted(membership.known_nodes.live),
    )
    is_starting = any(hosts[worker] not in target.idle for worker in membership.workers.begun_s)
    return is_starting and len(prefer_trusted(membership.usable_spares, trusted, room)) < room


def may_rebalance(membership: Membership) -> bool:
    """Return whether shards can be moved between the members.

    All members must train, and no other membership may be expected soon. Those of a sharded job are
    never moved.
    """
    training, members, workers = membership.training, membership.members, membership.workers
    if not membership.settled or training.done or membership.search.active:
        return False
    if membership.is_sharded or membership.finished or len(members) < membership.world:
        return False
    entered = membership.generations.entered.issuperset(members)  # as in may_move
    is_starting = len(members) < membership.size and bool(workers.begun_s)
    is_leaving = any(workers.hosts[worker] in membership.target.idle for worker in members)
    may_train = membership.generation == 1 or entered
    return may_train and not is_starting and not is_leaving and not may_move(membership)


def wants_other_shares(membership: Membership) -> bool:
    """Return whether the numbers of shards in the last plan differ from the wanted shares.

    Without wanted shares, they may differ by one from each other. False without a plan.
    """
    if membership.plan is None:
        return False
    shard_counts = {member.worker: len(member.shards) for member in membership.plan.members}
    wanted_counts = fit(membership.target.shares, membership.members, sum(shard_counts.values()))
    if wanted_counts is None:
        return max(shard_counts.values()) - min(shard_counts.values()) > 1
    return wanted_counts != shard_counts


# -- workers of the next world ---------------------------------------------------------------------


def first_workers(membership: Membership) -> list[str]:
    """Return ready workers for a first world, by rank: as many nodes as possible have a rank.

    There are ``membership.size`` workers, or all that are ready if these are fewer.
    """
    ready = sorted(membership.workers.ready, key=name_order)
    hosts = [membership.workers.hosts[worker] for worker in ready]
    node_indices = {
        worker: membership.nodes.index(host) for worker, host in zip(ready, hosts, strict=True)
    }
    turns = {worker: index - hosts.index(hosts[index]) for index, worker in enumerate(ready)}
    chosen = sorted(ready, key=lambda worker: (turns[worker], node_indices[worker]))[
        : membership.size
    ]
    return sorted(chosen, key=lambda worker: node_indices[worker])


def next_workers(membership: Membership, *, abort: bool) -> list[str]:
    """Return the workers that have a rank in the next generation, by rank."""
    workers, nodes, idle = membership.workers, membership.known_nodes, membership.target.idle
    base = membership.generations.base
    starting = {node for worker, node in workers.hosts.items() if worker not in workers.ready}
    candidates = Candidates(
        abort=abort,
        seats=[(member.worker, member.node) for member in base.members] if base else [],
        hosts=workers.hosts,
        crew=membership.crew,
        departing=membership.departing,
        holders=membership.training.holders,
        spares=membership.usable_spares,
        starting=starting - idle,
        trusted=nodes.trusted(nodes.live),
        size=membership.size,
        size_max=membership.config.world_max,
        spread=membership.config.elastic is not None,
    )
    return membership.policies.next_world(candidates)


# -- the plan --------------------------------------------------------------------------------------


def regroup(
    membership: Membership, *, abort: bool, restore: tuple[OfferedSnapshot, ...] = ()
) -> Publish | None:
    """Return the publication of a plan for the next world; None if too few workers are left.

    The plan is noted as the last published one.

    Args:
        abort: break the last generation off; otherwise it continues until a step boundary.
        restore: copies of the state that the new generation begins with.
    """
    if membership.generations.base:
        workers = next_workers(membership, abort=abort)
    else:
        workers = first_workers(membership)
    if len(workers) < membership.config.least_world:
        return None
    leavers = () if abort else tuple(worker for worker in membership.crew if worker not in workers)
    return publish(membership, workers, abort=abort, restore=restore, leavers=leavers)


def publish(
    membership: Membership,
    workers: list[str],
    *,
    abort: bool,
    restore: tuple[OfferedSnapshot, ...] = (),
    leavers: tuple[str, ...] = (),
) -> Publish:
    """Make a plan with a rank for each of ``workers``, and note it as the last published one.

    Args:
        workers: by rank; all of them are ready.
        abort: break the last generation off; otherwise it continues until a step boundary.
        restore: copies of the state that the new generation begins with.
        leavers: workers of the last generation that leave at the step boundary.
    """
    plan = Plan(
        generation=membership.newest_known + 1,
        members=_members(membership, workers),
        abort=abort,
        restore=restore,
        leavers=leavers,
    )
    membership.generations.begin(plan)
    if membership.is_sharded:
        membership.training.restart_pieces()
    return Publish(plan)


def _members(membership: Membership, workers: list[str]) -> tuple[Member, ...]:
    """Return the members of a plan: workers with their ranks and shards."""
    base = membership.generations.base
    previous = {member.worker: member.shards for member in base.members} if base else {}
    shard_count = membership.config.shards_of(-1, len(workers))
    if sum(map(len, previous.values())) != shard_count:
        previous = {}  # gradients of another batch are of no use
    shares = fit(membership.target.shares, workers, shard_count)
    shards = membership.policies.assign(previous, workers, shard_count, shares)
    hosts, ready = membership.workers.hosts, membership.workers.ready
    return tuple(
        Member(rank, worker, hosts[worker], ready[worker], shards[worker])
        for rank, worker in enumerate(workers)
    )
