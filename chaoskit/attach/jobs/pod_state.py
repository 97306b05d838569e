"""States of pods and their containers, as plain data read from objects of the API server.

-> ``tracker.py`` compares the states of a pod. ``membership.py``: the place of a pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chaoskit.attach.jobs.kinds import RESTART_ATTEMPT

_ENDED = ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The state of a container of a pod.

    Attributes:
        name: name of the container in its pod.
        container_id: identifier of its present or last life, which differs after a restart;
            "" before the first one.
        restart_count: number of restarts, as the kubelet counts them.
        state: ``waiting``, ``running``, ``terminated``, or "" before there is one.
        reason: reason of a wait or an end, such as ``CrashLoopBackOff`` or ``OOMKilled``.
        exit_code: exit code of a terminated container; None for one that is not terminated.
        last_exit_code: exit code of the life before; None if there was none.
        last_reason: reason for the end of the life before; "" if there was none.
    """

    name: str
    container_id: str = ""
    restart_count: int = 0
    state: str = ""
    reason: str = ""
    exit_code: int | None = None
    last_exit_code: int | None = None
    last_reason: str = ""


@dataclass(frozen=True, slots=True)
class PodState:
    """The state of a pod.

    Attributes:
        uid: identifier of the pod, which no other pod has, also not one of the same name.
        name: name of the pod.
        node: name of its node; "" before it is scheduled.
        address: its IP address; "" before it has one.
        labels: its labels.
        phase: phase of the pod, such as ``Running``.
        created: time of its creation, as the API server writes it (whole seconds, UTC).
        version: resource version of this state; 0 if it cannot be compared.
        container_names: names of all containers that its specification has.
        containers: states of its containers, in the order of the API server.
        restart_attempt: number of restarts of its JobSet before it was made; 0 without a JobSet.
        is_ready: True if the API server regards the pod as ready.
        is_terminating: True if the deletion of the pod has been requested.
        is_deleted: True if the API server has no such object any more.
        is_node_silent: True if the pod is marked as not ready although its containers are:
            the control plane does that if the node is silent.
    """

    uid: str
    name: str
    node: str = ""
    address: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    phase: str = ""
    created: str = ""
    version: int = 0
    container_names: tuple[str, ...] = ()
    containers: tuple[ContainerState, ...] = ()
    restart_attempt: int = 0
    is_ready: bool = False
    is_terminating: bool = False
    is_deleted: bool = False
    is_node_silent: bool = False

    @property
    def has_ended(self) -> bool:
        """True if no process of the pod will run any more."""
        return self.is_deleted or self.phase in _ENDED

    def container(self, name: str) -> ContainerState:
        """Return the state of a container, which is an empty one before the kubelet reports it."""
        return next(
            (container for container in self.containers if container.name == name),
            ContainerState(name),
        )


def read_pod(pod: Mapping[str, Any]) -> PodState:
    """Return the state of a pod.

    Args:
        pod: the object of the API server.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    conditions = condition_statuses(status.get("conditions"))
    attempt = (metadata.get("labels") or {}).get(RESTART_ATTEMPT, "0")
    is_ready = conditions.get("Ready") == "True"
    return PodState(
        uid=str(metadata["uid"]),
        name=str(metadata["name"]),
        node=str(spec.get("nodeName") or ""),
        address=str(status.get("podIP") or ""),
        labels=dict(metadata.get("labels") or {}),
        phase=str(status.get("phase") or ""),
        created=str(metadata.get("creationTimestamp") or ""),
        version=as_version(metadata.get("resourceVersion")),
        container_names=tuple(str(entry["name"]) for entry in spec.get("containers") or ()),
        containers=tuple(_read_container(entry) for entry in status.get("containerStatuses") or ()),
        restart_attempt=int(attempt) if str(attempt).isdecimal() else 0,
        is_ready=is_ready,
        is_terminating=bool(metadata.get("deletionTimestamp")),
        is_node_silent=(
            status.get("phase") == "Running"
            and conditions.get("Ready") == "False"
            and conditions.get("ContainersReady") == "True"
            and not spec.get("readinessGates")  # a gate keeps a pod unready on a healthy node
        ),
    )


def as_version(text: object) -> int:
    """Return a resource version as a number, or 0 if it is none and cannot be compared."""
    return int(str(text)) if str(text).isdecimal() else 0


def condition_statuses(conditions: Iterable[Mapping[str, Any]] | None) -> dict[str, str]:
    """Return the status of each condition, by its type."""
    return {
        str(condition.get("type")): str(condition.get("status")) for condition in conditions or ()
    }


def _read_container(status: Mapping[str, Any]) -> ContainerState:
    """Return the state of a container from its entry in ``containerStatuses``."""
    states = status.get("state") or {}
    present = (
        name for name in ("terminated", "running", "waiting") if states.get(name) is not None
    )
    state = next(present, "")
    details = states.get(state) or {}
    ended = (status.get("lastState") or {}).get("terminated") or {}
    return ContainerState(
        name=str(status.get("name")),
        container_id=str(status.get("containerID") or ""),
        restart_count=int(status.get("restartCount") or 0),
        state=state,
        reason=str(details.get("reason") or ""),
        exit_code=details.get("exitCode"),
        last_exit_code=ended.get("exitCode"),
        last_reason=str(ended.get("reason") or ""),
    )
