"""The process of an object-store proxy: it passes HTTP/1.1 on unless a trouble affects it.

Each connection of a client has its own connection to the store. Bodies pass in blocks as they come,
so that a transfer can fail midway. The proxy listens on the loopback only, and ends when its
launcher's socket closes.

-> ``object_store/troubles.py``: which requests a trouble affects. ``object_store/proxy.py``: the
launcher's end. ``checkpoint/remote/``: the clients.
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

from chaoskit.checkpoint.remote.pace import UploadPace
from chaoskit.process.linux import restore_signals, set_name
from chaoskit.substrate.helper_process import BYTES_MAX, take_launcher_socket
from chaoskit.substrate.object_store.http_messages import HEAD_BYTES_MAX, Head, read_body, read_head
from chaoskit.substrate.object_store.proxy import (
    CountStoreTrouble,
    ImposeStoreTrouble,
    LiftStoreTrouble,
    ProxyTraffic,
    ReadTraffic,
    Request,
    StoreTroubleDone,
)
from chaoskit.substrate.object_store.troubles import ErrorReply, Lag, RequestRuling, StoreTroubles

_LINGER_NONE = struct.pack("ii", 1, 0)  # close() resets the connection
_CODES = {403: "AccessDenied", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


class _CloseConnection(Exception):
    """Signal to close the client's connection.

    Attributes:
        reset: True to reset it, False to close it in order.
    """

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset


class _Proxy:
    """The proxy: its troubles, its connections, and the counts of its traffic."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._troubles = StoreTroubles()
        self._paces: dict[int, UploadPace] = {}
        self._methods: Counter[str] = Counter()
        self._sent_bytes = self._received_bytes = 0
        self._clients: set[asyncio.StreamWriter] = set()
        self._lifted = asyncio.Event()
        self.port = 0

    async def listen(self) -> None:
        """Start to accept clients on a free port of the loopback, and set ``port``."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        self.port = server.sockets[0].getsockname()[1]

    # -- the launcher ------------------------------------------------------------------------------

    async def carry_out(self, request: Request) -> StoreTroubleDone:
        """Carry out a request of the launcher, and return its answer.

        Each lifted trouble also resets the connections of all stalled requests.
        """
        match request:
            case ImposeStoreTrouble(trouble):
                number = self._troubles.impose(trouble)
                if isinstance(trouble, Lag):
                    self._paces[number] = UploadPace(trouble.bytes_per_s)
                if self._troubles.is_out:
                    for writer in list(self._clients):
                        self._refuse_connection(writer)
                return StoreTroubleDone(number)
            case LiftStoreTrouble(number):
                affected_count = self._troubles.lift(number)
                self._lifted.set()
                self._lifted = asyncio.Event()
                return StoreTroubleDone(number, affected_count)
            case CountStoreTrouble(number):
                return StoreTroubleDone(number, self._troubles.affected_count(number))
            case ReadTraffic():
                traffic = ProxyTraffic(dict(self._methods), self._sent_bytes, self._received_bytes)
                return StoreTroubleDone(traffic=traffic, port=self.port)

    def _refuse_connection(self, writer: asyncio.StreamWriter) -> None:
        """Reset a connection because of an outage.

        The port stays open, as connections could not be counted otherwise.
        """
        self._troubles.strike_outage()
        _reset(writer)

    # -- clients -----------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on the requests of a client until either side closes its connection."""
        if self._troubles.is_out:
            self._refuse_connection(writer)
            return
        self._clients.add(writer)
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head = await read_head(reader)
                if upstream is None:
                    upstream = await asyncio.open_connection(*self._upstream, limit=HEAD_BYTES_MAX)
                await self._exchange(head, (reader, writer), upstream)
        except _CloseConnection as close:
            if close.reset:
                _reset(writer)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _reset(writer)  # one side is gone or does not speak HTTP
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
        """Pass on one request and its answer.

        Raises _CloseConnection if the client's connection must not be used further.
        """
        reader, writer = client
        words = head.line.decode("latin-1").split(" ", 2)
        if len(words) < 3:
            raise _CloseConnection(reset=True)  # not a request: reset, as a server would
        method, path, _ = words
        self._methods[method] += 1
        ruling = self._troubles.rule(method, path)
        await self._apply_early_troubles(ruling, head, client)
        if head.get(b"expect") == b"100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        upstream[1].write(head.encode())
        sent_bytes = await self._send(reader, head, upstream[1], ruling)
        answer = await read_head(upstream[0])
        writer.write(answer.encode())
        await self._receive(
            upstream[0],
            answer,
            writer,
            ruling,
            has_no_body=method == "HEAD",
            may_reset=not sent_bytes,
        )
        framed = bool(answer.get(b"content-length") or answer.get(b"transfer-encoding"))
        if answer.get(b"connection") == b"close" or not framed:
            raise _CloseConnection(reset=False)  # the client expects the end of the connection

    async def _apply_early_troubles(
        self,
        ruling: RequestRuling,
        head: Head,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Apply the troubles that take effect before anything of the request is passed on.

        Raises _CloseConnection if the request is not passed on at all.
        """
        reader, writer = client
        if ruling.stall:
            number, _ = ruling.stall
            self._troubles.strike(number)
            await self._lifted.wait()
            raise _CloseConnection(reset=True)
        for number, lag in ruling.lags:
            self._troubles.strike(number)
            await asyncio.sleep(lag.delay_ms / 1e3)
        if ruling.reply:
            number, reply = ruling.reply
            self._troubles.strike(number)
            if head.get(b"expect") != b"100-continue":  # else it sends no body
                async for _ in read_body(reader, head, until_eof=False):
                    pass  # else closing would reset the connection, and lose the refusal
            writer.write(_refusal(reply))
            await writer.drain()
            raise _CloseConnection(reset=False)

    async def _send(
        self,
        reader: asyncio.StreamReader,
        head: Head,
        upstream: asyncio.StreamWriter,
        ruling: RequestRuling,
    ) -> int:
        """Pass on the body of a request, and return its number of bytes.

        Raises _CloseConnection if a trouble resets the connection.
        """
        passed_bytes = 0
        async for block in read_body(reader, head, until_eof=False):
            passed_bytes += len(block)
            self._sent_bytes += len(block)
            await self._wait(ruling, len(block))
            if ruling.reset and passed_bytes > ruling.reset[1].after_bytes:
                self._troubles.strike(ruling.reset[0])
                raise _CloseConnection(reset=True)
            upstream.write(block)
            await upstream.drain()
        return passed_bytes

    async def _receive(
        self,
        reader: asyncio.StreamReader,
        head: Head,
        writer: asyncio.StreamWriter,
        ruling: RequestRuling,
        *,
        has_no_body: bool,
        may_reset: bool,
    ) -> None:
        """Pass on the body of an answer. Raises _CloseConnection if a trouble cuts it short.

        Args:
            has_no_body: True if the answer has no body, whatever its head says.
            may_reset: True if a trouble may reset the connection during the answer.
        """
        status = head.line.split()[1]
        if has_no_body or status in {b"204", b"304"}:
            await writer.drain()
            return
        passed_bytes = 0
        async for block in read_body(reader, head, until_eof=True):
            if ruling.garble and not passed_bytes:
                self._troubles.strike(ruling.garble[0])
                block = bytes([block[0] ^ 1]) + block[1:]  # noqa: PLW2901 - changed in transit
            if (
                ruling.reset
                and may_reset
                and passed_bytes + len(block) > ruling.reset[1].after_bytes
            ):
                self._troubles.strike(ruling.reset[0])
                raise _CloseConnection(reset=True)
            if ruling.truncate and passed_bytes + len(block) > ruling.truncate[1].after_bytes:
                self._troubles.strike(ruling.truncate[0])
                writer.write(block[: ruling.truncate[1].after_bytes - passed_bytes])
                await writer.drain()
                raise _CloseConnection(reset=False)
            await self._wait(ruling, len(block))
            passed_bytes += len(block)
            self._received_bytes += len(block)
            writer.write(block)
            await writer.drain()

    async def _wait(self, ruling: RequestRuling, size_bytes: int) -> None:
        """Wait as long as the rate limits of the troubles demand for this many bytes."""
        for number, _ in ruling.lags:
            if wait_s := self._paces[number].wait_s(size_bytes, time.monotonic()):
                await asyncio.sleep(wait_s)


def _refusal(reply: ErrorReply) -> bytes:
    """Return the HTTP answer with which a store refuses a request."""
    code = _CODES.get(reply.status, "InternalError")
    message = "refused by the fault-injection proxy"
    xml = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    body = xml.encode()
    head = (
        f"HTTP/1.1 {reply.status} {code}\r\ncontent-type: application/xml\r\nconnection: close\r\n"
    )
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset instead of an orderly end."""
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
    writer.transport.abort()


async def _serve_launcher(connection: socket.socket, proxy: _Proxy) -> None:
    """Answer the launcher until it goes away."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    await loop.sock_sendall(connection, msgspec.json.encode(StoreTroubleDone(port=proxy.port)))
    while data := await loop.sock_recv(connection, BYTES_MAX):
        try:
            done = await proxy.carry_out(_requests.decode(data))
        except Exception as error:  # noqa: BLE001 - reported to the launcher
            done = StoreTroubleDone(error=f"{type(error).__name__}: {error}")
        await loop.sock_sendall(connection, msgspec.json.encode(done))


async def _run(connection: socket.socket, host: str, port: int) -> None:
    proxy = _Proxy(host, port)
    await proxy.listen()
    with contextlib.suppress(OSError):
        await _serve_launcher(connection, proxy)
    os._exit(0)  # stalled exchanges would keep the loop running


def main() -> None:
    """Serve until the launcher goes away: the entry point of the proxy.

    The arguments are the store's host and port; the launcher's socket is standard input.
    """
    set_name("ck-objects")
    restore_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_run(take_launcher_socket(), sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
