"""The start of a hand in a pod, and its trial without any effect.

-> attach/hands/hand_container.py: the container; attach/hands/exec_hand.py: a hand without one;
attach/hands/hand.py: requests to the hand.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import closing
from http import HTTPStatus
from typing import Any, NamedTuple

from chaoskit.attach.hands.attached_stream import AttachedStream
from chaoskit.attach.hands.exec_hand import start_by_exec
from chaoskit.attach.hands.hand import Hand, OnEvent
from chaoskit.attach.hands.hand_container import (
    PREFIX,
    PROCESSES,
    UNPRIVILEGED_UID,
    ContainerExec,
    HandRole,
    HandSource,
    Manifest,
    TargetUser,
    hand_container,
    hand_status,
    needed_user,
    refusal_of_pod,
    user_of,
)
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

#: Seconds in which a hand must run. Its node pulls the image first.
START_S = 60.0
_LOOK_S = 0.05
_ATTACH_S = 5.0  # a container that has just been started may refuse streams for a moment
_UNPRIVILEGED = TargetUser(UNPRIVILEGED_UID, UNPRIVILEGED_UID)


class HandPod(NamedTuple):
    """A pod in which hands are started. A later pod of the same name has another ``uid``."""

    name: str
    uid: str


def why_no_hand(
    api: KubernetesApi, pod: HandPod, container: str, role: HandRole, source: HandSource
) -> str:
    """Return why a pod admits no hand; "" if it does. Nothing is created.

    The API server answers, with Pod Security and other admission. A hand by exec is started, and
    ends at once.

    Args:
        pod: the pod. Another pod of its name is left alone.
        container: its container that trains.
        role: the role of the hand.
        source: the means by which it would be started.

    Raises:
        ApiError: if the server does not answer.
    """
    try:
        pod_object = _present(api, pod)
        if problem := refusal_of_pod(pod_object, role):
            return problem
        if isinstance(source, ContainerExec):
            _start_by_exec(api, pod, container, source).close()
            return ""
        user = user_of(pod_object, container) or _UNPRIVILEGED
        trial = hand_container(_new_name(role), role, source, container, user)
        api.add_ephemeral_container(pod.name, pod.uid, trial, dry_run=True)
    except ApiError as error:
        if error.is_silence:
            raise
        return str(error)
    except HarnessError as error:
        return str(error)
    return ""


def start_hand(
    api: KubernetesApi,
    pod: HandPod,
    container: str,
    role: HandRole,
    source: HandSource,
    *,
    limit_s: float = START_S,
    on_event: OnEvent = lambda event: None,
) -> Hand:
    """Start a hand in a pod, and return it once it has answered.

    A hand on processes runs as their user. If the pod does not set that user, a first hand finds it
    out.

    Args:
        pod: the pod. Another pod of its name is left alone.
        container: its container that trains.
        role: the role of the hand.
        source: the means by which it is started.
        limit_s: seconds in which each hand must run.
        on_event: called with each event of the hand, by another thread.

    Raises:
        HarnessError: if it does not run in time, or its container cannot be started.
        ApiError: if the server refuses it or does not answer.
    """
    pod_object = _present(api, pod)
    if problem := refusal_of_pod(pod_object, role):
        raise HarnessError(f"no hand in {pod.name}: {problem}")
    if isinstance(source, ContainerExec):
        return _start_by_exec(api, pod, container, source, on_event)
    user = user_of(pod_object, container)
    if role == PROCESSES and user is None:
        first = hand_container(_new_name("user"), role, source, container, _UNPRIVILEGED)
        with closing(_start(api, pod, first, limit_s)) as hand:
            user = needed_user(hand.ask("hello"))
    own = hand_container(_new_name(role), role, source, container, user or _UNPRIVILEGED)
    return _start(api, pod, own, limit_s, on_event)


def _start(
    api: KubernetesApi,
    pod: HandPod,
    container: Manifest,
    limit_s: float,
    on_event: OnEvent = lambda event: None,
) -> Hand:
    """Create the container of a hand, and return the hand once it has answered."""
    name, until_s = container["name"], time.monotonic() + limit_s
    api.add_ephemeral_container(pod.name, pod.uid, container)
    _await_running(api, pod, name, until_s, limit_s)
    hand = Hand(f"{name} in {pod.name}", _attach(api, pod.name, name), on_event)
    try:
        hand.ask("hello")
    except NodeUnreachable:
        hand.close()
        problem = hand_status(_present(api, pod), name).problem
        raise NodeUnreachable(f"{hand.name} does not answer: {problem or 'see its log'}") from None
    except BaseException:
        hand.close()
        raise
    return hand


def _start_by_exec(
    api: KubernetesApi,
    pod: HandPod,
    container: str,
    source: ContainerExec,
    on_event: OnEvent = lambda event: None,
) -> Hand:
    """Return a hand by exec. The request has the name of the pod only, so its UID is checked."""
    hand = start_by_exec(api, pod.name, container, source, on_event)
    try:
        _present(api, pod)
    except BaseException:
        hand.close()
        raise
    return hand


def _await_running(
    api: KubernetesApi, pod: HandPod, name: str, until_s: float, limit_s: float
) -> None:
    """Wait until the container of a hand runs.

    Raises:
        HarnessError: if it will not run, or not in time; with the reason.
        ApiError: if the server does not answer.
    """
    while not (status := hand_status(_present(api, pod), name)).is_running:
        if status.problem:
            raise HarnessError(f"no hand in {pod.name}: {status.problem}")
        if time.monotonic() > until_s:
            reason = f": {status.waits_for}" if status.waits_for else ""
            raise HarnessError(
                f"no hand in {pod.name}: it does not run after {limit_s:g} s{reason}"
            )
        time.sleep(_LOOK_S)


def _present(api: KubernetesApi, pod: HandPod) -> Mapping[str, Any]:
    """Return the object of a pod.

    Raises:
        HarnessError: if it is gone, also if another pod has its name.
        ApiError: if the server does not answer.
    """
    try:
        pod_object = api.get("Pod", pod.name)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        raise HarnessError(f"the pod {pod.name} is gone") from None
    if pod_object["metadata"]["uid"] != pod.uid:
        raise HarnessError(f"the pod {pod.name} is gone: another one has its name")
    return pod_object


def _attach(api: KubernetesApi, pod: str, name: str) -> AttachedStream:
    """Return the stream of a container that has just been started. Raises ApiError."""
    until_s = time.monotonic() + _ATTACH_S
    while True:
        try:
            return AttachedStream(api.attach(pod, name))
        except ApiError:
            if time.monotonic() > until_s:
                raise
        time.sleep(_LOOK_S)


def _new_name(purpose: str) -> str:
    """Return a name for a container that no other one in its pod has."""
    return f"{PREFIX}{purpose}-{secrets.token_hex(3)}"
