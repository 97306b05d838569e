"""Control API of a running launch: HTTP on loopback, for scaling, draining and lending nodes.

-> ``experiment/plan/requests.py``: what becomes of a request. ``elastic/client.py``: the client,
and the file with address and token. ``coordinator/handlers/on_size_request.py``: which requests are
accepted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.elastic.client import Door, RequestReply, open_door
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.requests import Requests
from chaoskit.process.linux import await_readable
from chaoskit.wire.messages import NoticeCancelled, ReturnNodes, SpotNotice

_BODY_BYTES_MAX = 65536


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for another number of nodes."""

    size: int
    asked_by: str = ""


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a notice that a node will be removed."""

    node: str
    grace_s: float


class _CancelDrain(msgspec.Struct, forbid_unknown_fields=True):
    """The body of the cancellation of a notice."""

    node: str


class _Lend(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to lend nodes to another job."""

    job: str
    nodes: int
    grace_s: float


class _ReturnNodes(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a notice that lent nodes are back."""

    job: str


#: Last part of the URL -> the type of the body, and the function that carries the request out.
_ACTIONS: dict[str, tuple[type[Any], Callable[[Requests, Any], RequestReply]]] = {
    "scale": (
        _Scale,
        lambda requests, body: requests.scale(body.size, body.asked_by or "an HTTP call"),
    ),
    "drain": (_Drain, lambda requests, body: requests.tell(SpotNotice(body.node, body.grace_s))),
    "cancel-drain": (
        _CancelDrain,
        lambda requests, body: requests.tell(NoticeCancelled(body.node)),
    ),
    "lend": (_Lend, lambda requests, body: requests.lend(body.job, body.nodes, body.grace_s)),
    "return-nodes": (_ReturnNodes, lambda requests, body: requests.tell(ReturnNodes(body.job))),
}


@contextlib.contextmanager
def listening(requests: Requests, directory: Path, port: int = 0) -> Iterator[Door]:
    """Serve requests while the block lasts, and yield the address and the token.

    Both are written into a file in the directory of the run, too. At the end of the block the file
    is removed, and requests that still wait get a refusal.

    Args:
        requests: carries the requests out; it accepts none after the block.
        directory: the directory of the run.
        port: 0 for a free one.

    Raises:
        BadInput: if the port is in use.
    """
    token = secrets.token_hex(16)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(requests, token))
    except OverflowError:
        raise BadInput(
            "control_port", port, "choose a port from 1 to 65535, or 0 for any"
        ) from None
    except OSError as error:
        raise BadInput(
            "control_port", port, f"choose a free port, or 0 for any ({error.strerror})"
        ) from None
    server.daemon_threads = True
    door = Door(f"http://127.0.0.1:{server.server_port}", token, os.getpid())
    path = open_door(directory, door)
    close_end, server_end = socket.socketpair()
    thread = threading.Thread(target=_serve, args=(server, server_end), name="door", daemon=True)
    thread.start()
    try:
        yield door
    finally:
        path.unlink(missing_ok=True)
        requests.end()
        close_end.close()
        thread.join()
        server_end.close()
        server.server_close()


def _serve(server: ThreadingHTTPServer, closing: socket.socket) -> None:
    """Answer requests until the other end of ``closing`` is closed.

    ``serve_forever`` is not used because it wakes up again and again.
    """
    while closing.fileno() not in await_readable([server.fileno(), closing.fileno()]):
        server.handle_request()


def _fields(body_type: type[Any]) -> str:
    """Return the fields of a body with their types, for an error message."""
    return ", ".join(
        f"{field.encode_name} ({field.type.__name__})"
        for field in msgspec.structs.fields(body_type)
    )


def _handler(requests: Requests, token: str) -> type[BaseHTTPRequestHandler]:
    """Return the class of a handler of HTTP requests for a launch."""

    class Handler(BaseHTTPRequestHandler):
        """The handler of one HTTP request. A request without the token learns nothing."""

        timeout = 10.0

        def do_GET(self) -> None:
            """Respond to GET /world with the state of the world.

            The status is 401 without the token, and 404 for another path.
            """
            if not self._is_authorized():
                self._respond(401, {"error": "send the token of control.json as a bearer token"})
            elif self.path == "/world":
                self._respond(200, msgspec.to_builtins(requests.state))
            else:
                self._respond(404, {"error": "GET /world"})

        def do_POST(self) -> None:
            """Carry out a request with a JSON body, and respond with its reply.

            The status is 200 for a request that was accepted, 409 for one that was not, and 400 for
            bad input. It is 401 without the token, and 404 for an unknown request.
            """
            if not self._is_authorized():
                self._respond(401, {"error": "send the token of control.json as a bearer token"})
                return
            if (action := _ACTIONS.get(self.path.strip("/"))) is None:
                self._respond(404, {"error": f"POST {', '.join('/' + name for name in _ACTIONS)}"})
                return
            body_type, carry_out = action
            try:
                length = int(self.headers.get("Content-Length", 0))
                if length < 0:
                    raise ValueError("Content-Length is negative")
                body = msgspec.json.decode(
                    self.rfile.read(min(length, _BODY_BYTES_MAX)), type=body_type
                )
            except (msgspec.DecodeError, ValueError) as error:
                self._refuse("body", "", f"send JSON with {_fields(body_type)}: {error}")
                return
            try:
                reply = carry_out(requests, body)
            except BadInput as error:
                self._refuse(error.field, error.value, error.remedy)
                return
            self._respond(200 if reply.accepted else 409, msgspec.to_builtins(reply))

        def _is_authorized(self) -> bool:
            """Return True if the request carries the token. The comparison takes constant time."""
            header = self.headers.get("Authorization", "")
            return hmac.compare_digest(header.encode(), f"Bearer {token}".encode())

        def _refuse(self, field: str, value: Any, remedy: str) -> None:
            """Respond that an input is bad, with a remedy."""
            self._respond(400, {"field": field, "value": value, "remedy": remedy})

        def _respond(self, status: int, body: Any) -> None:
            """Send a response with a JSON body."""
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the name that http.server gave it
            """Print nothing: the terminal shows the training."""

    return Handler
