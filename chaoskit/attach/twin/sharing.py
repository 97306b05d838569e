"""Storage and labels that a second job would share with the job that runs. They are refused.

Checkpoints of the running job would be overwritten, and its controller would take foreign pods.

-> attach/twin/manifests.py: the manifests. attach/jobs/membership.py: the pods of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from chaoskit.attach.jobs.find import FoundJob
from chaoskit.attach.jobs.kinds import STATEFULSET
from chaoskit.attach.twin.manifests import FIELD, TwinManifests, describe
from chaoskit.errors import BadInput

_ROOT = PurePosixPath("/")


class Storage(NamedTuple):
    """A directory that outlives pods, and that several pods may mount.

    Attributes:
        kind: kind of its volume, as the specification of a pod names it.
        source: name of the claim, or of the server of NFS; "" for a path of a machine.
        path: the directory in it.
    """

    kind: str
    source: str
    path: PurePosixPath

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.source, str(self.path))))

    def holds(self, other: Storage) -> bool:
        """Return whether another directory is this one, or below it."""
        same_volume = (self.kind, self.source) == (other.kind, other.source)
        return same_volume and other.path.is_relative_to(self.path)


def check_sharing(twin: TwinManifests, job: FoundJob) -> None:
    """Refuse a second job that would write to storage of a job, or has the labels of its pods.

    Args:
        twin: the manifests, which the API server would accept.
        job: the job that runs.

    Raises:
        BadInput: naming the storage and a pod that has it, or the labels.
    """
    used = [
        (storage, pod["metadata"]["name"])
        for pod in job.listing.pods
        if job.membership.place_of(pod) is not None
        for storage, _ in _mounted(pod["spec"])
    ]
    for manifest in twin.objects:
        for template in _pod_templates(manifest):
            _check_storage(twin, manifest, template["spec"], used)
            labels = (template.get("metadata") or {}).get("labels") or {}
            if _selects(_selector(job), labels):
                remedy = f"write other labels into the pods of {describe(manifest)}"
                reason = f"{job.membership.selector} selects them as pods of {job.reference}"
                raise BadInput(FIELD, twin.file, f"{remedy}: {reason}")


def _check_storage(
    twin: TwinManifests,
    manifest: Mapping[str, Any],
    pod_spec: Mapping[str, Any],
    used: Sequence[tuple[Storage, str]],
) -> None:
    """Refuse storage that pods of a second job write to, and a pod of the job has. Raises BadInput."""
    for storage, is_written in _mounted(pod_spec):
        for used_storage, pod_name in used:
            if is_written and storage.holds(used_storage):
                remedy = f"give {describe(manifest)} storage of its own, or mount it with readOnly"
                reason = f"{pod_name} of the job that runs has {used_storage}, too"
                raise BadInput(FIELD, twin.file, f"{remedy}: {reason}")


def _pod_templates(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the templates of pods in a manifest of any kind, and the manifest of a pod itself."""
    if isinstance(node, Mapping):
        spec = node.get("spec")
        if isinstance(spec, Mapping) and isinstance(spec.get("containers"), list):
            yield node
    values = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    for value in values:
        yield from _pod_templates(value)


def _mounted(pod_spec: Mapping[str, Any]) -> Iterator[tuple[Storage, bool]]:
    """Yield the storage that the containers of a pod mount, and whether they may write to it."""
    volumes = {volume["name"]: volume for volume in pod_spec.get("volumes") or ()}
    for container in [*(pod_spec.get("initContainers") or ()), *pod_spec["containers"]]:
        mounts = (container.get("volumeMounts") or (), container.get("volumeDevices") or ())
        for mount in (mount for listed in mounts for mount in listed):
            volume = volumes.get(mount["name"])  # None for a claim that a StatefulSet makes
            storage = None if volume is None else _storage(volume, mount)
            if volume is not None and storage is not None:
                yield storage, not (mount.get("readOnly") or volume[storage.kind].get("readOnly"))


def _storage(volume: Mapping[str, Any], mount: Mapping[str, Any]) -> Storage | None:
    """Return the storage that a container mounts; None for a volume that ends with its pod."""
    inner = str(mount.get("subPath") or mount.get("subPathExpr") or "").strip("/")
    if claim := volume.get("persistentVolumeClaim"):
        return Storage("persistentVolumeClaim", claim["claimName"], _ROOT / inner)
    if host_path := volume.get("hostPath"):
        return Storage("hostPath", "", _ROOT / host_path["path"] / inner)
    if nfs := volume.get("nfs"):
        return Storage("nfs", nfs["server"], _ROOT / nfs["path"] / inner)
    return None


def _selector(job: FoundJob) -> Mapping[str, Any]:
    """Return the label selector of the pods of a job, as objects have it."""
    if job.reference.kind is STATEFULSET and job.listing.job is not None:
        selector: Mapping[str, Any] = job.listing.job["spec"].get("selector") or {}
        return selector
    terms = [term.partition("=") for term in job.membership.selector.split(",") if term]
    return {"matchLabels": {key: value.removeprefix("=") for key, _, value in terms}}


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects labels. An empty one selects none."""
    required = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()
    if not required and not expressions:
        return False
    return all(labels.get(key) == value for key, value in required.items()) and all(
        _satisfies(expression, labels) for expression in expressions
    )


def _satisfies(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether labels satisfy an expression of a selector."""
    key, values = expression["key"], expression.get("values") or ()
    return {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }[expression["operator"]]
