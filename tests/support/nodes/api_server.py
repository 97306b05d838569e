"""A small API server on the loopback, for requests and answers that a real server gives only in
trouble.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: The answer to a request: a function of its method, path and body that returns a status and a
#: body. A body that is a function writes the chunks of a stream to the connection.
Answer = Callable[[str, str, Any], tuple[int, Any]]


class ApiServer:
    """The server, as a test sees it.

    Attributes:
        kubeconfig: a file that names the server.
        requests: method, path and body of each request, in the order of their arrival.
    """

    def __init__(self, directory: Path, answer: Answer) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def do_PATCH(self) -> None:
                self._answer()

            def do_DELETE(self) -> None:
                self._answer()

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                path = self.path.partition("?")[0]
                requests.append((self.command, path, body))
                status, answer_body = answer(self.command, path, body)
                if callable(answer_body):
                    self._stream(status, answer_body)
                    return
                data = json.dumps(answer_body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, status: int, write: Callable[[socket.socket], None]) -> None:
                self.protocol_version = "HTTP/1.1"  # else the client gives its socket away
                self.send_response(status)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client has gone
                    write(self.connection)

            def log_message(self, *arguments: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self.kubeconfig = kubeconfig(directory, self._server.server_port)

    def start(self) -> None:
        """Start to answer requests."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering requests."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def api_server(directory: Path, answer: Answer) -> Iterator[ApiServer]:
    """Run a server that answers until the context ends."""
    server = ApiServer(directory, answer)
    server.start()
    try:
        yield server
    finally:
        server.close()


def refusal(status: int, message: str) -> tuple[int, Any]:
    """Return the answer of a server that refuses a request."""
    return status, {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": status,
        "message": message,
    }


def kubeconfig(directory: Path, port: int) -> str:
    """Return a file that names a server on this port of the loopback."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "chaos"}}
        ],
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {"token": "secret"}}],
    }
    path = directory / f"kubeconfig-{port}.json"
    path.write_text(json.dumps(config))
    return str(path)
