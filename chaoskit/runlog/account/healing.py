"""Redundancy after a recovery: until spares and copies are complete, another setback would cost
more.

-> runlog/redundancy.py: the times without copies in an outcome. runlog/account/setback.py: the
phases that are marked here.
"""

from __future__ import annotations

from chaoskit.journal import Record
from chaoskit.runlog.account.setback import Setback
from chaoskit.vocabulary import Event


class Healing:
    """The ready spares and the missing copies of pieces, which decide when a setback is healed.

    Args:
        spares: the number of spares that the run asks for.

    Attributes:
        spares: the number of spares that the run asks for.
        members: the workers of the newest plan.
        ready_spares: warm workers without a rank.
    """

    def __init__(self, spares: int) -> None:
        self.spares = spares
        self.members: frozenset[str] = frozenset()
        self.ready_spares: set[str] = set()
        self._unprotected: set[str] = set()  # workers with a piece that lacks copies
        self._unhealed: list[Setback] = []

    def take_plan(self, members: frozenset[str]) -> None:
        """Store the workers that have ranks from now on."""
        self.members, self._unprotected = members, self._unprotected & members
        self.ready_spares -= members

    def take_protection(self, record: Record) -> None:
        """Store whether the piece of a worker has all its copies, from a record of its state."""
        if record.event == Event.EXPOSED:
            self._unprotected |= {record["worker"]} & self.members
        else:
            self._unprotected.discard(record["worker"])

    def admit(self, setback: Setback) -> None:
        """Add a setback that the training has recovered from."""
        self._unhealed.append(setback)

    def take_commit(self, record: Record, *, is_full_world: bool) -> None:
        """Mark the phases of all setbacks that end with a rank's commit.

        Args:
            record: the record of the commit.
            is_full_world: the world has its full size.
        """
        for setback in self._unhealed:
            if setback.generation == record["generation"] and setback.step + 1 >= record["step"]:
                setback.mark("first good step", record.t_ns)
            if is_full_world and setback.generation <= record["generation"]:
                setback.ends.setdefault("full strength", record.t_ns)

    def mark_redundancy(self, t_ns: int) -> None:
        """Mark the redundancy as restored at ``t_ns`` if spares and copies are complete.

        Only setbacks with a world of full size again are marked. Settled ones are then forgotten.
        """
        if self._unhealed and len(self.ready_spares) >= self.spares and not self._unprotected:
            for setback in self._unhealed:
                if "full strength" in setback.ends:
                    setback.ends.setdefault("redundancy restored", t_ns)
            self._unhealed = [
                setback
                for setback in self._unhealed
                if not (setback.settled and "redundancy restored" in setback.ends)
            ]
