"""How messages travel: frames, blocking and asyncio connections, and the mutual proof of the run's token.

Every message is encoded as MessagePack behind a 4-byte length. Unknown fields, unknown types and oversized frames are
refused. Nothing is ever unpickled. A TCP connection begins with a mutual challenge that shows knowledge of the run's
token without sending it. The server's side of it for blocking sockets is in :mod:`chaoskit.wire.handshakes`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from chaoskit.errors import Refused
from chaoskit.wire.messages import Accepted, AnyMessage, Challenge, Message, Proof

FRAME_BYTES_MAX = 16 * 2**20
#: The same before the other side has shown that it knows the token.
UNPROVEN_BYTES_MAX = 1024
#: A client has this long to show it.
PROOF_S = 10.0
_LENGTH = struct.Struct("!I")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One frame: length and body."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decoder(kinds: Any) -> Callable[[bytes], Any]:
    """A function that gives the message in one frame's body, of any of the types ``kinds``.

    It raises Refused if that is not a valid message.
    """
    typed: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds)

    def decode(body: bytes) -> Any:
        try:
            return typed.decode(body)
        except (
            msgspec.MsgspecError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # a stranger's may be anything
            raise Refused(f"not a chaoskit message: {error}") from None

    return decode


#: Of the control protocol.
decode = decoder(AnyMessage)


def _checked_length(header: bytes | bytearray, most_bytes: int = FRAME_BYTES_MAX) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > most_bytes:
        raise Refused(f"frame of {length} bytes, more than {most_bytes}: not a chaoskit connection")
    return int(length)


class ShortFrame:
    """One frame of a side that has yet to show that it knows the token."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def missing(self) -> int:
        """Bytes that are to be read next; 0 when the frame is whole. Raises Refused if it is too long."""
        end = _LENGTH.size
        if len(self._data) >= end:
            end += _checked_length(self._data[: _LENGTH.size], UNPROVEN_BYTES_MAX)
        return end - len(self._data)

    def feed(self, data: bytes) -> None:
        """Add what was read."""
        self._data += data

    @property
    def body(self) -> bytes:
        """Without the length."""
        return bytes(self._data[_LENGTH.size :])


class Splitter:
    """Cuts a byte stream into messages."""

    def __init__(self, decode: Callable[[bytes], Any] = decode) -> None:
        self._buffer, self._decode = bytearray(), decode

    def feed(self, data: bytes) -> list[Any]:
        """The messages that ``data`` completes."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _checked_length(self._buffer[: _LENGTH.size])
            if len(self._buffer) < end:
                break
            messages.append(self._decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


# -- blocking sockets (workers) -----------------------------------------------------------------------------------


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Read ``size_bytes`` bytes. Raises ConnectionError at the end of the stream."""
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("connection closed by the other side")
        data += piece
    return bytes(data)


def send(connection: socket.socket, message: Message) -> None:
    connection.sendall(encode(message))


def receive(
    connection: socket.socket,
    decode: Callable[[bytes], Any] = decode,
    *,
    most_bytes: int = FRAME_BYTES_MAX,
) -> Any:
    """The next message. Raises ConnectionError at the end of the stream."""
    length = _checked_length(receive_exactly(connection, _LENGTH.size), most_bytes)
    return decode(receive_exactly(connection, length))


# -- asyncio streams (coordinator, agents, harness) ---------------------------------------------------------------


async def read_message(
    reader: asyncio.StreamReader,
    decode: Callable[[bytes], Any] = decode,
    *,
    most_bytes: int = FRAME_BYTES_MAX,
) -> Any:
    """The next message. Raises ConnectionError at the end of the stream, and when the network has given it up."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return decode(await reader.readexactly(_checked_length(header, most_bytes)))
    except asyncio.IncompleteReadError:
        raise ConnectionError("connection closed by the other side") from None
    except (
        OSError
    ) as error:  # "no route to host", "timed out": the kernel's word is no ConnectionError
        raise ConnectionError(f"connection lost: {error}") from error


# -- mutual proof of the token ------------------------------------------------------------------------------------


def _digest(token: str, side: str, *nonces: bytes) -> bytes:
    return hmac.new(token.encode(), side.encode() + b"".join(nonces), hashlib.sha256).digest()


class Handshake:
    """Both halves of the challenge, without I/O: server sends Challenge, client Proof, server Accepted."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(32)

    def challenge(self) -> Challenge:
        return Challenge(self._nonce)

    def answer(self, challenge: Any) -> Proof:
        if not isinstance(challenge, Challenge):
            raise Refused("expected a challenge: not a chaoskit server")
        self._theirs = challenge.nonce
        return Proof(self._nonce, _digest(self._token, "client", challenge.nonce, self._nonce))

    def accept(self, proof: Any) -> Accepted:
        if not isinstance(proof, Proof):
            raise Refused("expected a proof of the token")
        if not hmac.compare_digest(
            proof.digest, _digest(self._token, "client", self._nonce, proof.nonce)
        ):
            raise Refused("wrong token: use the one this run was started with")
        return Accepted(_digest(self._token, "server", proof.nonce, self._nonce))

    def confirm(self, accepted: Any) -> None:
        expected = _digest(self._token, "server", self._nonce, self._theirs)
        if not isinstance(accepted, Accepted) or not hmac.compare_digest(accepted.digest, expected):
            raise Refused("the server does not know the token")


def connect(
    address: tuple[str, int],
    token: str,
    timeout_s: float = 10.0,
    *,
    made: Callable[[int], None] = lambda fd: None,
) -> socket.socket:
    """An authenticated, blocking connection.

    Args:
        made: is told the descriptor of the socket before it is connected.

    Raises:
        OSError: nobody listens there. Refused: the other side does not know the token.
    """
    family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        made(connection.fileno())
        connection.settimeout(timeout_s)
        connection.connect(resolved)
        introduce(connection, token, timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def introduce(connection: socket.socket, token: str, timeout_s: float = 10.0) -> None:
    """Show a server that we know the token, and have it show the same. Raises what :func:`connect` does."""
    connection.settimeout(timeout_s)
    if connection.family != socket.AF_UNIX:  # one that another process carries on
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake = Handshake(token)
    send(connection, handshake.answer(receive(connection, most_bytes=UNPROVEN_BYTES_MAX)))
    handshake.confirm(receive(connection, most_bytes=UNPROVEN_BYTES_MAX))
    connection.settimeout(None)


async def connect_async(
    address: tuple[str, int], token: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An authenticated connection for asyncio code."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        handshake = Handshake(token)
        writer.write(
            encode(handshake.answer(await read_message(reader, most_bytes=UNPROVEN_BYTES_MAX)))
        )
        handshake.confirm(await read_message(reader, most_bytes=UNPROVEN_BYTES_MAX))
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def accept_async(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: str,
    timeout_s: float = PROOF_S,
) -> None:
    """Authenticate the client of a server-side asyncio connection."""
    handshake = Handshake(token)
    writer.write(encode(handshake.challenge()))
    try:
        proof = await asyncio.wait_for(
            read_message(reader, most_bytes=UNPROVEN_BYTES_MAX), timeout_s
        )
    except TimeoutError:
        raise Refused(f"has not shown that it knows the token for {timeout_s:g} s") from None
    writer.write(encode(handshake.accept(proof)))
