"""A user's pod template, which is merged over the pods of a session: what it may set, and what not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput
from chaoskit.settings_file import read_document

#: The container in which a node lives.
CONTAINER = "node"
#: Containers of a template that say only what the driver's pod and the coordinator's pod ask for.
ROLES = ("driver", "coordinator")
#: Labels and volumes whose names begin so are the session's.
OURS = "chaoskit"

# The key by which elements of a list are the same one, where Kubernetes merges lists.
_KEYS = {
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
#: Lists whose elements are taken whole: a variable has a value or a source, and not both.
_WHOLE = ("env",)
_SPEC = (
    "restartPolicy",
    "hostname",
    "subdomain",
    "shareProcessNamespace",
    "hostPID",
    "hostNetwork",
    "hostIPC",
)
_METADATA = ("name", "generateName", "namespace", "ownerReferences", "finalizers")
_CONTAINER = ("command", "args", "workingDir")
_ROLE = ("name", "resources")


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
    """What is looked at here; the API server knows the rest."""

    spec: _ShapeOfSpec
    metadata: _ShapeOfMetadata = _ShapeOfMetadata()


def read(path: str) -> dict[str, Any]:
    """The template of a file, with ``metadata`` and ``spec``.

    Raises:
        BadInput: if it holds no pod, or sets what is the session's.
    """
    try:
        found = read_document("template", Path(path))
    except BadInput as error:
        raise BadInput(
            "template", path, f"name a file with one Pod, in YAML or JSON: {error.remedy}"
        ) from None
    if isinstance(found, Mapping):
        inner = (
            found.get("template") or (found.get("spec") or {}).get("template")
            if _is_kind(found)
            else None
        )
        found = inner or found
    try:
        msgspec.convert(found, _Shape)
    except msgspec.ValidationError as error:
        raise BadInput("template", path, f"give a Pod, with spec.containers: {error}") from None
    template = {"metadata": dict(found.get("metadata", {})), "spec": dict(found["spec"])}
    if taken := next(_taken(template), ""):
        raise BadInput("template", path, f"leave {taken} out: the session sets it")
    return template


def _taken(template: Mapping[str, Any]) -> Iterator[str]:
    """Paths of fields that are the session's."""
    metadata, spec = template["metadata"], template["spec"]
    yield from (f"metadata.{name}" for name in _METADATA if name in metadata)
    yield from (
        f"metadata.labels[{name}]"
        for name in metadata.get("labels", {})
        if name.startswith(f"{OURS}.dev/")
    )
    yield from (f"spec.{name}" for name in _SPEC if name in spec)
    for container in spec.get("containers", []):
        if container["name"] == CONTAINER:
            yield from (
                f"spec.containers[{CONTAINER}].{name}" for name in _CONTAINER if name in container
            )
        elif container["name"] in ROLES:  # it is the node's container otherwise
            yield from (
                f"spec.containers[{container['name']}].{name}"
                for name in container
                if name not in _ROLE
            )
        else:  # it would keep the pod, and with it the session, from ending
            yield f"spec.containers[{container['name']}] (make it an init container with restartPolicy: Always)"
    yield from (
        f"spec.volumes[{one['name']}]"
        for one in spec.get("volumes", [])
        if one["name"].startswith(OURS)
    )


def _is_kind(found: Mapping[str, Any]) -> bool:
    """Whether it is an object with the template of a pod in it."""
    return found.get("kind") in ("PodTemplate", "Deployment", "StatefulSet", "DaemonSet", "Job")


def without_roles(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template without the containers of :data:`ROLES`, which are in no pod."""
    spec = template.get("spec", {})
    if "containers" not in spec:
        return dict(template)
    containers = [
        container for container in spec["containers"] if container.get("name") not in ROLES
    ]
    return {**template, "spec": {**spec, "containers": containers}}


def resources_of(template: Mapping[str, Any], role: str) -> dict[str, Any] | None:
    """Return what a template has a role of :data:`ROLES` ask for; None if it does not say."""
    containers = template.get("spec", {}).get("containers", [])
    return next(
        (container.get("resources") for container in containers if container.get("name") == role),
        None,
    )


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Ours, with everything that theirs sets, as ``kubectl patch`` does it: lists whose elements have a name are merged
    by that name, others are replaced.
    """
    merged = dict(ours)
    for name, value in theirs.items():
        mine = merged.get(name)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            merged[name] = merge(mine, value)
        elif isinstance(mine, list) and isinstance(value, list) and name in _KEYS:
            merged[name] = _merge_lists(mine, value, _KEYS[name], whole=name in _WHOLE)
        else:
            merged[name] = value
    return merged


def _merge_lists(ours: list[Any], theirs: list[Any], key: str, *, whole: bool) -> list[Any]:
    merged = {one.get(key): one for one in ours}
    for one in theirs:
        merged[one.get(key)] = one if whole else merge(merged.get(one.get(key), {}), one)
    return list(merged.values())
