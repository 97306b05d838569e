"""The pods of a job on the tests' cluster, as its watch sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chaoskit.attach.jobs.find import FoundJob
from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.jobs.watch import JobWatch
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from support.jobs.processes import kill_container


class WatchedPods:
    """The pods of a job, from its watch.

    Containers are killed from outside of their pods.

    Args:
        watch: the watch of the job, which has started.
        containers: name of the container that trains, by node.
    """

    def __init__(self, watch: JobWatch, containers: dict[str, str]) -> None:
        self.watch, self.containers = watch, containers

    def key(self, node: str) -> PlaceKey:
        """Return the place that is a node."""
        return next(
            place.key for place in self.watch.places().places if place.key.node_name == node
        )

    def pod(self, node: str) -> PodState:
        place = self.watch.places().place(self.key(node))
        if place is None or place.pod is None:
            raise ProcessLookupError(f"{node} has no pod")
        return place.pod

    def is_pod_over(self, uid: str) -> bool:
        return all(pod.has_ended for pod in self._pods() if pod.uid == uid)

    def is_life_over(self, uid: str, container_id: str) -> bool:
        return all(
            pod.has_ended
            or all(
                container.container_id != container_id or container.state == "terminated"
                for container in pod.containers
            )
            for pod in self._pods()
            if pod.uid == uid
        )

    def crash(self, node: str) -> None:
        kill_container(self.pod(node).name)

    def nodes_on(self, machine: str) -> tuple[str, ...]:
        return tuple(
            place.key.node_name
            for place in self.watch.places().places
            if place.pod is not None and place.pod.node == machine
        )

    def _pods(self) -> Iterator[PodState]:
        """Yield the pods that hold places, and former pods."""
        for place in self.watch.places().places:
            if place.pod is not None:
                yield place.pod
            yield from place.former_pods


@contextmanager
def watched_pods(api: KubernetesApi, job: FoundJob) -> Iterator[WatchedPods]:
    """Watch the pods of a job until the context ends."""
    containers = {key.node_name: name for key, name in job.containers.items()}
    with JobWatch(api, job) as watch:
        yield WatchedPods(watch, containers)
        assert watch.error is None
