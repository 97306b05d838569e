"""Pods that do nothing, in which hands are started, and their effects as the machine sees them.

-> benchmarks/pods/hands.py measures. hand_client.py: a client that is killed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

import chaoskit.hand
from chaoskit.attach.hands.hand_container import HandImage
from chaoskit.attach.hands.start import HandPod
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

#: The container with the target.
CONTAINER = "main"
#: An address of a block for documentation, whose packets a cut drops.
ADDRESS = "192.0.2.1"
_IMAGE = "local.test/host:1"
_PYTHON = "/usr/bin/python3"
_LIMIT_S = 90.0
_UNPRIVILEGED = {
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


class HandPods:
    """Pods with a process each, from their creation to ``close``.

    Args:
        api: client of the namespace.
        count: number of the pods.

    Attributes:
        pods: the pods. All of them run.
    """

    def __init__(self, api: KubernetesApi, count: int) -> None:
        self._api, self._undone = api, ExitStack()
        self._directory = copy_of_hand()
        self._undone.callback(shutil.rmtree, self._directory)
        names = [f"hands-{uuid.uuid4().hex[:8]}" for _ in range(count)]
        try:
            for name in names:
                api.create(self._manifest(name))
                self._undone.callback(api.delete, "Pod", name, grace_s=0)
            self.pods = [self._await_running(name) for name in names]
        except BaseException:
            self.close()
            raise

    @property
    def image(self) -> HandImage:
        """The image of hands, whose program is that of this checkout."""
        command = (_PYTHON, "-S", "-m", "hand")
        return HandImage(_IMAGE, command, str(self._directory), tuple(self._mounts()))

    def close(self) -> None:
        """Delete the pods."""
        self._undone.close()

    def _mounts(self) -> list[dict[str, Any]]:
        paths = {"usr": "/usr", "hand": str(self._directory)}
        return [{"name": name, "mountPath": path, "readOnly": True} for name, path in paths.items()]

    def _manifest(self, name: str) -> dict[str, Any]:
        container = {
            "name": CONTAINER,
            "image": _IMAGE,
            "command": [_PYTHON, "-c", "import time; time.sleep(3600)", name],
            "securityContext": _UNPRIVILEGED,
            "volumeMounts": self._mounts(),
        }
        volumes = [
            {"name": mount["name"], "hostPath": {"path": mount["mountPath"]}}
            for mount in self._mounts()
        ]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [container], "volumes": volumes},
        }

    def _await_running(self, name: str) -> HandPod:
        """Return a pod once it runs."""
        await_until(
            lambda: (self._api.get("Pod", name).get("status") or {}).get("phase") == "Running",
            f"the pod {name}",
            poll_s=0.1,
        )
        return HandPod(name, self._api.get("Pod", name)["metadata"]["uid"])


def copy_of_hand() -> Path:
    """Return a new directory with a copy of the hand, which every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="hand-"))
    (source,) = chaoskit.hand.__path__
    shutil.copytree(source, folder / "hand", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


def target_of(pod: HandPod) -> psutil.Process:
    """Return the process of a pod, as this machine sees it."""
    return next(
        process
        for process in psutil.process_iter(["cmdline"])
        if pod.name in (process.info["cmdline"] or ()) and process.info["cmdline"][0] == _PYTHON
    )


def is_stopped(target: psutil.Process) -> bool:
    """Return whether a hand stops a process."""
    stopped: bool = target.status() == psutil.STATUS_TRACING_STOP
    return stopped


def drops_packets(target: psutil.Process) -> bool:
    """Return whether rules in the pod of a process drop packets."""
    command = ["nsenter", "--target", str(target.pid), "--net", "nft", "list", "ruleset"]
    rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return ADDRESS in rules


def await_until(condition: Callable[[], object], what: str, *, poll_s: float = 0.0005) -> None:
    """Wait until a condition holds. Raises TimeoutError after a minute and a half."""
    until_s = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {_LIMIT_S:g} s: {what}")
        time.sleep(poll_s)
