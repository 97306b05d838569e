"""Pods of a run that something other than the run took away, and the checks that they make unknown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chaoskit.experiment.outcome import COMMITTED_STEPS, COMPLETED, RECOVERED, Check
from chaoskit.journal import Record
from chaoskit.vocabulary import Verdict

NAME = "no pod was taken away"
#: Checks that fail where more is lost than was planned. Other checks must hold whatever is lost.
_DEPENDENT = (COMPLETED, RECOVERED, COMMITTED_STEPS, "k faults cost k bounds")
_SHOWN = 3


def words_of(taken: Record) -> str:
    """Return what took a pod, in words: which pod, the cause, and the proof."""
    role = taken["node"] if taken["role"] != "coordinator" else "the coordinator"
    return f"the pod of {role} ({taken['pod']}) was {taken['cause']}, and not by this run: {taken['detail']}"


def disturbing(taken: Iterable[Record], end_ns: int) -> list[Record]:
    """Return the records of pods whose end disturbed the job: not of pods that stood by, or that went after its end."""
    return [record for record in taken if record["role"] != "standby" and record.t_ns <= end_ns]


def check_pods(taken: Sequence[Record], end_ns: int) -> list[Check]:
    """Return the check of pods that were taken; none if all pods stayed.

    It is unknown where a pod's end disturbed the job: more was broken than the plan says.
    """
    if not taken:
        return []
    records = disturbing(taken, end_ns)
    verdict = Verdict.UNKNOWN if records else Verdict.PASSED
    detail = "; ".join(words_of(record) for record in (records or taken)[:_SHOWN])
    if not records:
        detail += "; the job did not need it"
    return [Check(name=NAME, verdict=verdict, detail=detail)]


def spare(checks: Iterable[Check], taken: Sequence[Record], end_ns: int) -> list[Check]:
    """Return the checks; those that fail where more was lost than was planned are unknown, if a pod was taken."""
    records = disturbing(taken, end_ns)
    if not records:
        return list(checks)
    nodes = ", ".join(dict.fromkeys(str(record["node"]) for record in records))
    return [_spared(check, nodes) if _depends(check) else check for check in checks]


def _depends(check: Check) -> bool:
    return check.verdict == Verdict.FAILED and check.name in _DEPENDENT


def _spared(check: Check, nodes: str) -> Check:
    detail = f"{check.detail}; the pod of {nodes} was taken away, which was not planned"
    return Check(name=check.name, verdict=Verdict.UNKNOWN, detail=detail)
