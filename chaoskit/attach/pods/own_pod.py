"""A pod that chaoskit itself makes beside a job that already runs, and its end.

``python -m chaoskit.attach.pods.own_pod JSON`` deletes such a pod. The undo guard of a killed
process runs it.

-> ``preemption.py`` and ``attach/doctor/`` make such pods.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.undo import CommandEntry, Undo, UndoLog


class OwnPod:
    """A pod that exists, until it is deleted.

    Attributes:
        name: its name.
        uid: its identifier.
    """

    def __init__(self, api: KubernetesApi, name: str, uid: str, entry: Undo) -> None:
        self.name, self.uid = name, uid
        self._api, self._entry = api, entry

    def delete(self) -> bool:
        """Delete the pod without a wait, and return whether the server has accepted that.

        The undo entry stays otherwise.
        """
        return _delete(self._api, self.name, self._entry, self.uid)


def make_own_pod(api: KubernetesApi, manifest: Mapping[str, Any], undo: UndoLog) -> OwnPod:
    """Create a pod and return it. The undo log deletes it if this process is killed.

    Args:
        manifest: the pod, with a name that no other pod ever has.

    Raises:
        ApiError: if the server refuses it or does not answer. No pod is left then.
    """
    name = str(manifest["metadata"]["name"])
    arguments = json.dumps({"name": name, "server": api.server, **api.arguments})
    entry = undo.plan(CommandEntry(shlex.join([sys.executable, "-m", __name__, arguments])))
    try:
        uid = str(api.create(manifest)["metadata"]["uid"])
    except ApiError:
        _delete(api, name, entry)  # it may exist all the same
        raise
    return OwnPod(api, name, uid, entry)


def _delete(api: KubernetesApi, name: str, entry: Undo, uid: str = "") -> bool:
    """Delete a pod, and return whether the server has accepted that."""
    try:
        api.delete("Pod", name, grace_s=0, uid=uid)
    except ApiError:
        return False
    entry.done()
    return True


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    api = KubernetesApi(arguments["context"], arguments["namespace"], arguments["kubeconfig"])
    if api.server != arguments["server"]:
        sys.exit(f"the pod is on {arguments['server']}, but the kubeconfig is for {api.server}")
    api.delete("Pod", arguments["name"], grace_s=0)
