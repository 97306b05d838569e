"""The backend of actions on the pods of a job that already runs.

The controller of the job replaces a pod that ends, and the kubelet restarts a container.

-> ``pod_requests.py``: the requests. ``substrate/kubernetes/backends.py``: the same for the pods of
a session. ``faults/kubernetes/pod.py`` has the faults that order these actions.
"""

from __future__ import annotations

from collections.abc import Mapping

from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.pods.attached_pods import AttachedPods
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.attach.pods.preemption import Preemptions
from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.kubernetes.api.requests import ApiError
from chaoskit.substrate.kubernetes.backends import RefusedEviction
from chaoskit.substrate.kubernetes.pods.actions import (
    ContainerCrash,
    PodDeletion,
    PodEviction,
    PodPreemption,
)

#: Actions that the pods of an attached job admit.
ATTACHED_POD_ACTIONS: frozenset[type[Action]] = frozenset(
    {PodDeletion, PodEviction, PodPreemption, ContainerCrash}
)


class AttachedPodBackend:
    """Backend that deletes, evicts and preempts the pods of nodes, and kills their containers.

    Args:
        pods: the pods of the job.
        requests: the requests to the API server.
        preemptions: makes the pods for which pods of the job are preempted.
        containers: name of the container that trains, by node.
    """

    actions = ATTACHED_POD_ACTIONS

    def __init__(
        self,
        pods: AttachedPods,
        requests: PodRequests,
        preemptions: Preemptions,
        containers: Mapping[str, str],
    ) -> None:
        self._pods, self._requests, self._preemptions = pods, requests, preemptions
        self._containers = containers

    def apply(self, node: str, action: Action) -> Applied:
        """Request the end of a node's pod or container, and return the handle.

        An eviction that a budget forbids raises nothing: its handle never shows an effect.

        Raises:
            ProcessLookupError: if the pod is gone or going, or its container does not run.
            HarnessError: if the API server refuses the request or does not answer, the container
                cannot be killed, or a preemption might not end exactly that pod.
        """
        pod = self._requests.running(node)
        match action:
            case PodDeletion(grace_s):
                self._requests.delete(pod, grace_s)
            case PodEviction(grace_s):
                try:
                    self._requests.evict(pod, grace_s)
                except ApiError as error:
                    if not error.is_budget_refusal:
                        raise
                    return RefusedEviction()
            case PodPreemption(priority_class):
                container = self._containers[node]
                return self._preemptions.begin(pod, container, priority_class)
            case ContainerCrash():
                return self._crash(node, pod)
            case _:
                raise HarnessError(
                    f"{type(action).__name__} is not an action on pods of an attached job"
                )
        return _EndedPod(self._pods, pod.uid)

    def _crash(self, node: str, pod: PodState) -> Applied:
        """Kill the first process of the container that trains, and return the handle.

        The life of the container is read from the API server first. The watch of the job may not
        have seen a restart yet, and the end of the life before would be no effect.
        """
        name = self._containers[node]
        container = self._requests.present(pod).container(name)
        if container.state != "running":
            raise ProcessLookupError(f"the container {name} of the pod {pod.name} does not run")
        self._pods.crash(node)
        return _EndedLife(self._pods, pod.uid, container.container_id)

    def release(self, node: str | None = None) -> None:
        """Do nothing: no such action keeps processes from ending."""

    def close(self) -> None:
        """Do nothing: the controller of the job has made the successors."""


class _EndedPod:
    """A pod whose end was requested. Its action is shown once the API server proves the end."""

    def __init__(self, pods: AttachedPods, uid: str) -> None:
        self._pods, self._uid = pods, uid

    def shown(self) -> int:
        return int(self._pods.is_pod_over(self._uid))

    def lift(self) -> bool:
        return True


class _EndedLife:
    """A life of a container that was killed. Its action is shown once that life is over."""

    def __init__(self, pods: AttachedPods, uid: str, container_id: str) -> None:
        self._pods, self._uid, self._container_id = pods, uid, container_id

    def shown(self) -> int:
        return int(self._pods.is_life_over(self._uid, self._container_id))

    def lift(self) -> bool:
        return True
