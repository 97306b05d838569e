"""Removal of containers that launchers left in the Docker daemon of this machine.

Everything that chaoskit creates in a daemon carries its labels, and nothing else is ever touched.
The janitor must work when the environment is what broke, so it uses only the standard library and
not the SDK.

-> ``undo/entries.py`` (``ContainerEntry``): one container of a killed launcher.
``docker/container.py``: how containers are made.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
import urllib.parse
from typing import Any

from chaoskit.process.linux import is_ending, kernel_id, start_ticks

#: Label of everything that chaoskit creates.
LABEL = "chaoskit"
#: Label with the owner: pid and start time of a launcher.
OWNER = "chaoskit.owner"
#: Label with the kernel id that the pid belongs to: other machines and containers may share the
#: daemon.
HOST = "chaoskit.host"
_USUAL_PLACE = "/var/run/docker.sock"
_ANSWER_S = 30.0
_GONE_S = 10.0
_LOOK_S = 0.02
_OK, _NOT_FOUND = 200, 404


def endpoint() -> str:
    """Return the path of the daemon's socket; "" if ``DOCKER_HOST`` names a remote one."""
    host = os.environ.get("DOCKER_HOST", "")
    if not host:
        return _USUAL_PLACE
    return host.removeprefix("unix://") if host.startswith("unix://") else ""


def owner() -> str:
    """Return the owner label of this process: its pid and start time."""
    return f"{os.getpid()}-{start_ticks(os.getpid())}"


def labels() -> dict[str, str]:
    """Return the labels of everything that this process creates."""
    return {LABEL: "1", OWNER: owner(), HOST: kernel_id()}


class _Connection(http.client.HTTPConnection):
    """HTTP connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the Unix socket, where the base class would use TCP."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def call(path: str, method: str, url: str, body: object = None) -> tuple[int, Any]:
    """Send a request to the daemon, and return the HTTP status and the decoded JSON of its answer.

    An answer that is not JSON is returned as text.

    Args:
        path: path of the daemon's socket.
        body: sent as JSON; None for no body.

    Raises:
        OSError: if the daemon cannot be reached, or does not speak HTTP.
    """
    with contextlib.closing(_Connection(path)) as connection:
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, url, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        except http.client.HTTPException as error:
            raise OSError(f"{path} does not speak HTTP: {error}") from error
    try:
        return answer.status, json.loads(text or b"null")
    except ValueError:
        return answer.status, text.decode(errors="replace")


def remove_container(path: str, name: str, expected_owner: str) -> bool:
    """Remove a container with everything in it, even if it is paused.

    Args:
        path: path of the daemon's socket.
        name: name of the container.
        expected_owner: owner label that it must have.

    Returns:
        True if it was removed; False if it was gone before, or has another owner.

    Raises:
        OSError: if the daemon cannot be reached, or does not remove the container.
    """
    status, container = call(path, "GET", f"/containers/{urllib.parse.quote(name)}/json")
    if status == _NOT_FOUND:
        return False
    if status != _OK:
        raise OSError(f"the daemon answered with status {status}: {container}")
    labels_found = _mapping(container, "Config", "Labels")
    if labels_found.get(LABEL) != "1" or labels_found.get(OWNER) != expected_owner:
        return False
    return _remove(path, str(container["Id"]))


def remove_abandoned(path: str, host: str = "") -> list[str]:
    """Remove the containers of launchers that are gone, and return their names.

    Args:
        path: path of the daemon's socket.
        host: kernel id that the pids of the launchers belong to; "" for this one.

    Raises:
        OSError: if the daemon cannot be reached, or does not remove a container.
    """
    filters = urllib.parse.quote(
        json.dumps({"label": [f"{LABEL}=1", f"{HOST}={host or kernel_id()}"]})
    )
    status, containers = call(path, "GET", f"/containers/json?all=1&filters={filters}")
    if not isinstance(containers, list):
        raise OSError(f"the daemon answered with status {status}: {containers}")
    return [
        str(container["Names"][0]).lstrip("/")
        for container in containers
        if not _is_alive(_mapping(container, "Labels").get(OWNER, ""))
        and _remove(path, str(container["Id"]))
    ]


def _remove(path: str, identity: str) -> bool:
    """Remove a container by its unique id, and wait until it is gone. Always return True.

    Raises OSError if it is not gone after 10 s.
    """
    deadline_s = time.monotonic() + _GONE_S
    while True:
        status, answer = call(path, "DELETE", f"/containers/{identity}?force=1&v=1")
        if (
            status == _NOT_FOUND
            or call(path, "GET", f"/containers/{identity}/json")[0] == _NOT_FOUND
        ):
            return True
        if time.monotonic() > deadline_s:  # another removal is in progress, or it does not end
            raise OSError(f"container {identity[:12]} was not removed: {answer}")
        time.sleep(_LOOK_S)


def _mapping(node: Any, *keys: str) -> dict[str, str]:
    """Return the mapping of strings below ``keys`` in an answer, or an empty one."""
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _is_alive(name: str) -> bool:
    """Return whether the launcher with this owner label lives.

    A label in another form counts as alive.
    """
    pid, _, ticks = name.partition("-")
    if not pid.isdecimal() or not ticks.isdecimal():
        return True
    return start_ticks(int(pid)) == int(ticks) and not is_ending(int(pid))
