"""How a running launch is told what to do: by HTTP on loopback, by a file, and by signals."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.text import Text

from chaoskit.elastic.client import Door, Reply, open_door
from chaoskit.errors import BadInput
from chaoskit.experiment.requests import Requests
from chaoskit.messages import NoticeCancelled, ReturnNodes, SpotNotice

#: A file in the directory of a run: whoever writes a number into it asks for a world of so many nodes.
SCALE_FILE = "scale"
_LOOK_S = 0.5
_CLOSE_S = 0.05  # the end of a launch waits so long for the server
_BODY_BYTES_MAX = 65536


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    size: int
    asked_by: str = ""


class _Notice(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    grace_s: float


class _CancelNotice(msgspec.Struct, forbid_unknown_fields=True):
    node: str


class _Lend(msgspec.Struct, forbid_unknown_fields=True):
    job: str
    nodes: int
    grace_s: float


class _GiveBack(msgspec.Struct, forbid_unknown_fields=True):
    job: str


#: What can be asked for, by the last part of the URL.
_ACTS: dict[str, tuple[type[Any], Callable[[Requests, Any], Reply]]] = {
    "scale": (_Scale, lambda requests, asked: requests.scale(asked.size, asked.asked_by or "an HTTP call")),
    "notice": (_Notice, lambda requests, asked: requests.tell(SpotNotice(asked.node, asked.grace_s))),
    "cancel-notice": (_CancelNotice, lambda requests, asked: requests.tell(NoticeCancelled(asked.node))),
    "lend": (_Lend, lambda requests, asked: requests.lend(asked.job, asked.nodes, asked.grace_s)),
    "give-back": (_GiveBack, lambda requests, asked: requests.tell(ReturnNodes(asked.job))),
}


def stamp(path: Path) -> tuple[int, int] | None:
    """Return when a file was written and its size, or None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def listening(
    requests: Requests,
    directory: Path,
    console: Console,
    port: int = 0,
    *,
    look_s: float = _LOOK_S,
    look: Callable[[Path], tuple[int, int] | None] = stamp,
) -> Iterator[Door]:
    """Take requests while the block lasts.

    Args:
        look_s: time between two looks at the file that asks for a size.
        look: takes such a look.

    Raises:
        BadInput: if the port is in use.
    """
    token = secrets.token_hex(16)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(requests, token))
    except OSError as error:
        raise BadInput("control_port", port, f"choose a free port, or 0 for any ({error.strerror})") from None
    server.daemon_threads = True
    door = Door(f"http://127.0.0.1:{server.server_port}", token, os.getpid())
    path, over = open_door(directory, door), threading.Event()
    threads = [
        threading.Thread(target=server.serve_forever, args=(_CLOSE_S,), name="door", daemon=True),
        threading.Thread(
            target=_watch_file, args=(directory / SCALE_FILE, requests, console, over, look_s, look), daemon=True
        ),
    ]
    for thread in threads:
        thread.start()
    try:
        with _signals(requests):
            yield door
    finally:
        over.set()
        path.unlink(missing_ok=True)
        requests.end()
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _signals(requests: Requests) -> Iterator[None]:
    """SIGUSR1 asks for the next larger size, SIGUSR2 for the next smaller one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    steps: dict[signal.Signals, Literal[1, -1]] = {signal.SIGUSR1: 1, signal.SIGUSR2: -1}
    before = {
        one: signal.signal(one, lambda signum, frame: requests.step_size(steps[signal.Signals(signum)]))
        for one in steps
    }
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _watch_file(
    path: Path,
    requests: Requests,
    console: Console,
    over: threading.Event,
    look_s: float,
    look: Callable[[Path], tuple[int, int] | None],
) -> None:
    """Ask for the size that is written into the file, each time that it changes."""
    seen = look(path)
    while not over.wait(look_s):
        found = look(path)
        if found is None or found == seen or not found[1]:  # empty: `echo 2 > scale` is half done
            continue
        seen = found
        try:
            reply = requests.scale(int(path.read_text(encoding="utf-8")), f"the file {path.name}")
        except (OSError, ValueError):
            reply = Reply(False, f"write a number of nodes into {path}")
        console.print(Text(f"{path}: {'' if reply.accepted else 'refused: '}{reply.reason}"), soft_wrap=True)


def _fields(kind: type[Any]) -> str:
    return ", ".join(f"{field.encode_name} ({field.type.__name__})" for field in msgspec.structs.fields(kind))


def _handler(requests: Requests, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """One request. Whoever does not know the token learns nothing."""

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
                asked = msgspec.json.decode(self.rfile.read(min(length, _BODY_BYTES_MAX)), type=kind)
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
            """Nothing: the terminal shows the training."""

    return Handler
