"""The control API of a running launch: HTTP on loopback."""

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
    size: int
    asked_by: str = ""


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    grace_s: float


class _CancelDrain(msgspec.Struct, forbid_unknown_fields=True):
    node: str


class _Lend(msgspec.Struct, forbid_unknown_fields=True):
    job: str
    nodes: int
    grace_s: float


class _ReturnNodes(msgspec.Struct, forbid_unknown_fields=True):
    job: str


#: What can be asked for, by the last part of the URL.
_ACTS: dict[str, tuple[type[Any], Callable[[Requests, Any], RequestReply]]] = {
    "scale": (
        _Scale,
        lambda requests, asked: requests.scale(asked.size, asked.asked_by or "an HTTP call"),
    ),
    "drain": (_Drain, lambda requests, asked: requests.tell(SpotNotice(asked.node, asked.grace_s))),
    "cancel-drain": (
        _CancelDrain,
        lambda requests, asked: requests.tell(NoticeCancelled(asked.node)),
    ),
    "lend": (_Lend, lambda requests, asked: requests.lend(asked.job, asked.nodes, asked.grace_s)),
    "return-nodes": (_ReturnNodes, lambda requests, asked: requests.tell(ReturnNodes(asked.job))),
}


@contextlib.contextmanager
def listening(requests: Requests, directory: Path, port: int = 0) -> Iterator[Door]:
    """Take requests while the block lasts.

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
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=_serve, args=(server, theirs), name="door", daemon=True)
    thread.start()
    try:
        yield door
    finally:
        path.unlink(missing_ok=True)
        requests.end()
        ours.close()
        thread.join()
        theirs.close()
        server.server_close()


def _serve(server: ThreadingHTTPServer, over: socket.socket) -> None:
    """Answer until the other end of ``over`` is closed; ``serve_forever`` would wake up again and again to look."""
    while over.fileno() not in await_readable([server.fileno(), over.fileno()]):
        server.handle_request()


def _fields(kind: type[Any]) -> str:
    return ", ".join(
        f"{field.encode_name} ({field.type.__name__})" for field in msgspec.structs.fields(kind)
    )


def _handler(requests: Requests, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """One request. Without the token a request learns nothing."""

        timeout = 10.0

        def do_GET(self) -> None:
            if not self._is_known():
                self._say(401, {"error": "send the token of control.json as a bearer token"})
            elif self.path == "/world":
                self._say(200, msgspec.to_builtins(requests.state))
            else:
                self._say(404, {"error": "GET /world"})

        def do_POST(self) -> None:
            if not self._is_known():
                self._say(401, {"error": "send the token of control.json as a bearer token"})
                return
            if (act := _ACTS.get(self.path.strip("/"))) is None:
                self._say(404, {"error": f"POST {', '.join('/' + name for name in _ACTS)}"})
                return
            kind, do = act
            try:
                length = int(self.headers.get("Content-Length", 0))
                if length < 0:
                    raise ValueError("Content-Length is negative")
                asked = msgspec.json.decode(
                    self.rfile.read(min(length, _BODY_BYTES_MAX)), type=kind
                )
            except (msgspec.DecodeError, ValueError) as error:
                self._refuse("body", "", f"send JSON with {_fields(kind)}: {error}")
                return
            try:
                reply = do(requests, asked)
            except BadInput as error:
                self._refuse(error.field, error.value, error.remedy)
                return
            self._say(200 if reply.accepted else 409, msgspec.to_builtins(reply))

        def _is_known(self) -> bool:
            said = self.headers.get("Authorization", "")
            return hmac.compare_digest(said.encode(), f"Bearer {token}".encode())

        def _refuse(self, field: str, value: Any, remedy: str) -> None:
            self._say(400, {"field": field, "value": value, "remedy": remedy})

        def _say(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the name that http.server gave it
            """Print nothing: the terminal shows the training."""

    return Handler
