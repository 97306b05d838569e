"""The user's pod template, which is merged over the pods of a session, and its restrictions.

-> kubernetes/pods/manifests.py merges it; kubernetes/pods/resources.py sets the resources of the
driver's and the coordinator's pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput
from chaoskit.settings_file import read_document

#: Name of the container of a node.
CONTAINER = "node"
#: Containers of a template that only set the resources of the driver's and the coordinator's pod.
RESOURCE_CONTAINERS = ("driver", "coordinator")
#: Prefix of the labels and volumes of a session.
PREFIX = "chaoskit"

#: The key that identifies elements of a list, where Kubernetes merges lists.
_KEY_BY_LIST = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
#: Lists whose elements are replaced whole: a variable has either a value or a source.
_REPLACED_WHOLE = ("env",)
_SPEC_FIELDS = (
    "restartPolicy",
    "hostname",
    "subdomain",
    "shareProcessNamespace",
    "hostPID",
    "hostNetwork",
    "hostIPC",
)
_METADATA_FIELDS = ("name", "generateName", "namespace", "ownerReferences", "finalizers")
_CONTAINER_FIELDS = ("command", "args", "workingDir")
_RESOURCE_CONTAINER_FIELDS = ("name", "resources")


class _Named(msgspec.Struct, frozen=True):
    name: str


class _Mounted(msgspec.Struct, frozen=True):
    mountPath: str  # noqa: N815 - Kubernetes' own word


class _Container(_Named, frozen=True):
    env: list[_Named] = []
    volumeMounts: list[_Mounted] = []  # noqa: N815
    resources: dict[str, Any] | None = None


class _ShapeOfSpec(msgspec.Struct, frozen=True):
    containers: list[_Container] = []
    volumes: list[_Named] = []


class _ShapeOfMetadata(msgspec.Struct, frozen=True):
    labels: dict[str, str] = {}


class _Shape(msgspec.Struct, frozen=True):
    """The parts of a template that are checked here; the API server checks the rest."""

    spec: _ShapeOfSpec
    metadata: _ShapeOfMetadata = _ShapeOfMetadata()


def read(path: str) -> dict[str, Any]:
    """Return the template of a file as a mapping with ``metadata`` and ``spec``.

    If the file has an object such as a Deployment, the template in it is returned.

    Args:
        path: path of the file.

    Raises:
        BadInput: if the file cannot be read, has no pod, or sets fields of the session.
    """
    try:
        document = read_document("template", Path(path))
    except BadInput as error:
        raise BadInput(
            "template", path, f"name a file with one Pod, in YAML or JSON: {error.remedy}"
        ) from None
    if isinstance(document, Mapping):
        inner = (
            document.get("template") or (document.get("spec") or {}).get("template")
            if _has_pod_template(document)
            else None
        )
        document = inner or document
    try:
        msgspec.convert(document, _Shape)
    except msgspec.ValidationError as error:
        raise BadInput("template", path, f"give a Pod, with spec.containers: {error}") from None
    template = {"metadata": dict(document.get("metadata", {})), "spec": dict(document["spec"])}
    if session_field := next(_fields_of_session(template), ""):
        raise BadInput("template", path, f"remove {session_field}: the session sets it")
    return template


def _fields_of_session(template: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of fields that a session sets."""
    metadata, spec = template["metadata"], template["spec"]
    yield from (f"metadata.{name}" for name in _METADATA_FIELDS if name in metadata)
    yield from (
        f"metadata.labels[{name}]"
        for name in metadata.get("labels", {})
        if name.startswith(f"{PREFIX}.dev/")
    )
    yield from (f"spec.{name}" for name in _SPEC_FIELDS if name in spec)
    for container in spec.get("containers", []):
        if container["name"] == CONTAINER:
            yield from (
                f"spec.containers[{CONTAINER}].{name}"
                for name in _CONTAINER_FIELDS
                if name in container
            )
        elif container["name"] in RESOURCE_CONTAINERS:  # resources of the other pods
            yield from (
                f"spec.containers[{container['name']}].{name}"
                for name in container
                if name not in _RESOURCE_CONTAINER_FIELDS
            )
        else:  # such a container would keep the pod and its session from ending
            yield f"spec.containers[{container['name']}] (make it an init container with restartPolicy: Always)"
    yield from (
        f"spec.volumes[{volume['name']}]"
        for volume in spec.get("volumes", [])
        if volume["name"].startswith(PREFIX)
    )


def _has_pod_template(document: Mapping[str, Any]) -> bool:
    """Return whether a document is an object with the template of a pod."""
    return document.get("kind") in ("PodTemplate", "Deployment", "StatefulSet", "DaemonSet", "Job")


def without_resource_containers(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template without the containers that only set resources, which are in no pod."""
    spec = template.get("spec", {})
    if "containers" not in spec:
        return dict(template)
    containers = [
        container
        for container in spec["containers"]
        if container.get("name") not in RESOURCE_CONTAINERS
    ]
    return {**template, "spec": {**spec, "containers": containers}}


def resources_of(template: Mapping[str, Any], role: str) -> dict[str, Any] | None:
    """Return the resources that a template sets for a role: ``driver`` or ``coordinator``.

    Return None if it has no such container, or the container has none.
    """
    containers = template.get("spec", {}).get("containers", [])
    return next(
        (container.get("resources") for container in containers if container.get("name") == role),
        None,
    )


def require_mounted(template: Mapping[str, Any], directory: str) -> None:
    """Raise BadInput unless a template mounts a volume at a directory, or above it.

    Args:
        template: a template that :func:`read` returns; empty without a file.
        directory: the directory that all pods share.
    """
    path = Path(directory)
    mounts = [
        Path(mount["mountPath"])
        for container in template.get("spec", {}).get("containers", [])
        if container["name"] == CONTAINER
        for mount in container.get("volumeMounts", [])
    ]
    if not path.is_absolute() or not any(path.is_relative_to(mount) for mount in mounts):
        raise BadInput(
            "shared",
            directory,
            f"name a directory at which the container {CONTAINER} of the template mounts a volume",
        )


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with all fields that ``changes`` sets, merged like ``kubectl patch`` does.

    Known lists, such as ``containers`` and ``volumeMounts``, are merged by the key of their
    elements; others are replaced. An element of ``env`` with the same name is replaced whole.
    """
    merged = dict(base)
    for name, change in changes.items():
        present = merged.get(name)
        if isinstance(present, Mapping) and isinstance(change, Mapping):
            merged[name] = merge(present, change)
        elif isinstance(present, list) and isinstance(change, list) and name in _KEY_BY_LIST:
            merged[name] = _merge_lists(
                present, change, _KEY_BY_LIST[name], whole=name in _REPLACED_WHOLE
            )
        else:
            merged[name] = change
    return merged


def _merge_lists(base: list[Any], changes: list[Any], key: str, *, whole: bool) -> list[Any]:
    """Return the elements of both lists, merged where they have the same ``key``.

    Args:
        whole: True to replace such an element as a whole.
    """
    merged = {element.get(key): element for element in base}
    for element in changes:
        merged[element.get(key)] = (
            element if whole else merge(merged.get(element.get(key), {}), element)
        )
    return list(merged.values())
