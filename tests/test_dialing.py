"""Attempts to connect that overlap: a network may lose one of them, and the next one succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import AsyncIterator

import pytest

from chaoskit import wire
from chaoskit.control.dialing import can_connect, dial

TOKEN = "token"
HOST = "127.0.0.1"


def closed_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


@contextlib.asynccontextmanager
async def listener(deaf: int = 0) -> AsyncIterator[tuple[tuple[str, int], list[int]]]:
    """A server that says nothing to the first ``deaf`` connections, and proves the token to the others."""
    seen: list[int] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(len(seen))
        with contextlib.suppress(ConnectionError):
            if len(seen) > deaf:
                await wire.accept_async(reader, writer, TOKEN)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, HOST, 0)
    try:
        yield server.sockets[0].getsockname(), seen
    finally:
        server.close()


def test_an_attempt_that_is_not_answered_is_overtaken_by_the_next() -> None:
    async def main() -> None:
        async with listener(deaf=2) as (address, seen):
            began_s = time.monotonic()
            connection = await dial(address, TOKEN, began_s + 30.0)
            assert connection is not None
            assert len(seen) == 3
            assert time.monotonic() - began_s < 5.0, "it waited for the first attempts to fail"
            connection[1].close()

    asyncio.run(main())


def test_a_listener_that_comes_late_is_found() -> None:
    async def main() -> None:
        port = closed_port()
        dialing = asyncio.ensure_future(dial((HOST, port), TOKEN, time.monotonic() + 30.0))
        await asyncio.wait([dialing], timeout=0.1)  # it is refused for a while
        server = await asyncio.start_server(lambda reader, writer: wire.accept_async(reader, writer, TOKEN), HOST, port)
        connection = await dialing
        assert connection is not None
        connection[1].close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("deaf", [0, 99])
def test_at_the_deadline_nothing_is_left_of_the_attempts(deaf: int) -> None:
    """Neither errors that nobody has looked at, which would end an agent, nor connections."""

    async def main() -> list[object]:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        async with listener(deaf) as (address, _):
            there = address if deaf else (HOST, closed_port())
            assert await dial(there, TOKEN, time.monotonic() + 2.2) is None, "more attempts than are kept"
            await asyncio.sleep(0)
            gc.collect()
            await asyncio.sleep(0)
        return [*errors]

    assert asyncio.run(main()) == []


def test_whether_a_link_works() -> None:
    async def main() -> None:
        async with listener() as (address, seen):
            assert await can_connect(address)
            assert len(seen) <= 1
        assert not await can_connect((HOST, closed_port()))

    asyncio.run(main())


def test_a_link_that_is_refused_once_is_tried_again_later() -> None:
    """An unreachable host may be a route that is just being changed."""

    async def main() -> None:
        port = closed_port()
        trying = asyncio.ensure_future(can_connect((HOST, port)))
        await asyncio.wait([trying], timeout=0.2)
        assert not trying.done()
        server = await asyncio.start_server(lambda reader, writer: writer.close(), HOST, port)
        assert await trying
        server.close()

    asyncio.run(main())
