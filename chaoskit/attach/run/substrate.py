"""A job that runs already, as the substrate of a run: its pods are the nodes.

-> substrate/core/base.py: the interface. attach/run/cluster.py: the nodes of a run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaoskit.attach.guards.guard_rails import GuardRails
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandMeans, HandRole
from chaoskit.attach.hands.load import HandLoad
from chaoskit.attach.hands.other_hands import (
    OtherHand,
    find_earlier_hand,
    find_running_hand,
)
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
from chaoskit.faults.base import Fault
from chaoskit.stacks import LogPatterns
from chaoskit.stacks.ranks import seats
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.base import NOTHING, Cluster, Needs
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.launched_ranks import LOG
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.undo import UndoLog
from chaoskit.wire.injection_line import InjectionDoor

#: Name of the substrate in reports.
ATTACHED = "attached"
_LOG_RANKS_S = 10.0  # time in which logs must show ranks
_LOOK_S = 0.5
_PARALLEL = 8  # pods in which hands are started at the same time


class AttachedSubstrate:
    """A job that runs already. One run can be made on it, after :meth:`reach`.

    Args:
        api: client of the namespace of the job.
        job: the job, which passed all checks.
        means: the means by which hands are started.
        options: the user's options, which name the machines that may be broken.
        rails: the guard rails, which are checked at each strike, too.
        patterns: the patterns for the logs.
        why_aborted: returns why the user wants the run to end; "" while it may go on.

    Attributes:
        run_name: name of the run, which is noted on a machine that it breaks.
    """

    name = ATTACHED

    def __init__(
        self,
        api: KubernetesApi,
        job: FoundJob,
        means: HandMeans,
        options: KubernetesOptions,
        rails: GuardRails,
        patterns: LogPatterns,
        why_aborted: Callable[[], str],
    ) -> None:
        self.undo, self.run_name = UndoLog(), new_run_name()
        self._api, self._job, self._means, self._options = api, job, means, options
        self._patterns, self._guards = patterns, RunGuards(rails, why_aborted)
        self._nodes: dict[str, AttachedNode] = {}
        self._watch = JobWatch(api, job, lambda changes: self._wake())

    def require_no_other_run(self) -> None:
        """Refuse a job in which another run has hands. They get a while to end.

        Raises:
            BadInput: naming the pod and the hand.
            ApiError: if the server does not answer.
        """
        self._require_none(find_running_hand(self._api, self._job.listing.pods))

    def _require_none(self, other_hand: OtherHand | None) -> None:
        """Raise BadInput if another run has a hand in the job."""
        if other_hand is not None:
            raise BadInput("job", str(self._job.reference), other_hand.remedy)

    def require_hands(self, actions: Collection[type[Action]]) -> None:
        """Refuse a job whose pods do not admit the hands that these actions need.

        The API server is asked by dry runs: nothing is created.

        Raises:
            BadInput: naming the pod and the refusal.
            ApiError: if the server does not answer.
        """
        roles = (PROCESSES, NETWORK) if needs_network(actions) else (PROCESSES,)
        asked = [
            (HandPod(place.pod.name, place.pod.uid), self._job.containers[place.key], role)
            for place in self._job.places.places
            if place.pod is not None
            for role in roles
        ]

        def ask(pod: HandPod, container: str, role: HandRole) -> str:
            source = self._means.source(role)
            assert source is not None  # or the faults would have been refused
            return why_no_hand(self._api, pod, container, role, source)

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
            BadInput: if another run has started its hands a little earlier.
        """
        self._watch.start()
        parts = RunParts(
            self._api, self._watch, self._means, needs_network(actions), self._patterns
        )
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
        first_node = self._nodes[min(self._nodes)]  # of both runs
        if (pod := first_node.pod) is not None:
            self._require_none(find_earlier_hand(first_node.hand(PROCESSES), pod.name))

    def ranks(self) -> dict[int, str]:
        """Return rank -> node, as the processes of the job show them, or else its logs.

        Logs that show no rank are read again for some seconds.

        Raises:
            BadInput: if the logs of two nodes show the same rank.
            NodeUnreachable: if a hand does not answer any more.
        """
        until_s = time.monotonic() + (_LOG_RANKS_S if self._patterns.rank is not None else 0)
        while True:
            ranks = {name: node.first_ranks() for name, node in self._nodes.items()}
            if all(ranks.values()) or time.monotonic() > until_s:
                break
            time.sleep(_LOOK_S)
        require_distinct(
            str(self._patterns.rank),
            {
                name: launched.rank
                for name, launched_ranks in ranks.items()
                for launched in launched_ranks.values()
                if launched.variable == LOG
            },
        )
        return {rank: seat.node for rank, seat in seats(ranks).items()}

    def require_processes(self, faults: Sequence[Fault], ranks: Mapping[int, str]) -> None:
        """Refuse a fault of one process if the log shows its rank, and the pod has several.

        Args:
            faults: the faults, with ranks in place of roles.
            ranks: rank -> node.

        Raises:
            BadInput: naming the fault, and the node.
        """
        for fault in faults:
            if fault.whole_node or not isinstance(fault.rank, int):
                continue
            if reason := self._nodes[ranks[fault.rank]].why_no_process():
                remedy = "use KillNode, KillContainer, FreezeNode or Cut"
                raise BadInput("faults", str(fault), f"{remedy}: {reason}")

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
            ),
            HandThrottle(lambda node: nodes[node].hand(PROCESSES)),
            HandLoad(lambda node: nodes[node].hand(PROCESSES)),
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


def require_distinct(pattern: str, ranks: Mapping[str, int]) -> None:
    """Raise BadInput if the logs of two nodes show the same rank.

    Args:
        pattern: the pattern of a rank.
        ranks: node -> rank, by its log.
    """
    by_rank: dict[int, str] = {}
    for node, rank in ranks.items():
        if other := by_rank.get(rank):
            why = f"the logs of {other} and {node} both show rank {rank}"
            raise BadInput("watch.rank", pattern, f"match a node's own rank only: {why}")
        by_rank[rank] = node


def needs_network(actions: Collection[type[Action]]) -> bool:
    """Return whether actions need hands on the network."""
    return not HandTraffic.actions.isdisjoint(actions)
