"""The verdict on a fault: passed with evidence, unknown if it did not act or nothing shows its effect.

-> experiment/judge/fault_audit.py: a fault that struck another target than planned.
runlog/injected.py: the strike and its evidence, read from the journals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chaoskit.faults.evidence import NO_RANK
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import Check, EvidenceRecord, FaultRecord
from chaoskit.vocabulary import Verdict


def fault_record(
    strike: InjectionRecord,
    started_ns: int,
    place_of: Callable[[Struck], str],
    impacts: Sequence[EvidenceRecord],
    moment: str = "",
) -> FaultRecord:
    """Return the record of a fault for an outcome.

    A fault that did not act, or acted too late, gets no time and no evidence.

    Args:
        strike: the fault and its result.
        started_ns: the start of the run, in ns.
        place_of: returns in words where the target was when it was struck.
        impacts: the effects of the fault on the job.
        moment: the moment at which the fault was due, in words; "" for the fault's own text.
    """
    fault, target = strike.fault, strike.target
    record = FaultRecord(
        fault=str(fault),
        kind=fault.kind,
        rank=fault.rank if isinstance(fault.rank, int) else None,
        step=fault.at_step,
        phase=fault.phase if fault.at_step is not None else fault.during,
        moment=moment or fault.moment,
        state=_state(strike),
        undone=strike.undone,
    )
    if target is None or strike.missed:
        return record

    def seconds(t_ns: int) -> float:
        return (t_ns - started_ns) / 1e9

    record.rank = target.rank if target.rank != NO_RANK else None
    record.injected_s = seconds(target.injected_ns)
    record.evidence = [
        EvidenceRecord(level="armed", at_s=record.injected_s, observed=place_of(target))
    ]
    if strike.effective_ns is not None:
        record.evidence.append(
            EvidenceRecord(
                level="effective", at_s=seconds(strike.effective_ns), observed=strike.observed
            )
        )
    record.evidence += impacts
    return record


def _state(strike: InjectionRecord) -> str:
    """Return the state of a fault, one of the values of :attr:`FaultRecord.state`."""
    if not strike.undone:
        return "undo failed"
    if strike.target is None:
        return "not fired"
    if strike.missed:
        return "missed"
    return "confirmed" if strike.effective_ns is not None else "not observed"


def fault_check(strike: InjectionRecord, ended_ns: int, *, effect_shown: bool = True) -> Check:
    """Return the check of a fault's evidence: passed with evidence, unknown without.

    It is unknown, too, if the fault did not act or acted too late, or if the loss did not follow
    that it must cause. It is an error if the fault could not be undone.

    Args:
        strike: the fault and its result.
        ended_ns: the end of the run, in ns.
        effect_shown: the job showed the loss or the bad numbers that such a fault must cause; True
            for a fault that need not cause any.
    """
    name, state = f"evidence of {strike.fault}", _state(strike)
    if state == "confirmed" and not effect_shown:
        causes = ", ".join(sorted(strike.fault.must_show))
        detail = (
            f"{strike.observed}; but no loss and no bad numbers followed, as they must ({causes})"
        )
        return Check(name=name, verdict=Verdict.UNKNOWN, detail=detail)
    if state == "confirmed":
        return Check(name=name, verdict=Verdict.PASSED, detail=strike.observed)
    if state == "undo failed":
        return Check(
            name=name,
            verdict=Verdict.ERROR,
            detail="its effect could not be undone; run `chaoskit cleanup`",
        )
    if state == "missed":
        return Check(
            name=name, verdict=Verdict.UNKNOWN, detail=f"injected, and missed: {strike.why_missed}"
        )
    if state == "not fired":
        return Check(name=name, verdict=Verdict.UNKNOWN, detail=f"not fired: {strike.why_missed}")
    detail = f"injected, but no effect was observed on its target: {strike.fault.kind}.inject yielded no Evidence"
    if strike.target is not None:
        left_s, needed_s = (ended_ns - strike.target.injected_ns) / 1e9, strike.fault.evidence_s
        if left_s < needed_s:
            detail = f"the run ended {left_s:.1f} s after it, and its evidence needs {needed_s:g} s: use more steps"
    return Check(name=name, verdict=Verdict.UNKNOWN, detail=detail)
