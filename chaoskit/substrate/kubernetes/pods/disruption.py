"""Pods that something other than their session takes away, and sessions that something ends from outside. Pure: these
functions read objects of the API server, and ask nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: An annotation of a session's Job: the user that has ended it with ``chaoskit cluster end``.
ENDED_BY = "chaoskit.dev/ended-by"

#: Causes, by the reason of the condition ``DisruptionTarget``.
_BY_CONDITION = {
    "EvictionByEvictionAPI": "evicted",
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "deleted for a taint of its machine",
    "DeletionByPodGC": "deleted with its machine",
    "TerminationByKubelet": "ended by its machine",
}
#: Causes, by the reason of an event about the pod; the API server keeps events for an hour.
_BY_EVENT = {
    "Preempted": "preempted",
    "TaintManagerEviction": "deleted for a taint of its machine",
    "Evicted": "evicted",
    "ScaleDown": "deleted for the autoscaler",
    "NodeShutdown": "ended by its machine",
    "DeletingPod": "deleted with its machine",
}
_JOB_FAILURES = ("Failed", "FailureTarget")  # the second one is there before its pods have ended
#: Reasons in the status of a pod that its kubelet has ended: pressure on its machine, or the machine's shutdown.
_BY_STATUS = ("Evicted", "NodeShutdown", "Shutdown", "Terminated", "Preempting")
#: The cluster says so of the pods on a machine that has fallen silent.
_NODE_LOST, _NODE_NOT_READY = "NodeLost", "NodeNotReady"
_LOST_WITH_MACHINE = "lost with its machine"
#: Taints of a machine that its cloud has ended, or that an operator has declared dead.
_ENDED = ("node.cloudprovider.kubernetes.io/shutdown", "node.kubernetes.io/out-of-service")


@dataclass(frozen=True, slots=True)
class Disruption:
    """An end of a pod that its session has not asked for.

    Attributes:
        cause: the cause in a word or two, such as ``evicted``.
        detail: the words of the API server that prove it.
    """

    cause: str
    detail: str

    def __str__(self) -> str:
        return f"{self.cause} ({self.detail})"


def disruption_of(
    pod: Mapping[str, Any] | None, events: Iterable[Mapping[str, Any]] = ()
) -> Disruption | None:
    """Return why a pod goes that its session has not told to go; None if nothing takes it away.

    Args:
        pod: the object as the API server has it; None if it has no such pod any more.
        events: events about the pod.
    """
    events = list(events)
    told = _by_event(events)
    if pod is None:
        gone = "the API server has no such pod any more"
        return (
            Disruption(told.cause, f"{told.detail}; {gone}")
            if told
            else Disruption("deleted", gone)
        )
    proof = "; ".join(_deletion(pod))
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = str(condition.get("reason", ""))
            words = _joined(f"DisruptionTarget: {reason}", condition.get("message", ""))
            return Disruption(
                _BY_CONDITION.get(reason, "disrupted"), "; ".join(filter(None, (words, proof)))
            )
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason") in _BY_STATUS:
        return Disruption(
            "ended by its machine", _joined(str(status["reason"]), status.get("message", ""))
        )
    if status.get("reason") == _NODE_LOST:
        words = _joined(_NODE_LOST, status.get("message", ""))
        return Disruption(_LOST_WITH_MACHINE, "; ".join(filter(None, (words, proof))))
    if proof:
        return (
            Disruption(told.cause, f"{told.detail}; {proof}")
            if told
            else Disruption("deleted", proof)
        )
    return _by_readiness(status, events)


def loss_of_machine(machine: str, node: Mapping[str, Any] | None) -> Disruption | None:
    """Return why the pods of a machine are lost that have fallen silent; None if nothing shows that the machine is.

    Args:
        machine: its name.
        node: the object of the cluster's node; None if there is no such node any more.
    """
    if node is None:
        return Disruption(_LOST_WITH_MACHINE, f"the API server has no node {machine} any more")
    for condition in node.get("status", {}).get("conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            ready = f"node {machine}: Ready is {condition.get('status')}"
            words = _joined(
                _joined(ready, condition.get("reason", "")), condition.get("message", "")
            )
            return Disruption(_LOST_WITH_MACHINE, words)
    if proof := "; ".join(_deletion(node)):
        return Disruption(_LOST_WITH_MACHINE, f"node {machine}: {proof}")
    for taint in node.get("spec", {}).get("taints") or ():
        if taint.get("key") in _ENDED:
            return Disruption(_LOST_WITH_MACHINE, f"node {machine}: taint {taint['key']}")
    return None


def end_of_session(
    session: str,
    namespace: Mapping[str, Any] | None,
    job: Mapping[str, Any] | None,
    first_pod: Disruption | None = None,
) -> str:
    """Return what has ended a session from outside, in words; "" if nothing shows that.

    Args:
        session: its name.
        namespace, job: objects as the API server has them; None if it has no such object any more.
        first_pod: why the pod of the Job goes, if something takes that away.
    """
    if namespace is None or _goes(namespace):
        return "the namespace of the session was deleted"
    if job is None:
        return f"the Job {session} of the session was deleted"
    if ended_by := (job["metadata"].get("annotations") or {}).get(ENDED_BY, ""):
        return f"{ended_by} has ended the session with chaoskit cluster end"
    if _goes(job):
        return f"the Job {session} of the session was deleted"
    for condition in (
        job.get("status", {}).get("conditions") or ()
    ):  # before its pod, which is deleted then
        if condition.get("type") in _JOB_FAILURES and condition.get("reason") == "DeadlineExceeded":
            return f"the Job of the session has reached its deadline of {job['spec'].get('activeDeadlineSeconds')} s"
    return "" if first_pod is None else f"the pod of the session's Job was {first_pod}"


def _by_event(events: Iterable[Mapping[str, Any]]) -> Disruption | None:
    known = [event for event in events if event.get("reason") in _BY_EVENT]
    if not known:
        return None
    reason = str(known[-1]["reason"])
    return Disruption(_BY_EVENT[reason], _joined(f"event {reason}", known[-1].get("message", "")))


def _by_readiness(
    status: Mapping[str, Any], events: Iterable[Mapping[str, Any]]
) -> Disruption | None:
    """Return the loss of a pod's machine if an event NodeNotReady shows it and the pod is not ready now; else None."""
    conditions = {
        condition.get("type"): condition.get("status")
        for condition in status.get("conditions") or ()
    }
    ended = any(
        "terminated" in one.get("state", {}) for one in status.get("containerStatuses") or ()
    )
    if conditions.get("Ready") != "False" or ended or status.get("phase") != "Running":
        return None
    for event in events:
        if event.get("reason") == _NODE_NOT_READY:
            return Disruption(
                _LOST_WITH_MACHINE, _joined(f"event {_NODE_NOT_READY}", event.get("message", ""))
            )
    return None


def _deletion(pod: Mapping[str, Any]) -> Iterable[str]:
    metadata = pod.get("metadata", {})
    if at := metadata.get("deletionTimestamp"):
        grace_s = metadata.get("deletionGracePeriodSeconds")
        yield f"deletionTimestamp {at}" + (f", grace {grace_s} s" if grace_s is not None else "")


def _goes(found: Mapping[str, Any]) -> bool:
    return (
        bool(found["metadata"].get("deletionTimestamp"))
        or found.get("status", {}).get("phase") == "Terminating"
    )


def _joined(begin: str, message: object) -> str:
    words = " ".join(str(message or "").split())
    return f"{begin}, {words}" if words else begin
