"""How nodes hand copies to each other: messages, and frames for them, on an authenticated connection.

owner                               partner
Offer                          ->
                               <-   Go, or Stored (it read the slot itself), or Declined
index, scalars, data           ->
                               <-   Stored, or Declined

Ask                            ->
                               <-   Holding
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec

from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.errors import Refused
from chaoskit.wire import frames

#: A peer that is silent for so long is given up.
SILENT_S = 10.0
#: Data is sent in pieces of this size.
SEND_BYTES = 2**20
_LENGTH = struct.Struct("!I")
_FRAME_BYTES_MAX = 2**22
_INDEX_BYTES_MAX = 2**25


class PeerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the copy server of a node listens. ``host_id`` tells whether shared memory will do."""

    node: str
    host_id: str
    host: str
    port: int


class SlotPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A slot that a process of ``host_id`` has open."""

    host_id: str
    pid: int
    fd: int

    @classmethod
    def at(cls, path: str, host_id: str) -> SlotPlace:
        """Of ``/proc/PID/fd/N``."""
        pid, fd = path.removeprefix("/proc/").split("/fd/")
        return cls(host_id, int(pid), int(fd))

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A sealed copy of ``piece``.

    Args:
        index_bytes, scalars_bytes: how long these are.
        protected: the newest step of which every piece has its copies, as far as the owner knows.
        place: where it can be read; None if it is to be sent.
    """

    piece: str
    seal: Seal
    index_bytes: int
    scalars_bytes: int
    protected: int = -1
    place: SlotPlace | None = None


class Go(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Send it."""


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """It is complete here, and has the checksum of ``seal``."""

    seal: Seal


class Declined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """It is not here, and why."""

    reason: str


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """What do you have? ``piece``: of this one only; "" for all."""

    piece: str = ""


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete copy at a peer."""

    piece: str
    seal: Seal
    place: SlotPlace


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Complete copies, the newest of each piece first."""

    copies: tuple[Copy, ...]


Message = Offer | Go | Stored | Declined | Ask | Holding
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(connection: socket.socket, message: Message) -> None:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> Message:
    """The next frame.

    Raises:
        ConnectionError: at the end of the stream. Refused: if it is not one of these messages.
    """
    (length,) = _LENGTH.unpack(frames.receive_exactly(connection, _LENGTH.size))
    if length > _FRAME_BYTES_MAX:
        raise Refused(f"frame of {length} bytes, more than {_FRAME_BYTES_MAX}")
    try:
        message = _decoder.decode(frames.receive_exactly(connection, length))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(f"not a message about copies: {error}") from None
    if isinstance(message, Offer) and not (
        0 <= message.index_bytes <= _INDEX_BYTES_MAX
        and 0 <= message.scalars_bytes <= _INDEX_BYTES_MAX
        and message.seal.size_bytes >= 0
    ):
        raise Refused("a copy of impossible size was offered")
    return message


def receive_into(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Fill ``pieces`` from the stream. Raises ConnectionError at its end."""
    for piece in pieces:
        filled = 0
        while filled < len(piece):
            count = connection.recv_into(piece[filled:])
            if not count:
                raise ConnectionError("connection closed in the middle of a copy")
            filled += count
