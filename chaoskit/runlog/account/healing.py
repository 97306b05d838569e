"""After the way back: when another setback would cost no more than the last one."""

from __future__ import annotations

from chaoskit.journal import Record
from chaoskit.runlog.account.setback import Setback
from chaoskit.vocabulary import Event


class Healing:
    """Knows which spares are ready and whose pieces lack copies, and marks what that means for setbacks.

    Args:
        spares: how many there shall be.

    Attributes:
        members: workers of the newest plan.
        ready: warm workers without a rank.
    """

    def __init__(self, spares: int) -> None:
        self.spares = spares
        self.members: frozenset[str] = frozenset()
        self.ready: set[str] = set()
        self._lacking: set[str] = set()  # workers whose piece lacks copies
        self._open: list[Setback] = []

    def plan(self, members: frozenset[str]) -> None:
        """These workers have ranks from now on."""
        self.members, self._lacking = members, self._lacking & members
        self.ready -= members

    def protection(self, record: Record) -> None:
        """A piece of the state has all its copies, or not."""
        if record.event == Event.EXPOSED:
            self._lacking |= {record["worker"]} & self.members
        else:
            self._lacking.discard(record["worker"])

    def admit(self, setback: Setback) -> None:
        """Training has come back from it."""
        self._open.append(setback)

    def commit(self, record: Record, *, full: bool) -> None:
        """A rank has committed a step; ``full``: in the full world."""
        for setback in self._open:
            if setback.generation == record["generation"] and setback.step + 1 >= record["step"]:
                setback.mark("first good step", record.t_ns)
            if full and setback.generation <= record["generation"]:
                setback.ends.setdefault("full strength", record.t_ns)

    def look(self, t_ns: int) -> None:
        """Whatever happened at ``t_ns`` may have restored the redundancy."""
        if self._open and len(self.ready) >= self.spares and not self._lacking:
            for setback in self._open:
                if "full strength" in setback.ends:
                    setback.ends.setdefault("redundancy restored", t_ns)
            self._open = [
                one for one in self._open if not (one.settled and "redundancy restored" in one.ends)
            ]
