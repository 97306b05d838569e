"""Changes of a job, as the tracker reports them. Each has the monotonic time of its observation.

-> ``tracker.py`` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaoskit.attach.jobs.membership import PlaceKey


@dataclass(frozen=True, slots=True)
class PlaceTaken:
    """A pod holds a place now.

    Attributes:
        at_s: monotonic time of the observation.
        place: the place.
        uid: identifier of the pod.
        pod: name of the pod.
        previous_uid: identifier of the last pod that held the place; "" if there was none.
    """

    at_s: float
    place: PlaceKey
    uid: str
    pod: str
    previous_uid: str = ""


@dataclass(frozen=True, slots=True)
class PlaceEmptied:
    """No live pod holds a place any more.

    Attributes:
        at_s: monotonic time of the observation.
        place: the place.
        uid: identifier of the pod that held it.
        pod: name of that pod.
        cause: ``Failed``, ``Succeeded`` or ``deleted``.
    """

    at_s: float
    place: PlaceKey
    uid: str
    pod: str
    cause: str


@dataclass(frozen=True, slots=True)
class PodTerminating:
    """The deletion of a pod was requested, and its processes still have time to end."""

    at_s: float
    place: PlaceKey
    uid: str
    pod: str


@dataclass(frozen=True, slots=True)
class ReadinessChanged:
    """The API server regards a pod as ready, or does so no longer."""

    at_s: float
    place: PlaceKey
    uid: str
    pod: str
    is_ready: bool


@dataclass(frozen=True, slots=True)
class ContainerEnded:
    """A container has ended, and was not started again so far.

    Attributes:
        container_id: identifier of the life that ended.
        exit_code: its exit code; None if the kubelet does not know it.
        reason: its reason, such as ``Error`` or ``OOMKilled``.
    """

    at_s: float
    place: PlaceKey
    uid: str
    pod: str
    container: str
    container_id: str
    exit_code: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class ContainerRestarted:
    """The kubelet has started a container again.

    Attributes:
        restart_count: number of restarts so far.
        restarts_unseen: number of further restarts since the last observation; 0 usually.
        exit_code: exit code of the life before; None if it is not known.
        reason: reason for the end of the life before.
    """

    at_s: float
    place: PlaceKey
    uid: str
    pod: str
    container: str
    restart_count: int
    restarts_unseen: int
    exit_code: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class NodeReadinessChanged:
    """A node fell silent, or is heard again.

    Attributes:
        node: name of the node.
        is_ready: False if the control plane has not heard of it for its grace period.
        places: places whose pods are on it.
    """

    at_s: float
    node: str
    is_ready: bool
    places: tuple[PlaceKey, ...]


@dataclass(frozen=True, slots=True)
class JobRestarted:
    """The controller of a JobSet has begun to make all pods anew.

    Attributes:
        attempt: number of restarts so far.
    """

    at_s: float
    attempt: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job has ended by itself.

    Attributes:
        outcome: ``complete`` or ``failed``.
    """

    at_s: float
    outcome: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class JobReplaced:
    """The object of the job was deleted, and another one of its name may exist.

    Attributes:
        uid: identifier of the new object; "" if there is none so far.
        previous_uid: identifier of the deleted one; "" after an earlier report of the deletion.
    """

    at_s: float
    uid: str
    previous_uid: str


JobChange = (
    PlaceTaken
    | PlaceEmptied
    | PodTerminating
    | ReadinessChanged
    | ContainerEnded
    | ContainerRestarted
    | NodeReadinessChanged
    | JobRestarted
    | JobEnded
    | JobReplaced
)
