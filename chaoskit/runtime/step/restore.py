"""Restore the state that a rank lacks: from members that are ahead, or from sealed copies.

All ranks of a generation must take the same step. A rank therefore chooses only among sources of
one step: the members that are furthest ahead, or else the newest copies. If all of them fail, the
coordinator is informed and plans again with the remaining sources.

-> state/peer.py and state/from_store.py read a source. coordinator/membership/copy_search.py finds
the copies that a plan offers. state/pieces.py does the same for sharded jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chaoskit.runtime.group.generations import Generation
from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.group.rendezvous import GenerationSuperseded
from chaoskit.runtime.state.peer import Corrupt, NotComplete, PeerLost, Pulled
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, OfferedSnapshot, SourceFailed

_READ = "restored from the remote tier"  # rendezvous key that ranks other than 0 wait for


@dataclass(frozen=True, slots=True)
class StateSource:
    """A source of the state: a member, or a sealed copy in some tier.

    Attributes:
        name: the worker, or tier and node of the copy, for journals and messages.
        rank: the rank of the member; -1 for a copy.
        snapshot: the copy; None for a member.
    """

    name: str
    endpoint: Endpoint
    rank: int = -1
    snapshot: OfferedSnapshot | None = None

    @property
    def checksum(self) -> str:
        """The checksum that the state must have; "" for a member, as its state is not sealed."""
        return self.snapshot.checksum if self.snapshot is not None else ""


def sources(formation: Generation) -> list[StateSource]:
    """Return all sources of the step that this generation trains next, in the order to try them.

    Each rank begins with a different one, so that their load is spread. Copies in memory come
    before stored ones. If only the remote tier has the state, rank 0 is the source of all other
    ranks. Pure.
    """
    plan, goal, me = formation.plan, formation.goal_step, formation.me.rank
    ranks_ahead = [standing.rank for standing in formation.standings if standing.step == goal]
    if ranks_ahead:
        candidates = [
            StateSource(plan.members[rank].worker, plan.members[rank].endpoint, rank)
            for rank in ranks_ahead
        ]
    else:
        newest = max(snapshot.age for snapshot in plan.restore)
        copies = [snapshot for snapshot in plan.restore if snapshot.age == newest]
        preferred = [
            snapshot for snapshot in copies if not snapshot.path
        ] or copies  # memory if any
        candidates = [
            StateSource(f"{snapshot.tier} of {snapshot.node}", snapshot.endpoint, snapshot=snapshot)
            for snapshot in preferred
        ]
        if _has_one_reader(formation) and me:
            candidates = [StateSource(plan.members[0].worker, plan.members[0].endpoint, 0)]
    offset = me % len(candidates)
    return candidates[offset:] + candidates[:offset]


def _has_one_reader(formation: Generation) -> bool:
    """Return whether only rank 0 reads the state from the remote tier.

    The other ranks then take it from rank 0.
    """
    if any(standing.step == formation.goal_step for standing in formation.standings):
        return False
    newest = max(snapshot.age for snapshot in formation.plan.restore)
    return all(
        snapshot.tier == "remote" for snapshot in formation.plan.restore if snapshot.age == newest
    )


def restore(
    worker: WorkerContext, formation: Formation, pull: Callable[[StateSource], Pulled]
) -> bool:
    """Take the state from the first source that provides it.

    Return False if a newer formation came first, or no source provided it. If rank 0 reads the
    remote tier for all ranks, a failure of rank 0 and the loss of the coordinator give False as
    well.

    Args:
        pull: replaces the state by that of a source.

    Raises:
        NotComplete: if no source provided it, and the script of some source is still writing its
            state.
    """
    if not _has_one_reader(formation):
        return _take(worker, formation, pull)
    generation, rendezvous = formation.plan.generation, None
    try:
        rendezvous = worker.regrouper.open_rendezvous()  # the group is built over another one
        if not formation.me.rank:
            has_state = _take(worker, formation, pull)
            rendezvous.put(generation, _READ, b"read" if has_state else b"")
            return has_state
        return bool(rendezvous.get(generation, _READ)) and _take(worker, formation, pull)
    except (GenerationSuperseded, OSError):
        return False
    finally:
        if rendezvous is not None:
            rendezvous.close()


def _take(
    worker: WorkerContext, formation: Formation, pull: Callable[[StateSource], Pulled]
) -> bool:
    """Pull the state from the sources in turn, and journal the one that succeeds.

    Return False if a newer formation came first, or no source provided the state. Sealed copies
    that could not be restored are reported.

    Args:
        pull: as in :func:`restore`.

    Raises:
        NotComplete: as :func:`restore`.
    """
    incomplete: NotComplete | None = None
    for source in sources(formation):
        if source.rank == formation.me.rank:
            continue  # this rank had that state, and gave it up
        try:
            pulled = pull(source)
        except GenerationSuperseded:
            return False
        except NotComplete as error:
            incomplete = error
            continue
        except (PeerLost, Corrupt) as error:
            _report(worker, formation, source, error)
            continue
        generation = formation.plan.generation
        worker.board.progress(pulled.step)
        worker.journal.write(
            Event.RESTORED,
            generation=generation,
            rank=formation.me.rank,
            step=pulled.step,
            size_bytes=pulled.size_bytes,
            transport=pulled.transport,
            source=source.name,
            checksum=pulled.checksum,
        )
        worker.journal.write(
            Event.ADOPT, step=pulled.step, generation=generation, source=source.name
        )
        return True
    if incomplete is not None:
        raise incomplete
    return False


def _report(
    worker: WorkerContext, formation: Formation, source: StateSource, error: Exception
) -> None:
    """Report ``source`` if it is a sealed copy. A lost member is not reported."""
    if source.snapshot is not None:  # the agent of a lost member notices the loss
        is_corrupt = isinstance(error, Corrupt)
        report_copy(worker, formation.plan.generation, source.snapshot, is_corrupt, str(error))


def report_copy(
    worker: WorkerContext, generation: int, snapshot: OfferedSnapshot, is_corrupt: bool, detail: str
) -> None:
    """Report to the coordinator that a copy could not be restored.

    A copy that is corrupt is never offered again, and is journalled as quarantined.
    """
    detail = detail[:200]
    if is_corrupt:
        source = f"{snapshot.tier} of {snapshot.node}"
        worker.journal.write(
            Event.QUARANTINED,
            generation=generation,
            step=snapshot.step,
            source=source,
            detail=detail,
        )
    worker.send(SourceFailed(worker.name, snapshot, is_corrupt, detail))
