"""Marks on machines by which a cluster itself empties them: cordons and taints, each with its undo.

``python -m chaoskit.substrate.kubernetes.machines.marks JSON`` removes a mark. The undo guard of a
killed process runs it.

-> kubernetes/machines/machines.py: which machine may get a mark.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.external_commands import NotPutBack
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.pods.actions import MachineDrain, MachineLoss, MachineTaint
from chaoskit.substrate.undo import CommandEntry, UndoLog

#: Names of marks. A cordon keeps new pods off a machine; a taint also ends the present ones.
CORDON, TAINT = "cordon", "taint"
MARKS = (CORDON, TAINT)
#: Actions on machines -> the mark that they put on, or "" for a lever.
MARK_OF: Mapping[type[Action], str] = {MachineLoss: "", MachineDrain: CORDON, MachineTaint: TAINT}
_KEY = "chaoskit.dev/fault"
_TRIES = 5  # attempts; other clients may change the same object


def require_unmarked(node: Mapping[str, Any], name: str) -> None:
    """Raise HarnessError if a machine already has a mark of another user."""
    if has_mark(node, name):
        raise HarnessError(f"{node['metadata']['name']} has a {name} already")


def mark(api: KubernetesApi, name: str, machine: str, undo: UndoLog) -> Callable[[], None]:
    """Put a mark on a machine after its undo is recorded, and return a function that removes it.

    The returned function raises ApiError if that fails; the undo entry stays then.

    Raises:
        HarnessError: if the machine already has the mark of another user.
        ApiError: if the server refuses it or does not answer.
        NotPutBack: if the request fails, and the undo, too. The undo entry stays for the guard.
    """
    require_unmarked(api.get("Node", machine), name)
    arguments = json.dumps(
        {"mark": name, "machine": machine, "server": api.server, **api.arguments}
    )
    command = [sys.executable, "-m", "chaoskit.substrate.kubernetes.machines.marks", arguments]
    entry = undo.plan(CommandEntry(shlex.join(command)))

    def put_back() -> None:
        take_off(api, name, machine)
        entry.done()

    try:
        _change(api, name, machine, on=True)
    except ApiError as failure:  # the mark may be on all the same
        try:
            put_back()
        except ApiError as error:  # the undo guard tries once more
            raise NotPutBack(f"{failure}; {error}") from failure
        raise
    return put_back


def take_off(api: KubernetesApi, name: str, machine: str) -> None:
    """Remove a mark from a machine, if it is on. Raises ApiError."""
    _change(api, name, machine, on=False)


def has_mark(node: Mapping[str, Any], name: str) -> bool:
    """Return whether a machine has a mark."""
    spec = node.get("spec", {})
    if name == CORDON:
        return bool(spec.get("unschedulable"))
    return any(taint["key"] == _KEY for taint in spec.get("taints", ()))


def _change(api: KubernetesApi, name: str, machine: str, *, on: bool) -> None:
    """Put on or remove a mark. A machine that does not exist any more has no mark.

    Raises ApiError.
    """
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
    """Return the patch of a node that puts on or removes a mark.

    Args:
        node: the object of the machine, whose other taints are kept.
    """
    if name == CORDON:
        return {"spec": {"unschedulable": True if on else None}}
    others = [taint for taint in node.get("spec", {}).get("taints", ()) if taint["key"] != _KEY]
    own = [{"key": _KEY, "value": "chaoskit", "effect": "NoExecute"}] if on else []
    # the list is replaced as a whole: a change by another client must conflict
    version = {"resourceVersion": node["metadata"]["resourceVersion"]}
    return {"metadata": version, "spec": {"taints": others + own}}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    api = KubernetesApi(arguments["context"], arguments["namespace"], arguments["kubeconfig"])
    if api.server != arguments["server"]:
        sys.exit(f"the machine is on {arguments['server']}, but the kubeconfig is for {api.server}")
    take_off(api, arguments["mark"], arguments["machine"])
