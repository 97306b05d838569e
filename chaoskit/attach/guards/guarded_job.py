"""The nodes of a job with their labels and ranks, as guard rails see them before a fault.

-> ``guard_rails.py`` and ``reach.py`` use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaoskit.attach.jobs.find import FoundJob, object_kinds
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.session import find_namespace

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GuardedNode:
    """A node of a job: a place with the pod that holds it.

    Attributes:
        name: name of the node, such as ``llama-1``.
        pod: name of the pod.
        uid: identifier of the pod.
        machine: machine of the pod, which is a node of Kubernetes.
        labels: labels of the pod.
    """

    name: str
    pod: str
    uid: str
    machine: str = ""
    labels: Labels = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class GuardedJob:
    """A job with all that guard rails need to know.

    Attributes:
        reference: reference to the job, such as ``statefulset/llama``.
        nodes: its nodes that a pod holds.
        ranks: rank -> name of its node, as far as ranks were read.
        owners: objects above the pods, in words -> their labels: the namespace and the job.
    """

    reference: str
    nodes: tuple[GuardedNode, ...]
    ranks: Mapping[int, str] = field(default_factory=dict, hash=False)
    owners: Mapping[str, Labels] = field(default_factory=dict, hash=False)

    @property
    def rank_count(self) -> int:
        """The number of ranks from which roles are drawn; at least one on each node."""
        return max(len(self.nodes), 1 + max(self.ranks, default=-1))


def guarded_job(
    job: FoundJob, ranks: Mapping[int, str], owners: Mapping[str, Labels]
) -> GuardedJob:
    """Return a job for guard rails.

    Args:
        job: the job that runs.
        ranks: rank -> name of its node, as far as ranks were read.
        owners: objects above the pods, in words -> their labels.
    """
    labels = {
        str(pod["metadata"]["uid"]): pod["metadata"].get("labels") or {} for pod in job.listing.pods
    }
    nodes = tuple(
        GuardedNode(
            place.key.node_name,
            place.pod.name,
            place.pod.uid,
            place.pod.node,
            labels.get(place.pod.uid, {}),
        )
        for place in job.places.places
        if place.pod is not None
    )
    return GuardedJob(str(job.reference), nodes, ranks, owners)


def owner_labels(api: KubernetesApi, job: FoundJob) -> dict[str, Labels]:
    """Return the labels of a job's namespace and of its objects, by their names in words.

    Raises:
        ApiError: if the server refuses a request or does not answer.
    """
    owners: dict[str, Labels] = {f"namespace {job.namespace}": _labels(find_namespace(api))}
    for kind in object_kinds(job.reference.kind):
        if kind == job.reference.kind.watched and job.listing.job is not None:
            objects: list[Mapping[str, Any]] = [job.listing.job]
        else:
            objects, _ = api.list_all(kind, name=job.reference.name)
        owners |= {f"{kind} {job.reference.name}": _labels(entry) for entry in objects}
    return owners


def _labels(entry: Mapping[str, Any]) -> Labels:
    return entry["metadata"].get("labels") or {}
