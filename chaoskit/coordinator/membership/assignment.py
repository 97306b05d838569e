"""Assignment of ranks and shards to workers. A survivor of a fault keeps what it has.

A shard is a slice of the global batch. Each shard is computed by one rank.

-> coordinator/membership/regroup.py makes the plan; coordinator/detectors/balance.py: how many
shards a slow rank gets. runtime/reduction/tree.py: why neighbouring shards belong together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from chaoskit.runtime.reduction.tree import Subtree, maximal_subtrees, merge_above


def reassign(
    previous: Mapping[str, tuple[int, ...]],
    members: Sequence[str],
    shard_count: int,
    shares: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Spread the shards over ``members``; loads differ by at most one, or follow ``shares``.

    A survivor keeps the shards it has as far as balance allows: it still holds their gradients.
    Shards without an owner go to a member with room that owns the sibling subtree, so that sums
    fold locally. A single worker that replaces another gets exactly its shards.

    Args:
        previous: worker -> shards, of the generation that last worked. Empty: start from scratch.
        members: workers of the next generation, by rank.
        shard_count: V, the number of shards.
        shares: member -> number of its shards, V together; see :func:`fit`. None for equal loads.

    Returns:
        worker -> its shards, sorted.
    """
    least, extras = divmod(shard_count, len(members))
    held = {
        member: _largest_subtrees_first(previous.get(member, ()), shard_count) for member in members
    }
    survivors = [member for member in members if held[member]]
    if not survivors:
        return _contiguous(members, shard_count, shares)
    if shares is not None:
        for member in members:
            del held[member][shares[member] :]
        room = {member: shares[member] - len(held[member]) for member in members}
        _adopt_orphans(held, room, 0, set(), shard_count)
        return {member: tuple(sorted(shards)) for member, shards in held.items()}
    survivors_above_least = [member for member in survivors if len(held[member]) > least]
    # newcomers first: else a replacement could lose a shard to a neighbour of the lost worker
    newcomers = [member for member in members if not held[member]]
    members_with_extra = set((survivors_above_least + newcomers)[:extras])
    room = {}
    for member in members:
        limit = least + (member in members_with_extra)
        del held[member][limit:]
        room[member] = limit - len(held[member])
    _adopt_orphans(
        held, room, extras - len(members_with_extra), set(members) - members_with_extra, shard_count
    )
    return {member: tuple(sorted(shards)) for member, shards in held.items()}


def fit(
    shares: Mapping[str, int], members: Sequence[str], shard_count: int
) -> dict[str, int] | None:
    """Return ``shares`` scaled to ``members``, which may be others than those with a share.

    A member with a share keeps its part relative to the others; a new member gets the mean. Each
    member has at least one shard.

    Returns:
        member -> number of shards, V together. None if all known shares are equal, or there are
        fewer shards than members.
    """
    known_shares = [shares[member] for member in members if member in shares]
    if len(set(known_shares)) < 2 or len(members) > shard_count:
        return None
    mean = sum(known_shares) / len(known_shares)
    weights = {member: shares.get(member, mean) for member in members}
    total_weight = sum(weights.values())
    exact = {member: weight * shard_count / total_weight for member, weight in weights.items()}
    fitted = {member: max(1, int(part)) for member, part in exact.items()}
    while (missing := shard_count - sum(fitted.values())) > 0:
        # members that lost most by rounding, the lowest rank first
        for member in sorted(members, key=lambda member: fitted[member] - exact[member])[:missing]:
            fitted[member] += 1
    while sum(fitted.values()) > shard_count:
        fitted[
            max(members, key=lambda member: (fitted[member] > 1, fitted[member] - exact[member]))
        ] -= 1
    return fitted


def _contiguous(
    members: Sequence[str], shard_count: int, shares: Mapping[str, int] | None
) -> dict[str, tuple[int, ...]]:
    """Return a contiguous range of shards for each member, in order of the ranks.

    Args:
        shares: member -> number of its shards; None for equal numbers.
    """
    least, extras = divmod(shard_count, len(members))
    counts = [
        shares[member] if shares else least + (rank < extras) for rank, member in enumerate(members)
    ]
    starts = [0, *accumulate(counts)]
    return {
        member: tuple(range(starts[rank], starts[rank + 1])) for rank, member in enumerate(members)
    }


def _adopt_orphans(
    held: dict[str, list[int]],
    room: dict[str, int],
    extras: int,
    stretchable: set[str],
    shard_count: int,
) -> None:
    """Add every shard without an owner to ``held``, to a member with room for it.

    Args:
        held: member -> its shards.
        room: member -> how many more shards it may have.
        extras: number of members of ``stretchable`` that may have one shard beyond that.
    """
    owners = {shard: member for member, shards in held.items() for shard in shards}
    for shard in range(shard_count):
        if shard in owners:
            continue
        takers = [member for member in held if room[member] or (extras and member in stretchable)]
        member = _nearest(shard, owners, set(takers), shard_count) or takers[0]
        if room[member]:
            room[member] -= 1
        else:
            extras -= 1
            stretchable.remove(member)
        held[member].append(shard)
        owners[shard] = member


def _nearest(
    shard: int, owners: Mapping[int, str], candidates: Collection[str], shard_count: int
) -> str | None:
    """Return the candidate that owns most shards of the closest subtree beside ``shard``.

    Subtrees without a shard of any candidate do not count. None if no candidate owns a shard.
    """
    node = Subtree(shard, shard + 1)
    while merge := merge_above(node, shard_count):
        sibling = merge.right if merge.left == node else merge.left
        shares = Counter(
            owners[other] for other in sibling.shards if owners.get(other) in candidates
        )
        if shares:
            return shares.most_common(1)[0][0]
        node = merge.parent
    return None


def _largest_subtrees_first(shards: Sequence[int], shard_count: int) -> list[int]:
    """Return the shards, those in the largest subtrees first.

    Cutting the end of the list off then splits as few sums as possible.
    """
    subtrees = sorted(
        maximal_subtrees(shards, shard_count), key=lambda subtree: subtree.lo - subtree.hi
    )
    return [shard for subtree in subtrees for shard in subtree.shards]


def seat(
    seats: Sequence[tuple[str, str]],
    members: Mapping[str, str],
    spares: Mapping[str, str],
    size: int,
) -> list[str]:
    """Return the worker of every rank of the next generation.

    The result depends on the workers that live, not on the order in which others were lost.
    Survivors keep their rank; where the world shrinks, the highest ranks fill the holes. A spare
    takes the rank of a lost worker, best on its own node.

    Args:
        seats: worker and node of every rank of the generation that last worked.
        members: worker -> node, of all workers that must have a rank.
        spares: worker -> node, of the workers that may fill up the world.
        size: the full world.
    """
    world = min(size, len(members) + len(spares))
    seat_workers = {worker for worker, _ in seats}
    joiners = {worker: node for worker, node in members.items() if worker not in seat_workers}
    lost_ranks = Counter(node for worker, node in seats if worker not in members) - Counter(
        joiners.values()
    )
    joiners |= _choose_spares(spares, lost_ranks, world - len(members))

    ranks = {rank: worker for rank, (worker, _) in enumerate(seats) if worker in members}
    for rank, (_, node) in enumerate(seats[:world]):
        same_node = [worker for worker in joiners if joiners[worker] == node]
        if rank not in ranks and same_node:
            ranks[rank] = min(same_node, key=name_order)
            del joiners[ranks[rank]]
    displaced = [worker for worker, _ in reversed(seats[world:]) if worker in members]
    holes = (rank for rank in range(world) if rank not in ranks)
    ranks |= dict(zip(list(holes), displaced + sorted(joiners, key=name_order), strict=True))
    return [ranks[rank] for rank in range(world)]


def _choose_spares(
    spares: Mapping[str, str], lost_ranks: Counter[str], count: int
) -> dict[str, str]:
    """Return ``count`` of the spares: first those on a node that lost a rank, then by name.

    Args:
        lost_ranks: node -> ranks that it lost; used up here.
    """
    matching: list[str] = []
    others: list[str] = []
    for worker in sorted(spares, key=name_order):
        matches = lost_ranks[spares[worker]] > 0
        lost_ranks[spares[worker]] -= matches
        (matching if matches else others).append(worker)
    return {worker: spares[worker] for worker in (matching + others)[:count]}


def name_order(worker: str) -> tuple[str, int]:
    """Return the sort key of a worker's name: its node, then its number."""
    node, _, number = worker.rpartition(".")
    return node, int(number)
