"""The hands of another run in the pods of a job. Two runs at the same time would disturb each other.

A run looks twice: for containers of hands before it starts its own, and for their processes once its
own stand. Hands by exec are such processes, too, without a container. Of two runs that start together,
the one whose hand began first goes on: each sees all hands that began before its own.

-> attach/hands/hand_container.py: the containers. attach/run/substrate.py looks for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from chaoskit.attach.hands.hand import Hand
from chaoskit.attach.hands.hand_container import PREFIX, hand_status
from chaoskit.hand import PROGRAM_NAME
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

#: Seconds in which hands end by themselves after their run was killed. The kubelet reports it then.
ENDING_S = 12.0
_LOOK_S = 0.25
_REMEDY = (
    "wait until the run that acts in it has ended: {hand} in the pod {pod} is a hand that runs. "
    "The hands of a run that was killed end by themselves within 10 s"
)


class OtherHand(NamedTuple):
    """A hand of another run, by its pod and its container or process."""

    pod: str
    hand: str

    @property
    def remedy(self) -> str:
        """The remedy for a run that finds it."""
        return _REMEDY.format(**self._asdict())


def running_hands(pod: Mapping[str, Any]) -> list[str]:
    """Return the names of the containers of hands that run in a pod."""
    containers = pod["spec"].get("ephemeralContainers") or ()
    names = [str(entry["name"]) for entry in containers]
    return [name for name in names if name.startswith(PREFIX) and hand_status(pod, name).is_running]


def earlier_hand(hello: Mapping[str, Any]) -> int | None:
    """Return the pid of a hand that began before the run's own one; None if there is none.

    Args:
        hello: the answer of the run's own hand on processes to ``hello``.
    """
    hands = {
        int(process["pid"]): (int(process["ticks"]), int(process["pid"]))
        for process in hello["processes"]
        if process["name"] == PROGRAM_NAME
    }
    first_pid = min(hands, key=lambda pid: hands[pid], default=hello["pid"])
    return None if first_pid == hello["pid"] else first_pid


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


def find_earlier_hand(hand: Hand, pod: str, *, limit_s: float = ENDING_S) -> OtherHand | None:
    """Return a hand of another run that began before the one of this run, and runs after a while.

    Args:
        hand: the run's own hand on processes.
        pod: name of its pod.
        limit_s: seconds in which the other one may end.

    Raises:
        NodeUnreachable: if the own hand does not answer.
    """
    until_s = time.monotonic() + limit_s
    while (pid := earlier_hand(hand.ask("hello"))) is not None:
        if time.monotonic() > until_s:
            return OtherHand(pod, f"process {pid}")
        time.sleep(_LOOK_S)
    return None


def present_pod(api: KubernetesApi, name: str) -> Mapping[str, Any] | None:
    """Return the object of a pod; None if there is none. Raises ApiError for other failures."""
    try:
        return api.get("Pod", name)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return None
