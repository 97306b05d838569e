"""The control protocol: framing that survives any cut, refusal of anything else, the mutual proof
of the token.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import pickle
import socket
import struct
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.nodes.network import accept

from chaoskit.errors import Refused
from chaoskit.wire import frames, messages
from chaoskit.wire.frames import FrameSplitter
from chaoskit.wire.messages import Accepted, Endpoint, Formed, Healed, Proof, Put, StopWorker

TOKEN = "correct-horse-battery-staple-0451"
WAIT_S = 20.0
Address = tuple[str, int]


# -- frames ----------------------------------------------------------------------------------------


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotation that occurs in a message."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: _values(hint) for name, hint in hints.items()})
    if origin is Annotated:  # a number that is not negative
        assert [(type(limit), limit.ge) for limit in arguments[1:]] == [(msgspec.Meta, 0)]
        return _values(arguments[0]).map(abs)
    if origin is tuple:
        items = arguments[:1] if arguments[-1] is Ellipsis else arguments
        if arguments[-1] is Ellipsis:
            return st.lists(_values(items[0]), max_size=3).map(tuple)
        return st.tuples(*map(_values, items))
    if isinstance(kind, EnumType):
        return st.sampled_from(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (types.UnionType, Union):
        return st.one_of(*map(_values, arguments))
    if origin is dict:
        leaves = (
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**64 - 1)
            | st.floats(allow_nan=False)
            | st.text()
        )
        return st.dictionaries(st.text(), leaves | st.lists(leaves, max_size=2), max_size=3)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
        type(None): st.none(),
    }
    return simple[kind]


KINDS: tuple[type[messages.Message], ...] = get_args(messages.AnyMessage)
any_message = st.sampled_from(KINDS).flatmap(_values)


@settings(max_examples=examples(150), deadline=None, database=None)
@given(st.lists(any_message, min_size=1, max_size=4), st.data())
def test_messages_survive_any_cut_of_the_stream(
    sent: list[messages.Message], data: st.DataObject
) -> None:
    """The messages of a stream come out once, whole and in order, for any cut into pieces."""
    stream = b"".join(map(frames.encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8), label="cuts"))
    splitter = FrameSplitter()
    received = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += splitter.feed(stream[start:stop])
    assert received == sent
    assert splitter.feed(b"") == []


def test_a_message_comes_out_with_its_last_byte_and_not_before() -> None:
    """Fed byte by byte, a frame yields no message until it is complete, and then its message at
    once.
    """
    sent = [Formed("a", 1), Put(3, "key", b"\x00\xff" * 300), Healed("b", 2)]
    ends = [
        sum(len(frames.encode(message)) for message in sent[: count + 1])
        for count in range(len(sent))
    ]
    stream = b"".join(map(frames.encode, sent))
    splitter = FrameSplitter()
    by_position = {
        number + 1: fed
        for number in range(len(stream))
        if (fed := splitter.feed(stream[number : number + 1]))
    }
    assert by_position == {end: [message] for end, message in zip(ends, sent, strict=True)}


def test_every_kind_of_message_has_a_tag_of_its_own() -> None:
    """The name of the class is sent on the wire, so no two kinds can be confused."""
    subclasses = {
        kind
        for kind in messages.Message.__subclasses__()
        if kind.__module__.startswith(messages.__name__)
    }
    assert set(KINDS) == subclasses, (
        "a message that AnyMessage leaves out can be sent but never received"
    )
    assert len({kind.__struct_config__.tag for kind in KINDS}) == len(KINDS)


_DEEP = b"\x84\xa4type\xa7Welcome\xa6config\x81\xa3job\x81\xa7options\x81\xa1k"
_PLACE = msgspec.to_builtins(Endpoint("host", "", 0, 1, -1))
REFUSED_BODIES = {
    "unknown field": msgspec.msgpack.encode(
        {"type": "Formed", "worker": "w", "generation": 1, "more": 1}
    ),
    "unknown field inside": msgspec.msgpack.encode(
        {"type": "WorkerReady", "worker": "w", "node": "n", "endpoint": _PLACE | {"more": 1}}
    ),
    "missing field": msgspec.msgpack.encode({"type": "Formed", "worker": "w"}),
    "wrong type of a field": msgspec.msgpack.encode(
        {"type": "Formed", "worker": "w", "generation": "one"}
    ),
    "unknown type": msgspec.msgpack.encode({"type": "Shell", "command": "rm -rf /"}),
    "no type": msgspec.msgpack.encode({"worker": "w", "generation": 1}),
    "not a map": msgspec.msgpack.encode([1, 2, 3]),
    "JSON": b'{"type": "Formed", "worker": "w", "generation": 1}',
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "two messages in one frame": msgspec.msgpack.encode(
        {"type": "Formed", "worker": "w", "generation": 1}
    )
    * 2,
    "cut off": msgspec.msgpack.encode({"type": "Formed", "worker": "w", "generation": 1})[:-1],
    "not UTF-8": b"\x83\xa4type\xa6Formed\xa6worker\xa2\xff\xfe\xaageneration\x01",
    "nested too deep": _DEEP + b"\x91" * 100_000 + b"\x01",
    "unhashable key": _DEEP + b"\x81\x80\x01",
    "empty": b"",
}


@pytest.mark.parametrize("body", REFUSED_BODIES.values(), ids=REFUSED_BODIES.keys())
def test_what_is_not_a_message_is_refused(body: bytes) -> None:
    """Unknown fields, unknown types and anything malformed raise Refused, whole or inside a
    frame.
    """
    with pytest.raises(Refused):
        frames.decode(body)
    with pytest.raises(Refused):
        FrameSplitter().feed(struct.pack("!I", len(body)) + body)


@settings(max_examples=examples(300), deadline=None, database=None)
@given(st.binary(max_size=200))
@example(b"\xc1")
def test_garbage_is_a_message_or_refused(body: bytes) -> None:
    """The decoder raises only Refused, for any bytes: a stranger cannot bring a server down."""
    try:
        frames.decode(body)
    except Refused:
        pass


@settings(max_examples=examples(300), deadline=None, database=None)
@given(any_message, st.data())
def test_a_damaged_message_is_a_message_or_refused(
    message: messages.Message, data: st.DataObject
) -> None:
    """Changed bytes in a valid message lead to another valid message or to Refused."""
    body = bytearray(frames.encode(message)[4:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        frames.decode(bytes(body))
    except Refused:
        pass


class _Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self._path), "w")


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    """Pickle bytes are refused as a frame, as a body and inside one; their code does not run."""
    sprung = tmp_path / "sprung"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(_Trap(sprung), protocol)
        with pytest.raises(Refused):
            frames.decode(data)
        with pytest.raises(Refused):
            FrameSplitter().feed(data)
        assert frames.decode(frames.encode(Put(1, "k", data))[4:]) == Put(1, "k", data), (
            "bytes stay bytes"
        )
    assert not sprung.exists()
    pickle.loads(data).close()  # noqa: S301  # the trap works
    assert sprung.exists()


def _header(size_bytes: int) -> bytes:
    return struct.pack("!I", size_bytes)


def test_an_oversized_frame_is_refused_by_its_header() -> None:
    """A frame that claims to be too long is refused before any of its body is awaited; the longest
    is not.
    """
    over = _header(frames.FRAME_BYTES_MAX + 1)
    with pytest.raises(Refused, match="more than"):
        FrameSplitter().feed(over)
    assert FrameSplitter().feed(_header(frames.FRAME_BYTES_MAX)) == []
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(WAIT_S)
        far.sendall(over)
        with pytest.raises(Refused, match="more than"):
            frames.receive(near)

    async def read() -> None:
        near, far = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=near)
        with far:
            far.sendall(over)
            with pytest.raises(Refused, match="more than"):
                await asyncio.wait_for(frames.read_message(reader), WAIT_S)
        writer.close()

    asyncio.run(read())


def test_a_connection_that_the_network_gave_up_is_a_connection_error() -> None:
    """The kernel may report "no route to host": an OSError that once ended the coordinator, or an
    agent, like a bug.
    """

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.set_exception(OSError(errno.EHOSTUNREACH, "No route to host"))
        await frames.read_message(reader)

    with pytest.raises(ConnectionError, match="No route to host"):
        asyncio.run(read())


def test_a_stream_that_ends_inside_a_message_is_a_connection_error() -> None:
    """Both readers report the end of a stream as ConnectionError, in a header, in a body and
    between messages.
    """
    frame = frames.encode(Formed("w", 7))
    for length in (0, 2, 4, len(frame) - 1):
        near, far = socket.socketpair()
        with near:
            near.settimeout(WAIT_S)
            far.sendall(frame + frame[:length])
            far.close()
            assert frames.receive(near) == Formed("w", 7)
            with pytest.raises(ConnectionError):
                frames.receive(near)

        async def read(length: int = length) -> None:
            near, far = socket.socketpair()
            reader, writer = await asyncio.open_connection(sock=near)
            far.sendall(frame + frame[:length])
            far.close()
            assert await asyncio.wait_for(frames.read_message(reader), WAIT_S) == Formed("w", 7)
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(frames.read_message(reader), WAIT_S)
            writer.close()

        asyncio.run(read())


# -- the handshake, over TCP -----------------------------------------------------------------------


def _serve_blocking(connection: socket.socket, token: str) -> float | None:
    """Authenticate, then answer a ping. Return the socket's timeout after the handshake."""
    with connection:
        accept(connection, token)
        timeout_s = connection.gettimeout()
        ping = frames.receive(connection)
        frames.send(connection, Healed(ping.worker, ping.generation))
        return timeout_s


def _serve_async(connection: socket.socket, token: str) -> None:
    async def serve() -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            await frames.accept_async(reader, writer, token)
            ping = await frames.read_message(reader)
            writer.write(frames.encode(Healed(ping.worker, ping.generation)))
            await writer.drain()
        finally:
            writer.close()

    asyncio.run(asyncio.wait_for(serve(), WAIT_S))


def _call_blocking(address: Address, token: str) -> Any:
    with frames.connect(address, token, timeout_s=WAIT_S) as connection:
        assert connection.gettimeout() is None, "a worker waits as long as it takes"
        frames.send(connection, Formed("w", 42))
        return frames.receive(connection)


def _call_async(address: Address, token: str) -> Any:
    async def call() -> Any:
        reader, writer = await frames.connect_async(address, token)
        writer.write(frames.encode(Formed("w", 42)))
        try:
            return await frames.read_message(reader)
        finally:
            writer.close()

    return asyncio.run(asyncio.wait_for(call(), WAIT_S))


SERVERS: dict[str, Callable[[socket.socket, str], Any]] = {
    "accept": _serve_blocking,
    "accept_async": _serve_async,
}
CLIENTS: dict[str, Callable[[Address, str], Any]] = {
    "connect": _call_blocking,
    "connect_async": _call_async,
}
servers = pytest.mark.parametrize("serve", SERVERS.values(), ids=SERVERS.keys())
clients = pytest.mark.parametrize("call", CLIENTS.values(), ids=CLIENTS.keys())


@contextmanager
def _listening(serve: Callable[[socket.socket], Any]) -> Iterator[tuple[Address, Future[Any]]]:
    """Run a server for one connection. Yield its address, and the future of its result."""
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def run() -> Any:
            connection, _ = listener.accept()
            connection.settimeout(WAIT_S)
            try:
                return serve(connection)
            finally:
                connection.close()

        served = pool.submit(run)
        yield listener.getsockname(), served


@servers
@clients
def test_both_sides_that_know_the_token_can_talk(
    serve: Callable[..., Any], call: Callable[..., Any]
) -> None:
    """Messages pass after the handshake for every pair of blocking and asyncio ends, without a
    remaining time limit.
    """
    with _listening(lambda connection: serve(connection, TOKEN)) as (address, served):
        assert call(address, TOKEN) == Healed("w", 42)
        assert served.result(WAIT_S) is None


@servers
@clients
@pytest.mark.parametrize("wrong", ["", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_a_wrong_token_is_refused_on_both_sides(
    serve: Callable[..., Any], call: Callable[..., Any], wrong: str
) -> None:
    """The server refuses a client with another token, and that client never gets a connection."""
    with _listening(lambda connection: serve(connection, TOKEN)) as (address, served):
        with pytest.raises((Refused, ConnectionError)):
            call(address, wrong)
        assert isinstance(served.exception(WAIT_S), Refused)


def _rogue(answer: Callable[[Proof], messages.Message]) -> Callable[[socket.socket], bytes]:
    """Return a server without the token that answers the client's proof with ``answer``, and
    returns the next bytes.
    """

    def serve(connection: socket.socket) -> bytes:
        frames.send(connection, messages.Challenge(bytes(32)))
        frames.send(connection, answer(frames.receive(connection)))
        try:
            return connection.recv(4096)
        except ConnectionResetError:
            return b""

    return serve


ROGUES: dict[str, Callable[[Proof], messages.Message]] = {
    "guesses": lambda proof: Accepted(hashlib.sha256(b"guess").digest()),
    "echoes the client's digest": lambda proof: Accepted(proof.digest),
    "sends nothing": lambda proof: Accepted(b""),
    "welcomes anybody": lambda proof: Healed("w", 42),
}


@clients
@pytest.mark.parametrize("answer", ROGUES.values(), ids=ROGUES.keys())
def test_a_server_that_does_not_know_the_token_is_refused(
    call: Callable[..., Any], answer: Callable[[Proof], messages.Message]
) -> None:
    """The proof is mutual: a client sends a false server no data and hangs up at once."""
    with _listening(_rogue(answer)) as (address, served):
        with pytest.raises(Refused, match="does not know the token") as caught:
            call(address, TOKEN)
        assert served.result(WAIT_S) == b"", (
            "the client must close, although its caller still holds the error"
        )
        del caught


@clients
def test_a_server_that_speaks_first_of_something_else_is_refused(call: Callable[..., Any]) -> None:
    """A client sends no proof to a server that opens with another message."""
    serving = _listening(lambda connection: frames.send(connection, Healed("w", 1)))
    with serving as (address, _), pytest.raises(Refused, match="expected a challenge"):
        call(address, TOKEN)


@servers
def test_a_client_that_skips_the_proof_is_refused(serve: Callable[..., Any]) -> None:
    """Any message in the place of the proof, even a harmless one, ends the connection."""
    serving = _listening(lambda connection: serve(connection, TOKEN))
    with (
        serving as (address, served),
        socket.create_connection(address, timeout=WAIT_S) as connection,
    ):
        frames.receive(connection)
        frames.send(connection, StopWorker("w", "lost"))
        assert isinstance(served.exception(WAIT_S), Refused)


class _Tap:
    """A TCP relay that records the bytes that it passes on."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self.address: Address = self._listener.getsockname()
        self.to_server, self.to_client = bytearray(), bytearray()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target, timeout=WAIT_S)
        client.settimeout(WAIT_S)
        with client, server:
            back = threading.Thread(
                target=self._pass_on, args=(server, client, self.to_client), daemon=True
            )
            back.start()
            self._pass_on(client, server, self.to_server)
            back.join(WAIT_S)

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while data := source.recv(4096):
                kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def finish(self) -> tuple[bytes, bytes]:
        """Return the bytes that went to the server and to the client."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._listener.close()
        return bytes(self.to_server), bytes(self.to_client)


def _tapped(
    serve: Callable[..., Any], call: Callable[..., Any], server_token: str = TOKEN
) -> tuple[bytes, bytes]:
    with _listening(lambda connection: serve(connection, server_token)) as (address, served):
        tap = _Tap(address)
        try:
            call(tap.address, TOKEN)
        except (Refused, ConnectionError):
            assert server_token != TOKEN
        served.exception(WAIT_S)
        return tap.finish()


@servers
@clients
@pytest.mark.parametrize("server_token", [TOKEN, "another"], ids=["accepted", "refused"])
def test_nothing_of_the_token_is_on_the_wire(
    serve: Callable[..., Any], call: Callable[..., Any], server_token: str
) -> None:
    """The token, a piece or a plain hash of it never passes, whether the connection is accepted or
    refused.
    """
    frames = b"".join(_tapped(serve, call, server_token))
    assert b"Challenge" in frames
    assert b"Proof" in frames, "the tap must have recorded the handshake"
    token = TOKEN.encode()
    pieces = [token[start : start + 5] for start in range(len(token) - 4)]
    encoded = [token.hex().encode(), base64.b64encode(token), token[::-1]]
    hashes = [
        getattr(hashlib, name)(token).digest() for name in ("md5", "sha1", "sha256", "sha512")
    ]
    for secret in (*pieces, *encoded, *hashes):
        assert secret not in frames


@servers
def test_a_replayed_proof_is_refused(serve: Callable[..., Any]) -> None:
    """A proof that was good once is worthless on a second connection: the server's challenge is a
    new one.
    """
    to_server, _ = _tapped(serve, _call_blocking)
    proof = FrameSplitter().feed(to_server)[0]
    assert isinstance(proof, Proof)
    with _listening(lambda connection: serve(connection, TOKEN)) as (address, served):
        with socket.create_connection(address, timeout=WAIT_S) as connection:
            frames.receive(connection)
            frames.send(connection, proof)
            with pytest.raises(ConnectionError):
                frames.receive(connection)
        assert isinstance(served.exception(WAIT_S), Refused)


@clients
def test_a_replayed_server_is_refused(call: Callable[..., Any]) -> None:
    """A recorded answer of a true server does not make a false one true: the client's nonce is a
    new one.
    """
    _, to_client = _tapped(_serve_blocking, call)

    def replay(connection: socket.socket) -> None:
        connection.sendall(to_client)
        frames.receive(connection)

    with (
        _listening(replay) as (address, _),
        pytest.raises(Refused, match="does not know the token"),
    ):
        call(address, TOKEN)


def test_a_proof_cannot_be_used_in_the_other_direction() -> None:
    """A client's digest does not serve as the server's, so no client is served by being asked
    itself.
    """
    client, server = frames.Handshake(TOKEN), frames.Handshake(TOKEN)
    proof = client.answer(server.challenge())
    accepted = server.accept(proof)
    client.confirm(accepted)
    assert accepted.digest != proof.digest
    with pytest.raises(Refused):
        server.accept(Proof(proof.nonce, accepted.digest))
    with pytest.raises(Refused):
        client.confirm(Accepted(proof.digest))


def test_silence_in_a_handshake_ends_at_the_time_limit() -> None:
    """A client gives up on a silent server, and closes what it opened."""

    def say_nothing(connection: socket.socket) -> bytes:
        return connection.recv(1)

    with _listening(say_nothing) as (address, served):
        with pytest.raises(TimeoutError):
            frames.connect(address, TOKEN, timeout_s=0.1)
        assert served.result(WAIT_S) == b""
