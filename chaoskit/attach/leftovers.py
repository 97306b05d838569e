"""Leftovers of attached runs in a namespace: hands in pods, and objects of second jobs.

-> attach/hands/hand_container.py: the containers. attach/doctor/: throw-away pods.
attach/twin/objects.py: the objects, and what deletes them when a run ends.
cli/machine/cleanup.py prints the leftovers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from chaoskit.attach.doctor.trial_pod import COMPONENT, COMPONENT_LABEL
from chaoskit.attach.hands.hand_container import PREFIX
from chaoskit.attach.twin.objects import MARK
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import JOB_RESOURCES
from chaoskit.substrate.kubernetes.pods.state import has_ended

#: Resources and groups of the objects of second jobs that are looked for, by kind.
_TWIN_RESOURCES = {**JOB_RESOURCES, "Service": ("services", "")}


@dataclass(frozen=True, slots=True)
class LeftHands:
    """The containers of hands in a pod.

    Attributes:
        pod: name of the pod.
        uid: its identifier.
        ended: number of those that have ended. They stay in the list of the pod.
        standing: number of those that run, or may start still.
    """

    pod: str
    uid: str
    ended: int
    standing: int


@dataclass(frozen=True, slots=True)
class LeftTwinObject:
    """An object of a second job. The run that made it may still need it, also on another machine.

    Attributes:
        kind: its kind.
        name: its name.
        resource: the resource with its group, as kubectl names it.
    """

    kind: str
    name: str
    resource: str


@dataclass(frozen=True, slots=True)
class NamespaceLeftovers:
    """The leftovers in a namespace.

    Attributes:
        namespace: its name.
        hands: the containers of hands, for each pod that has any.
        removed_pods: names of the ended throw-away pods that were deleted.
        problem: why its pods are not known, or one was not deleted; "" for none.
        twin_objects: the objects of second jobs.
        twin_problem: why these are not all known; "" if they are.
    """

    namespace: str
    hands: tuple[LeftHands, ...] = ()
    removed_pods: tuple[str, ...] = ()
    problem: str = ""
    twin_objects: tuple[LeftTwinObject, ...] = ()
    twin_problem: str = ""


def clean_namespace(api: KubernetesApi) -> NamespaceLeftovers:
    """Delete ended throw-away pods in the namespace of a client, and return what is left.

    A throw-away pod that has not ended may be in use. The cluster ends it within 10 minutes. Objects
    of second jobs may be in use without end, so none is deleted.
    """
    removed: list[str] = []
    try:
        pods = list(api.find("Pod", ""))
        for pod in pods:
            labels = pod["metadata"].get("labels") or {}
            if labels.get(COMPONENT_LABEL) == COMPONENT and has_ended(pod):
                name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
                api.delete("Pod", name, grace_s=0, uid=uid)
                removed.append(name)
    except ApiError as error:
        return NamespaceLeftovers(api.namespace, (), tuple(removed), str(error))
    present = [pod for pod in pods if pod["metadata"]["name"] not in removed]
    hands = tuple(left_hands(present))
    twin_objects: list[LeftTwinObject] = []
    problem = ""
    for kind in _TWIN_RESOURCES:
        try:
            twin_objects += _twin_objects(api, kind)
        except ApiError as error:
            problem = problem or str(error)
    return NamespaceLeftovers(
        api.namespace,
        hands,
        tuple(removed),
        twin_objects=tuple(twin_objects),
        twin_problem=problem,
    )


def _twin_objects(api: KubernetesApi, kind: str) -> list[LeftTwinObject]:
    """Return the objects of second jobs of a kind. Raises ApiError."""
    resource = ".".join(filter(None, _TWIN_RESOURCES[kind]))
    try:
        return [
            LeftTwinObject(kind, manifest["metadata"]["name"], resource)
            for manifest in api.find(kind, MARK)
        ]
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:  # the cluster has no such kind
            raise
        return []


def left_hands(pods: Iterable[Mapping[str, Any]]) -> list[LeftHands]:
    """Return the containers of hands in pods, without the pods that have none."""
    all_left = []
    for pod in pods:
        names = [
            entry["name"]
            for entry in pod["spec"].get("ephemeralContainers") or ()
            if entry["name"].startswith(PREFIX)
        ]
        ended = sum(_has_ended(pod, name) for name in names)
        if names:
            metadata = pod["metadata"]
            all_left.append(LeftHands(metadata["name"], metadata["uid"], ended, len(names) - ended))
    return all_left


def describe_hands(left: LeftHands) -> list[str]:
    """Return lines about the containers of hands in a pod."""
    lines = []
    if left.ended:
        lines.append(
            f"{left.pod}: {_containers(left.ended)} of hands ended, and cannot be removed:"
            " the API server keeps them until the pod goes"
        )
    if left.standing:
        lines.append(
            f"{left.pod}: {_containers(left.standing)} of hands may run:"
            " a hand whose run is gone ends by itself within 10 s"
        )
    return lines


def describe_twin_object(left: LeftTwinObject, namespace: str) -> str:
    """Return a line about an object of a second job, with the command that deletes it."""
    return (
        f"{left.kind} {left.name}: belongs to the second job of a run (--twin), which may go on;"
        f" if that run is gone: kubectl --namespace {namespace} delete {left.resource} {left.name}"
    )


def _has_ended(pod: Mapping[str, Any], name: str) -> bool:
    """Return whether an ephemeral container has ended, or will not start any more."""
    statuses = (pod.get("status") or {}).get("ephemeralContainerStatuses") or ()
    state = next((entry.get("state") or {} for entry in statuses if entry["name"] == name), {})
    return "terminated" in state or has_ended(pod)


def _containers(number: int) -> str:
    return f"{number} container{'' if number == 1 else 's'}"
