"""A TCP proxy before an API server that cuts connections, refuses new ones, or falls silent."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

_HOST = "127.0.0.1"


class ApiProxy:
    """A proxy on the loopback.

    Args:
        kubeconfig: file that names the API server.
        directory: receives a kubeconfig that names this proxy.

    Attributes:
        kubeconfig: path of that file.
    """

    def __init__(self, kubeconfig: str, directory: Path) -> None:
        config = msgspec.yaml.decode(Path(kubeconfig).read_bytes(), type=dict[str, Any])
        self._listener = socket.create_server((_HOST, 0))
        for entry in config["clusters"]:
            server = urlsplit(entry["cluster"]["server"])
            self._target = (str(server.hostname), server.port or 443)
            entry["cluster"]["server"] = f"https://{_HOST}:{self._listener.getsockname()[1]}"
            entry["cluster"]["tls-server-name"] = server.hostname
        self.kubeconfig = str(directory / "proxied-kubeconfig")
        Path(self.kubeconfig).write_bytes(msgspec.json.encode(config))
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._refuses = False
        self._forwards = threading.Event()
        self._forwards.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset all connections."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def refuse(self, *, refuses: bool) -> None:
        """Cut all connections and close each new one at once, or accept new ones again."""
        self._refuses = refuses
        if refuses:
            self.cut()

    def silence(self, *, is_silent: bool) -> None:
        """Forward no data and keep all connections, or forward again."""
        if is_silent:
            self._forwards.clear()
        else:
            self._forwards.set()

    def close(self) -> None:
        """Cut all connections, and accept no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._forwards.set()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._refuses:
                near.close()
                continue
            far = socket.create_connection(self._target)
            with self._lock:
                self._connections |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._forwards.wait()
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._connections -= {source, sink}
        source.close()
