"""A job that runs already, as the substrate of a run: its pods are the nodes.

-> substrate/core/base.py: the interface. attach/run/cluster.py: the nodes of a run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaoskit.attach.guards.guard_rails import GuardRails
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandImage, HandRole
from chaoskit.attach.hands.start import HandPod, why_no_hand
from chaoskit.attach.hands.throttle import HandThrottle
from chaoskit.attach.hands.traffic import HandTraffic
from chaoskit.attach.jobs.find import FoundJob
from chaoskit.attach.jobs.watch import JobWatch
from chaoskit.attach.pods.machine_pods import (
    AttachedMachinePods,
    job_uids,
    machine_backend,
    new_run_name,
)
from chaoskit.attach.pods.pod_backend import AttachedPodBackend
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.attach.pods.preemption import Preemptions
from chaoskit.attach.pods.silent_loss import SilentLosses
from chaoskit.attach.run.cluster import AttachedCluster, RunGuards
from chaoskit.attach.run.logs import AttachedLogs
from chaoskit.attach.run.node import AttachedNode, RunParts
from chaoskit.attach.run.pods import NodePods
from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, HarnessError
from chaoskit.stacks.ranks import seats
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.base import NOTHING, Cluster, Needs
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.undo import UndoLog
from chaoskit.wire.injection_line import InjectionDoor

#: Name of the substrate in reports.
ATTACHED = "attached"
_PARALLEL = 8  # pods in which hands are started at the same time


class AttachedSubstrate:
    """A job that runs already. One run can be made on it, after :meth:`reach`.

    Args:
        api: client of the namespace of the job.
        job: the job, which passed all checks.
        image: image of the hands.
        options: the user's options, which name the machines that may be broken.
        rails: the guard rails, which are checked at each strike, too.
        why_aborted: returns why the user wants the run to end; "" while it may go on.

    Attributes:
        run_name: name of the run, which is noted on a machine that it breaks.
    """

    name = ATTACHED

    def __init__(
        self,
        api: KubernetesApi,
        job: FoundJob,
        image: HandImage,
        options: KubernetesOptions,
        rails: GuardRails,
        why_aborted: Callable[[], str],
    ) -> None:
        self.undo, self.run_name = UndoLog(), new_run_name()
        self._api, self._job, self._image, self._options = api, job, image, options
        self._guards = RunGuards(rails, why_aborted)
        self._nodes: dict[str, AttachedNode] = {}
        self._watch = JobWatch(api, job, lambda changes: self._wake())

    def require_hands(self, actions: Collection[type[Action]]) -> None:
        """Refuse a job whose pods do not admit the hands that these actions need.

        The API server is asked by dry runs: nothing is created.

        Raises:
            BadInput: naming the pod and the refusal.
            ApiError: if the server does not answer.
        """
        roles = (PROCESSES, NETWORK) if _needs_network(actions) else (PROCESSES,)
        asked = [
            (HandPod(place.pod.name, place.pod.uid), self._job.containers[place.key], role)
            for place in self._job.places.places
            if place.pod is not None
            for role in roles
        ]

        def ask(pod: HandPod, container: str, role: HandRole) -> str:
            return why_no_hand(self._api, pod, container, role, self._image)

        with ThreadPoolExecutor(_PARALLEL) as pool:
            refusals = list(pool.map(ask, *zip(*asked, strict=True)))
        for (pod, _, role), refusal in zip(asked, refusals, strict=True):
            if refusal:
                remedy = f"let its pods have hands on their {role}: {pod.name}: {refusal}"
                raise BadInput("job", str(self._job.reference), remedy)

    def reach(self, actions: Collection[type[Action]]) -> None:
        """Start the hands in all pods of the job, which the given actions need.

        Raises:
            HarnessError: if a hand cannot be started.
        """
        self._watch.start()
        parts = RunParts(self._api, self._watch, self._image, _needs_network(actions))
        self._nodes = {
            place.key.node_name: AttachedNode(parts, place.key, self._job.containers[place.key])
            for place in self._job.places.places
            if place.key in self._job.containers
        }
        with ThreadPoolExecutor(_PARALLEL) as pool:
            results = [pool.submit(node.reach) for node in self._nodes.values()]
        problems = [str(error) for result in results if (error := result.exception()) is not None]
        if problems:
            raise HarnessError("; ".join(problems[:3]))

    def ranks(self) -> dict[int, str]:
        """Return rank -> node, as the processes of the job show them.

        Raises:
            NodeUnreachable: if a hand does not answer any more.
        """
        by_rank = seats({name: node.ranks() for name, node in self._nodes.items()})
        return {rank: seat.node for rank, seat in by_rank.items()}

    def why_no_ranks(self) -> list[str]:
        """Return why no process of a node shows a rank, for each such node."""
        reasons = ((name, node.why_no_ranks()) for name, node in self._nodes.items())
        return [f"{name}: {reason}" for name, reason in reasons if reason]

    def require(self, demand: RunDemand) -> None:
        """Do nothing: the job has passed its checks, and its hands stand."""

    def why_not(self, action: type[Action]) -> str:
        return ""  # the hands of each fault were chosen and tried before

    def event_sink(self, run_directory: Path) -> Callable[[RunEvent], None] | None:
        return None

    def launch(
        self,
        config: RunConfig,
        run_directory: Path,
        *,
        port: int = 0,
        heartbeat_s: float = 0.0,
        replacements: int = 0,
        injection: InjectionDoor | None = None,
    ) -> Cluster:
        raise BadInput("substrate", ATTACHED, "name a substrate on which jobs are started")

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> AttachedCluster:
        """Return the places of the job as nodes, with the hands that :meth:`reach` has started."""
        pods = NodePods(self._nodes, self._watch)
        requests = PodRequests(self._api, pods)
        return AttachedCluster(
            self._nodes,
            self._watch,
            AttachedLogs(self._api, run_directory),
            self._backends(pods, requests),
            SilentLosses(pods, requests, lambda node: self._nodes[node].hand(NETWORK)),
            run_directory,
            self._guards,
        )

    def _backends(self, pods: NodePods, requests: PodRequests) -> list[Backend]:
        """Return the backends of actions on the nodes."""
        api, undo, nodes = self._api, self.undo, self._nodes
        containers = {name: node.container for name, node in nodes.items()}
        machine_pods = AttachedMachinePods(api, pods, requests, containers)
        own_uids = job_uids(api, self._job.membership)
        return [
            HandTraffic(
                lambda node: nodes[node].hand(NETWORK),
                lambda node: nodes[node].address(),
                nodes=list(nodes),
            ),
            HandThrottle(lambda node: nodes[node].hand(PROCESSES)),
            AttachedPodBackend(pods, requests, Preemptions(api, pods, requests, undo), containers),
            machine_backend(api, machine_pods, self._options, self.run_name, own_uids, undo),
        ]

    def _wake(self) -> None:
        """Have every node look at its place now, since something has changed in the job."""
        for node in self._nodes.values():
            node.wake()

    def close(self) -> None:
        """End the hands and the watch of the job."""
        with contextlib.ExitStack() as closed:
            closed.callback(self.undo.close)
            closed.callback(self._watch.close)
            for node in self._nodes.values():
                closed.callback(node.close)


def _needs_network(actions: Collection[type[Action]]) -> bool:
    """Return whether actions need hands on the network."""
    return not HandTraffic.actions.isdisjoint(actions)
