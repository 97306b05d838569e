"""Requests of controllers and tests about jobs at the API server of the tests' cluster.

-> ``support/nodes/pods.py``: the cluster. ``controller.py``: the stand-in for controllers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from support.jobs import recordings
from support.nodes import pods
from support.waiting import wait_until

_GROUPS = {
    "StatefulSet": "/apis/apps/v1",
    "Job": "/apis/batch/v1",
    "Service": "/api/v1",
    "Pod": "/api/v1",
    "PersistentVolumeClaim": "/api/v1",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1",
    "TrainingRuntime": "/apis/trainer.kubeflow.org/v1alpha1",
}
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_STATUS = re.compile(r"^\((\d+)\)")
NOT_FOUND, CONFLICT = 404, 409


def path(kind: str, name: str = "", subresource: str = "") -> str:
    """Return the path of an object, or of all objects of a kind in the namespace."""
    parts = [_GROUPS[kind], "namespaces", pods.NAMESPACE, f"{kind.lower()}s", name, subresource]
    return "/".join(filter(None, parts))


def status_of(error: OSError) -> int:
    """Return the HTTP status of a refusal, or 0 for a server that did not answer."""
    match = _STATUS.match(str(error))
    return int(match[1]) if match else 0


def whole(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with the version of its API."""
    group = _GROUPS[str(manifest["kind"])].removeprefix("/apis/").removeprefix("/api/")
    return {"apiVersion": group, **manifest}


def create(manifest: Mapping[str, Any]) -> Any:
    """Create an object, and return it."""
    return pods.ask("POST", path(str(manifest["kind"])), whole(manifest))


def all_of(kind: str) -> list[Any]:
    """Return the objects of a kind in the namespace."""
    objects: list[Any] = pods.ask("GET", path(kind))["items"]
    return objects


def delete(kind: str, name: str, propagation: str = "Background") -> None:
    """Delete an object and all that it owns, if it exists."""
    with contextlib.suppress(OSError):
        pods.ask("DELETE", path(kind, name), {"propagationPolicy": propagation})


@contextlib.contextmanager
def created(*manifests: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Create objects, and delete them with all their pods when the context ends."""
    pods.namespace()
    with contextlib.ExitStack() as undone:
        undone.callback(wait_until, lambda: not pods.pods(), "the end of all pods")
        objects = []
        for manifest in manifests:
            objects.append(create(manifest))
            undone.callback(delete, manifest["kind"], manifest["metadata"]["name"])
        yield objects


def install_crds(*names: str) -> None:
    """Install CRDs that the cluster does not have, and wait until it serves them.

    They stay: other tests may use them at the same time.
    """
    for name in names:
        definition = recordings.crd(name)
        at = f"{_CRDS}/{definition['metadata']['name']}"
        try:
            pods.ask("GET", at)
        except OSError:
            pods.ask("POST", _CRDS, definition)
        wait_until(lambda at=at: _is_served(at), f"the CRD {name}")


def _is_served(at: str) -> bool:
    conditions = pods.ask("GET", at).get("status", {}).get("conditions") or ()
    return any(
        condition["type"] == "Established" and condition["status"] == "True"
        for condition in conditions
    )
