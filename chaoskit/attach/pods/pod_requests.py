"""Requests that end pods of a job that already runs, by UID.

The successor of a pod may have the name of that pod. Each request carries the UID as a
precondition, so that the API server leaves the successor alone.

-> ``substrate/kubernetes/api/requests.py`` makes the requests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from http import HTTPStatus

from chaoskit.attach.jobs.pod_state import PodState, read_pod
from chaoskit.attach.pods.attached_pods import AttachedPods
from chaoskit.errors import HarnessError
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

_END_S = 30.0
_LOOK_S = 0.02


class PodRequests:
    """Requests to end pods of an attached job.

    Args:
        api: client of the namespace of the job.
        pods: the pods of the job.
        end_s: seconds within which a deleted pod must be over.
    """

    def __init__(self, api: KubernetesApi, pods: AttachedPods, *, end_s: float = _END_S) -> None:
        self._api, self._pods, self._end_s = api, pods, end_s

    def running(self, node: str) -> PodState:
        """Return the pod of a node for a fault.

        Raises:
            ProcessLookupError: if the pod is gone or going. Its end would not be the effect of the
                fault.
        """
        pod = self._pods.pod(node)
        if pod.is_terminating or pod.has_ended:
            raise ProcessLookupError(f"the pod {pod.name} of {node} has ended, or is ending")
        return pod

    def present(self, pod: PodState) -> PodState:
        """Return the present state of a pod at the API server.

        Raises:
            ProcessLookupError: if the pod is gone, also if another one has its name.
            ApiError: if the server refuses the request or does not answer.
        """
        try:
            state = read_pod(self._api.get("Pod", pod.name))
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            raise _gone(pod) from None
        if state.uid != pod.uid:
            raise _gone(pod)
        return state

    def delete(self, pod: PodState, grace_s: int) -> None:
        """Delete a pod without waiting for its end.

        Args:
            grace_s: seconds that its processes get to end by themselves.

        Raises:
            ProcessLookupError: if the pod is gone, also if another one has its name.
            ApiError: if the server refuses the request or does not answer.
        """
        with self._by_uid(pod):
            if not self._api.delete("Pod", pod.name, grace_s=grace_s, uid=pod.uid):
                raise _gone(pod)

    def evict(self, pod: PodState, grace_s: int) -> None:
        """Evict a pod without waiting for its end.

        Args:
            grace_s: seconds that its processes get to end by themselves.

        Raises:
            ProcessLookupError: if the pod is gone, also if another one has its name.
            ApiError: if the server refuses the request or does not answer. If a
                PodDisruptionBudget forbids the eviction, ``is_budget_refusal`` is True.
        """
        with self._by_uid(pod):
            self._api.evict(pod.name, grace_s, uid=pod.uid)

    def await_over(self, pod: PodState) -> None:
        """Wait until a deleted pod is over.

        Raises:
            HarnessError: if the API server does not show its end in time.
        """
        until_s = time.monotonic() + self._end_s
        while not self._pods.is_pod_over(pod.uid):
            if time.monotonic() > until_s:
                raise HarnessError(
                    f"the pod {pod.name} was deleted, but the API server has not shown its end "
                    f"after {self._end_s:g} s"
                )
            time.sleep(_LOOK_S)

    @contextlib.contextmanager
    def _by_uid(self, pod: PodState) -> Iterator[None]:
        """Raise ProcessLookupError for the refusal of a request whose UID is that of a former pod."""
        try:
            yield
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise _gone(pod) from None
            if error.status == HTTPStatus.CONFLICT:
                self.present(pod)  # raises if the UID is the reason
            raise


def _gone(pod: PodState) -> ProcessLookupError:
    """Return the error for a pod that the API server has no longer."""
    return ProcessLookupError(f"the pod {pod.name} with UID {pod.uid} is gone")
