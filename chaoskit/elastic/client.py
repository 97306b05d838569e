"""Client of a job that trains: ``RunClient("chaoskit-runs/...").scale(6)``.

It needs only the directory of the run. The launcher of a run listens on loopback, and writes its
address and a token to a file that only its user can read. Any HTTP client can do the same:

    curl -H "Authorization: Bearer $TOKEN" -d '{"size": 6}' $URL/scale

-> launcher/control_api.py answers; elastic/policy.py decides on a request. cli/training/scale.py:
the command.
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

#: Name of the file with the address, in the directory of a run.
DOOR = "control.json"
_ANSWER_S = 30.0
_BODY_BYTES_MAX = 1 << 20
_BAD_REQUEST, _CONFLICT = 400, 409
_T = TypeVar("_T")


class Unanswered(HarnessError):
    """The launcher of the run did not answer: the run is over, or the launcher is stopped."""


class Door(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of a launcher, with its token and process."""

    url: str
    token: str
    pid: int


class RequestReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reply to a request: accepted or refused, with the reason.

    Attributes:
        accepted: the request is carried out, at once or when there are nodes.
        reason: the reason, in words, also of an accepted request.
        nodes: nodes that a job of higher priority may have, once they have left.
    """

    accepted: bool
    reason: str
    nodes: tuple[str, ...] = ()


class WorldState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Present and intended size of a world.

    Attributes:
        world: number of ranks that train together now.
        size: number of ranks at which the run aims.
        wanted: size that was asked for last, 0 for none.
        nodes: nodes that the world will have.
        generation: number of the membership.
        step: number of committed steps.
    """

    world: int = 0
    size: int = 0
    wanted: int = 0
    nodes: tuple[str, ...] = ()
    generation: int = 0
    step: int = 0


class _BadRequest(msgspec.Struct, frozen=True):
    """Answer of a launcher to bad input."""

    field: str
    value: Any
    remedy: str

    def error(self) -> BadInput:
        return BadInput(self.field, self.value, self.remedy)


class RunClient:
    """Client of a run, found by its directory.

    A request that the run refuses returns a :class:`RequestReply` with ``accepted=False``. Each
    method raises :class:`Unanswered` if no launcher answers, and BadInput for a value that is not
    allowed.

    Raises:
        BadInput: if the directory has no readable file with the address of a launcher: the run is
            over, or the directory is not that of a run.
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
        """Return the present and intended size of the world."""
        return self._decoded(WorldState, self._ask("world", None))

    @typed_arguments
    def scale(self, size: int, asked_by: str = "") -> RequestReply:
        """Ask for a world of ``size`` nodes.

        Args:
            asked_by: the source of the request, for people; "" if it is not to be shown.
        """
        return self._reply("scale", {"size": size, "asked_by": asked_by})

    @typed_arguments
    def drain(self, node: str, grace_s: float) -> RequestReply:
        """Announce that ``node`` will be removed in ``grace_s`` seconds."""
        require_node_name("node", node)
        require_grace(grace_s)
        return self._reply("drain", {"node": node, "grace_s": grace_s})

    @typed_arguments
    def cancel_drain(self, node: str) -> RequestReply:
        """Announce that ``node`` stays after all, in spite of any earlier notice."""
        require_node_name("node", node)
        return self._reply("cancel-drain", {"node": node})

    @typed_arguments
    def lend(self, nodes: int, job: str, grace_s: float) -> RequestReply:
        """Lend so many nodes to ``job``, of higher priority, within ``grace_s`` seconds.

        The reply names the nodes, which may be fewer.
        """
        require_grace(grace_s)
        return self._reply("lend", {"job": job, "nodes": nodes, "grace_s": grace_s})

    @typed_arguments
    def return_nodes(self, job: str) -> RequestReply:
        """Take back the nodes that ``job`` has had."""
        return self._reply("return-nodes", {"job": job})

    def _reply(self, action: str, fields: dict[str, Any]) -> RequestReply:
        return self._decoded(RequestReply, self._ask(action, fields))

    def _ask(self, action: str, fields: dict[str, Any] | None) -> bytes:
        """Send a request and return the body of the answer, whether it grants or refuses.

        Raises:
            BadInput: if the launcher finds a value that is not allowed.
            Unanswered: if no launcher answers within 30 s, or another server does.
        """
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({})
        )  # the launcher is on this machine: no proxy
        try:
            request = urllib.request.Request(
                f"{self._door.url}/{action}",
                data=None if fields is None else json.dumps(fields).encode(),
                headers={"Authorization": f"Bearer {self._door.token}"},
            )
            with opener.open(request, timeout=_ANSWER_S) as response:
                return bytes(response.read(_BODY_BYTES_MAX))
        except urllib.error.HTTPError as error:
            body = _rest(error)
            if error.code == _BAD_REQUEST:
                raise self._decoded(_BadRequest, body).error() from None
            if error.code == _CONFLICT:
                return body
            raise self._wrong_server(f"status {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            problem = (
                f"{self._directory} does not answer at {self._door.url} ({one_line(str(error))})"
            )
            raise Unanswered(f"{problem}: it is over, or its launcher stands still") from None

    def _decoded(self, kind: type[_T], body: bytes) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._wrong_server(str(error)) from None

    def _wrong_server(self, detail: str) -> Unanswered:
        problem = (
            f"what answers at {self._door.url} is not the launcher of {self._directory} ({detail})"
        )
        return Unanswered(f"{problem}: the run is over; name another one by --run")


def _rest(error: urllib.error.HTTPError) -> bytes:
    """Return the body of an answer that refuses, or b"" if it does not arrive."""
    try:
        return bytes(error.read(_BODY_BYTES_MAX))
    except (OSError, http.client.HTTPException):
        return b""


def require_grace(grace_s: float) -> None:
    """Raise BadInput unless ``grace_s`` is a finite time of 0 or more."""
    if not 0 <= grace_s < math.inf:
        raise BadInput("grace_s", grace_s, "use a number of seconds, 0 or more")


def newest_live_run(directory: Path = Path("chaoskit-runs")) -> Path:
    """Return the directory of the newest run below ``directory`` with a live launcher.

    The newest run is the one that has begun to listen last.

    Raises:
        BadInput: if no run has a live launcher.
    """
    doors = sorted(directory.glob(f"*/{DOOR}"), key=_written_ns, reverse=True)
    for path in doors:
        with contextlib.suppress(OSError, msgspec.DecodeError):  # just ended, or damaged
            if Path(f"/proc/{msgspec.json.decode(path.read_bytes(), type=Door).pid}").exists():
                return path.parent
    raise BadInput(
        "run", str(directory), "no run listens there: give the directory of one by --run"
    )


def _written_ns(path: Path) -> int:
    with contextlib.suppress(OSError):  # the run has just ended
        return path.stat().st_mtime_ns
    return 0


def open_door(directory: Path, door: Door) -> Path:
    """Write the address of a launcher to a file that only its user can read, and return its path.

    The file appears at once and complete.

    Raises:
        OSError: if the file cannot be written.
    """
    path = directory / DOOR
    draft = path.with_suffix(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(door))
    draft.replace(path)
    return path
