"""``python -m chaoskit.substrate.kubernetes.port_forward JSON``: carries a socket, standard input, to a port of a pod.

A process of its own, as its stream must be read while the client waits for something else. A port-forward that is cut
is made again, and the stream goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from http import HTTPStatus
from typing import Any

from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.pods.state import has_ended
from chaoskit.substrate.supervisor.resumable_stream import cross
from chaoskit.substrate.supervisor.stream import watch
from chaoskit.wire import frames

_DATA, _ERROR = 0, 1  # channels; on each the number of the port comes first
_NEVER = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_RECEIVE_BYTES = 2**16
_PING_S = 10.0  # some proxies cut what is silent for a minute


def start(
    api: KubernetesApi, pod: str, port: int, token: str, patience_s: float
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A stream to a port of a pod, and the process that carries it. That ends where no connection is made in time."""
    ours, theirs = socket.socketpair()
    told = json.dumps({"pod": pod, "port": port, "patience_s": patience_s, **api.arguments})
    command = [sys.executable, "-P", "-m", "chaoskit.substrate.kubernetes.port_forward", told]
    with theirs:
        process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
    ours.sendall(f"{token}\n".encode())
    return process, ours


def main() -> None:
    """Entry point."""
    from websocket import WebSocketException

    told = json.loads(sys.argv[1])
    pod, port, patience_s = (told.pop(name) for name in ("pod", "port", "patience_s"))
    local = socket.socket(fileno=os.dup(0))
    token = _read_line(local)
    api = KubernetesApi(**told)

    def connect() -> socket.socket:
        _require_alive(api, pod)
        try:
            connection = _carried(api.forward(pod, port))
        except WebSocketException as error:
            raise ConnectionError(str(error)) from None
        except ApiError as error:
            if error.status in _NEVER:
                raise LookupError(f"you may not: {error}") from None
            raise
        frames.introduce(connection, token)
        return connection

    if reason := cross(local, connect, patience_s):
        sys.exit(f"chaoskit: the stream to {pod} has ended: {reason}")


def _read_line(local: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        line += local.recv(1) or b"\n"
    return line.decode().strip()


def _require_alive(api: KubernetesApi, pod: str) -> None:
    """Raises LookupError if the pod is gone, or has ended."""
    try:
        found = api.get("Pod", pod)
    except ApiError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise LookupError("the pod is gone") from None
        raise
    if has_ended(found):
        raise LookupError("the pod has ended")


def _carried(remote: Any) -> socket.socket:
    """One end of a socket whose other end a thread carries over a WebSocket, until either ends."""
    for _ in (_DATA, _ERROR):  # each says its port first
        remote.recv_data_frame()
    remote.settimeout(None)
    watch(remote.sock)
    ours, theirs = socket.socketpair()
    threading.Thread(target=carry, args=[theirs, remote], daemon=True).start()
    return ours


def carry(local: socket.socket, remote: Any) -> None:
    """Carry a socket over a WebSocket, until either of them ends."""
    from websocket import WebSocketException

    with contextlib.suppress(WebSocketException, OSError), local:
        while True:
            pending = getattr(remote.sock, "pending", lambda: 0)()
            ready, _, _ = select.select([local, remote.sock], [], [], 0.0 if pending else _PING_S)
            if pending and remote.sock not in ready:
                ready.append(remote.sock)
            if not ready:
                remote.ping()
            if local in ready:
                data = local.recv(_RECEIVE_BYTES)
                if not data:
                    break
                remote.send_binary(bytes([_DATA]) + data)
            if remote.sock in ready:
                channel, data = _frame(remote)
                if channel != _DATA:
                    break
                local.sendall(data)
    remote.shutdown()


def _frame(remote: Any) -> tuple[int, bytes]:
    """The next frame: its channel and data. One that is only for the connection, as an answer to a ping, has none."""
    from websocket import ABNF

    opcode, frame = remote.recv_data_frame(control_frame=True)
    if opcode == ABNF.OPCODE_BINARY:
        return frame.data[0], frame.data[1:]
    return (_ERROR if opcode == ABNF.OPCODE_CLOSE else _DATA), b""


if __name__ == "__main__":
    main()
