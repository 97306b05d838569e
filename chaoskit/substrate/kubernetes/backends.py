"""The backend of actions on pods, by the API server or by the first process of a pod.

-> kubernetes/pods/pods.py makes the requests, and knows when a pod is over.
-> faults/kubernetes/pod.py and pending.py have the faults that order these actions.
"""

from __future__ import annotations

import math
import time

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.kubernetes.api.requests import ApiError
from chaoskit.substrate.kubernetes.pods.actions import (
    POD_ACTIONS,
    ContainerCrash,
    PodDeletion,
    PodEviction,
    PodHindrance,
    PodPreemption,
)
from chaoskit.substrate.kubernetes.pods.pods import ASK_AGAIN_S, Pod, SessionPods
from chaoskit.substrate.supervisor.messages import CrashContainer


class PodApi:
    """Backend that deletes, evicts, preempts and crashes the pods of nodes, and blocks new pods."""

    actions = POD_ACTIONS

    def __init__(self, pods: SessionPods) -> None:
        self._pods = pods

    def apply(self, node: str, action: Action) -> Applied:
        """Request the end of a node's pod, or block new pods, and return the handle.

        An eviction that a budget forbids raises nothing: its handle never shows an effect.

        Raises:
            ProcessLookupError: if the pod is gone or going.
            HarnessError: if the API server refuses the request or does not answer, or a preemption
                might not end exactly that pod.
        """
        if isinstance(action, PodHindrance):
            return self._pods.block_pods(action.how)
        pod = self._pods.running(node)
        match action:
            case PodDeletion(grace_s):
                self._pods.delete(pod, grace_s)
            case PodEviction(grace_s):
                try:
                    self._pods.evict(pod, grace_s)
                except ApiError as error:
                    if not error.is_budget_refusal:
                        raise
                    return RefusedEviction()
            case PodPreemption(priority_class):
                return _Preemption(
                    self._pods, pod, *self._pods.create_preemptor(pod, priority_class)
                )
            case ContainerCrash() if pod.link is not None:
                pod.link.notify(CrashContainer())
            case _:
                raise HarnessError(f"{type(action).__name__} is not an action on pods")
        return _Removal(self._pods, pod)

    def release(self, node: str | None = None) -> None:
        """Do nothing: no such action keeps processes from ending."""

    def close(self) -> None:
        """Do nothing: no pod is created once a run is over."""


class _Removal:
    """A pod whose end was requested. Its action is shown once the pod is gone.

    A pod that counts as lost because its supervisor was silent never shows it.
    """

    def __init__(self, pods: SessionPods, pod: Pod) -> None:
        self._pods, self._pod = pods, pod

    def shown(self) -> int:
        # this process has closed the stream of a silent pod, which proves nothing
        return int(not self._pod.fell_silent and self._pods.is_over(self._pod))

    def lift(self) -> bool:
        return True


class _Preemption(_Removal):
    """A pod that the scheduler preempts for another one.

    Its action is shown once the pod is gone and the scheduler has reported that.
    """

    def __init__(self, pods: SessionPods, pod: Pod, preemptor: str, uid: str) -> None:
        super().__init__(pods, pod)
        self._preemptor, self._uid, self._asked_s = preemptor, uid, -math.inf

    def shown(self) -> int:
        if not super().shown() or time.monotonic() < self._asked_s + ASK_AGAIN_S:
            return 0
        self._asked_s = time.monotonic()
        return int(self._pods.was_preempted(self._pod, self._uid))

    def lift(self) -> bool:
        return self._pods.delete_preemptor(self._preemptor)


class RefusedEviction:
    """A pod that a budget protects from eviction. A later end is no effect of this action."""

    def shown(self) -> int:
        return 0

    def lift(self) -> bool:
        return True
