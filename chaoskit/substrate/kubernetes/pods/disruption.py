"""Disruptions of pods by something other than their session, and ends of sessions from outside.

These functions read objects of the API server. They make no requests.

-> ``pods.py`` stores the disruption of a pod, and ``session.py`` reports the end of a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Annotation of a session's Job: the user that has ended it with ``chaoskit cluster end``.
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
_JOB_FAILURES = ("Failed", "FailureTarget")  # the second one is set before the pods end
#: Reasons in the status of a pod that its kubelet has ended, for pressure or a shutdown.
_BY_STATUS = ("Evicted", "NodeShutdown", "Shutdown", "Terminated", "Preempting")
#: Reasons that the cluster gives for pods on a silent machine.
_NODE_LOST, _NODE_NOT_READY = "NodeLost", "NodeNotReady"
_LOST_WITH_MACHINE = "lost with its machine"
#: Taints of a machine that its cloud has ended, or that an operator has declared dead.
_ENDED = ("node.cloudprovider.kubernetes.io/shutdown", "node.kubernetes.io/out-of-service")


@dataclass(frozen=True, slots=True)
class Disruption:
    """The end of a pod that its session has not requested.

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
    """Return the disruption of a pod whose end its session has not requested.

    None is returned if the objects show none.

    Args:
        pod: the object as the API server has it; None if it has no such pod any more.
        events: events about the pod.
    """
    events = list(events)
    event = _disruption_by_event(events)
    if pod is None:
        missing = "the API server has no such pod any more"
        return (
            Disruption(event.cause, f"{event.detail}; {missing}")
            if event
            else Disruption("deleted", missing)
        )
    proof = "; ".join(_deletion_words(pod))
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = str(condition.get("reason", ""))
            words = _with_message(f"DisruptionTarget: {reason}", condition.get("message", ""))
            return Disruption(
                _BY_CONDITION.get(reason, "disrupted"), "; ".join(filter(None, (words, proof)))
            )
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason") in _BY_STATUS:
        return Disruption(
            "ended by its machine", _with_message(str(status["reason"]), status.get("message", ""))
        )
    if status.get("reason") == _NODE_LOST:
        words = _with_message(_NODE_LOST, status.get("message", ""))
        return Disruption(_LOST_WITH_MACHINE, "; ".join(filter(None, (words, proof))))
    if proof:
        return (
            Disruption(event.cause, f"{event.detail}; {proof}")
            if event
            else Disruption("deleted", proof)
        )
    return _disruption_by_readiness(status, events)


def loss_of_machine(machine: str, node: Mapping[str, Any] | None) -> Disruption | None:
    """Return the disruption of pods by the loss of their machine, or None if that is not proved.

    Args:
        machine: name of the machine.
        node: object of the cluster's node; None if there is no such node any more.
    """
    if node is None:
        return Disruption(_LOST_WITH_MACHINE, f"the API server has no node {machine} any more")
    for condition in node.get("status", {}).get("conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            ready = f"node {machine}: Ready is {condition.get('status')}"
            words = _with_message(
                _with_message(ready, condition.get("reason", "")), condition.get("message", "")
            )
            return Disruption(_LOST_WITH_MACHINE, words)
    if proof := "; ".join(_deletion_words(node)):
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
    """Return the event that has ended a session from outside, in words, or "" if none is proved.

    Args:
        session: name of the session.
        namespace: object of its namespace; None if the API server has no such object any more.
        job: object of its Job; None if the API server has no such object any more.
        first_pod: disruption of the pod of the Job, if there is one.
    """
    if namespace is None or _is_being_deleted(namespace):
        return "the namespace of the session was deleted"
    if job is None:
        return f"the Job {session} of the session was deleted"
    if ended_by := (job["metadata"].get("annotations") or {}).get(ENDED_BY, ""):
        return f"{ended_by} has ended the session with chaoskit cluster end"
    if _is_being_deleted(job):
        return f"the Job {session} of the session was deleted"
    for condition in (
        job.get("status", {}).get("conditions") or ()
    ):  # checked before the pod, which the Job controller deletes then
        if condition.get("type") in _JOB_FAILURES and condition.get("reason") == "DeadlineExceeded":
            return f"the Job of the session has reached its deadline of {job['spec'].get('activeDeadlineSeconds')} s"
    return "" if first_pod is None else f"the pod of the session's Job was {first_pod}"


def _disruption_by_event(events: Iterable[Mapping[str, Any]]) -> Disruption | None:
    """Return the disruption that the last event with a known reason shows, or None."""
    events_with_cause = [event for event in events if event.get("reason") in _BY_EVENT]
    if not events_with_cause:
        return None
    reason = str(events_with_cause[-1]["reason"])
    return Disruption(
        _BY_EVENT[reason],
        _with_message(f"event {reason}", events_with_cause[-1].get("message", "")),
    )


def _disruption_by_readiness(
    status: Mapping[str, Any], events: Iterable[Mapping[str, Any]]
) -> Disruption | None:
    """Return the loss of the machine if an event NodeNotReady shows it and the pod is not ready.

    Return None otherwise, or if a container has ended.
    """
    conditions = {
        condition.get("type"): condition.get("status")
        for condition in status.get("conditions") or ()
    }
    ended = any(
        "terminated" in container.get("state", {})
        for container in status.get("containerStatuses") or ()
    )
    if conditions.get("Ready") != "False" or ended or status.get("phase") != "Running":
        return None
    for event in events:
        if event.get("reason") == _NODE_NOT_READY:
            return Disruption(
                _LOST_WITH_MACHINE,
                _with_message(f"event {_NODE_NOT_READY}", event.get("message", "")),
            )
    return None


def _deletion_words(pod: Mapping[str, Any]) -> Iterable[str]:
    """Yield the words that prove the deletion of an object; none if it is not being deleted."""
    metadata = pod.get("metadata", {})
    if at := metadata.get("deletionTimestamp"):
        grace_s = metadata.get("deletionGracePeriodSeconds")
        yield f"deletionTimestamp {at}" + (f", grace {grace_s} s" if grace_s is not None else "")


def _is_being_deleted(resource: Mapping[str, Any]) -> bool:
    """Return whether an object of the API server is being deleted."""
    return (
        bool(resource["metadata"].get("deletionTimestamp"))
        or resource.get("status", {}).get("phase") == "Terminating"
    )


def _with_message(begin: str, message: object) -> str:
    """Return ``begin``, followed by a comma and the message on one line if there is one."""
    words = " ".join(str(message or "").split())
    return f"{begin}, {words}" if words else begin
