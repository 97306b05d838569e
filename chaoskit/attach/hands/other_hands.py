"""The hands of another run in the pods of a job. Two runs at the same time would disturb each other.

A run looks twice: before it starts hands, and once they stand. Of two runs that start together, the
one whose hand comes first in the pod goes on: the API server puts each new ephemeral container at
the end of the pod's list, which both read.

-> attach/hands/hand_container.py: the containers. attach/run/substrate.py looks for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from chaoskit.attach.hands.hand_container import PREFIX, PROCESSES, hand_status
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

#: Seconds in which hands end by themselves after their run was killed. The kubelet reports it then.
ENDING_S = 12.0
_LOOK_S = 0.25
_REMEDY = (
    "wait until the run that acts in it has ended: {container} in the pod {pod} is a hand that "
    "runs. The hands of a run that was killed end by themselves within 10 s"
)


class OtherHand(NamedTuple):
    """A hand of another run, by its pod and its container."""

    pod: str
    container: str

    @property
    def remedy(self) -> str:
        """The remedy for a run that finds it."""
        return _REMEDY.format(**self._asdict())


def running_hands(pod: Mapping[str, Any]) -> list[str]:
    """Return the names of the containers of hands that run in a pod."""
    return [name for name in _hands(pod, PREFIX) if hand_status(pod, name).is_running]


def earlier_hand(pod: Mapping[str, Any], own: str) -> str:
    """Return the hand on processes before another one in the list of a pod; "" for none.

    One that may still start counts, too. Hands that have ended, or cannot start, do not.

    Args:
        pod: the object of the pod.
        own: name of the container of the run's own hand on processes.
    """
    for name in _hands(pod, f"{PREFIX}{PROCESSES}-"):
        if name == own:
            return ""
        if not hand_status(pod, name).problem:
            return name
    return ""


def container_of(hand: str) -> str:
    """Return the name of the container of a hand, with which the name of the hand begins."""
    return hand.partition(" ")[0]


def find_running_hand(
    api: KubernetesApi, pods: Sequence[Mapping[str, Any]], *, limit_s: float = ENDING_S
) -> OtherHand | None:
    """Return a hand that still runs in one of the pods after a while; None if there is none.

    Hands of a former run may be ending. A pod that is gone has none.

    Args:
        api: client of the namespace of the pods.
        pods: objects of the pods.
        limit_s: seconds in which they may end.

    Raises:
        ApiError: if the server does not answer.
    """
    until_s = time.monotonic() + limit_s
    while pods := [pod for pod in pods if running_hands(pod)]:
        if time.monotonic() > until_s:
            return OtherHand(str(pods[0]["metadata"]["name"]), running_hands(pods[0])[0])
        time.sleep(_LOOK_S)
        present_pods = [present_pod(api, str(pod["metadata"]["name"])) for pod in pods]
        pods = [pod for pod in present_pods if pod is not None]
    return None


def find_earlier_hand(api: KubernetesApi, pod: str, own: str) -> OtherHand | None:
    """Return the hand of another run that comes before the one of this run in a pod.

    Args:
        api: client of the namespace of the pod.
        pod: name of the pod.
        own: name of the container of the run's own hand on processes.

    Raises:
        ApiError: if the server does not answer.
    """
    pod_object = present_pod(api, pod)
    name = earlier_hand(pod_object, own) if pod_object is not None else ""
    return OtherHand(pod, name) if name else None


def present_pod(api: KubernetesApi, name: str) -> Mapping[str, Any] | None:
    """Return the object of a pod; None if there is none. Raises ApiError for other failures."""
    try:
        return api.get("Pod", name)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return None


def _hands(pod: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the names of the ephemeral containers with a prefix, in the order of their creation."""
    containers = pod["spec"].get("ephemeralContainers") or ()
    return [str(entry["name"]) for entry in containers if entry["name"].startswith(prefix)]
