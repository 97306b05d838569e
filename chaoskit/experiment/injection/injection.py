"""A planned fault during a run, and the transitions between its states.

-> experiment/injection/job_follower.py and command_follower.py cause the transitions before the
strike, injector.py those after it. runlog/injected.py: the same fault, read from the journals.
"""

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
    """The state of an injection.

    A fault strikes once: only one whose node is not reached leads back from *in force*.
    """

    PLANNED = "planned"
    WAITING = "waiting"  # a rank waits at its hook
    IN_FORCE = "in force"  # the fault has acted, and its target shows no effect yet
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
    InjectionState.IN_FORCE: {
        InjectionState.PLANNED,
        InjectionState.CONFIRMED,
        InjectionState.MISSED,
    },
    # missed, if the job had ended before the fault acted
    InjectionState.CONFIRMED: {InjectionState.CONFIRMED, InjectionState.MISSED},
    InjectionState.MISSED: set(),
}


@dataclass(eq=False)
class Injection:
    """A planned fault during a run.

    A method that changes the state raises HarnessError if no transition leads there. The judges do
    not see this object: they read the journal records that the injector writes of it.

    Attributes:
        fault_id: the name of the fault in messages and journals.
        fault: the fault.
        state: the state of the injection.
        hook: the report of the rank that waits at its hook to be struck, or None.
        hook_s: monotonic time since which that rank waits.
        armed_worker: the worker that was ordered during the run to stop at the fault's phase; "" if none
            was.
        target: the process or node that was struck; None before.
        evidence: proofs of the effect, the newest last; empty if there is none.
        unreached: why its node was not reached when the fault was due last; "" if it was.
        waited_for: why its node was not reached when the fault was due before; "" if it always was.
        missed: the reason why the fault did not act, or acted too late; "" if it was not missed.
        is_loss_detected: a loss that the fault caused was detected.
        is_journalled: the injection is in the journal.
        recorded_acts_ns: worker -> time in ns of the act that is in the journal.
        recorded_lift_ns: time of the end of the fault that is in the journal; 0 if none is.
    """

    fault_id: str
    fault: Fault
    state: InjectionState = InjectionState.PLANNED
    hook: AtHook | None = None
    hook_s: float = 0.0
    armed_worker: str = ""
    target: Target | None = None
    evidence: list[Evidence] = field(default_factory=list)
    unreached: str = ""
    waited_for: str = ""
    missed: str = ""
    is_loss_detected: bool = False
    is_journalled: bool = False
    recorded_acts_ns: dict[str, int] = field(default_factory=dict)
    recorded_lift_ns: int = 0

    def _enter(self, state: InjectionState) -> None:
        """Enter a state; raise HarnessError if no transition leads there."""
        if state not in _NEXT[self.state]:
            raise HarnessError(f"{self.fault} is {self.state}, and cannot become {state}")
        self.state = state

    def wait_at_hook(self, hook: AtHook, now_s: float) -> None:
        """Store that a rank waits at the hook of the fault."""
        self._enter(InjectionState.WAITING)
        self.hook, self.hook_s = hook, now_s

    def return_to_planned(self, unreached: str = "") -> None:
        """Return to *planned*, because the rank at the hook, or the target, cannot be struck.

        The next rank there may be, or the same node later.

        Args:
            unreached: why the node of the target is not reached. The fault has not acted then.
        """
        self._enter(InjectionState.PLANNED)
        self.hook = self.target = None
        self.note_unreached(unreached)

    def note_unreached(self, reason: str) -> None:
        """Store why its node is not reached; "" if it is."""
        self.unreached = reason
        self.waited_for = reason or self.waited_for

    def strike(self, target: Target) -> None:
        """Store the target; the fault acts now."""
        self._enter(InjectionState.IN_FORCE)
        self.hook, self.target = None, target

    def confirm(self, evidence: Evidence) -> None:
        """Store evidence of the effect; the newest counts."""
        self._enter(InjectionState.CONFIRMED)
        self.evidence.append(evidence)

    def miss(self, reason: str) -> None:
        """Store why the fault did not act, or could have no effect any more."""
        self._enter(InjectionState.MISSED)
        self.hook, self.missed = None, reason

    @property
    def is_struck(self) -> bool:
        """True if the fault has struck or was missed; then it never strikes again.

        A step that is repeated does not change that.
        """
        return self.state not in (InjectionState.PLANNED, InjectionState.WAITING)

    @property
    def struck(self) -> Target | None:
        """The target that was struck; None before the strike, and for a fault that was missed."""
        return None if self.missed else self.target

    @property
    def observed(self) -> str:
        """The newest evidence in words, or an empty string."""
        return str(self.evidence[-1]) if self.evidence else ""

    @property
    def why_missed(self) -> str:
        """The reason why the fault did not act, in words; for a fault without a strike only.

        If none was given, it is that no process had the rank at the fault's moment.
        """
        return self.missed or f"{self.fault.place} was held by no process {self.fault.moment}"

    @property
    def moment_key(self) -> tuple[Any, ...]:
        """A key of the moment of the fault; equal for faults that are due at the same moment."""
        fault = self.fault
        return (fault.at_step, fault.phase, fault.after_s, fault.during, fault.recovery)
