"""Messages with which nodes copy pieces to each other, on an authenticated connection.

owner                               partner
Offer                          ->
                               <-   Go, or PeerStored (it read the slot itself), or Declined
index, scalars, data           ->
                               <-   PeerStored, or Declined

Ask                            ->
                               <-   PeerHolding

-> ``peer/sender.py``: the owner's end. ``peer/server.py``: the partner's end.
-> ``runtime/state/peer.py``: a copy is read back over another connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec

from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.errors import Refused
from chaoskit.wire import frames

#: The connection to a peer that is silent for so long is closed.
SILENT_S = 10.0
#: Data is sent in pieces of this size.
SEND_BYTES = 2**20
_LENGTH = struct.Struct("!I")
_FRAME_BYTES_MAX = 2**22
_INDEX_BYTES_MAX = 2**25


class PeerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of a node's copy server. ``host_id`` shows whether shared memory can be used."""

    node: str
    host_id: str
    host: str
    port: int


class SlotPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a slot: descriptor ``fd`` of process ``pid`` on the host ``host_id``."""

    host_id: str
    pid: int
    fd: int

    @classmethod
    def at(cls, path: str, host_id: str) -> SlotPlace:
        """Return the place of a slot with the path ``/proc/PID/fd/N``.

        Raise ValueError for a path of another form.
        """
        pid, fd = path.removeprefix("/proc/").split("/fd/")
        return cls(host_id, int(pid), int(fd))

    @property
    def path(self) -> str:
        """The path of the slot on its host."""
        return f"/proc/{self.pid}/fd/{self.fd}"


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The offer of a sealed copy of ``piece``.

    Args:
        piece: name of the piece.
        seal: seal of the copy.
        index_bytes, scalars_bytes: lengths of index and scalars.
        protected: the newest step of which every piece has its copies, as far as the owner knows;
            -1 if it knows of none.
        place: slot from which the copy can be read; None if it must be sent.
    """

    piece: str
    seal: Seal
    index_bytes: int
    scalars_bytes: int
    protected: int = -1
    place: SlotPlace | None = None


class Go(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The request to send the offered copy."""


class PeerStored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The answer that the copy is stored and has the checksum of ``seal``."""

    seal: Seal


class Declined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The answer that the copy is not stored, with the reason."""

    reason: str


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The question for the copies that a node keeps; ``piece`` is "" for all pieces."""

    piece: str = ""


class PeerCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete copy that a node keeps, and the slot in which it lies."""

    piece: str
    seal: Seal
    place: SlotPlace


class PeerHolding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The complete copies of a node, the newest of each piece first."""

    copies: tuple[PeerCopy, ...]


Message = Offer | Go | PeerStored | Declined | Ask | PeerHolding
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message as one frame. Raise OSError if the connection fails."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> Message:
    """Receive and return the next message.

    Raises:
        ConnectionError: at the end of the stream.
        OSError: if the connection fails in another way, such as by its time limit.
        Refused: if the frame is too long, is none of these messages, or offers an invalid size.
    """
    (length,) = _LENGTH.unpack(frames.receive_exactly(connection, _LENGTH.size))
    if length > _FRAME_BYTES_MAX:
        raise Refused(f"a frame of {length} bytes exceeds the limit of {_FRAME_BYTES_MAX}")
    try:
        message = _decoder.decode(frames.receive_exactly(connection, length))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(f"a frame holds no message about copies: {error}") from None
    if isinstance(message, Offer) and not (
        0 <= message.index_bytes <= _INDEX_BYTES_MAX
        and 0 <= message.scalars_bytes <= _INDEX_BYTES_MAX
        and message.seal.size_bytes >= 0
    ):
        raise Refused("an offered copy has an invalid size")
    return message


def receive_into(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Fill ``pieces``, one after the other, from the stream.

    Raise ConnectionError at its end, and OSError if the connection fails in another way.
    """
    for piece in pieces:
        filled = 0
        while filled < len(piece):
            count = connection.recv_into(piece[filled:])
            if not count:
                raise ConnectionError("the connection was closed in the middle of a copy")
            filled += count
