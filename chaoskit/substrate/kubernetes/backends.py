"""The backend of what is done to pods: through the API server, or by their first process."""

from __future__ import annotations

import math
import time

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.kubernetes.api.requests import EvictionRefused
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
    """Takes the pods of nodes away, has their containers crash, and keeps others from running."""

    actions = POD_ACTIONS

    def __init__(self, pods: SessionPods) -> None:
        self._pods = pods

    def apply(self, node: str, action: Action) -> Applied:
        if isinstance(action, PodHindrance):
            return self._pods.hinder(action.how)
        pod = self._pods.running(node)
        match action:
            case PodDeletion(grace_s):
                self._pods.delete(pod, grace_s)
            case PodEviction(grace_s):
                try:
                    self._pods.evict(pod, grace_s)
                except EvictionRefused:
                    return _Refused()
            case PodPreemption(priority_class):
                return _Preemption(
                    self._pods, pod, *self._pods.create_preemptor(pod, priority_class)
                )
            case ContainerCrash() if pod.link is not None:
                pod.link.tell(CrashContainer())
            case _:
                raise HarnessError(f"{type(action).__name__} is not done to pods")
        return _Removal(self._pods, pod)

    def release(self, node: str | None = None) -> None:
        """Nothing of this keeps processes from ending."""

    def close(self) -> None:
        """Nothing to let go of: no pod is made when a run is over."""


class _Removal:
    """A pod that was told to go."""

    def __init__(self, pods: SessionPods, pod: Pod) -> None:
        self._pods, self._pod = pods, pod

    def shown(self) -> int:
        # of one that fell silent the stream was ended here
        return int(not self._pod.fell_silent and self._pods.is_over(self._pod))

    def lift(self) -> bool:
        return True


class _Preemption(_Removal):
    """A pod that the scheduler is to take away, for the sake of another one."""

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


class _Refused:
    """A pod that the API server did not tell to go: what ends it later is another's doing."""

    def shown(self) -> int:
        return 0

    def lift(self) -> bool:
        return True
