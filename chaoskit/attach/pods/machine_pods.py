"""The machines below the pods of a job that already runs, for the backend of machine faults.

The rules, the levers and the undo are those of sessions. Pods that do not belong to the job are
others' pods.

-> ``substrate/kubernetes/machine_faults.py``: the backend. ``machines/machines.py``: the rules.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from chaoskit.attach.jobs.membership import JobMembership
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.pods.attached_pods import AttachedPods
from chaoskit.attach.pods.machine_silence import MachineSilence
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.substrate.core.external_commands import LocalCommands
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.machine_faults import MachineFaults
from chaoskit.substrate.kubernetes.machine_pods import PodOnMachine
from chaoskit.substrate.kubernetes.machines.machines import ATTACHED, Machines
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.undo import UndoLog


def new_run_name() -> str:
    """Return a new name for an attached run, which is noted on a machine that the run breaks."""
    return f"{ATTACHED}{secrets.token_hex(4)}"


def job_uids(api: KubernetesApi, membership: JobMembership) -> Callable[[], Collection[str]]:
    """Return a function that returns the identifiers of the present pods of a job.

    It raises ApiError if the server refuses the request or does not answer.
    """

    def uids() -> Collection[str]:
        return {
            str(pod["metadata"]["uid"])
            for pod in api.find("Pod", membership.selector)
            if membership.place_of(pod) is not None
        }

    return uids


def machine_backend(
    api: KubernetesApi,
    pods: AttachedMachinePods,
    options: KubernetesOptions,
    run_name: str,
    own_uids: Callable[[], Collection[str]],
    undo: UndoLog,
) -> MachineFaults:
    """Return the backend of faults of the machines below an attached job.

    Args:
        api: client of the namespace of the job.
        pods: the pods of the job on machines.
        options: the user's options, which name the machines that may be broken, and the levers.
        run_name: name of the run, by :func:`new_run_name`.
        own_uids: returns the identifiers of the pods of the job.
        undo: log of the changes that must be undone if this process is killed.
    """
    machines = Machines(api, run_name, options, undo, own_uids)
    return MachineFaults(api, pods, LocalCommands(machines.do), options.own_machine)


class AttachedMachinePods:
    """The pods of an attached job on machines.

    Args:
        api: client of the namespace of the job.
        pods: the pods of the job.
        requests: the requests to the API server.
        containers: name of the container that trains, by node.
    """

    def __init__(
        self,
        api: KubernetesApi,
        pods: AttachedPods,
        requests: PodRequests,
        containers: Mapping[str, str],
    ) -> None:
        self._api, self._pods, self._requests = api, pods, requests
        self._containers = containers

    def machine(self, node: str) -> str:
        return self._requests.running(node).node

    def on(self, machine: str) -> Sequence[PodOnMachine]:
        present = list(self._present(machine))
        containers = [
            (pod.name, self._containers[node])
            for node, pod in present
            if node in self._containers  # a job that has grown has more nodes than the run
        ]
        silence = MachineSilence(self._api, containers)
        return [
            _AttachedPodOnMachine(self._pods, self._requests, pod, silence) for _, pod in present
        ]

    def of_run(self, machine: str) -> Sequence[PodOnMachine]:
        return [pod for pod in self.on(machine) if pod.lives()]

    def plan_loss(self, machine: str) -> None:
        """Do nothing: the ends of the job's pods need no reason."""

    def expect_back(self, machine: str) -> None:
        """Do nothing: the controller of the job places its pods."""

    def _present(self, machine: str) -> Iterator[tuple[str, PodState]]:
        """Yield the nodes with pods on a machine, and these pods."""
        for node in self._pods.nodes_on(machine):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                pod = self._pods.pod(node)
                if pod.node == machine:
                    yield node, pod


class _AttachedPodOnMachine:
    """A pod of an attached job on a machine.

    Args:
        pod: its state when the fault began.
        silence: the watch of the machine, which all of its pods share.
    """

    def __init__(
        self, pods: AttachedPods, requests: PodRequests, pod: PodState, silence: MachineSilence
    ) -> None:
        self._pods, self._requests, self._pod, self._silence = pods, requests, pod, silence

    def lives(self) -> bool:
        return not self._pod.has_ended and not self.is_over()

    def is_over(self) -> bool:
        return self._pods.is_pod_over(self._pod.uid)

    def is_silent(self) -> bool:
        return self._silence.is_silent

    def expect_silence(self) -> None:
        self._silence.start()

    def expect_answers(self) -> None:
        self._silence.close()

    def evict(self, grace_s: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, and must not again
            self._requests.evict(self._pod, grace_s)
