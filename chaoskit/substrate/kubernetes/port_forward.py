"""``python -m chaoskit.substrate.kubernetes.port_forward JSON`` connects standard input to a pod.

Standard input is a socket, which is carried to a port of the pod. A process of its own does that:
the stream must be read while the client waits for other things. A port-forward that is cut is made
again, and the stream goes on where it was.

-> substrate/supervisor/resumable_stream.py: how the stream goes on after a cut.
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
from chaoskit.substrate.supervisor.resumable_stream import run_connecting_side
from chaoskit.substrate.supervisor.stream import watch
from chaoskit.wire import frames

_DATA, _ERROR = 0, 1  # channels; the first frame of each is the port
_NEVER = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_RECEIVE_BYTES = 2**16
_PING_S = 10.0  # some proxies cut a connection that is silent for a minute


def start(
    api: KubernetesApi, pod: str, port: int, token: str, patience_s: float
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that carries a stream to a port of a pod. Return the process and the stream.

    The process ends if it makes no connection within ``patience_s`` seconds.
    """
    client_end, process_end = socket.socketpair()
    arguments = json.dumps({"pod": pod, "port": port, "patience_s": patience_s, **api.arguments})
    command = [sys.executable, "-P", "-m", "chaoskit.substrate.kubernetes.port_forward", arguments]
    with process_end:
        process = subprocess.Popen(command, stdin=process_end.fileno(), start_new_session=True)
    client_end.sendall(f"{token}\n".encode())
    return process, client_end


def main() -> None:
    """Carry standard input, a socket, to a pod until the stream ends: the entry point.

    The argument is JSON. The process ends with an error if the stream was given up.
    """
    from websocket import WebSocketException

    arguments = json.loads(sys.argv[1])
    pod, port, patience_s = (arguments.pop(name) for name in ("pod", "port", "patience_s"))
    local = socket.socket(fileno=os.dup(0))
    token = _read_line(local)
    api = KubernetesApi(**arguments)

    def connect() -> socket.socket:
        _require_alive(api, pod)
        try:
            connection = _carried(api.forward(pod, port))
        except WebSocketException as error:
            raise ConnectionError(str(error)) from None
        except ApiError as error:
            if error.status in _NEVER:
                raise LookupError(f"the right to forward ports is missing: {error}") from None
            raise
        frames.introduce(connection, token)
        return connection

    if reason := run_connecting_side(local, connect, patience_s):
        sys.exit(f"chaoskit: the stream to {pod} has ended: {reason}")


def _read_line(local: socket.socket) -> str:
    """Return the first line of a socket, and leave the data behind it unread."""
    line = b""
    while not line.endswith(b"\n"):
        line += local.recv(1) or b"\n"
    return line.decode().strip()


def _require_alive(api: KubernetesApi, pod: str) -> None:
    """Raise LookupError if the pod is gone or has ended, and ApiError if that is unknown."""
    try:
        pod_object = api.get("Pod", pod)
    except ApiError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise LookupError("the pod is gone") from None
        raise
    if has_ended(pod_object):
        raise LookupError("the pod has ended")


def _carried(remote: Any) -> socket.socket:
    """Return a socket whose data a thread carries over a WebSocket until either of them ends."""
    for _ in (_DATA, _ERROR):  # the first frame of each channel is its port
        remote.recv_data_frame()
    remote.settimeout(None)
    watch(remote.sock)
    near_end, far_end = socket.socketpair()
    threading.Thread(target=carry, args=[far_end, remote], daemon=True).start()
    return near_end


def carry(local: socket.socket, remote: Any) -> None:
    """Carry a socket over a WebSocket until either of them ends, and close both then."""
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
    """Return channel and data of the next frame. Control frames, such as a pong, have no data."""
    from websocket import ABNF

    opcode, frame = remote.recv_data_frame(control_frame=True)
    if opcode == ABNF.OPCODE_BINARY:
        return frame.data[0], frame.data[1:]
    return (_ERROR if opcode == ABNF.OPCODE_CLOSE else _DATA), b""


if __name__ == "__main__":
    main()
