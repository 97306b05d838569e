"""``python -m chaoskit.substrate.kubernetes.port_forward JSON``: carries a socket, standard input, to a port of a pod.

A process of its own, as its stream must be read while the client waits for something else. It ends with either side.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from chaoskit.errors import ChaoskitError
from chaoskit.substrate.kubernetes.api import KubernetesApi
from chaoskit.substrate.supervisor.stream import watch

_DATA, _ERROR = 0, 1  # channels; on each the number of the port comes first
_RECEIVE_BYTES = 2**16
_PING_S = 10.0  # some proxies cut what is silent for a minute


def start(api: KubernetesApi, pod: str, port: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A stream to a port of a pod, and the process that carries it."""
    ours, theirs = socket.socketpair()
    told = json.dumps({"pod": pod, "port": port, **api.place})
    command = [sys.executable, "-m", "chaoskit.substrate.kubernetes.port_forward", told]
    with theirs:
        return subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True), ours


def carry(local: socket.socket, remote: Any) -> str:
    """Pass on what comes from either side, until one of them ends. Gives why, as far as that was told."""
    watch(remote.sock)
    while True:
        ready, _, _ = select.select([local, remote.sock], [], [], _PING_S)
        if not ready:
            remote.ping()
        if local in ready:
            data = local.recv(_RECEIVE_BYTES)
            if not data:
                return ""
            remote.send_binary(bytes([_DATA]) + data)
        if remote.sock in ready:
            for channel, data in _frames(remote):
                if channel != _DATA:
                    return data.decode(errors="replace").strip()
                local.sendall(data)


def _frames(remote: Any) -> Iterator[tuple[int, bytes]]:
    """What has come: at least one frame is on its way, and others may lie in the TLS layer, where no poll sees them."""
    from websocket import ABNF

    while True:
        opcode, frame = remote.recv_data_frame()
        if opcode == ABNF.OPCODE_CLOSE:
            yield _ERROR, b"the API server has ended the stream"
        elif opcode == ABNF.OPCODE_BINARY:
            yield frame.data[0], frame.data[1:]
        if not getattr(remote.sock, "pending", lambda: 0)():
            return


def _is_over(local: socket.socket) -> bool:
    """Whether the client has let go of its stream."""
    try:
        return not local.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> None:
    """Entry point."""
    from websocket import WebSocketException

    told = json.loads(sys.argv[1])
    pod, port = told.pop("pod"), told.pop("port")
    local = socket.socket(fileno=os.dup(0))
    try:
        remote = KubernetesApi(**told).forward(pod, port)
        for _ in (_DATA, _ERROR):  # each says its port first
            remote.recv_data_frame()
        reason = carry(local, remote)
    except (WebSocketException, ChaoskitError, OSError) as error:
        reason = str(error)
    if reason and not _is_over(local):
        sys.exit(f"chaoskit: the stream to {pod} has ended: {reason}")


if __name__ == "__main__":
    main()
