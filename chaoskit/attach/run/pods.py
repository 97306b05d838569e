"""The pods of a run, for actions on pods and machines.

-> attach/pods/: the actions. attach/run/node.py: the nodes.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.jobs.watch import JobWatch
from chaoskit.attach.run.lives import is_life_over, is_pod_over
from chaoskit.attach.run.node import AttachedNode


class NodePods:
    """The pods of the nodes of a run, as :class:`chaoskit.attach.pods.attached_pods.AttachedPods`.

    Args:
        nodes: the nodes, by name.
        watch: the places of the job.
    """

    def __init__(self, nodes: Mapping[str, AttachedNode], watch: JobWatch) -> None:
        self._nodes, self._watch = nodes, watch

    def pod(self, node: str) -> PodState:
        pod, life = self._nodes[node].pod, self._nodes[node].life
        if pod is None or life is None or pod.uid != life.uid:
            raise ProcessLookupError(f"no pod with a hand of this run holds the place of {node}")
        return pod

    def is_pod_over(self, uid: str) -> bool:
        return is_pod_over(self._watch.places(), uid)

    def is_life_over(self, uid: str, container_id: str) -> bool:
        places = self._watch.places()
        containers = {node.container for node in self._nodes.values()}
        return any(is_life_over(places, uid, container_id, name) for name in containers)

    def crash(self, node: str) -> None:
        self._nodes[node].root().signal(signal.SIGKILL)

    def nodes_on(self, machine: str) -> tuple[str, ...]:
        return tuple(
            name
            for name, node in self._nodes.items()
            if (pod := node.pod) is not None and pod.node == machine
        )
