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
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from chaoskit import wire
from chaoskit.substrate.kubernetes.api import ApiError, KubernetesApi
from chaoskit.substrate.supervisor.ferry import cross
from chaoskit.substrate.supervisor.stream import watch

_DATA, _ERROR = 0, 1  # channels; on each the number of the port comes first
_NEVER = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_RECEIVE_BYTES = 2**16
_PING_S = 10.0  # some proxies cut what is silent for a minute


def start(
    api: KubernetesApi, pod: str, port: int, token: str, patience_s: float
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A stream to a port of a pod, and the process that carries it. It ends if there is none in this time."""
    ours, theirs = socket.socketpair()
    told = json.dumps({"pod": pod, "port": port, "patience_s": patience_s, **api.place})
    command = [sys.executable, "-m", "chaoskit.substrate.kubernetes.port_forward", told]
    with theirs:
        process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
    ours.sendall(f"{token}\n".encode())
    return process, ours


def main() -> None:
    """Entry point."""
    told = json.loads(sys.argv[1])
    pod, port, patience_s = (told.pop(name) for name in ("pod", "port", "patience_s"))
    local = socket.socket(fileno=os.dup(0))
    token = _read_line(local)
    api = KubernetesApi(**told)

    def connect() -> socket.socket:
        _require_alive(api, pod)
        try:
            connection = _carried(api.forward(pod, port))
        except ApiError as error:
            if error.status in _NEVER:
                raise LookupError(f"you may not: {error}") from None
            raise
        wire.introduce(connection, token)
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
        phase = api.get("Pod", pod).get("status", {}).get("phase")
    except ApiError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise LookupError("the pod is gone") from None
        raise
    if phase in ("Failed", "Succeeded"):
        raise LookupError("the pod has ended")


def _carried(remote: Any) -> socket.socket:
    """One end of a socket whose other end a thread carries over a WebSocket, until either ends."""
    for _ in (_DATA, _ERROR):  # each says its port first
        remote.recv_data_frame()
    ours, theirs = socket.socketpair()
    threading.Thread(target=_carry, args=[theirs, remote], daemon=True).start()
    return ours


def _carry(local: socket.socket, remote: Any) -> None:
    from websocket import WebSocketException

    with contextlib.suppress(WebSocketException, OSError), local:
        watch(remote.sock)
        while True:
            ready, _, _ = select.select([local, remote.sock], [], [], _PING_S)
            if not ready:
                remote.ping()
            if local in ready:
                data = local.recv(_RECEIVE_BYTES)
                if not data:
                    break
                remote.send_binary(bytes([_DATA]) + data)
            if remote.sock in ready:
                for channel, data in _frames(remote):
                    if channel != _DATA:
                        return
                    local.sendall(data)
    remote.shutdown()


def _frames(remote: Any) -> Iterator[tuple[int, bytes]]:
    """What has come: at least one frame is on its way, and others may lie in the TLS layer, where no poll sees them."""
    from websocket import ABNF

    while True:
        opcode, frame = remote.recv_data_frame()
        if opcode == ABNF.OPCODE_CLOSE:
            yield _ERROR, b""
        elif opcode == ABNF.OPCODE_BINARY:
            yield frame.data[0], frame.data[1:]
        if not getattr(remote.sock, "pending", lambda: 0)():
            return


if __name__ == "__main__":
    main()
