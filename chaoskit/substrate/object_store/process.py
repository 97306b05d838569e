"""The process that stands before a store of objects: an HTTP/1.1 proxy that hands everything on, but for what is wrong.

A connection of a client has one of its own to the store. Bodies pass in blocks as they come, so a store can fail in the
middle of one. It listens on loopback alone, and ends when its launcher's socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections import Counter

import msgspec

from chaoskit.checkpoint.remote.pace import Pace
from chaoskit.process.linux import restore_signals, set_name
from chaoskit.substrate.helper_process import BYTES_MAX, serve_launcher
from chaoskit.substrate.object_store.http_messages import HEAD_BYTES_MAX, Head, read_body, read_head
from chaoskit.substrate.object_store.proxy import (
    CountTrouble,
    Done,
    ImposeTrouble,
    LiftTrouble,
    ReadTraffic,
    Request,
    Traffic,
)
from chaoskit.substrate.object_store.troubles import Ailments, Lag, Reply, Ruling

_LINGER_NONE = struct.pack("ii", 1, 0)  # close() resets the connection
_CODES = {403: "AccessDenied", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


class _Struck(Exception):
    """The connection of the client is to be closed; ``reset``: not in order."""

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset


class _Proxy:
    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._ailments = Ailments()
        self._paces: dict[int, Pace] = {}
        self._methods: Counter[str] = Counter()
        self._sent_bytes = self._received_bytes = 0
        self._clients: set[asyncio.StreamWriter] = set()
        self._lifted = asyncio.Event()
        self.port = 0

    async def listen(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        self.port = server.sockets[0].getsockname()[1]

    # -- the launcher -------------------------------------------------------------------------------------------

    async def carry_out(self, request: Request) -> Done:
        match request:
            case ImposeTrouble(trouble):
                number = self._ailments.impose(trouble)
                if isinstance(trouble, Lag):
                    self._paces[number] = Pace(trouble.bytes_per_s)
                if self._ailments.out:
                    for writer in list(self._clients):
                        self._turn_away(writer)
                return Done(number)
            case LiftTrouble(number):
                met = self._ailments.lift(number)
                self._lifted.set()
                self._lifted = asyncio.Event()
                return Done(number, met)
            case CountTrouble(number):
                return Done(number, self._ailments.met(number))
            case ReadTraffic():
                traffic = Traffic(dict(self._methods), self._sent_bytes, self._received_bytes)
                return Done(traffic=traffic, port=self.port)

    def _turn_away(self, writer: asyncio.StreamWriter) -> None:
        """The port stays open, or nothing could count the connections."""
        self._ailments.strike_outage()
        _reset(writer)

    # -- clients ------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._ailments.out:
            self._turn_away(writer)
            return
        self._clients.add(writer)
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head = await read_head(reader)
                if upstream is None:
                    upstream = await asyncio.open_connection(*self._upstream, limit=HEAD_BYTES_MAX)
                await self._exchange(head, (reader, writer), upstream)
        except _Struck as struck:
            if struck.reset:
                _reset(writer)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _reset(
                writer
            )  # one side is gone, or says what is no HTTP: nothing that is whole can be said any more
        finally:
            self._clients.discard(writer)
            for end in (writer, upstream[1] if upstream else None):
                if end is not None:
                    end.close()

    async def _exchange(
        self,
        head: Head,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """One request and its answer."""
        reader, writer = client
        words = head.line.decode("latin-1").split(" ", 2)
        if len(words) < 3:
            raise _Struck(reset=True)  # no request: as a server does that cannot make sense of it
        method, path, _ = words
        self._methods[method] += 1
        ruling = self._ailments.rule(method, path)
        await self._before(ruling, head, client)
        if head.get(b"expect") == b"100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        upstream[1].write(head.encode())
        passed = await self._send(reader, head, upstream[1], ruling)
        answer = await read_head(upstream[0])
        writer.write(answer.encode())
        await self._receive(
            upstream[0], answer, writer, ruling, bare=method == "HEAD", resets=not passed
        )
        framed = bool(answer.get(b"content-length") or answer.get(b"transfer-encoding"))
        if answer.get(b"connection") == b"close" or not framed:
            raise _Struck(reset=False)  # the client has been told so, or sees it by the end

    async def _before(
        self, ruling: Ruling, head: Head, client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        """What happens before anything of the request is handed on."""
        reader, writer = client
        if ruling.stall:
            number, _ = ruling.stall
            self._ailments.strike(number)
            await self._lifted.wait()
            raise _Struck(reset=True)
        for number, lag in ruling.lags:
            self._ailments.strike(number)
            await asyncio.sleep(lag.delay_ms / 1e3)
        if ruling.reply:
            number, reply = ruling.reply
            self._ailments.strike(number)
            if (
                head.get(b"expect") != b"100-continue"
            ):  # else the client waits before it sends its body
                async for _ in read_body(reader, head, until_eof=False):
                    pass  # closing with something unread would reset the connection, and the refusal be lost
            writer.write(_refusal(reply))
            await writer.drain()
            raise _Struck(reset=False)

    async def _send(
        self,
        reader: asyncio.StreamReader,
        head: Head,
        upstream: asyncio.StreamWriter,
        ruling: Ruling,
    ) -> int:
        passed = 0
        async for block in read_body(reader, head, until_eof=False):
            passed += len(block)
            self._sent_bytes += len(block)
            await self._wait(ruling, len(block))
            if ruling.reset and passed > ruling.reset[1].after_bytes:
                self._ailments.strike(ruling.reset[0])
                raise _Struck(reset=True)
            upstream.write(block)
            await upstream.drain()
        return passed

    async def _receive(
        self,
        reader: asyncio.StreamReader,
        head: Head,
        writer: asyncio.StreamWriter,
        ruling: Ruling,
        *,
        bare: bool,
        resets: bool,
    ) -> None:
        status = head.line.split()[1]
        if bare or status in {b"204", b"304"}:
            await writer.drain()
            return
        passed = 0
        async for block in read_body(reader, head, until_eof=True):
            if ruling.garble and not passed:
                self._ailments.strike(ruling.garble[0])
                block = bytes([block[0] ^ 1]) + block[1:]  # noqa: PLW2901 - what is handed on is another block
            if ruling.reset and resets and passed + len(block) > ruling.reset[1].after_bytes:
                self._ailments.strike(ruling.reset[0])
                raise _Struck(reset=True)
            if ruling.truncate and passed + len(block) > ruling.truncate[1].after_bytes:
                self._ailments.strike(ruling.truncate[0])
                writer.write(block[: ruling.truncate[1].after_bytes - passed])
                await writer.drain()
                raise _Struck(reset=False)
            await self._wait(ruling, len(block))
            passed += len(block)
            self._received_bytes += len(block)
            writer.write(block)
            await writer.drain()

    async def _wait(self, ruling: Ruling, size_bytes: int) -> None:
        for number, _ in ruling.lags:
            if wait_s := self._paces[number].wait_s(size_bytes, time.monotonic()):
                await asyncio.sleep(wait_s)


def _refusal(reply: Reply) -> bytes:
    code = _CODES.get(reply.status, "InternalError")
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>by order of the proxy</Message></Error>'.encode()
    head = (
        f"HTTP/1.1 {reply.status} {code}\r\ncontent-type: application/xml\r\nconnection: close\r\n"
    )
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
    writer.transport.abort()


async def _serve_launcher(connection: socket.socket, proxy: _Proxy) -> None:
    """Answers the launcher, until that goes away."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    await loop.sock_sendall(connection, msgspec.json.encode(Done(port=proxy.port)))
    while data := await loop.sock_recv(connection, BYTES_MAX):
        try:
            done = await proxy.carry_out(_requests.decode(data))
        except Exception as error:  # noqa: BLE001 - whatever it is, the launcher must hear of it
            done = Done(error=f"{type(error).__name__}: {error}")
        await loop.sock_sendall(connection, msgspec.json.encode(done))


async def _run(connection: socket.socket, host: str, port: int) -> None:
    proxy = _Proxy(host, port)
    await proxy.listen()
    with contextlib.suppress(OSError):
        await _serve_launcher(connection, proxy)
    os._exit(0)  # exchanges that stall would keep the loop


def main() -> None:
    """Entry point; the store's address is the arguments, the launcher's socket is standard input."""
    set_name("ck-objects")
    restore_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_run(serve_launcher(), sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
