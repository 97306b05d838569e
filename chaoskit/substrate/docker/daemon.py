"""Checks for a Docker daemon whose containers can be nodes, and the connection of the SDK to it.

-> ``registry.py`` refuses the substrate for the reason that is found here.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
from typing import Any

from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.undo.docker_janitor import call, endpoint

#: Variable with the name of the nodes' image. An option takes precedence.
IMAGE_VARIABLE = "CHAOSKIT_DOCKER_IMAGE"
_ANSWER_S = 60.0
_OK = 200


def connect() -> Any:
    """Return a client of the SDK for the daemon of this machine, which the caller closes.

    Raises the SDK's errors.
    """
    import docker

    return docker.DockerClient(base_url=f"unix://{endpoint()}", timeout=_ANSWER_S)


def unavailable() -> str:
    """Return the reason why containers cannot be nodes here, or ""."""
    if importlib.util.find_spec("docker") is None:
        return "the Docker SDK is not installed: pip install 'chaoskit[docker]'"
    if not endpoint():
        return f"DOCKER_HOST={os.environ['DOCKER_HOST']}: the daemon must be on this machine, behind unix://"
    if reason := _unreachable(endpoint()):
        return reason
    if os.geteuid() != 0 or not capabilities.privileged():
        return "connecting the networks of containers needs root"
    return capabilities.namespaces()


def _unreachable(path: str) -> str:
    """Return why the daemon at a socket cannot be used; "" if it can."""
    try:
        status, text = call(path, "GET", "/version")
        if status != _OK:
            return f"the Docker daemon at {path} answered with status {status}: {text}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
            peer_pid, _, _ = struct.unpack(
                "3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
    except OSError as error:
        return (
            f"no Docker daemon at {path} ({error.strerror or error}): start one, or set DOCKER_HOST"
        )
    if peer_pid == 0:
        return f"the Docker daemon at {path} does not see the same processes: chaoskit itself is in a container"
    return ""
