"""Who gets which rank and which shards, so that a survivor of a fault keeps what it has."""

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
    """Spread the shards over ``members``; loads differ by at most one, or are as ``shares`` has them.

    A survivor keeps the shards it has as far as balance allows: it still holds their gradients. Shards without an
    owner go to a member with room that owns the sibling subtree, so that sums fold locally. One worker that replaces
    another gets exactly its shards.

    Args:
        previous: worker -> shards, of the generation that last worked. Empty: start from scratch.
        members: workers of the next generation, by rank.
        shard_count: V, the number of shards.
        shares: member -> how many it gets, V together; see :func:`fit`. None: all the same, as far as possible.

    Returns:
        worker -> its shards, sorted.
    """
    least, extras = divmod(shard_count, len(members))
    held = {member: _by_subtree(previous.get(member, ()), shard_count) for member in members}
    survivors = [member for member in members if held[member]]
    if not survivors:
        return _contiguous(members, shard_count, shares)
    if shares is not None:
        for member in members:
            del held[member][shares[member] :]
        room = {member: shares[member] - len(held[member]) for member in members}
        _adopt_orphans(held, room, 0, set(), shard_count)
        return {member: tuple(sorted(shards)) for member, shards in held.items()}
    heavy = [member for member in survivors if len(held[member]) > least]
    # Newcomers come before the other survivors: else a replacement could lose a shard to a neighbour of the dead one.
    newcomers = [member for member in members if not held[member]]
    heavier = set((heavy + newcomers)[:extras])
    room = {}
    for member in members:
        limit = least + (member in heavier)
        del held[member][limit:]
        room[member] = limit - len(held[member])
    _adopt_orphans(held, room, extras - len(heavier), set(members) - heavier, shard_count)
    return {member: tuple(sorted(shards)) for member, shards in held.items()}


def fit(
    shares: Mapping[str, int], members: Sequence[str], shard_count: int
) -> dict[str, int] | None:
    """What ``shares`` mean for ``members``, when some of those whom they were made for are lost, and others have come.

    Who goes on keeps its part relative to the others; who is new gets the mean of these. Everybody has a shard.

    Returns:
        member -> number of shards, V together; None where those that are known are alike, or there are too few shards.
    """
    known = [shares[member] for member in members if member in shares]
    if len(set(known)) < 2 or len(members) > shard_count:
        return None
    mean = sum(known) / len(known)
    weights = {member: shares.get(member, mean) for member in members}
    whole = sum(weights.values())
    exact = {member: weight * shard_count / whole for member, weight in weights.items()}
    fitted = {member: max(1, int(part)) for member, part in exact.items()}
    while (
        missing := shard_count - sum(fitted.values())
    ) > 0:  # to whom the rounding took most, the lowest rank first
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
    """Give every shard without an owner to a member with room; ``extras`` of ``stretchable`` may take one more."""
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
    """The candidate that owns most of the closest subtree beside ``shard`` of which any candidate owns anything."""
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


def _by_subtree(shards: Sequence[int], shard_count: int) -> list[int]:
    """The shards, those in the largest subtrees first: cutting the end off splits as few sums as possible."""
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
    """The worker of every rank of the next generation.

    The result depends on who is there, not on the order in which others were lost. Survivors keep their rank; where
    the world shrinks, the highest ranks fill the holes. A spare takes the rank of a lost worker, best on its own node.

    Args:
        seats: worker and node of every rank of the generation that last worked.
        members: worker -> node, of all who must be in.
        spares: worker -> node, of those who may fill up the world.
        size: the full world.
    """
    world = min(size, len(members) + len(spares))
    seated = {worker for worker, _ in seats}
    joiners = {worker: node for worker, node in members.items() if worker not in seated}
    orphaned = Counter(node for worker, node in seats if worker not in members) - Counter(
        joiners.values()
    )
    joiners |= _chosen(spares, orphaned, world - len(members))

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


def _chosen(spares: Mapping[str, str], orphaned: Counter[str], count: int) -> dict[str, str]:
    """``count`` of the spares: first those on a node that lost a rank, then the lowest names."""
    matching: list[str] = []
    others: list[str] = []
    for worker in sorted(spares, key=name_order):
        matches = orphaned[spares[worker]] > 0
        orphaned[spares[worker]] -= matches
        (matching if matches else others).append(worker)
    return {worker: spares[worker] for worker in (matching + others)[:count]}


def name_order(worker: str) -> tuple[str, int]:
    """Sorts worker names by node, then by number."""
    node, _, number = worker.rpartition(".")
    return node, int(number)
