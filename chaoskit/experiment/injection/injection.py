"""One planned fault during a run: which state it is in, and what may follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from chaoskit.errors import HarnessError
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.target import Target
from chaoskit.wire.messages import AtHook


class InjectionState(StrEnum):
    """Where an injection is. It strikes once: nothing leads back from *in force*."""

    PLANNED = "planned"
    WAITING = "waiting"  # a rank stands at its hook
    IN_FORCE = "in force"  # it has acted, and its target has not shown it
    CONFIRMED = "confirmed"
    MISSED = "missed"


_NEXT = {
    InjectionState.PLANNED: {
        InjectionState.WAITING,
        InjectionState.IN_FORCE,
        InjectionState.MISSED,
    },
    InjectionState.WAITING: {
        InjectionState.PLANNED,
        InjectionState.IN_FORCE,
        InjectionState.MISSED,
    },
    InjectionState.IN_FORCE: {InjectionState.CONFIRMED, InjectionState.MISSED},
    InjectionState.CONFIRMED: {
        InjectionState.CONFIRMED,
        InjectionState.MISSED,
    },  # the job had ended before it acted
    InjectionState.MISSED: set(),
}


@dataclass(eq=False)
class Injection:
    """One planned fault during a run.

    Attributes:
        hook: said by the rank that waits to be struck; hook_s: since when.
        armed: the worker that was told during the run where to stop.
        target: what it struck; None before.
        evidence: of its effect, the newest last.
        missed: why it did not act, or too late.
        answered: a loss that it caused is known.
    """

    fault_id: str
    fault: Fault
    state: InjectionState = InjectionState.PLANNED
    hook: AtHook | None = None
    hook_s: float = 0.0
    armed: str = ""
    target: Target | None = None
    evidence: list[Evidence] = field(default_factory=list)
    missed: str = ""
    answered: bool = False
    is_written: bool = False  # its act is in the journal
    acts: dict[str, int] = field(
        default_factory=dict
    )  # worker -> time: what is in the journal of its acts
    lifted_ns: int = 0  # the same of its end

    def _become(self, state: InjectionState) -> None:
        if state not in _NEXT[self.state]:
            raise HarnessError(f"{self.fault} is {self.state}, and cannot become {state}")
        self.state = state

    def stand(self, hook: AtHook, now_s: float) -> None:
        """A rank stands at its hook."""
        self._become(InjectionState.WAITING)
        self.hook, self.hook_s = hook, now_s

    def step_back(self) -> None:
        """That rank cannot be struck: the next one that comes there may be."""
        self._become(InjectionState.PLANNED)
        self.hook = None

    def strike(self, target: Target) -> None:
        """It acts now."""
        self._become(InjectionState.IN_FORCE)
        self.hook, self.target = None, target

    def confirm(self, evidence: Evidence) -> None:
        """Its target shows it; of several proofs the last one counts."""
        self._become(InjectionState.CONFIRMED)
        self.evidence.append(evidence)

    def miss(self, reason: str) -> None:
        """It did not act, or could not be felt any more."""
        self._become(InjectionState.MISSED)
        self.hook, self.missed = None, reason

    @property
    def is_struck(self) -> bool:
        """Whether its moment has come and gone: it strikes once, whatever is repeated later."""
        return self.state not in (InjectionState.PLANNED, InjectionState.WAITING)

    @property
    def struck(self) -> Target | None:
        """What it struck; None where it did not."""
        return None if self.missed else self.target

    @property
    def observed(self) -> str:
        """Its evidence in words; "" without."""
        return str(self.evidence[-1]) if self.evidence else ""

    @property
    def why_missed(self) -> str:
        """Why it did not act."""
        return self.missed or f"no rank {self.fault.rank} was there {self.fault.moment}"

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for faults that are due at the same moment."""
        fault = self.fault
        return (fault.at_step, fault.phase, fault.after_s, fault.during, fault.recovery)
