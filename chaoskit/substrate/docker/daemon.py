"""Whether this machine has a Docker daemon with containers in which nodes can live, and the SDK's way to it."""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
from typing import Any

from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.undo.docker_janitor import call, endpoint

#: Names the image of which nodes are made, unless an option does.
IMAGE_VARIABLE = "CHAOSKIT_DOCKER_IMAGE"
_ANSWER_S = 60.0
_OK = 200


def connect() -> Any:
    """A client of the SDK. Raises the SDK's errors."""
    import docker

    return docker.DockerClient(base_url=f"unix://{endpoint()}", timeout=_ANSWER_S)


def unavailable() -> str:
    """Why nodes cannot live in containers here; "" if they can."""
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
    try:
        status, said = call(path, "GET", "/version")
        if status != _OK:
            return f"the Docker daemon at {path} answered with status {status}: {said}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
            peer, _, _ = struct.unpack(
                "3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
    except OSError as error:
        return (
            f"no Docker daemon at {path} ({error.strerror or error}): start one, or set DOCKER_HOST"
        )
    if peer == 0:
        return f"the Docker daemon at {path} does not see the same processes: chaoskit itself is in a container"
    return ""
