"""Speak to a job that trains: ``RunClient("chaoskit-runs/...").scale(6)``. Needs nothing but the directory of the run.

The launcher of a run listens on loopback, and writes where, with a token, into a file that only its user can read.
Whatever can send an HTTP request can do the same:

    curl -H "Authorization: Bearer $TOKEN" -d '{"size": 6}' $URL/scale
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chaoskit.errors import BadInput, HarnessError
from chaoskit.nodename import require_node_name
from chaoskit.plaintext import one_line
from chaoskit.typed import named_path, typed_arguments

#: In the directory of a run.
DOOR = "control.json"
_ANSWER_S = 30.0
_BODY_BYTES_MAX = 1 << 20
_BAD_REQUEST, _CONFLICT = 400, 409
_T = TypeVar("_T")


class Unanswered(HarnessError):
    """The launcher of the run did not answer: the run is over, or it stands still."""


class Door(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a launcher listens."""

    url: str
    token: str
    pid: int


class RequestReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a request was accepted, and why; ``nodes``: which a job of higher priority may have, once they left."""

    accepted: bool
    reason: str
    nodes: tuple[str, ...] = ()


class WorldState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How large a world is, and shall be.

    Attributes:
        world: ranks that train together now. size: how many they shall be. wanted: how many were asked for, 0 for none.
        nodes: that the world shall be of.
        step: committed steps.
    """

    world: int = 0
    size: int = 0
    wanted: int = 0
    nodes: tuple[str, ...] = ()
    generation: int = 0
    step: int = 0


class _BadRequest(msgspec.Struct, frozen=True):
    """What a launcher answers to bad input."""

    field: str
    value: Any
    remedy: str

    def error(self) -> BadInput:
        return BadInput(self.field, self.value, self.remedy)


class RunClient:
    """A run, by its directory.

    Raises:
        BadInput: if nothing listens for it: it is over, or the directory is of no run.
    """

    @typed_arguments
    def __init__(self, directory: Path | str) -> None:
        self._directory = directory
        path = named_path("run", directory) / DOOR
        try:
            self._door = msgspec.json.decode(path.read_bytes(), type=Door)
        except (FileNotFoundError, NotADirectoryError):
            remedy = (
                "name the directory of a run that `chaoskit launch` has begun, and that is not over"
            )
            raise BadInput("run", str(directory), remedy) from None
        except OSError as error:
            remedy = (
                f"it cannot be read ({error.strerror}): ask as the user that has launched the run"
            )
            raise BadInput("run", str(path), remedy) from None
        except msgspec.DecodeError as error:
            remedy = f"it is damaged ({error}): name the directory of another run, or start this one anew"
            raise BadInput("run", str(path), remedy) from None

    def state(self) -> WorldState:
        """How large the world is now."""
        return self._told(WorldState, self._ask("world", None))

    @typed_arguments
    def scale(self, size: int, asked_by: str = "") -> RequestReply:
        """Ask for a world of ``size`` nodes."""
        return self._reply("scale", {"size": size, "asked_by": asked_by})

    @typed_arguments
    def drain(self, node: str, grace_s: float) -> RequestReply:
        """Say that ``node`` will be removed in ``grace_s``."""
        require_node_name("node", node)
        require_grace(grace_s)
        return self._reply("drain", {"node": node, "grace_s": grace_s})

    @typed_arguments
    def cancel_drain(self, node: str) -> RequestReply:
        """Say that ``node`` stays after all, however it was announced to go."""
        require_node_name("node", node)
        return self._reply("cancel-drain", {"node": node})

    @typed_arguments
    def lend(self, nodes: int, job: str, grace_s: float) -> RequestReply:
        """Let ``job``, of higher priority, have so many nodes within ``grace_s``."""
        require_grace(grace_s)
        return self._reply("lend", {"job": job, "nodes": nodes, "grace_s": grace_s})

    @typed_arguments
    def return_nodes(self, job: str) -> RequestReply:
        """Take back the nodes that ``job`` has had."""
        return self._reply("return-nodes", {"job": job})

    def _reply(self, act: str, fields: dict[str, Any]) -> RequestReply:
        return self._told(RequestReply, self._ask(act, fields))

    def _ask(self, act: str, fields: dict[str, Any] | None) -> bytes:
        """The body of the answer, whether it grants or refuses. Raises BadInput and :class:`Unanswered`."""
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({})
        )  # it is on this machine
        try:
            request = urllib.request.Request(
                f"{self._door.url}/{act}",
                data=None if fields is None else json.dumps(fields).encode(),
                headers={"Authorization": f"Bearer {self._door.token}"},
            )
            with opener.open(request, timeout=_ANSWER_S) as response:
                return bytes(response.read(_BODY_BYTES_MAX))
        except urllib.error.HTTPError as error:
            body = _rest(error)
            if error.code == _BAD_REQUEST:
                raise self._told(_BadRequest, body).error() from None
            if error.code == _CONFLICT:
                return body
            raise self._stranger(f"status {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            told = f"{self._directory} does not answer at {self._door.url} ({one_line(str(error))})"
            raise Unanswered(f"{told}: it is over, or its launcher stands still") from None

    def _told(self, kind: type[_T], body: bytes) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._stranger(str(error)) from None

    def _stranger(self, why: str) -> Unanswered:
        told = f"what answers at {self._door.url} is not the launcher of {self._directory} ({why})"
        return Unanswered(f"{told}: the run is over; name another one by --run")


def _rest(error: urllib.error.HTTPError) -> bytes:
    """The body of an answer that refuses, as far as it comes."""
    try:
        return bytes(error.read(_BODY_BYTES_MAX))
    except (OSError, http.client.HTTPException):
        return b""


def require_grace(grace_s: float) -> None:
    """Raises BadInput if nobody can wait so long."""
    if not 0 <= grace_s < math.inf:
        raise BadInput("grace_s", grace_s, "use a number of seconds, 0 or more")


def newest_live_run(directory: Path = Path("chaoskit-runs")) -> Path:
    """The run below ``directory`` that was begun last, of those whose launcher lives.

    Raises:
        BadInput: if there is none.
    """
    doors = sorted(directory.glob(f"*/{DOOR}"), key=_written_ns, reverse=True)
    for path in doors:
        with contextlib.suppress(OSError, msgspec.DecodeError):  # it has just ended, or is damaged
            if Path(f"/proc/{msgspec.json.decode(path.read_bytes(), type=Door).pid}").exists():
                return path.parent
    raise BadInput(
        "run", str(directory), "no run listens there: give the directory of one by --run"
    )


def _written_ns(path: Path) -> int:
    with contextlib.suppress(OSError):  # its run has just ended
        return path.stat().st_mtime_ns
    return 0


def open_door(directory: Path, door: Door) -> Path:
    """Write where a launcher listens, for its user alone; whoever waits for the file finds it whole."""
    path = directory / DOOR
    draft = path.with_suffix(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(door))
    draft.replace(path)
    return path
