"""From where a rank takes the state that it lacks: members that are ahead, or sealed copies when no member has it.

All ranks of a generation must take the same step. So a rank chooses only among sources of one step: the furthest
members, else the newest copies. When all of these fail the control plane is told, and plans again with what is left.
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
from chaoskit.wire.messages import Endpoint, Snapshot, SourceFailed

_READ = "restored from the remote tier"  # key, for those who wait for rank 0


@dataclass(frozen=True, slots=True)
class Source:
    """A member (``rank``), or a sealed copy (``snapshot``) in some tier."""

    name: str
    endpoint: Endpoint
    rank: int = -1
    snapshot: Snapshot | None = None

    @property
    def checksum(self) -> str:
        """What the state must have; "" for a member, whose state is not sealed."""
        return self.snapshot.checksum if self.snapshot is not None else ""


def sources(formation: Generation) -> list[Source]:
    """Everything that has the step that this generation trains next; each rank begins with another one. Pure."""
    plan, goal, me = formation.plan, formation.goal_step, formation.me.rank
    ahead = [standing.rank for standing in formation.standings or () if standing.step == goal]
    if ahead:
        found = [
            Source(plan.members[rank].worker, plan.members[rank].endpoint, rank) for rank in ahead
        ]
    else:
        newest = max(snapshot.age for snapshot in plan.restore)
        copies = [snapshot for snapshot in plan.restore if snapshot.age == newest]
        nearest = [
            snapshot for snapshot in copies if not snapshot.path
        ] or copies  # memory, while there is any
        found = [
            Source(f"{snapshot.tier} of {snapshot.node}", snapshot.endpoint, snapshot=snapshot)
            for snapshot in nearest
        ]
        if _has_one_reader(formation) and me:
            found = [Source(plan.members[0].worker, plan.members[0].endpoint, 0)]
    turn = me % len(found)
    return found[turn:] + found[:turn]


def _has_one_reader(formation: Generation) -> bool:
    """Whether the state comes from the remote tier, so that rank 0 reads it, and the others take it from there."""
    if any(standing.step == formation.goal_step for standing in formation.standings or ()):
        return False
    newest = max(snapshot.age for snapshot in formation.plan.restore)
    return all(
        snapshot.tier == "remote" for snapshot in formation.plan.restore if snapshot.age == newest
    )


def restore(worker: WorkerContext, formation: Formation, pull: Callable[[Source], Pulled]) -> bool:
    """Take the state from the first source that gives it; False if a newer formation came first, or none gave it.

    Args:
        pull: replaces the state by that of a source.

    Raises:
        NotComplete: if none gave it, and the script of some source is not done with its state.
    """
    if not _has_one_reader(formation):
        return _take(worker, formation, pull)
    generation, rendezvous = formation.plan.generation, None
    try:
        rendezvous = (
            worker.regrouper.open_rendezvous()
        )  # the group is being built over the other one
        if not formation.me.rank:
            taken = _take(worker, formation, pull)
            rendezvous.put(generation, _READ, b"read" if taken else b"")
            return taken
        return bool(rendezvous.get(generation, _READ)) and _take(worker, formation, pull)
    except (GenerationSuperseded, OSError):
        return False
    finally:
        if rendezvous is not None:
            rendezvous.close()


def _take(worker: WorkerContext, formation: Formation, pull: Callable[[Source], Pulled]) -> bool:
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


def _report(worker: WorkerContext, formation: Formation, source: Source, error: Exception) -> None:
    if source.snapshot is not None:  # a lost member is noticed by those who watch it
        corrupt = isinstance(error, Corrupt)
        report_copy(worker, formation.plan.generation, source.snapshot, corrupt, str(error))


def report_copy(
    worker: WorkerContext, generation: int, snapshot: Snapshot, corrupt: bool, detail: str
) -> None:
    """Say that a copy could not be restored. One that is corrupt is never offered again."""
    detail = detail[:200]
    if corrupt:
        source = f"{snapshot.tier} of {snapshot.node}"
        worker.journal.write(
            Event.QUARANTINED,
            generation=generation,
            step=snapshot.step,
            source=source,
            detail=detail,
        )
    worker.send(SourceFailed(worker.name, snapshot, corrupt, detail))
