"""The Docker daemon of this machine, by the standard library only: finds and removes what launchers left there.

Everything that chaoskit makes in a daemon bears its labels, and nothing else is ever touched. The janitor must work
when the environment is what broke, so it does not need the SDK.
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

#: On everything that is ours.
LABEL = "chaoskit"
#: Its owner: pid and start time of a launcher.
OWNER = "chaoskit.owner"
#: Where that pid means something: other machines and containers may share the daemon.
HOST = "chaoskit.host"
_USUAL_PLACE = "/var/run/docker.sock"
_ANSWER_S = 30.0
_GONE_S = 10.0
_LOOK_S = 0.02
_OK, _NOT_FOUND = 200, 404


def endpoint() -> str:
    """The daemon's socket; "" where ``DOCKER_HOST`` names a daemon that is not on this machine."""
    host = os.environ.get("DOCKER_HOST", "")
    if not host:
        return _USUAL_PLACE
    return host.removeprefix("unix://") if host.startswith("unix://") else ""


def owner() -> str:
    """What our things are labelled with."""
    return f"{os.getpid()}-{start_ticks(os.getpid())}"


def labels() -> dict[str, str]:
    """What everything gets that this process makes."""
    return {LABEL: "1", OWNER: owner(), HOST: kernel_id()}


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket of this machine."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def call(path: str, method: str, url: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON of the daemon's answer. Raises OSError where it cannot be reached."""
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


def remove_container(path: str, name: str, wanted_owner: str) -> bool:
    """Remove a container with everything in it, also if it is paused; False where it is gone, or is not ours.

    Raises:
        OSError: if the daemon cannot be reached, or does not do it.
    """
    status, found = call(path, "GET", f"/containers/{urllib.parse.quote(name)}/json")
    if status == _NOT_FOUND:
        return False
    if status != _OK:
        raise OSError(f"the daemon answered with status {status}: {found}")
    marks = _mapping(found, "Config", "Labels")
    if marks.get(LABEL) != "1" or marks.get(OWNER) != wanted_owner:
        return False
    return _remove(path, str(found["Id"]))


def remove_abandoned(path: str, host: str = "") -> list[str]:
    """Remove the containers of launchers that are gone. Gives their names.

    Args:
        host: where their pids mean something; "" for here.

    Raises:
        OSError: if the daemon cannot be reached, or does not do it.
    """
    wanted = urllib.parse.quote(
        json.dumps({"label": [f"{LABEL}=1", f"{HOST}={host or kernel_id()}"]})
    )
    status, found = call(path, "GET", f"/containers/json?all=1&filters={wanted}")
    if not isinstance(found, list):
        raise OSError(f"the daemon answered with status {status}: {found}")
    return [
        str(one["Names"][0]).lstrip("/")
        for one in found
        if not _lives(_mapping(one, "Labels").get(OWNER, "")) and _remove(path, str(one["Id"]))
    ]


def _remove(path: str, identity: str) -> bool:
    """By its id, which no other container ever gets."""
    deadline_s = time.monotonic() + _GONE_S
    while True:
        status, said = call(path, "DELETE", f"/containers/{identity}?force=1&v=1")
        if (
            status == _NOT_FOUND
            or call(path, "GET", f"/containers/{identity}/json")[0] == _NOT_FOUND
        ):
            return True
        if time.monotonic() > deadline_s:  # it is being removed already, or does not end
            raise OSError(f"container {identity[:12]} was not removed: {said}")
        time.sleep(_LOOK_S)


def _mapping(found: Any, *keys: str) -> dict[str, str]:
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _lives(name: str) -> bool:
    """Whether a launcher of that name is there. A name that is not in our form is not ours to judge."""
    pid, _, ticks = name.partition("-")
    if not pid.isdecimal() or not ticks.isdecimal():
        return True
    return start_ticks(int(pid)) == int(ticks) and not is_ending(int(pid))
