"""Hands in ephemeral containers of pods on the cluster for tests.

-> ``support/nodes/pods.py``: the cluster.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.hand import attach
from support.hand.client import UID, HandClient, directory
from support.nodes import pods
from support.waiting import wait_until

#: Rights that Pod Security ``restricted`` allows.
RESTRICTED = {
    "runAsUser": UID,
    "runAsGroup": UID,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
NET_ADMIN = {"runAsUser": 0, "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}}
PYTHON = "/usr/bin/python3"
_START_S = 120.0


@contextlib.contextmanager
def pod(
    name: str, code: str, rights: dict[str, Any] | None = None, *, restarts: bool = True
) -> Iterator[str]:
    """Run Python code as pid 1 of a pod, and delete the pod afterwards.

    Args:
        rights: the security context of the container; None for no right at all.
        restarts: True if the container is started again when it ends.

    Yields:
        The name of the pod.
    """
    sources = {"usr": "/usr", "hand": str(directory())}
    volumes = [{"name": key, "hostPath": {"path": path}} for key, path in sources.items()]
    container = {
        "name": "main",
        "image": pods.IMAGE,
        "command": [PYTHON, "-u", "-c", code],
        "securityContext": RESTRICTED if rights is None else rights,
        "volumeMounts": mounts(),
    }
    policy = "Always" if restarts else "Never"
    spec = {"containers": [container], "volumes": volumes, "restartPolicy": policy}
    path = f"/api/v1/namespaces/{pods.namespace()}/pods"
    pods.ask("POST", path, {"metadata": {"name": name}, "spec": spec})
    try:
        wait_until(lambda: status(name)["phase"] == "Running", "the pod", limit_s=_START_S)
        yield name
    finally:
        with contextlib.suppress(OSError):  # a test may have deleted it
            pods.delete(name)
        wait_until(lambda: name not in pods.pods(), "the end of the pod")


@contextlib.contextmanager
def hand_in(
    name: str, role: str, rights: dict[str, Any], *, container: str = "hand"
) -> Iterator[HandClient]:
    """Start a hand in an ephemeral container of a pod, and attach to it."""
    hand = {
        "name": container,
        "image": pods.IMAGE,
        "command": [PYTHON, "-S", "-m", "hand", f"--{role}"],
        "workingDir": str(directory()),
        "stdin": True,
        "stdinOnce": True,
        "securityContext": rights,
        "volumeMounts": mounts(),
        **({"targetContainerName": "main"} if role == "processes" else {}),
    }
    path = f"/api/v1/namespaces/{pods.namespace()}/pods/{name}"
    others = pods.ask("GET", path)["spec"].get("ephemeralContainers", [])
    patch = {"spec": {"ephemeralContainers": [*others, hand]}}
    pods.ask("PATCH", f"{path}/ephemeralcontainers", patch)
    wait_until(lambda: "running" in hand_state(name, container), "the hand", limit_s=_START_S)
    command = [sys.executable, str(Path(attach.__file__)), pods.namespace(), name, container]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=dict(os.environ))
    client = HandClient(process)
    try:
        yield client
    finally:
        process.kill()
        process.wait()


def status(name: str) -> Any:
    """Return the status of a pod."""
    return pods.ask("GET", f"/api/v1/namespaces/{pods.namespace()}/pods/{name}")["status"]


def hand_state(name: str, container: str = "hand") -> dict[str, Any]:
    """Return the state of an ephemeral container; empty before it has one."""
    for record in status(name).get("ephemeralContainerStatuses", ()):
        if record["name"] == container:
            state: dict[str, Any] = record["state"]
            return state
    return {}


def mounts() -> list[dict[str, Any]]:
    """Return the mounts of a container with this machine's Python and a copy of the hand."""
    return [
        {"name": "usr", "mountPath": "/usr", "readOnly": True},
        {"name": "hand", "mountPath": str(directory()), "readOnly": True},
    ]
