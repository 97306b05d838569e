"""The seal of a rank (class RankSeal), and votes over all seals, which find corrupt ranks.

Pure: without tensors and processes. Class RankChecks in ``rank_checks.py`` computes the seal of
this rank.

-> step/inquiry.py acts on the suspicions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

#: The name of the state, which :func:`examine` compares first.
STATE = "weights, buffers or optimizer state"


class RankSeal(NamedTuple):
    """The int64 words that a rank shows to the others in every reduction. 0 means: no statement.

    Attributes:
        state: checksum of a slice of its weights and optimizer state.
        gradient: checksum of the reduced gradient of the step before, if the reduction cannot check
            it at once.
        torn: 1 if its state has changed between two commits, in a slice that was not compared
            since.
        complaint: 1 + the rank from which it received corrupt data more than once (itself: from
            several).
        shard: checksum of its gradient of the shard that is audited in this step.
        heir: 1 if it copied its state from a peer so recently that not every slice was compared
            since. The source may have been corrupt already, so the rank is no second witness.
        layout: digest of the layout of its arena; 0 if its state is in none.
        written: the changes by its script since the last commit, as shown by
            :class:`~chaoskit.runtime.state.script_writes.ScriptWrites`.
        written_state: checksum of the state after these changes; 0 if it is not shown.
    """

    state: int = 0
    gradient: int = 0
    torn: int = 0
    complaint: int = 0
    shard: int = 0
    heir: int = 0
    layout: int = 0
    written: int = 0
    written_state: int = 0


@dataclass(frozen=True, slots=True)
class SuspectRanks:
    """A difference between ranks.

    Attributes:
        what: the numbers that differ.
        ranks: the ranks that are to blame; empty if no vote decides.
        involved: the ranks that contradict each other.
    """

    what: str
    ranks: tuple[int, ...]
    involved: tuple[int, ...]


def examine(seals: Sequence[RankSeal]) -> SuspectRanks | None:
    """Return the suspicion that follows from the seals of all ranks of a step, or None.

    Corrupt transfers come first, then different states, then different gradients.
    """
    ranks = tuple(range(len(seals)))
    if guilty := blamed([seal.complaint - 1 for seal in seals]):
        return SuspectRanks("received data", guilty, guilty)
    states = [seal.state for seal in seals]
    if len(set(states)) > 1:
        guilty = outvoted(states, [rank for rank in ranks if seals[rank].heir]) or _torn(seals)
        return SuspectRanks(STATE, guilty, guilty or ranks)
    gradients = [seal.gradient for seal in seals]
    if len({word for word in gradients if word}) > 1:
        guilty = outvoted(gradients)
        return SuspectRanks("reduced gradient", guilty, guilty or ranks)
    return None


def outvoted(words: Sequence[int], heirs: Collection[int] = ()) -> tuple[int, ...]:
    """Return the ranks that contradict more than half of those with a statement.

    The result is empty without such a majority.

    Args:
        words: the statement of each rank; 0 for none.
        heirs: ranks that are judged, but have no vote if at least two others have one.
    """
    votes = [winner for rank, winner in enumerate(words) if winner and rank not in heirs]
    if len(votes) < 2:
        votes = [winner for winner in words if winner]
    winner, count = Counter(votes).most_common(1)[0] if votes else (0, 0)
    if 2 * count <= len(votes):
        return ()
    return tuple(rank for rank, word in enumerate(words) if word not in (0, winner))


def _torn(seals: Sequence[RankSeal]) -> tuple[int, ...]:
    """Return the ranks that contradict themselves, if all other ranks agree."""
    torn = tuple(rank for rank, seal in enumerate(seals) if seal.torn)
    others = {seal.state for seal in seals if not seal.torn}
    return torn if len(others) == 1 else ()


def blamed(complaints: Sequence[int], unread: Collection[int] = ()) -> tuple[int, ...]:
    """Return the ranks to replace because of corrupt transfers.

    A rank that two others name is guilty. Otherwise, a rank that complains of itself is guilty. So
    is a lone complainer, as all other ranks read the same sender well, unless that sender complains
    of itself. Of two ranks, only one that complains of itself is guilty. Otherwise both stay: data
    that one of them received damaged is taken from the other, and nothing wrong is committed. The
    coordinator ends a job that makes no progress. The result is empty if all ranks would be guilty,
    as replacing all would lose the run.

    Args:
        complaints: by rank, the rank that repeatedly sent it corrupt data; -1 for none.
        unread: ranks with complaints that are unknown here. Then only ranks that two others name
            are guilty, as a complainer that seems to be alone may not be alone.
    """
    accuses = {rank: accused for rank, accused in enumerate(complaints) if rank not in unread}
    accuser_counts = Counter(
        accused for rank, accused in accuses.items() if accused not in (-1, rank)
    )
    certain = {
        rank for rank, count in accuser_counts.items() if count > 1 and rank < len(complaints)
    }
    if unread:
        return tuple(sorted(certain))
    confessed = {rank for rank, accused in accuses.items() if accused == rank}
    lone_complainers = (
        {rank for rank, accused in accuses.items() if accused not in (-1, *confessed)}
        if len(complaints) > 2
        else set()
    )
    guilty = tuple(sorted(certain or confessed | lone_complainers))
    return guilty if len(guilty) < len(complaints) else ()  # replacing all ranks would lose the run


# -- one shard, computed twice and more ------------------------------------------------------------


class Pair(NamedTuple):
    """A shard, and the two ranks that both compute it."""

    shard: int
    owner: int
    auditor: int


def audited_shard(step: int, every: int, shard_count: int) -> int | None:
    """Return the shard that is audited at ``step``, or None if none is.

    The shards take turns, one every ``every`` steps; 0 for never.
    """
    return step // every % shard_count if every and step % every == 0 else None


def audit_at(step: int, every: int, ownership: Sequence[Sequence[int]]) -> Pair | None:
    """Return the audit of ``step``; None if the step has none, or the world one rank.

    Every ``every`` steps another shard is audited by another rank.

    Args:
        every: 0 for never.
        ownership: the shards of each rank.
    """
    world = len(ownership)
    shard = audited_shard(step, every, sum(map(len, ownership)))
    if shard is None or world < 2:
        return None
    turn = step // every
    owner = next(rank for rank, shards in enumerate(ownership) if shard in shards)
    return Pair(shard, owner, (owner + 1 + turn // world % (world - 1)) % world)


def panel(pair: Pair, world: int) -> tuple[int, ...]:
    """Return the ranks that compute the shard again: both of ``pair``, and a third as referee.

    There is no referee in a world of two.
    """
    computing_ranks = (pair.owner, pair.auditor)
    others = [
        rank
        for rank in ((pair.auditor + distance) % world for distance in range(1, world))
        if rank not in computing_ranks
    ]
    return (*computing_ranks, *others[:1])


def judge(
    first_checksums: Mapping[int, int], second_checksums: Mapping[int, int]
) -> tuple[Literal["rank", "transient", "undecided"], tuple[int, ...]]:
    """Return the verdict and the faulty ranks, given checksums by rank.

    Args:
        first_checksums: the checksums of owner and auditor, which differ.
        second_checksums: new checksums of the same two, and of a referee if there is one.

    Returns:
        ``rank``: a rank computes wrongly. It contradicts the other two or, without such a majority,
        its own first result. ``transient``: owner and auditor agree now, and no referee differs;
        the ranks were wrong once. ``undecided``: they still differ, and there is no majority. None
        or both of them have changed their results. No rank is named then.
    """
    owner, auditor = first_checksums
    referees = [word for rank, word in second_checksums.items() if rank not in first_checksums]
    changed_ranks = tuple(
        rank for rank in first_checksums if first_checksums[rank] != second_checksums[rank]
    )
    if second_checksums[owner] == second_checksums[auditor]:
        if referees and referees[0] != second_checksums[owner]:
            return "rank", tuple(rank for rank in second_checksums if rank not in first_checksums)
        return "transient", changed_ranks
    if referees:
        wrong = tuple(rank for rank in first_checksums if second_checksums[rank] != referees[0])
        if len(wrong) == 1:
            return "rank", wrong
    return ("rank", changed_ranks) if len(changed_ranks) == 1 else ("undecided", ())
