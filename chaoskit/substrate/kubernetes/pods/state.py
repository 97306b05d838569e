"""Why a pod does not run, in the words of the cluster. Pure: it reads an object, and asks nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chaoskit.substrate.kubernetes.pods.disruption import disruption_of

# Of a container that waits: the user has to change something, and nothing gets better by waiting.
_FINAL = frozenset({"InvalidImageName"})
_NOT_PULLED = "Failed to pull image"
#: Reasons of a container whose image cannot be pulled: right after a failure, and while the kubelet waits.
PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff"})
#: Failures after which an image is given up: the kubelet has waited 10 s after the first, and waits twice as long then.
_PULLS_MAX = 2
_USUAL = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class Pending:
    """A reason for which a pod does not run.

    Attributes:
        is_final: the pod will not run later either.
        is_passing: another pod, made later, may not meet this reason.
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
    """Whether nothing of a pod runs, and nothing will."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def pending(station: str, pod: Mapping[str, Any]) -> Pending | None:
    """Why a pod does not run; None while nothing is known against it."""
    return next(_reasons(station, pod), None)


def taken_away(station: str, pod: Mapping[str, Any] | None) -> Pending | None:
    """Return that something else takes a pod away; None if nothing does. ``pod``: None if it is gone."""
    why = disruption_of(pod)
    return (
        None
        if why is None
        else Pending(station, why.cause, why.detail, is_final=True, is_passing=True)
    )


def pull_failure(station: str, events: Sequence[Mapping[str, Any]]) -> Pending | None:
    """Return why an image cannot be pulled, by the events ``Failed`` of a pod; None where they say nothing of it.

    It is final when the kubelet has backed off twice.
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
    """Why a pod, as the server would have it, would not preempt another one, or not that one alone; "" if it would."""
    spec = pod.get("spec", {})
    ours, theirs = spec.get("priority") or 0, victim.get("spec", {}).get("priority") or 0
    if ours <= theirs:
        return f"its priority would be {ours}, and that of the other pod is {theirs}: use another priority_class"
    if spec.get("preemptionPolicy") == "Never":
        return f"{spec.get('priorityClassName')} preempts no pods: use another priority_class"
    containers = (*spec.get("initContainers", ()), *spec.get("containers", ()))
    asked = [(one.get("resources") or {}).get("requests") or {} for one in (*containers, spec)]
    asked.append(spec.get("overhead") or {})
    if any(str(amount) != "0" for requests in asked for amount in requests.values()):
        return "the cluster has it ask for resources, so others' pods might be preempted, too"
    return ""


def _reasons(station: str, pod: Mapping[str, Any]) -> Iterator[Pending]:
    status = pod.get("status", {})
    if (taken := taken_away(station, pod)) is not None:
        yield taken
    if has_ended(pod):
        yield Pending(station, *_how_it_ended(status), is_final=True)
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


def _how_it_ended(status: Mapping[str, Any]) -> tuple[str, str]:
    for container in status.get("containerStatuses", ()):
        if ended := container.get("state", {}).get("terminated"):
            told = f"exit code {ended.get('exitCode')}: {_line(ended.get('message', ''))}"
            return ended.get("reason", "Terminated"), told.removesuffix(": ")
    return status.get("reason", "Failed"), _line(status.get("message", ""))


def _line(message: str) -> str:
    """The words without what a terminal would break."""
    return " ".join(message.split())
