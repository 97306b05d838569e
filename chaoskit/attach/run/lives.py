"""The container that trains at a place of a running job: its present life, and how a life ended.

Pure: read from the places of a job at one moment.

-> attach/jobs/places.py: the places. attach/run/node.py acts in the present life.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from chaoskit.attach.jobs.places import JobPlaces, Place
from chaoskit.attach.jobs.pod_state import PodState

_RUNNING = "running"
#: Seconds of silence after which a life is given up.
LINGER_S = 15.0


class PodLife(NamedTuple):
    """A life of the container that trains: from its start to its next end.

    Attributes:
        pod: name of its pod.
        uid: identifier of the pod.
        container_id: identifier of the life.
        machine: node of the cluster on which it runs.
        restarts: number of restarts of the container in this pod before.
    """

    pod: str
    uid: str
    container_id: str
    machine: str
    restarts: int


def present_life(place: Place | None, container: str) -> PodLife | None:
    """Return the life that runs at a place; None if no container runs there."""
    if place is None or place.pod is None:
        return None
    pod, state = place.pod, place.pod.container(container)
    if state.state != _RUNNING or not state.container_id:
        return None
    return PodLife(pod.name, pod.uid, state.container_id, pod.node, state.restart_count)


def find_pod(places: JobPlaces, uid: str) -> PodState | None:
    """Return the pod with an identifier, also a former one; None if it is not known any more."""
    return next(
        (
            pod
            for place in places.places
            for pod in (*((place.pod,) if place.pod else ()), *place.former_pods)
            if pod.uid == uid
        ),
        None,
    )


def is_pod_over(places: JobPlaces, uid: str) -> bool:
    """Return whether no process of a pod will run any more."""
    pod = find_pod(places, uid)
    return pod is None or pod.has_ended


def is_life_over(places: JobPlaces, uid: str, container_id: str, container: str) -> bool:
    """Return whether a life has ended: its container ended or was restarted, or its pod is over.

    Args:
        places: the places of the job.
        uid: identifier of the pod.
        container_id: identifier of the life.
        container: name of the container.
    """
    pod = find_pod(places, uid)
    if pod is None or pod.has_ended:
        return True
    state = pod.container(container)
    if not state.container_id:  # the kubelet has not reported it yet
        return False
    return state.container_id != container_id or state.state != _RUNNING


def is_end_proved(
    places: JobPlaces, life: PodLife, container: str, *, has_hand_ended: bool
) -> bool:
    """Return whether none of the processes of a life runs any more.

    A report of the kubelet proves that. The API server removes a pod that is deleted by force
    without such a report: then the hand in the pid namespace of the life must have ended, as the
    kubelet ends the containers of a pod together.

    Args:
        places: the places of the job.
        life: the life.
        container: name of the container.
        has_hand_ended: True if the end of its hand on processes is proved.
    """
    pod = find_pod(places, life.uid)
    state = pod.container(container) if pod is not None else None
    if state is not None and state.container_id:
        is_same = state.container_id == life.container_id
        if not is_same or state.state != _RUNNING:
            return True
    return has_hand_ended and is_life_over(places, life.uid, life.container_id, container)


class Lingering:
    """The time for which a life may go on that the API server does not show any more.

    It goes on for as long as its hand answers. After a silence of ``LINGER_S`` the place is left to
    a successor, and nothing is known of the processes.
    """

    def __init__(self) -> None:
        self._silent_since_s = math.inf

    def is_given_up(self, now_s: float, *, answers: bool) -> bool:
        """Return whether the life is given up.

        Args:
            now_s: monotonic time.
            answers: True if its hand answers, or the API server shows the life.
        """
        self._silent_since_s = math.inf if answers else min(self._silent_since_s, now_s)
        return now_s - self._silent_since_s > LINGER_S


def is_left_behind(places: JobPlaces, life: PodLife) -> bool:
    """Return whether another pod holds the place of a life whose machine is silent.

    Its processes may live on, but no hand reaches them, and the job goes on without them.
    """
    return any(
        pod.uid == life.uid and pod.is_node_silent
        for place in places.places
        for pod in place.former_pods
    )


def why_over(places: JobPlaces, life: PodLife, container: str) -> str:
    """Return in words how a life ended, such as ``the pod llama-1 was deleted``."""
    pod = find_pod(places, life.uid)
    if pod is None or pod.is_deleted:
        return f"the pod {life.pod} was deleted"
    if pod.is_node_silent:
        return f"the machine {life.machine} of the pod {life.pod} is silent"
    state = pod.container(container)
    is_later = state.container_id not in ("", life.container_id)
    exit_code = state.last_exit_code if is_later else state.exit_code
    reason = state.last_reason if is_later else state.reason
    if exit_code is None:
        return f"the container {container} of {life.pod} does not run: {reason or pod.phase}"
    return f"the container {container} of {life.pod} ended with exit code {exit_code} ({reason})"
