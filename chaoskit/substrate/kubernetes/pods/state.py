"""Reasons for which a pod does not run, in the words of the cluster.

These functions read objects of the API server. They make no requests.

-> ``diagnosis.py`` makes them the error of a run, and ``pods.py`` shows them while it waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chaoskit.substrate.kubernetes.pods.disruption import disruption_of

#: Reasons of a waiting container that only a change by the user can remove.
_FINAL = frozenset({"InvalidImageName"})
_NOT_PULLED = "Failed to pull image"
#: Reasons of a container whose image cannot be pulled: after a failure, and during a wait.
PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff"})
#: Failures after which an image is given up. The kubelet waits 10 s after the first, then 20 s.
_PULLS_MAX = 2
_USUAL = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class Pending:
    """A reason for which a pod does not run.

    Attributes:
        station: station of the pod.
        reason: the reason in a word, such as ``Unschedulable``.
        message: explanation of the cluster on one line; "" for none.
        is_final: True if the pod will not run later either.
        is_passing: True if another pod, created later, may not meet this reason.
    """

    station: str
    reason: str
    message: str = ""
    is_final: bool = False
    is_passing: bool = False

    def __str__(self) -> str:
        return f"{self.station}: {self.reason}" + (f" ({self.message})" if self.message else "")


def in_words(reasons: Iterable[Pending]) -> str:
    """Return reasons as one line. Stations with the same reason are named together."""
    stations: dict[Pending, list[str]] = {}
    for reason in reasons:
        stations.setdefault(replace(reason, station=""), []).append(reason.station)
    return "; ".join(
        str(replace(reason, station=", ".join(names))) for reason, names in stations.items()
    )


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Return whether no process of a pod runs, and none will."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def pending(station: str, pod: Mapping[str, Any]) -> Pending | None:
    """Return the reason for which a pod does not run, or None while there is no known reason."""
    return next(_reasons(station, pod), None)


def taken_away(station: str, pod: Mapping[str, Any] | None) -> Pending | None:
    """Return the disruption of a pod as a reason for which it does not run, or None.

    Args:
        station: station of the pod.
        pod: the object of the API server; None if the pod is gone.
    """
    disruption = disruption_of(pod)
    return (
        None
        if disruption is None
        else Pending(station, disruption.cause, disruption.detail, is_final=True, is_passing=True)
    )


def pull_failure(station: str, events: Sequence[Mapping[str, Any]]) -> Pending | None:
    """Return the reason for which an image cannot be pulled, or None if the events do not show one.

    It is final after two failures.

    Args:
        events: the events ``Failed`` of the pod.
    """
    failures = [event for event in events if str(event.get("message", "")).startswith(_NOT_PULLED)]
    if not failures:
        return None
    pulls = sum(
        event.get("count") or (event.get("series") or {}).get("count") or 1 for event in failures
    )
    return Pending(
        station, "ErrImagePull", _line(str(failures[-1]["message"])), pulls >= _PULLS_MAX
    )


def why_not_preempting(pod: Mapping[str, Any], victim: Mapping[str, Any]) -> str:
    """Return the reason for which a pod would not preempt exactly one other pod, or "" if it would.

    Args:
        pod: the pod as the API server would create it.
        victim: the pod to be preempted.
    """
    spec = pod.get("spec", {})
    priority, other = spec.get("priority") or 0, victim.get("spec", {}).get("priority") or 0
    if priority <= other:
        return f"its priority would be {priority}, and that of the other pod is {other}: use another priority_class"
    if spec.get("preemptionPolicy") == "Never":
        return f"{spec.get('priorityClassName')} preempts no pods: use another priority_class"
    containers = (*spec.get("initContainers", ()), *spec.get("containers", ()))
    all_requests = [
        (container.get("resources") or {}).get("requests") or {}
        for container in (*containers, spec)
    ]
    all_requests.append(spec.get("overhead") or {})
    if any(str(amount) != "0" for requests in all_requests for amount in requests.values()):
        return "the cluster adds requests to it, so that others' pods might be preempted, too"
    return ""


def _reasons(station: str, pod: Mapping[str, Any]) -> Iterator[Pending]:
    """Yield the reasons for which a pod does not run, the most important one first."""
    status = pod.get("status", {})
    if (taken := taken_away(station, pod)) is not None:
        yield taken
    if has_ended(pod):
        yield Pending(station, *_describe_end(status), is_final=True)
    for container in (
        *status.get("initContainerStatuses", ()),
        *status.get("containerStatuses", ()),
    ):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in _USUAL:
            reason = waiting.get("reason", "Waiting")
            yield Pending(station, reason, _line(waiting.get("message", "")), reason in _FINAL)
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield Pending(
                station,
                condition.get("reason", "Unschedulable"),
                _line(condition.get("message", "")),
            )


def _describe_end(status: Mapping[str, Any]) -> tuple[str, str]:
    """Return reason and message of a pod's end, by its first terminated container or its status."""
    for container in status.get("containerStatuses", ()):
        if ended := container.get("state", {}).get("terminated"):
            text = f"exit code {ended.get('exitCode')}: {_line(ended.get('message', ''))}"
            return ended.get("reason", "Terminated"), text.removesuffix(": ")
    return status.get("reason", "Failed"), _line(status.get("message", ""))


def _line(message: str) -> str:
    """Return the message on one line."""
    return " ".join(message.split())
