"""Marks on machines by which a cluster itself empties them: cordons and taints. Each is put on with its undo.

``python -m chaoskit.substrate.kubernetes.machines.marks JSON`` takes one off, for the undo guard of a killed process.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.external_commands import NotPutBack
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.undo import CommandEntry, UndoLog

#: Names of errands: no pod is bound to the machine any more; those that are there have to go, too.
CORDON, TAINT = "cordon", "taint"
MARKS = (CORDON, TAINT)
_KEY = "chaoskit.dev/fault"
_TRIES = 5  # against others that change the same object


def require_unmarked(node: Mapping[str, Any], name: str) -> None:
    """Raises HarnessError if a machine has a mark already, which is another's doing."""
    if has_mark(node, name):
        raise HarnessError(f"{node['metadata']['name']} has a {name} already")


def mark(api: KubernetesApi, name: str, machine: str, undo: UndoLog) -> Callable[[], None]:
    """Put a mark on, once its undo is written down. Gives what takes it off.

    Raises:
        HarnessError: if the machine has it already, which is another's doing. ApiError: if the server refuses it.
    """
    require_unmarked(api.get("Node", machine), name)
    told = json.dumps({"mark": name, "machine": machine, "server": api.server, **api.arguments})
    command = [sys.executable, "-m", "chaoskit.substrate.kubernetes.machines.marks", told]
    entry = undo.plan(CommandEntry(shlex.join(command)))

    def put_back() -> None:
        take_off(api, name, machine)
        entry.done()

    try:
        _change(api, name, machine, on=True)
    except ApiError as failure:  # it may be on all the same
        try:
            put_back()
        except ApiError as error:  # its guard tries once more
            raise NotPutBack(f"{failure}; {error}") from failure
        raise
    return put_back


def take_off(api: KubernetesApi, name: str, machine: str) -> None:
    """Take a mark off, if it is on. Raises ApiError."""
    _change(api, name, machine, on=False)


def has_mark(node: Mapping[str, Any], name: str) -> bool:
    """Return whether a machine has a mark."""
    spec = node.get("spec", {})
    if name == CORDON:
        return bool(spec.get("unschedulable"))
    return any(one["key"] == _KEY for one in spec.get("taints", ()))


def _change(api: KubernetesApi, name: str, machine: str, *, on: bool) -> None:
    """Put a mark on, or take it off; a machine that is not there any more has none."""
    for tries_left in reversed(range(_TRIES)):
        try:
            node = api.get("Node", machine)
            if has_mark(node, name) is not on:
                api.patch("Node", machine, _patch(node, name, on=on))
            return
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND and not on:
                return
            if error.status != HTTPStatus.CONFLICT or not tries_left:
                raise


def _patch(node: dict[str, Any], name: str, *, on: bool) -> dict[str, Any]:
    if name == CORDON:
        return {"spec": {"unschedulable": True if on else None}}
    others = [one for one in node.get("spec", {}).get("taints", ()) if one["key"] != _KEY]
    ours = [{"key": _KEY, "value": "chaoskit", "effect": "NoExecute"}] if on else []
    version = {
        "resourceVersion": node["metadata"]["resourceVersion"]
    }  # a list is replaced as a whole
    return {"metadata": version, "spec": {"taints": others + ours}}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    there = KubernetesApi(given["context"], given["namespace"], given["kubeconfig"])
    if there.server != given["server"]:
        sys.exit(f"the machine is of {given['server']}, and the kubeconfig is of {there.server}")
    take_off(there, given["mark"], given["machine"])
