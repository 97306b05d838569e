"""The preemption of a pod of a job that already runs, for a pod of a higher priority.

That pod can run only on the machine of the other one, but not beside a pod with all of its labels.
So the scheduler preempts no other pod. It is deleted also if this process is killed: a pod that
waits might preempt later.

-> ``substrate/kubernetes/pods/manifests.py``: its manifest. ``own_pod.py``: its end.
``pod_backend.py``: the action.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from typing import Any

from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.pods.attached_pods import AttachedPods
from chaoskit.attach.pods.own_pod import OwnPod, make_own_pod
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Applied
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.pods.manifests import Manifest, preempting_pod
from chaoskit.substrate.kubernetes.pods.state import has_ended, why_not_preempting
from chaoskit.substrate.undo import UndoLog

_ASK_AGAIN_S = 0.1
_LABELS = {"app.kubernetes.io/name": "chaoskit", "app.kubernetes.io/component": "preemptor"}
#: Ends at once, in any image with a shell's usual programs. An image without it fails at once.
_COMMAND = ("true",)


class Preemptions:
    """Pods that make the scheduler preempt pods of an attached job.

    Args:
        api: client of the namespace of the job.
        undo: log of the changes that must be undone if this process is killed.
    """

    def __init__(
        self, api: KubernetesApi, pods: AttachedPods, requests: PodRequests, undo: UndoLog
    ) -> None:
        self._api, self._pods, self._requests, self._undo = api, pods, requests, undo

    def begin(self, pod: PodState, container: str, priority_class: str) -> Applied:
        """Create a pod that makes the scheduler preempt another one, and return the handle.

        Args:
            pod: the pod to be preempted.
            container: name of its container that trains. Its image is used.
            priority_class: priority class of the new pod.

        Raises:
            ProcessLookupError: if the pod is gone, also if another one has its name.
            HarnessError: if the cluster would not preempt exactly that pod; no pod is created then.
            ApiError: if the API server refuses a request or does not answer.
        """
        self._requests.present(pod)
        victim = self._api.get("Pod", pod.name)
        name = f"chaoskit-preemptor-{secrets.token_hex(4)}"
        manifest = _manifest(name, victim, container, priority_class)
        others = self._api.find("Pod", "")
        reason = why_not_alone(victim, others) or why_not_preempting(
            self._api.create(manifest, dry_run=True), victim
        )
        if reason:
            raise HarnessError(f"the pod {pod.name} is not preempted: {reason}")
        preemptor = make_own_pod(self._api, manifest, self._undo)
        return _PreemptedPod(self._api, self._pods, pod, preemptor)


def why_not_alone(victim: Mapping[str, Any], pods: Any) -> str:
    """Return the reason for which the labels of a pod do not select it alone on its machine.

    Return "" if they do.

    Args:
        victim: the object of the pod.
        pods: objects of the pods of its namespace.
    """
    labels = victim["metadata"].get("labels") or {}
    if not labels:
        return "it has no labels, by which another pod could avoid it"
    machine = victim["spec"].get("nodeName")
    beside = [
        str(pod["metadata"]["name"])
        for pod in pods
        if pod["metadata"]["uid"] != victim["metadata"]["uid"]
        and pod["spec"].get("nodeName") == machine
        and labels.items() <= (pod["metadata"].get("labels") or {}).items()
        and not has_ended(pod)
    ]
    if beside:
        return f"{', '.join(beside)} on the same machine has the same labels"
    return ""


def _manifest(
    name: str, victim: Mapping[str, Any], container: str, priority_class: str
) -> Manifest:
    """Return the pod that preempts another one."""
    spec = victim["spec"]
    like = next(entry for entry in spec["containers"] if entry["name"] == container)
    labels = victim["metadata"].get("labels") or {}
    metadata = {"name": name, "labels": _LABELS}
    return preempting_pod(
        metadata, spec, like, _COMMAND, labels, str(spec["nodeName"]), priority_class
    )


class _PreemptedPod:
    """A pod that the scheduler preempts for another one.

    Its action is shown once the API server proves the end, and the scheduler has reported the
    preemption for the other pod.
    """

    def __init__(
        self, api: KubernetesApi, pods: AttachedPods, pod: PodState, preemptor: OwnPod
    ) -> None:
        self._api, self._pods, self._pod, self._preemptor = api, pods, pod, preemptor
        self._asked_s = -math.inf

    def shown(self) -> int:
        is_early = time.monotonic() < self._asked_s + _ASK_AGAIN_S
        if is_early or not self._pods.is_pod_over(self._pod.uid):
            return 0
        self._asked_s = time.monotonic()
        try:
            events = self._api.events_about(self._pod.name, "Preempted")
        except ApiError:  # without an answer there is no proof
            return 0
        return int(any(self._preemptor.uid in event.get("message", "") for event in events))

    def lift(self) -> bool:
        return self._preemptor.delete()
