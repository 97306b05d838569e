"""The objects of a second job at the API server: asked for by a dry run, created, deleted.

``python -m chaoskit.attach.twin.objects JSON`` deletes them. The undo guard of a killed process
runs it: a second job would go on without end.

-> attach/twin/manifests.py: the manifests. attach/twin/run.py: what happens between.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from chaoskit.attach.twin.manifests import FIELD, Manifest, TwinManifests, describe
from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import of_twin_object
from chaoskit.substrate.undo import CommandEntry, UndoLog

#: Label of each object, which tells it from another one that got its name meanwhile. Its value is
#: that of a run.
MARK = "chaoskit.dev/twin"
#: Seconds in which the server may still carry out the last request of a killed process.
_MAY_COME_S = 3.0
_LOOK_S = 0.25
#: Seconds that the pods of a second job get to end. The next one may have the same names.
_GONE_S = 120.0


class TwinObject(NamedTuple):
    """An object of a second job.

    Attributes:
        path: path of the objects of its kind.
        name: its name.
    """

    path: str
    name: str


def require_creatable(api: KubernetesApi, twin: TwinManifests) -> tuple[TwinObject, ...]:
    """Return the objects that manifests would make, if the API server would accept each of them.

    Nothing is created.

    Raises:
        BadInput: naming the object with the reason: the server has no such kind, a right is
            missing, an object of this name exists, or the server refuses it.
        ApiError: if the server does not answer.
    """
    return tuple(_require_creatable(api, twin, manifest) for manifest in twin.objects)


def _require_creatable(api: KubernetesApi, twin: TwinManifests, manifest: Manifest) -> TwinObject:
    """Return the object that a manifest would make. Raises as :func:`require_creatable`."""
    shown_object, name = describe(manifest), str(manifest["metadata"]["name"])

    def refuse(remedy: str) -> BadInput:
        return BadInput(FIELD, twin.file, remedy)

    served = api.served_kind(manifest["apiVersion"], manifest["kind"])
    if served is None:
        remedy = f"leave {shown_object} out, or use a cluster with its kind"
        raise refuse(f"{remedy}: {api.server} has no {manifest['apiVersion']} {manifest['kind']}")
    if not served.is_in_namespace:
        raise refuse(f"create {shown_object} before: it belongs to the whole cluster")
    right = of_twin_object(served.plural, served.group)
    missing = [verb for verb in right.verbs if not api.may(verb, right.group, right.resource)]
    if missing:
        resource = f"{served.plural}.{served.group}".rstrip(".")
        verbs = ", ".join(missing)
        raise refuse(
            f"have these rights granted in namespace {api.namespace}: {verbs} {resource} ({right.why})"
        )
    try:
        api.create_new(served.path, manifest, dry_run=True)
    except ApiError as error:
        if error.status == HTTPStatus.CONFLICT:
            raise refuse(f"delete {shown_object}, or write another name: {error}") from None
        if not error.is_refusal:
            raise
        raise refuse(f"mend {shown_object}: {error}") from None
    return TwinObject(served.path, name)


@contextlib.contextmanager
def created(
    api: KubernetesApi, manifests: Sequence[Manifest], objects: Sequence[TwinObject], undo: UndoLog
) -> Iterator[None]:
    """Create the objects of a second job, and delete them when the context ends.

    They are also deleted if this process is killed.

    Args:
        api: client of the namespace.
        manifests: the manifests.
        objects: the object of each manifest, of :func:`require_creatable`.
        undo: log of the changes that must be undone then.

    Raises:
        ApiError: if the server refuses one of them, or does not answer. It may also be raised at
            the end, if an object could not be deleted. Its undo entry stays then, as it does if a
            creation got no answer, and no object was there to delete: it may appear later.
        HarnessError: if the undo log cannot be written.
    """
    mark = secrets.token_hex(8)
    arguments = {"objects": objects, "mark": mark, "server": api.server, **api.arguments}
    command = [sys.executable, "-m", __name__, json.dumps(arguments)]
    entry = undo.plan(CommandEntry(shlex.join(command)))
    unanswered: TwinObject | None = None
    try:
        for manifest, target in zip(manifests, objects, strict=True):
            unanswered = target
            try:
                api.create_new(target.path, _marked(manifest, mark))
            except ApiError as error:
                unanswered = None if error.is_refusal else target
                raise
            unanswered = None
        yield
    finally:
        existing = _delete_all(api, objects, mark)
        if unanswered is None or unanswered in existing:
            entry.done()
        await_gone(api, objects, mark)


def _delete_all(api: KubernetesApi, objects: Sequence[TwinObject], mark: str) -> set[TwinObject]:
    """Delete objects, and return those that exist. Raises ApiError after the last one."""
    existing: set[TwinObject] = set()

    def delete(target: TwinObject) -> None:
        if delete_marked(api, target, mark):
            existing.add(target)

    with contextlib.ExitStack() as deleted:  # also the others, if one cannot be deleted
        for target in objects:
            deleted.callback(delete, target)
    return existing


def delete_marked(api: KubernetesApi, target: TwinObject, mark: str) -> bool:
    """Delete an object and all that it owns, and return whether it exists.

    An object of this name without the mark is another one, and is left alone.

    Raises ApiError.
    """
    uid = _uid(api, target, mark)
    if not uid:
        return False
    try:
        return api.delete_at(target.path, target.name, owned_first=True, uid=uid)
    except ApiError as error:
        if error.status != HTTPStatus.CONFLICT:  # it is gone, and another one has its name
            raise
        return False


def await_gone(
    api: KubernetesApi, objects: Sequence[TwinObject], mark: str, limit_s: float = _GONE_S
) -> None:
    """Wait until objects are gone with all that they own, or the limit has passed."""
    until_s = time.monotonic() + limit_s
    for target in objects:
        with contextlib.suppress(ApiError):  # the server has accepted the deletion
            while _uid(api, target, mark) and time.monotonic() < until_s:
                time.sleep(_LOOK_S)


def _uid(api: KubernetesApi, target: TwinObject, mark: str) -> str:
    """Return the identifier of an object with the mark; "" if there is none. Raises ApiError."""
    try:
        metadata = api.get_at(target.path, target.name)["metadata"]
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return ""
    is_own = (metadata.get("labels") or {}).get(MARK) == mark
    return str(metadata["uid"]) if is_own else ""


def _marked(manifest: Manifest, mark: str) -> dict[str, Any]:
    """Return a manifest with the mark."""
    metadata = manifest["metadata"]
    labels = {**(metadata.get("labels") or {}), MARK: mark}
    return {**manifest, "metadata": {**metadata, "labels": labels}}


def _undo(arguments: Mapping[str, Any]) -> None:
    """Delete the objects of a second job that a killed process has left."""
    api = KubernetesApi(arguments["context"], arguments["namespace"], arguments["kubeconfig"])
    if api.server != arguments["server"]:
        sys.exit(
            f"the second job is on {arguments['server']}, but the kubeconfig is for {api.server}"
        )
    until_s = time.monotonic() + _MAY_COME_S
    for target in reversed([TwinObject(*entry) for entry in arguments["objects"]]):
        while not delete_marked(api, target, arguments["mark"]) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    _undo(json.loads(sys.argv[1]))
