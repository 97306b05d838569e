"""The doctor of hands: tries each of them on a throw-away pod, which is deleted afterwards.

-> ``trial_pod.py``: the pod. ``hand_trials.py``: what a hand does there. ``remedies.py``: what would
let it work. ``cli/machine/cluster.py`` prints the findings.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from chaoskit.attach.doctor.hand_trials import try_hand
from chaoskit.attach.doctor.remedies import remedy_of
from chaoskit.attach.doctor.trial_pod import trial_pod
from chaoskit.attach.hands.hand_container import HAND_ROLES, HandImage, HandRole
from chaoskit.attach.hands.start import HandPod, start_hand
from chaoskit.attach.jobs.find import FoundJob, find_job
from chaoskit.attach.pods.own_pod import make_own_pod
from chaoskit.attach.required_rights import require_rights
from chaoskit.errors import HarnessError
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import DOCTOR_RIGHTS, HAND_RIGHTS
from chaoskit.substrate.kubernetes.pods.state import pending
from chaoskit.substrate.undo import UndoLog

#: Seconds in which the pod must run. Its image is on its machine already.
START_S = 60.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class HandFinding:
    """The result of the trial of a hand.

    Attributes:
        hand: its role.
        works: True if its effect was seen.
        text: what was seen, or the refusal in the words of the API server or the kernel.
        remedy: what would let it work; "" if it works.
    """

    hand: HandRole
    works: bool
    text: str
    remedy: str = ""


def examine_hands(
    api: KubernetesApi, reference: str, image: HandImage, *, container: str = ""
) -> list[HandFinding]:
    """Try each hand on a throw-away pod that is like a pod of a job, and return the findings.

    The pod is deleted at the end, also if this process is killed. The pods of the job are not
    touched.

    Args:
        api: client of the namespace of the job.
        reference: the job, such as ``statefulset/llama``.
        image: the image of hands.
        container: name of the container that trains; "" for the one that the rules of the kind
            select.

    Raises:
        BadInput: if the job cannot be broken as it is, or a right is missing. Nothing is created
            then.
        ApiError: if the server does not answer.
    """
    job = find_job(api, reference, container=container)
    require_rights(api, (*HAND_RIGHTS, *DOCTOR_RIGHTS))
    try:
        with _throwaway_pod(api, job) as (pod, own_container):
            return [_examine(api, pod, own_container, role, image) for role in HAND_ROLES]
    except _PodFailure as failure:
        remedy = remedy_of(failure, None)
        return [HandFinding(role, False, f"not tried: {failure}", remedy) for role in HAND_ROLES]


class _PodFailure(HarnessError):
    """Error of a throw-away pod that does not run."""


@contextlib.contextmanager
def _throwaway_pod(api: KubernetesApi, job: FoundJob) -> Iterator[tuple[HandPod, str]]:
    """Run a throw-away pod until the context ends, and yield it with the name of its container.

    Raises:
        _PodFailure: if the server refuses it, or it does not run in time.
    """
    place = next(place for place in job.places.places if place.pod is not None)
    assert place.pod is not None
    container = job.containers[place.key]
    like = api.get("Pod", place.pod.name)
    manifest = trial_pod(f"chaoskit-doctor-{secrets.token_hex(4)}", like, container)
    with closing(UndoLog()) as undo:
        try:
            pod = make_own_pod(api, manifest, undo)
        except HarnessError as error:
            raise _PodFailure(f"the throw-away pod is refused: {error}") from error
        try:
            _await_running(api, pod.name)
            yield HandPod(pod.name, pod.uid), container
        finally:
            pod.delete()


def _await_running(api: KubernetesApi, name: str) -> None:
    """Wait until a pod runs. Raises _PodFailure with the reason if it does not."""
    until_s = time.monotonic() + START_S
    while True:
        pod = api.get("Pod", name)
        if pod["status"].get("phase") == "Running":
            return
        reason = pending("the throw-away pod", pod)
        if reason is not None and reason.is_final:
            raise _PodFailure(str(reason))
        if time.monotonic() > until_s:
            raise _PodFailure(str(reason or f"the throw-away pod does not run after {START_S:g} s"))
        time.sleep(_LOOK_S)


def _examine(
    api: KubernetesApi, pod: HandPod, container: str, role: HandRole, image: HandImage
) -> HandFinding:
    """Return the result of the trial of a hand in a pod."""
    try:
        with closing(start_hand(api, pod, container, role, image)) as hand:
            return HandFinding(role, True, try_hand(role, hand))
    except HarnessError as error:
        return HandFinding(role, False, str(error), remedy_of(error, role))
