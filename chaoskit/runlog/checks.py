"""Checks and records that the judges of jobs and of commands share.

-> runlog/fault_verdict.py: the check of a fault's evidence. vocabulary.py (Verdict.worst): the
verdict of a run from its checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from chaoskit.journal import FileCoverage, Record
from chaoskit.runlog.outcome import Check, RuleRecord
from chaoskit.vocabulary import Event, Verdict


def conclude(name: str, problems: list[str], passed_detail: str, *, looked_at: int) -> Check:
    """Return a check that passed, or failed with the first three ``problems``.

    Args:
        name: the name of the check.
        problems: the problems in words; empty if there are none.
        passed_detail: the detail of a check that passed.
        looked_at: the number of things that the check has examined; the check is unknown if it is
            0.
    """
    if not problems and looked_at == 0:
        return Check(name=name, verdict=Verdict.UNKNOWN, detail="there was no data to check")
    if not problems:
        return Check(name=name, verdict=Verdict.PASSED, detail=passed_detail)
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return Check(name=name, verdict=Verdict.FAILED, detail="; ".join(problems[:3]) + more)


def harness_lost(records: Iterable[Record]) -> Check:
    """Return a check with the verdict error: the harness was killed, or failed, or lost records.

    The detail has the recorded error of the harness, if any.
    """
    end_records = [record for record in records if record.event == Event.RUN_ENDED]
    reason = end_records[-1]["detail"] if end_records else ""
    detail = f"the harness ended early: {reason}" if reason else "the harness ended early"
    return Check(name="the harness ended in order", verdict=Verdict.ERROR, detail=detail)


def compared_with_itself(name: str, run_id: str) -> Check:
    """Return a check with the verdict error, for a run that was compared with itself.

    Args:
        name: the name of the other side of the comparison.
        run_id: the run id of both sides.
    """
    detail = f"both have the run id {run_id}"
    return Check(name=f"the {name} is another run", verdict=Verdict.ERROR, detail=detail)


def rules_fired(records: Iterable[Record], started_ns: int) -> list[RuleRecord]:
    """Return the log rules that fired, by time, each with its action.

    A rule whose action was not carried out also has the reason.

    Args:
        records: the records of the run, by time.
        started_ns: the start of the run, in ns.
    """
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
            rule_key = (record["rule"], record["verdict"], record["worker"])
            positions = [
                position
                for position, record in enumerate(fired)
                if (record.rule, record.verdict, record.where) == rule_key
            ]
            if positions:
                fired[positions[-1]] = msgspec.structs.replace(
                    fired[positions[-1]], excused=record["detail"]
                )
    return fired


def environment(coverage: Mapping[str, FileCoverage], role: str, *names: str) -> dict[str, str]:
    """Return name -> fact, as processes of a role recorded it when they began.

    Different facts are joined by commas; a fact that no process recorded is left out.

    Args:
        coverage: the journals of the run.
        role: the role of the processes.
        names: the names of the facts.
    """
    opened = _opened(coverage, role)
    values_by_name = {
        name: sorted({str(record[name]) for record in opened if record[name]}) for name in names
    }
    return {name: ", ".join(values) for name, values in values_by_name.items() if values}


def started_at(coverage: Mapping[str, FileCoverage], started_ns: int) -> str:
    """Return the wall clock at the start of a run, in ISO 8601; "" if its harness recorded none."""
    opened_record = next(iter(_opened(coverage, "harness")), None)
    if opened_record is None:
        return ""
    unix_ns = opened_record["unix_ns"] + started_ns - opened_record.t_ns
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def _opened(coverage: Mapping[str, FileCoverage], role: str) -> list[Record]:
    """Return the first record of each process of a role."""
    role_writers = (
        writer for file in coverage.values() for writer in file.writers if writer.role == role
    )
    return [writer.opened for writer in role_writers if writer.opened is not None]
