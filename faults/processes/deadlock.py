"""Fault ``Deadlock``: a thread or a rank waits for an event that never happens.

-> runtime/injection/waiting.py takes the lock or skips the reduction, and watches the thread.
-> coordinator/detectors/hang.py and coordinator/handlers/on_suspicion.py: which rank is given up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence, ThreadStuck
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.vocabulary import HUNG_CAUSES, Phase
from chaoskit.wire.messages import Beat

HOWS = ("lock", "skip")

_STILL_MS = 40.0  # least age of the phase on the progress board


@dataclass(frozen=True, kw_only=True)
class Deadlock(Fault):
    """Let a rank wait for something that never happens, while its other threads live.

    Args:
        how: ``lock``: its training thread waits for a Python lock that is never released. ``skip``:
            it takes no part in this step's reduction and waits for a message that is never sent;
            from outside it looks like every other rank, which wait for it: no rank can be blamed,
            and the same ranks must begin the reduction anew.
    """

    how: str = "lock"

    family: ClassVar[str] = "standstill"
    leads_to: ClassVar[frozenset[str]] = HUNG_CAUSES
    effect: ClassVar[str] = (
        "one rank sleeps for ever, in a lock or in a collective that it has not joined"
    )
    evidence: ClassVar[str] = (
        "another thread of the process sees its training thread in the same frames without a context switch, and its "
        "progress board stands still"
    )
    stands_for: ClassVar[str] = (
        "ranks that leave each other in a collective, and locks in data loaders"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (
        incidents.SOFTWARE,
        incidents.WATCHDOG,
        incidents.HANG,
    )
    impact: ClassVar[str] = (
        "`lock`: the rank is given up as hung. `skip`: no rank is to blame, and the same ranks begin the reduction anew"
    )
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = ({"how": "lock"}, {"how": "skip"})

    @property
    def must_show(self) -> frozenset[str]:
        return self.leads_to if self.how == "lock" else frozenset()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")
        if self.how == "skip" and self.phase == "optimizer":
            raise BadInput(
                "phase",
                self.phase,
                "use 'forward', 'backward' or 'reduce': then the reduction is over",
            )
        if self.how == "skip" and self.during is not None:
            raise BadInput(
                "during",
                self.during,
                "use at_step or after_s: the next reduction is that of another step",
            )
        if self.how == "skip" and nodes < 2:
            raise BadInput("nodes", nodes, "use 2 or more: a single rank has no collective to skip")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act(self.how)
        proof = await target.read_back()
        beat = await target.heard(lambda: self._still_board(target))
        words = f"{proof}; its board has shown {Phase(beat.phase).label} of step {beat.step} for {beat.age_ms:.0f} ms"
        yield ThreadStuck(
            subject=target.rank_process,
            source="its other threads, and its board",
            tid=target.tid,
            seen=words,
        )

    def _still_board(self, target: Target) -> Beat | None:
        """Return the reading of the progress board if it has not changed for 40 ms; else None.

        It must show the step of the act, and for ``skip`` the phase ``reduce``.
        """
        beat = target.beat
        if beat is None or beat.step != target.step or beat.age_ms < _STILL_MS:
            return None
        return None if self.how == "skip" and Phase(beat.phase) != Phase.REDUCE else beat
