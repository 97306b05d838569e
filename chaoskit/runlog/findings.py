"""What the judges of all kinds of runs have in common: how a fault and a check are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from chaoskit.journal import FileCoverage, Record
from chaoskit.runlog.injected import InjectionRecord, Struck
from chaoskit.runlog.outcome import Check, EvidenceRecord, FaultRecord, RuleRecord
from chaoskit.vocabulary import Event, Verdict


def conclude(name: str, problems: list[str], fine: str, *, looked_at: int) -> Check:
    """Passed with ``fine``, or failed with the first three ``problems``.

    Args:
        looked_at: on how many things the check looked; without any nothing is known.
    """
    if not problems and looked_at == 0:
        return Check(name=name, verdict=Verdict.UNKNOWN, detail="there was nothing to look at")
    if not problems:
        return Check(name=name, verdict=Verdict.PASSED, detail=fine)
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return Check(name=name, verdict=Verdict.FAILED, detail="; ".join(problems[:3]) + more)


def harness_lost(records: Iterable[Record]) -> Check:
    """An error: the harness was killed, was interrupted or failed, or its journal is not whole."""
    ended = [record for record in records if record.event == Event.RUN_ENDED]
    reason = ended[-1]["detail"] if ended else ""
    detail = f"the harness ended early: {reason}" if reason else "the harness ended early"
    return Check(name="the harness ended in order", verdict=Verdict.ERROR, detail=detail)


def compared_with_itself(name: str, run_id: str) -> Check:
    """An error: a comparison of a run with itself finds no difference, whatever the run did.

    Args:
        name: of what it is compared with.
    """
    detail = f"both have the run id {run_id}"
    return Check(name=f"the {name} is another run", verdict=Verdict.ERROR, detail=detail)


def rules_fired(records: Iterable[Record], started_ns: int) -> list[RuleRecord]:
    """The log rules that fired, in the order of time, and what came of them."""
    fired: list[RuleRecord] = []
    for record in records:
        if record.event == Event.RULE_FIRED:
            fields = {
                name: record[name]
                for name in ("rule", "verdict", "rank", "step", "reason", "action")
            }
            fired.append(
                RuleRecord(where=record["worker"], at_s=(record.t_ns - started_ns) / 1e9, **fields)
            )
        elif record.event == Event.RULE_EXCUSED:
            told = (record["rule"], record["verdict"], record["worker"])
            of = [
                place
                for place, one in enumerate(fired)
                if (one.rule, one.verdict, one.where) == told
            ]
            if of:
                fired[of[-1]] = msgspec.structs.replace(fired[of[-1]], excused=record["detail"])
    return fired


def environment(coverage: Mapping[str, FileCoverage], role: str, *names: str) -> dict[str, str]:
    """Return what a reader must know to compare numbers, as the processes of this role said it of themselves."""
    opened = _opened(coverage, role)
    found = {
        name: sorted({str(record[name]) for record in opened if record[name]}) for name in names
    }
    return {name: ", ".join(values) for name, values in found.items() if values}


def started_at(coverage: Mapping[str, FileCoverage], started_ns: int) -> str:
    """Return the wall clock at the start of a run, in ISO 8601; "" where its harness does not tell."""
    harness = next(iter(_opened(coverage, "harness")), None)
    if harness is None:
        return ""
    unix_ns = harness["unix_ns"] + started_ns - harness.t_ns
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def _opened(coverage: Mapping[str, FileCoverage], role: str) -> list[Record]:
    """Return what each process of this role said of itself."""
    writers = (
        writer for file in coverage.values() for writer in file.writers if writer.role == role
    )
    return [writer.opened for writer in writers if writer.opened is not None]


def fault_record(
    strike: InjectionRecord,
    started_ns: int,
    stood: Callable[[Struck], str],
    felt: Sequence[EvidenceRecord],
    moment: str = "",
) -> FaultRecord:
    """What became of a fault.

    Args:
        stood: where the target was when it was struck, in words.
        felt: how the job felt it.
        moment: when it was due, if that is not what the fault itself says.
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

    record.rank = target.rank
    record.injected_s = seconds(target.injected_ns)
    record.evidence = [
        EvidenceRecord(level="armed", at_s=record.injected_s, observed=stood(target))
    ]
    if strike.effective_ns is not None:
        record.evidence.append(
            EvidenceRecord(
                level="effective", at_s=seconds(strike.effective_ns), observed=strike.observed
            )
        )
    record.evidence += felt
    return record


def _state(strike: InjectionRecord) -> str:
    if not strike.undone:
        return "undo failed"
    if strike.target is None:
        return "not fired"
    if strike.missed:
        return "missed"
    return "confirmed" if strike.effective_ns is not None else "not observed"


def fault_check(strike: InjectionRecord, ended_ns: int, *, shown: bool = True) -> Check:
    """Passed with what the target showed; unknown without evidence.

    Args:
        ended_ns: when the run ended.
        shown: whether the job showed what it must show of such a fault.
    """
    name, state = f"evidence of {strike.fault}", _state(strike)
    if state == "confirmed" and not shown:
        causes = ", ".join(sorted(strike.fault.must_show))
        detail = f"{strike.observed}; but nothing followed that must follow it: a loss, or bad numbers ({causes})"
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
