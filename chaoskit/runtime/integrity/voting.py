"""Who is corrupt? Votes over what the ranks say about their numbers. Pure: knows neither tensors nor processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

#: Name of what :func:`examine` compares first.
STATE = "weights, buffers or optimizer state"


class Seal(NamedTuple):
    """What a rank tells the others in every reduction, as int64 words. 0: nothing to say.

    Attributes:
        state: checksum of a slice of its weights and optimizer state.
        gradient: checksum of the reduced gradient of the step before, where the reduction cannot check it at once.
        torn: 1 if its state has changed between two commits, in a slice that was not compared since.
        complaint: 1 + the rank from which it received corrupt data more than once (itself: from several).
        shard: checksum of its gradient of the shard that is audited in this step.
        heir: 1 if it copied its state from a peer so lately that not every slice was compared since: it may have copied
            what was corrupt already, so it is no second witness.
        layout: digest of what lies where in its arena; 0 if its state is in none.
        written, written_state: what its script wrote into the state since the last commit, as
            :class:`~chaoskit.runtime.state.script_writes.ScriptWrites` shows it.
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
class Suspicion:
    """``what`` differs, and ``ranks`` are to blame. Nobody can tell: none of them. ``involved``: who contradict."""

    what: str
    ranks: tuple[int, ...]
    involved: tuple[int, ...]


def examine(seals: Sequence[Seal]) -> Suspicion | None:
    """What follows from the seals of all ranks of one step; None if nothing speaks against anybody."""
    ranks = tuple(range(len(seals)))
    if guilty := blamed([seal.complaint - 1 for seal in seals]):
        return Suspicion("received data", guilty, guilty)
    states = [seal.state for seal in seals]
    if len(set(states)) > 1:
        guilty = outvoted(states, [rank for rank in ranks if seals[rank].heir]) or _torn(seals)
        return Suspicion(STATE, guilty, guilty or ranks)
    gradients = [seal.gradient for seal in seals]
    if len({word for word in gradients if word}) > 1:
        guilty = outvoted(gradients)
        return Suspicion("reduced gradient", guilty, guilty or ranks)
    return None


def outvoted(words: Sequence[int], heirs: Collection[int] = ()) -> tuple[int, ...]:
    """The ranks that contradict more than half of those who said something. Nobody without such a majority.

    ``heirs`` are judged, but have no vote, where at least two others have one.
    """
    cast = [word for rank, word in enumerate(words) if word and rank not in heirs]
    if len(cast) < 2:
        cast = [word for word in words if word]
    word, count = Counter(cast).most_common(1)[0] if cast else (0, 0)
    if 2 * count <= len(cast):
        return ()
    return tuple(rank for rank, other in enumerate(words) if other not in (0, word))


def _torn(seals: Sequence[Seal]) -> tuple[int, ...]:
    """Ranks that contradict themselves, if that explains everything: all others agree."""
    torn = tuple(rank for rank, seal in enumerate(seals) if seal.torn)
    others = {seal.state for seal in seals if not seal.torn}
    return torn if len(others) == 1 else ()


def blamed(complaints: Sequence[int], unread: Collection[int] = ()) -> tuple[int, ...]:
    """Ranks to replace. ``complaints``: by rank, who sent it corrupt data again and again; -1 for nobody.

    Whom two others name is guilty. Else who complains of itself is, and a lone complainer, as everybody else reads the
    same sender well; not where that sender complains of itself, too. Of two ranks there is nobody else: only who
    complains of itself is guilty. Else both stay: what one of them received damaged it takes from the other, and
    nothing wrong is committed; the coordinator ends a job that does not get on that way.

    ``unread``: ranks of which nobody knows here whether they complain. Then only whom two others name is guilty: who
    seems to complain alone may not be alone.
    """
    known = {rank: accused for rank, accused in enumerate(complaints) if rank not in unread}
    named = Counter(accused for rank, accused in known.items() if accused not in (-1, rank))
    certain = {rank for rank, count in named.items() if count > 1 and rank < len(complaints)}
    if unread:
        return tuple(sorted(certain))
    confessed = {rank for rank, accused in known.items() if accused == rank}
    lone = (
        {rank for rank, accused in known.items() if accused not in (-1, *confessed)}
        if len(complaints) > 2
        else set()
    )
    guilty = tuple(sorted(certain or confessed | lone))
    return (
        guilty if len(guilty) < len(complaints) else ()
    )  # to replace everybody would lose the run


# -- one shard, computed twice and more ---------------------------------------------------------------------------


class Pair(NamedTuple):
    """A shard, and the two ranks that both compute it."""

    shard: int
    owner: int
    auditor: int


def audited_shard(step: int, every: int, shard_count: int) -> int | None:
    """The shards take turns, one every ``every`` steps."""
    return step // every % shard_count if every and step % every == 0 else None


def audit_at(step: int, every: int, ownership: Sequence[Sequence[int]]) -> Pair | None:
    """The audit of ``step``: every ``every`` steps, of another shard by another rank. None if there is none.

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
    """Who computes the shard once more: both ranks of ``pair``, and a third as referee where there is one."""
    both = (pair.owner, pair.auditor)
    others = [
        rank
        for rank in ((pair.auditor + distance) % world for distance in range(1, world))
        if rank not in both
    ]
    return (*both, *others[:1])


def judge(
    first: Mapping[int, int], second: Mapping[int, int]
) -> tuple[Literal["rank", "transient", "undecided"], tuple[int, ...]]:
    """Verdict and culprits, from checksums by rank.

    Args:
        first: of owner and auditor, which differ.
        second: of the same two, and of a referee if there is one.

    Returns:
        ``rank``: computes wrongly, and would do so again. ``transient``: both agree now, one of them was wrong once.
        ``undecided``: both stand by their words, and there is nobody else to ask.
    """
    one, other = first
    referees = [word for rank, word in second.items() if rank not in first]
    liars = tuple(rank for rank in first if first[rank] != second[rank])
    if second[one] == second[other]:
        if referees and referees[0] != second[one]:
            return "rank", tuple(rank for rank in second if rank not in first)
        return "transient", liars
    if referees:
        wrong = tuple(rank for rank in first if second[rank] != referees[0])
        if len(wrong) == 1:
            return "rank", wrong
    return ("rank", liars) if len(liars) == 1 else ("undecided", ())
