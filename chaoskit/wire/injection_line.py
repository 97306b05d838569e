"""Unix socket between the harness of an experiment and a worker or checkpoint daemon.

A network namespace does not break it, and the coordinator takes no part. A run without faults has
no such socket, so no fault can be injected into it.

-> experiment/injection/channel.py: the harness's end; runtime/step/hooks.py and daemon/process.py:
the other ends. wire/messages/injection.py: the messages.
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
    """Address at which the harness of a run with faults listens.

    ``path`` is that of a Unix socket. ``token`` is part of the first message to the harness.
    """

    path: str
    token: str


class InjectionLine:
    """End of a connection to or from the harness. Messages arrive whole and in order.

    Args:
        kind: type of the messages that arrive: orders at a worker, reports at the harness.
    """

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._connection, self._decoder = connection, msgspec.json.Decoder(kind)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: InjectionHello | InjectionOrder | InjectionReport) -> bool:
        """Send a message, from any thread. Return True if it was sent.

        Return False if the other end is gone. While the queue of unread messages is full, wait, or
        return False if the connection does not block.
        """
        with contextlib.suppress(OSError):
            self._connection.send(msgspec.json.encode(message))
            return True
        return False

    def receive(self) -> Any | None:
        """Return the next message; None if the other end is gone, or sent an invalid message.

        Wait for a message if the connection blocks.

        Raises:
            BlockingIOError: if no message has come yet on a connection that does not block.
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
    """Connect a worker, or with ``worker`` "" the checkpoint daemon of ``node``, to the harness.

    The hello is sent. Return the connection, which blocks; None without a harness, or if it cannot
    be reached.

    Args:
        door: address of the harness; None in a run without faults.
    """
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
