"""An interruption of training, from the fault until another one would cost no more than this
one.

-> runlog/account/accountant.py opens and ends it; runlog/account/healing.py marks its last phases.
runlog/outcome.py (Recovery): the same in an outcome, measured by
experiment/run/recovery_timeline.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chaoskit.runlog.account.time_account import STANDING_PHASES
from chaoskit.vocabulary import RECOVERY_PHASES


@dataclass(slots=True)
class Setback:
    """A loss, bad numbers, or a planned change of the world. Times are CLOCK_MONOTONIC in ns.

    Attributes:
        cause: a value of :data:`chaoskit.vocabulary.LOSS_CAUSES`, or a cause of
            :mod:`chaoskit.runlog.account.time_account`.
        begun_ns: the time of the fault. If it is not known, a usual step after the last commit, or
            the detection.
        noticed_ns: the time of the detection, or of the plan.
        step: the newest step committed before.
        generation: the generation that trains on; 0 while there is none.
        rank: the first lost rank, or None.
        workers: the lost workers.
        fault: the injected fault in words; empty if none is known.
        detail: the detail of the first loss.
        planned: the change of the world was planned.
        world_before, world: the number of ranks before and after; 0 while it is not known.
        ends: phase of a recovery -> its end with the last rank.
        settled: no rank commits the first good step any more. The phases up to it are final; each
            later one is final when it ends.
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
        """The nodes of the lost workers, each once."""
        return list(dict.fromkeys(worker.rpartition(".")[0] for worker in self.workers))

    @property
    def good_ns(self) -> int | None:
        """The end of the first good step in ns; None while there is none."""
        return next(
            (end_ns for phase, _, end_ns in self.spans() if phase == STANDING_PHASES[-1]), None
        )

    @property
    def seconds(self) -> float | None:
        """The seconds from the fault to the end of the first good step; None before it."""
        good_ns = self.good_ns
        return None if good_ns is None else (good_ns - self.begun_ns) / 1e9

    def spans(self) -> list[tuple[str, int, int]]:
        """Return the phases in sequence, each with begin and end in ns.

        A phase that ended before the one before it takes no time.
        """
        spans, before_ns = [], self.begun_ns
        for phase in RECOVERY_PHASES:
            if phase in self.ends:
                end_ns = max(before_ns, self.ends[phase])
                spans.append((phase, before_ns, end_ns))
                before_ns = end_ns
        return spans

    def mark(self, phase: str, t_ns: int) -> None:
        """Record that ``phase`` ends at ``t_ns``, or later.

        A late record does not move a settled phase.
        """
        if not (self.settled and phase in STANDING_PHASES):
            self.ends[phase] = max(t_ns, self.ends.get(phase, 0))
