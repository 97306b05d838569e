"""The pods on machines that faults break: the interface of these faults, for pods of any origin.

-> kubernetes/machine_faults.py breaks the machines. attach/pods/machine_pods.py has the pods of a
job that already runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from chaoskit.substrate.kubernetes.pods.pods import Pod, SessionPods


class PodOnMachine(Protocol):
    """A pod on a machine that a fault breaks."""

    def lives(self) -> bool:
        """Return whether the end of the pod is not known."""

    def is_over(self) -> bool:
        """Return whether no process of the pod runs."""

    def is_silent(self) -> bool:
        """Return whether the pod counts as lost because nothing on it answers."""

    def expect_silence(self) -> None:
        """Note that the machine of the pod is taken away. A second call changes nothing."""

    def expect_answers(self) -> None:
        """Note that the machine of the pod is put back."""

    def evict(self, grace_s: int) -> None:
        """Evict the pod. Raises ApiError, such as for a refusal by a PodDisruptionBudget."""


class MachinePods(Protocol):
    """The pods on the machines of a run."""

    def machine(self, node: str) -> str:
        """Return the machine of a node's pod; "" if it is unknown.

        Raises:
            ProcessLookupError: if the pod is gone or going.
        """

    def on(self, machine: str) -> Sequence[PodOnMachine]:
        """Return the pods on a machine that the cluster must end when it empties the machine."""

    def of_run(self, machine: str) -> Sequence[PodOnMachine]:
        """Return the live pods on a machine that the run watches."""

    def plan_loss(self, machine: str) -> None:
        """Note that ends of pods on a machine are planned from now on, and need no reason."""

    def expect_back(self, machine: str) -> None:
        """Note that a lost machine is put back."""


class SessionMachinePods:
    """The pods of a session on machines.

    Args:
        pods: the pods of the session, which may be more than those of the run.
        stations: returns the stations of the run.
    """

    def __init__(self, pods: SessionPods, stations: Callable[[], Sequence[str]]) -> None:
        self._pods, self._stations = pods, stations

    def machine(self, node: str) -> str:
        return self._pods.running(node).machine

    def on(self, machine: str) -> Sequence[PodOnMachine]:
        return [_SessionPod(self._pods, pod) for pod in self._pods.on(machine)]

    def of_run(self, machine: str) -> Sequence[PodOnMachine]:
        stations = self._stations()
        return [
            _SessionPod(self._pods, pod)
            for pod in self._pods.on(machine)
            if pod.station in stations and pod.lives()
        ]

    def plan_loss(self, machine: str) -> None:
        self._pods.plan_loss(machine)

    def expect_back(self, machine: str) -> None:
        self._pods.expect_back(machine)


class _SessionPod:
    """A pod of a session on a machine."""

    def __init__(self, pods: SessionPods, pod: Pod) -> None:
        self._pods, self._pod = pods, pod

    def lives(self) -> bool:
        return self._pod.lives()

    def is_over(self) -> bool:
        return self._pods.is_over(self._pod)

    def is_silent(self) -> bool:
        return self._pod.fell_silent

    def expect_silence(self) -> None:
        self._pod.kernel.is_doubted = True

    def expect_answers(self) -> None:
        self._pod.kernel.is_doubted = False

    def evict(self, grace_s: int) -> None:
        self._pods.evict(self._pod, grace_s)
