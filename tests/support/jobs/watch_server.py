"""A small API server on the loopback that answers lists and watches as a test orders it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from support.nodes.api_server import kubeconfig, refusal

Event = tuple[str, dict[str, Any]]
#: Answers a watch: a function of its resource version. It yields events while the stream is open;
#: an int is the status of a refusal.
Watch = Callable[[str], Iterable[Event] | int]


class WatchServer:
    """The server, as a test sees it.

    Attributes:
        kubeconfig: a file that names the server.
        objects: the objects of the next list.
        version: resource version of the next list.
        requests: ``list``, or ``watch`` and its resource version, for each request.
    """

    def __init__(self, directory: Path, watch: Watch) -> None:
        self.objects: list[dict[str, Any]] = []
        self.version = "1"
        self.requests: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.close_connection = True  # else a connection outlives the server
                query = parse_qs(urlsplit(self.path).query)
                if "watch" not in query:
                    server.requests.append("list")
                    metadata = {"resourceVersion": server.version}
                    self._send(200, {"metadata": metadata, "items": server.objects})
                    return
                version = query["resourceVersion"][0]
                server.requests.append(f"watch {version}")
                events = watch(version)
                if isinstance(events, int):
                    self._send(*refusal(events, "no"))
                else:
                    with contextlib.suppress(OSError):  # the client has gone
                        self._stream(events)

            def _send(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Connection", "close")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, events: Iterable[Event]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Connection", "close")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for kind, entry in events:
                    line = json.dumps({"type": kind, "object": entry}).encode() + b"\n"
                    half = len(line) // 2  # an event may come in pieces
                    for piece in (line[:half], line[half:]):
                        self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")

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
        """Stop answering new requests, if the server does so."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@contextlib.contextmanager
def watch_server(directory: Path, watch: Watch) -> Iterator[WatchServer]:
    """Run a server until the context ends."""
    server = WatchServer(directory, watch)
    server.start()
    try:
        yield server
    finally:
        server.close()
