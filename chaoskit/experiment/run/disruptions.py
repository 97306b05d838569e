"""Pods that were taken away by something other than the run, and the checks that they make
unknown.

-> substrate/kubernetes/pods/disruption.py: how such a pod is recognised.
experiment/run/recovery_timeline.py: losses that follow from it. experiment/judge/judge.py adds the
check.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from chaoskit.journal import Record
from chaoskit.runlog.injected import InjectionRecord
from chaoskit.runlog.outcome import COMMITTED_STEPS, COMPLETED, RECOVERED, Check
from chaoskit.vocabulary import Event, Verdict

NAME = "no pod was taken away"
#: Checks that may fail if more is lost than was planned. Other checks must hold whatever is lost.
DEPENDENT = (COMPLETED, RECOVERED, COMMITTED_STEPS, "property 16L: k faults cost k bounds")
_SHOWN = 3
_STANDBY = "standby"
_FOR_A_FAULT = "; a fault needs it"


def taken_in_words(taken_pod: Record) -> str:
    """Return in words which pod was taken, the cause, and the proof."""
    role = taken_pod["node"] if taken_pod["role"] != "coordinator" else "the coordinator"
    return f"the pod of {role} ({taken_pod['pod']}) was {taken_pod['cause']}, and not by this run: {taken_pod['detail']}"


def standbys_needed_until_ns(
    strikes: Iterable[InjectionRecord], returns: Sequence[Record]
) -> float:
    """Return the time in ns until which faults of a run need the standby pods.

    It is 0 if no fault needs them, and infinite if a need has no end.

    Args:
        strikes: the faults of the run.
        returns: the records of nodes and coordinators that were replaced.
    """
    return max(
        (_needs_until_ns(strike, returns) for strike in strikes if strike.fault.needs_standby),
        default=0,
    )


def _needs_until_ns(strike: InjectionRecord, returns: Sequence[Record]) -> float:
    """Return the time in ns until which a fault needs the standby pods; infinity without end.

    It is infinite for a fault that has not struck, or whose node never came back.
    """
    fault, target = strike.fault, strike.target
    if target is None:
        return math.inf
    later_records = [record for record in returns if record.t_ns > target.injected_ns]
    if fault.ends_coordinator:
        return min(
            (record.t_ns for record in later_records if record.event == Event.RESUMED),
            default=math.inf,
        )
    if not fault.ends_node:  # the fault adds a node, and the node's arrival is its evidence
        return math.inf if strike.effective_ns is None else strike.effective_ns
    replacements = [record for record in later_records if record.event == Event.NODE_REPLACED]
    first_ns = {record["node"]: record.t_ns for record in reversed(replacements)}
    return max(
        (first_ns.get(node, math.inf) for node in target.struck_nodes or {target.node}),
        default=math.inf,
    )


def disturbing_pods(
    taken_pods: Iterable[Record], end_ns: int, standbys_until_ns: float
) -> list[Record]:
    """Return the records of pods with an end that disturbed the job or a fault.

    A pod that was taken after the end of the job disturbed nothing, nor did a standby pod that no
    fault needed any more.

    Args:
        taken_pods: the records of pods that were taken.
        end_ns: the end of the job.
        standbys_until_ns: the time until which faults need the standby pods.
    """
    until_ns = {_STANDBY: min(end_ns, standbys_until_ns)}
    return [record for record in taken_pods if record.t_ns <= until_ns.get(record["role"], end_ns)]


def check_pods(taken_pods: Sequence[Record], disturbed_by: Sequence[Record]) -> list[Check]:
    """Return the check of pods that were taken; none if all pods stayed.

    The check is unknown if the end of a pod disturbed the job or a fault: more was broken than
    planned. Otherwise it passes. It never fails.

    Args:
        taken_pods: the records of pods that were taken.
        disturbed_by: those among them that disturbed the job or a fault.
    """
    if not taken_pods:
        return []
    if not disturbed_by:
        detail = "; ".join(map(taken_in_words, taken_pods[:_SHOWN]))
        return [
            Check(name=NAME, verdict=Verdict.PASSED, detail=f"{detail}; the job did not need it")
        ]
    needed = [
        taken_in_words(record) + _FOR_A_FAULT * (record["role"] == _STANDBY)
        for record in disturbed_by[:_SHOWN]
    ]
    return [Check(name=NAME, verdict=Verdict.UNKNOWN, detail="; ".join(needed))]


def excuse_failures(
    checks: Iterable[Check], records: Sequence[Record], dependent: Collection[str] = DEPENDENT
) -> list[Check]:
    """Return the checks; failed ones that depend on planned losses are unknown if a pod was taken.

    Args:
        checks: the checks of the run.
        records: the records of pods that disturbed the run.
        dependent: the names of the checks that depend on planned losses.
    """
    if not records:
        return list(checks)
    nodes = ", ".join(dict.fromkeys(str(record["node"]) for record in records))
    return [
        _as_unknown(check, nodes)
        if check.verdict == Verdict.FAILED and check.name in dependent
        else check
        for check in checks
    ]


def _as_unknown(check: Check, nodes: str) -> Check:
    """Return the check as unknown, with the pods that were taken in its detail."""
    detail = f"{check.detail}; the pod of {nodes} was taken away, which was not planned"
    return Check(name=check.name, verdict=Verdict.UNKNOWN, detail=detail)
