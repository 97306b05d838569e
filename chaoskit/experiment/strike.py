"""One planned fault during a run, and what every conductor does with it: inject, look for evidence, put back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chaoskit.errors import HarnessError
from chaoskit.experiment.plan import fault_id
from chaoskit.journal import Journal
from chaoskit.messages import HookReached
from chaoskit.osprocess import is_ending, start_ticks
from chaoskit.vocabulary import Event, RunEnd
from faults.base import Fault, Target

#: How a process has ended of which no record tells.
GONE = ("gone", "")


@dataclass
class Strike:
    """One planned fault during a run."""

    fault_id: str
    fault: Fault
    hook: HookReached | None = None  # said by the rank that waits to be struck
    hook_s: float = 0.0
    armed: tuple[str, float] = ("", 0.0)  # the worker that was told during the run where to stop, and when
    target: Target | None = None
    effective_ns: int | None = None
    observed: str = ""
    missed: str = ""  # why it could not be injected
    acts: dict[str, int] = field(default_factory=dict)  # worker -> time: what is in the journal of its acts
    lifted_ns: int = 0  # the same of its end
    answered: bool = False  # a loss that it caused is known
    undone: bool = True

    @property
    def struck(self) -> bool:
        """Whether its moment has come and gone: it strikes once, whatever is repeated later."""
        return self.target is not None or bool(self.missed)

    @property
    def awaits_evidence(self) -> bool:
        """Whether it acted, and its target has not shown it yet."""
        return self.target is not None and not self.missed and self.effective_ns is None

    @property
    def why_missed(self) -> str:
        """Why it did not act."""
        return self.missed or f"no rank {self.fault.rank} was there {self.fault.moment}"

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for faults that are due at the same moment."""
        fault = self.fault
        return (fault.at_step, fault.phase, fault.after_s, fault.during, fault.recovery)


class Striker:
    """Base of the conductors: faults, and the journal in which they are written down.

    Attributes:
        strikes: one for each fault, in the order of the plan.
        run_end: why the run was over.
    """

    def __init__(self, faults: Sequence[Fault], journal: Journal) -> None:
        self._journal = journal
        self.strikes = [Strike(fault_id(number), fault) for number, fault in enumerate(faults)]
        self.run_end = RunEnd.HARNESS

    def _inject(self, strike: Strike, target: Target) -> bool:
        self._note_gone()
        strike.target = target
        target.claim(target.worker)
        target.injected_ns = target.acted_ns
        try:
            strike.fault.inject(target)
        except (ProcessLookupError, ConnectionError) as error:
            strike.missed = f"the target was gone already: {error}"
            target.pull("none")
            return False
        except HarnessError as error:
            strike.missed = f"it could not act: {error}"
            raise
        except OSError as error:
            strike.missed = f"it could not act: {error}"
            target.pull("none")
            raise HarnessError(f"{strike.fault} could not act: {error}") from error
        return True

    def _note_gone(self) -> None:
        """A process that is gone before a fault strikes is not gone by it, even if that ends all that could tell."""
        for strike in self.strikes:
            target = strike.target
            if target is None or strike.missed or target.gone_ns:
                continue
            if is_ending(target.pid) or start_ticks(target.pid) != target.ticks:
                target.gone_ns = time.monotonic_ns()

    def _write_down(self, strike: Strike) -> None:
        target = strike.target
        assert target is not None
        self._journal.write(
            Event.INJECTED,
            t_ns=target.injected_ns,
            fault=strike.fault_id,
            what=str(strike.fault),
            worker=target.worker,
            rank=target.rank,
            step=target.step,
            phase=target.phase,
            node=target.node,
            nodes=sorted(target.struck_nodes) if strike.fault.whole_node else [],
            pid=target.pid,
            ticks=target.ticks,
            generation=self._place_of(target.worker)["generation"],
            waiting=target.waiting,
            done_ns=time.monotonic_ns(),
        )
        strike.acts = {worker: t_ns for worker, t_ns in target.claims.items() if worker == target.worker}

    def _place_of(self, worker: str) -> dict[str, Any]:
        """Return rank, node, pid and generation of a worker that is struck, as far as they are known."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """Let the faults that struck act again as time passes, and write down what they did."""
        for strike in self.strikes:
            if strike.target is not None and not strike.missed:
                strike.fault.again(strike.target, None)
        self._note_acts()

    def _note_acts(self) -> None:
        for strike in self.strikes:
            if strike.target is not None and not strike.missed:
                self._note_claims(strike, strike.target)
                self._note_end(strike, strike.target)

    def _note_claims(self, strike: Strike, target: Target) -> None:
        """A fault that strikes several workers, or one again, claims each before the act."""
        for worker, t_ns in target.claims.items():
            if strike.acts.get(worker) != t_ns:
                strike.acts[worker] = t_ns
                told = {"fault": strike.fault_id, "what": str(strike.fault), "worker": worker}
                self._journal.write(Event.ACTED, t_ns=t_ns, **told, **self._place_of(worker))

    def _note_end(self, strike: Strike, target: Target) -> None:
        """A fault that begins and ends, like a link that flaps, ends when it has ended for the last time so far."""
        if target.lifted_ns > strike.lifted_ns:
            strike.lifted_ns = target.lifted_ns
            what = str(strike.fault)
            self._journal.write(Event.LIFTED, t_ns=target.lifted_ns, fault=strike.fault_id, what=what)

    def _look_for_evidence(self) -> None:
        for strike in self.strikes:
            if strike.target is None or not strike.awaits_evidence:
                continue
            observed = strike.fault.observe(strike.target)
            if observed is not None:
                self._confirm(strike, time.monotonic_ns(), observed)

    def _confirm(self, strike: Strike, t_ns: int, observed: str) -> None:
        """The target shows the fault, and has since ``t_ns``."""
        strike.effective_ns, strike.observed = t_ns, observed
        told = {"fault": strike.fault_id, "level": "effective", "observed": observed}
        self._journal.write(Event.EVIDENCE, t_ns=t_ns, **told)

    def _sum_up(self) -> None:
        """The last word of faults that act again and again."""
        for strike in self.strikes:
            if strike.target is not None and strike.effective_ns is not None:
                observed = strike.fault.observe(strike.target)
                if observed is not None and observed != strike.observed:
                    self._confirm(strike, strike.effective_ns, observed)

    def tell_missed(self) -> None:
        """Write down which faults did not act. To be called when all is known that ever will be."""
        for strike in self.strikes:
            if strike.target is None or strike.missed:
                what, reason = str(strike.fault), strike.why_missed
                self._journal.write(Event.FAULT_MISSED, fault=strike.fault_id, what=what, reason=reason)

    def clean_up(self) -> None:
        """Put back what the run itself did not."""
        for strike in self.strikes:
            if strike.target is not None and not strike.missed:
                strike.undone = strike.fault.clean_up(strike.target)
                beat = strike.target.beat
                starved_s = beat[1].starved_ms / 1000 if beat is not None else 0.0
                told: dict[str, Any] = {"ok": strike.undone, "acted_ns": strike.target.acted_ns, "starved_s": starved_s}
                self._journal.write(Event.UNDONE, fault=strike.fault_id, **told)
