"""One interruption of training, from the fault to the moment when another one would cost no more than this one."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaoskit.runlog.account.time_account import STANDING_PHASES
from chaoskit.vocabulary import RECOVERY_PHASES


@dataclass(slots=True)
class Setback:
    """A loss, numbers that did not count, or a planned change of the world. Times are CLOCK_MONOTONIC in ns.

    Attributes:
        cause: of :data:`chaoskit.vocabulary.LOSS_CAUSES`, or one of :mod:`chaoskit.runlog.account.time_account`.
        begun_ns: when the fault struck. Where that is not known: a usual step after the last commit, or the notice.
        noticed_ns: when it was noticed, or planned.
        workers: those that were lost.
        fault: the injected one, in words; empty where none is known.
        step: the newest that was committed before.
        generation: that trains on; 0 while there is none.
        world_before, world: ranks.
        ends: phase of a recovery -> when it was over for the last rank.
        settled: no rank commits the first good step any more: phases up to it are final, and each later one is when it
            is over.
    """

    cause: str
    begun_ns: int
    noticed_ns: int
    step: int
    generation: int = 0
    rank: int | None = None
    workers: list[str] = field(default_factory=list)
    fault: str = ""
    detail: str = ""
    planned: bool = False
    world_before: int = 0
    world: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    settled: bool = False

    @property
    def nodes(self) -> list[str]:
        """Of the workers that were lost, each once."""
        return list(dict.fromkeys(worker.rpartition(".")[0] for worker in self.workers))

    @property
    def good_ns(self) -> int | None:
        """The end of the first good step; None while there is none."""
        return next(
            (end_ns for phase, _, end_ns in self.spans() if phase == STANDING_PHASES[-1]), None
        )

    @property
    def seconds(self) -> float | None:
        """From the fault to the first good step: as long as the phases up to there together."""
        good_ns = self.good_ns
        return None if good_ns is None else (good_ns - self.begun_ns) / 1e9

    def spans(self) -> list[tuple[str, int, int]]:
        """Phases with begin and end, one after the other: what was over before its turn came takes no time."""
        found, before_ns = [], self.begun_ns
        for phase in RECOVERY_PHASES:
            if phase in self.ends:
                end_ns = max(before_ns, self.ends[phase])
                found.append((phase, before_ns, end_ns))
                before_ns = end_ns
        return found

    def mark(self, phase: str, t_ns: int) -> None:
        """``phase`` is over at ``t_ns``, or later. What is settled is not moved by a record that comes late."""
        if not (self.settled and phase in STANDING_PHASES):
            self.ends[phase] = max(t_ns, self.ends.get(phase, 0))
