"""Pods of a run that something other than the run took away, and the checks that they make unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from chaoskit.faults.nodes.coordinator import CoordinatorFault
from chaoskit.journal import Record
from chaoskit.runlog.injected import InjectionRecord
from chaoskit.runlog.outcome import COMMITTED_STEPS, COMPLETED, RECOVERED, Check
from chaoskit.vocabulary import Event, Verdict

NAME = "no pod was taken away"
#: Checks that fail where more is lost than was planned. Other checks must hold whatever is lost.
_DEPENDENT = (COMPLETED, RECOVERED, COMMITTED_STEPS, "property 16L: k faults cost k bounds")
_SHOWN = 3
_STANDBY = "standby"
_FOR_A_FAULT = "; a fault needs it"


def words_of(taken: Record) -> str:
    """Return what took a pod, in words: which pod, the cause, and the proof."""
    role = taken["node"] if taken["role"] != "coordinator" else "the coordinator"
    return f"the pod of {role} ({taken['pod']}) was {taken['cause']}, and not by this run: {taken['detail']}"


def standbys_needed_until_ns(
    strikes: Iterable[InjectionRecord], returns: Sequence[Record]
) -> float:
    """Return until when faults of a run need the pods that stand by; 0 if none does.

    Args:
        returns: the records of nodes and coordinators that were replaced.
    """
    return max(
        (_needs_until_ns(strike, returns) for strike in strikes if strike.fault.needs_standby),
        default=0,
    )


def _needs_until_ns(strike: InjectionRecord, returns: Sequence[Record]) -> float:
    fault, target = strike.fault, strike.target
    if target is None:
        return math.inf
    later = [record for record in returns if record.t_ns > target.injected_ns]
    if isinstance(fault, CoordinatorFault):
        return min(
            (record.t_ns for record in later if record.event == Event.RESUMED), default=math.inf
        )
    if (
        not fault.ends_node
    ):  # the fault adds a node; the arrival of the node is the fault's evidence
        return math.inf if strike.effective_ns is None else strike.effective_ns
    replaced = [record for record in later if record.event == Event.NODE_REPLACED]
    first_ns = {record["node"]: record.t_ns for record in reversed(replaced)}
    return max(
        (first_ns.get(node, math.inf) for node in target.struck_nodes or {target.node}),
        default=math.inf,
    )


def disturbing(taken: Iterable[Record], end_ns: int, standbys_until_ns: float) -> list[Record]:
    """Return the records of pods whose end disturbed the job or a fault.

    A pod that went after the end of the job did not, nor one that stood by when no fault needed it any more.
    """
    until_ns = {_STANDBY: min(end_ns, standbys_until_ns)}
    return [record for record in taken if record.t_ns <= until_ns.get(record["role"], end_ns)]


def check_pods(taken: Sequence[Record], disturbed_by: Sequence[Record]) -> list[Check]:
    """Return the check of pods that were taken; none if all pods stayed.

    It is unknown where a pod's end disturbed the job or a fault: more was broken than the plan says.
    """
    if not taken:
        return []
    if not disturbed_by:
        detail = "; ".join(map(words_of, taken[:_SHOWN]))
        return [
            Check(name=NAME, verdict=Verdict.PASSED, detail=f"{detail}; the job did not need it")
        ]
    needed = [
        words_of(record) + _FOR_A_FAULT * (record["role"] == _STANDBY)
        for record in disturbed_by[:_SHOWN]
    ]
    return [Check(name=NAME, verdict=Verdict.UNKNOWN, detail="; ".join(needed))]


def spare(checks: Iterable[Check], records: Sequence[Record]) -> list[Check]:
    """Return the checks; those that fail where more was lost than was planned are unknown, if a pod was taken.

    ``records``: of the pods whose end disturbed the run.
    """
    if not records:
        return list(checks)
    nodes = ", ".join(dict.fromkeys(str(record["node"]) for record in records))
    return [_spared(check, nodes) if _depends(check) else check for check in checks]


def _depends(check: Check) -> bool:
    return check.verdict == Verdict.FAILED and check.name in _DEPENDENT


def _spared(check: Check, nodes: str) -> Check:
    detail = f"{check.detail}; the pod of {nodes} was taken away, which was not planned"
    return Check(name=check.name, verdict=Verdict.UNKNOWN, detail=detail)
