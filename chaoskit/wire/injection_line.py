"""The line between the harness of an experiment and a worker, or the checkpoint daemon of a node: a Unix socket.

A network namespace does not end it, and no coordinator stands between. A run without faults has none, so nothing can be
injected into it.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.process.linux import socket_name
from chaoskit.wire.messages.injection import InjectionHello, InjectionOrder, InjectionReport

_MESSAGE_BYTES_MAX = 2**16


class InjectionDoor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the harness of a run with faults listens. ``token``: what is to be said there first."""

    path: str
    token: str


class InjectionLine:
    """One end of a line. Messages are whole and keep their order.

    Args:
        kind: of the messages that come: orders, or reports.
    """

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._connection, self._decoder = connection, msgspec.json.Decoder(kind)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: InjectionHello | InjectionOrder | InjectionReport) -> bool:
        """Say something, from any thread. False where the other end is gone, or has not read what was said before."""
        with contextlib.suppress(OSError):
            self._connection.send(msgspec.json.encode(message))
            return True
        return False

    def receive(self) -> Any | None:
        """The next message; None when the other end is gone, or says what cannot be read.

        Raises:
            BlockingIOError: where there is none yet.
        """
        try:
            data, _, flags, _ = self._connection.recvmsg(_MESSAGE_BYTES_MAX)
            return self._decoder.decode(data) if data and not flags & socket.MSG_TRUNC else None
        except BlockingIOError:
            raise
        except (OSError, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        self._connection.close()


def dial(door: InjectionDoor | None, node: str, worker: str = "") -> InjectionLine | None:
    """The line of a worker, or of the checkpoint daemon of ``node``; None without a harness, or where it is gone."""
    if door is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with socket_name(Path(door.path)) as name:
            connection.connect(name)
    except OSError:
        connection.close()
        return None
    line = InjectionLine(connection, InjectionOrder)
    line.send(InjectionHello(door.token, node, worker))
    return line
