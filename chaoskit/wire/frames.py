"""Frames, blocking and asyncio connections, and the mutual proof of the run's token.

A frame is a message in MessagePack behind a 4-byte length. Unknown fields, unknown types and
oversized frames are refused. Nothing is ever unpickled.

A TCP connection begins with a mutual challenge that proves knowledge of the run's token without
sending it. :mod:`chaoskit.wire.handshakes` has the server's side of it for blocking sockets.

-> wire/messages/: the messages; agent/dial.py: attempts over a bad network.
coordinator/server.py counts and reports the refused clients.
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
#: Largest frame before the other side has proved that it knows the token.
UNPROVEN_BYTES_MAX = 1024
#: Time that a client has for the proof.
PROOF_S = 10.0
_LENGTH = struct.Struct("!I")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the frame of a message: length and body."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decoder(kinds: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes the body of a frame to a message of one of ``kinds``.

    The function raises Refused if the body is not a valid message.

    Args:
        kinds: a message class, or a union of them.
    """
    typed: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kinds)

    def decode(body: bytes) -> Any:
        try:
            return typed.decode(body)
        # any process may have sent it
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise Refused(f"not a chaoskit message: {error}") from None

    return decode


#: Decoder of the control protocol.
decode = decoder(AnyMessage)


def _checked_length(header: bytes | bytearray, most_bytes: int = FRAME_BYTES_MAX) -> int:
    """Return the length of the body from the header of a frame. Raise Refused if it is too long."""
    (length,) = _LENGTH.unpack(header)
    if length > most_bytes:
        raise Refused(f"frame of {length} bytes, more than {most_bytes}: not a chaoskit connection")
    return int(length)


class ShortFrame:
    """Frame of a side that has yet to prove that it knows the token."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def missing(self) -> int:
        """The number of bytes to be read next; 0 when the frame is complete.

        Raises Refused if the frame is too long.
        """
        end = _LENGTH.size
        if len(self._data) >= end:
            end += _checked_length(self._data[: _LENGTH.size], UNPROVEN_BYTES_MAX)
        return end - len(self._data)

    def feed(self, data: bytes) -> None:
        """Add bytes that were read."""
        self._data += data

    @property
    def body(self) -> bytes:
        """The body of the frame, without its length."""
        return bytes(self._data[_LENGTH.size :])


class FrameSplitter:
    """Splitter of a byte stream into messages.

    Args:
        decode: returns the message of a frame's body, as a function of :func:`decoder` does.
    """

    def __init__(self, decode: Callable[[bytes], Any] = decode) -> None:
        self._buffer, self._decode = bytearray(), decode

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that ``data`` completes, and keep the incomplete rest.

        Raises:
            Refused: if a frame is too long, or no message.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _checked_length(self._buffer[: _LENGTH.size])
            if len(self._buffer) < end:
                break
            messages.append(self._decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


# -- blocking sockets (workers) --------------------------------------------------------------------


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Return the next ``size_bytes`` bytes.

    Raises:
        ConnectionError: at the end of the stream.
        OSError: if the connection fails, or its time limit is over.
    """
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionError("connection closed by the other side")
        data += piece
    return bytes(data)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message; block until the kernel has taken all of it.

    Raises:
        OSError: if the connection fails, or its time limit is over.
    """
    connection.sendall(encode(message))


def receive(
    connection: socket.socket,
    decode: Callable[[bytes], Any] = decode,
    *,
    most_bytes: int = FRAME_BYTES_MAX,
) -> Any:
    """Return the next message.

    Args:
        decode: returns the message of a frame's body, as a function of :func:`decoder` does.
        most_bytes: largest body that is accepted.

    Raises:
        ConnectionError: at the end of the stream.
        OSError: if the connection fails, or its time limit is over.
        Refused: if the frame is too long, or no message.
    """
    length = _checked_length(receive_exactly(connection, _LENGTH.size), most_bytes)
    return decode(receive_exactly(connection, length))


# -- asyncio streams (coordinator, agents, harness) ------------------------------------------------


async def read_message(
    reader: asyncio.StreamReader,
    decode: Callable[[bytes], Any] = decode,
    *,
    most_bytes: int = FRAME_BYTES_MAX,
) -> Any:
    """Return the next message.

    Args:
        decode: returns the message of a frame's body, as a function of :func:`decoder` does.
        most_bytes: largest body that is accepted.

    Raises:
        ConnectionError: at the end of the stream, or if the network has failed.
        Refused: if the frame is too long, or no message.
    """
    try:
        header = await reader.readexactly(_LENGTH.size)
        return decode(await reader.readexactly(_checked_length(header, most_bytes)))
    except asyncio.IncompleteReadError:
        raise ConnectionError("connection closed by the other side") from None
    except OSError as error:  # "no route to host" and "timed out" are no ConnectionError
        raise ConnectionError(f"connection lost: {error}") from error


# -- mutual proof of the token ---------------------------------------------------------------------


def _digest(token: str, side: str, *nonces: bytes) -> bytes:
    return hmac.new(token.encode(), side.encode() + b"".join(nonces), hashlib.sha256).digest()


class Handshake:
    """Both sides of the mutual challenge, without I/O. Each connection has its own.

    The server sends Challenge, the client Proof, the server Accepted. A method that gets another
    message, or a wrong digest, raises Refused.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(32)

    def challenge(self) -> Challenge:
        """Return the first message of the server."""
        return Challenge(self._nonce)

    def answer(self, challenge: Any) -> Proof:
        """Return the client's proof for the challenge of the server, and keep the challenge.

        Raises:
            Refused: if ``challenge`` is no challenge.
        """
        if not isinstance(challenge, Challenge):
            raise Refused("expected a challenge: not a chaoskit server")
        self._server_nonce = challenge.nonce
        return Proof(self._nonce, _digest(self._token, "client", challenge.nonce, self._nonce))

    def accept(self, proof: Any) -> Accepted:
        """Verify the proof of the client, and return the server's own proof.

        Raises:
            Refused: if ``proof`` is no proof, or that of another token.
        """
        if not isinstance(proof, Proof):
            raise Refused("expected a proof of the token")
        if not hmac.compare_digest(
            proof.digest, _digest(self._token, "client", self._nonce, proof.nonce)
        ):
            raise Refused("wrong token: use the one this run was started with")
        return Accepted(_digest(self._token, "server", proof.nonce, self._nonce))

    def confirm(self, accepted: Any) -> None:
        """Verify the proof of the server, on the client's side, after :meth:`answer`.

        Raises:
            Refused: if ``accepted`` does not prove that the server knows the token.
        """
        expected = _digest(self._token, "server", self._nonce, self._server_nonce)
        if not isinstance(accepted, Accepted) or not hmac.compare_digest(accepted.digest, expected):
            raise Refused("the server does not know the token")


def connect(
    address: tuple[str, int],
    token: str,
    timeout_s: float = 10.0,
    *,
    made: Callable[[int], None] = lambda fd: None,
) -> socket.socket:
    """Return an authenticated, blocking connection.

    Args:
        timeout_s: seconds for the connection, and for each wait in the handshake.
        made: called with the descriptor of the socket before it is connected.

    Raises:
        OSError: if the address has no listener, the time is over, or the server refuses the token.
        Refused: if the other side does not know the token, or is no chaoskit server.
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
    """Prove to a server that this process knows the token, and require the same proof of it.

    The connection is blocking afterwards, without a time limit. After an error it is still open.

    Raises:
        OSError: if the server refuses the token, the connection ends, or a wait takes longer than
            ``timeout_s`` seconds.
        Refused: if the other side does not know the token, or is no chaoskit server.
    """
    connection.settimeout(timeout_s)
    if connection.family != socket.AF_UNIX:  # a Unix socket leads to a process that forwards it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake = Handshake(token)
    send(connection, handshake.answer(receive(connection, most_bytes=UNPROVEN_BYTES_MAX)))
    handshake.confirm(receive(connection, most_bytes=UNPROVEN_BYTES_MAX))
    connection.settimeout(None)


async def connect_async(
    address: tuple[str, int], token: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return an authenticated connection for asyncio code. It has no time limit of its own.

    Raises:
        OSError: if the address has no listener, the connection ends, or the server refuses the
            token.
        Refused: if the other side does not know the token, or is no chaoskit server.
    """
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
    """Authenticate the client of a server-side asyncio connection.

    Raises:
        ConnectionError: if the connection ends.
        Refused: if the client does not prove within ``timeout_s`` that it knows the token.
    """
    handshake = Handshake(token)
    writer.write(encode(handshake.challenge()))
    try:
        proof = await asyncio.wait_for(
            read_message(reader, most_bytes=UNPROVEN_BYTES_MAX), timeout_s
        )
    except TimeoutError:
        raise Refused(f"no proof of the token within {timeout_s:g} s") from None
    writer.write(encode(handshake.accept(proof)))
