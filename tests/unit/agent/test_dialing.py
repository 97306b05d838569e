"""Overlapping attempts to connect: a network may lose one of them, and the next succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator

import pytest
from support.nodes.network import HOST, refusing
from support.waiting import LIMIT_S

from chaoskit.agent.dial import can_connect, dial
from chaoskit.wire import frames

TOKEN = "token"


class Listener:
    """A server that does not answer the first ``deaf`` connections, and proves the token to the
    others.

    Attributes:
        begun: the number of accepted connections.
        ended: the number of accepted connections that the other side has closed.
    """

    def __init__(self, deaf: int) -> None:
        self._deaf, self.begun, self.ended = deaf, 0, 0
        self.address = (HOST, 0)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Listener]:
        server = await asyncio.start_server(self._greet, HOST, 0)
        self.address = server.sockets[0].getsockname()
        try:
            yield self
        finally:
            server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.begun += 1
        with contextlib.suppress(ConnectionError):
            if self.begun > self._deaf:
                await frames.accept_async(reader, writer, TOKEN)
            await reader.read()
        self.ended += 1
        writer.close()


def listener(deaf: int = 0) -> contextlib.AbstractAsyncContextManager[Listener]:
    return Listener(deaf).listening()


def test_an_attempt_that_is_not_answered_is_overtaken_by_the_next() -> None:
    """An attempt succeeds while earlier attempts are still open: none has to fail first."""

    async def main() -> None:
        async with listener(deaf=2) as server:
            connection = await dial(lambda: server.address, TOKEN, time.monotonic() + LIMIT_S)
            assert connection is not None
            assert (server.begun, server.ended) == (3, 0)
            connection[1].close()

    asyncio.run(main())


def test_a_listener_that_comes_late_is_found() -> None:
    """An attempt that is refused is repeated until the server listens."""

    async def main() -> None:
        with refusing() as held:
            dialing = asyncio.ensure_future(
                dial(held.getsockname, TOKEN, time.monotonic() + LIMIT_S)
            )
            await asyncio.wait([dialing], timeout=0.1)
            assert not dialing.done(), "it gave up after a refusal"
            server = await asyncio.start_server(
                lambda *ends: frames.accept_async(*ends, TOKEN), sock=held
            )
            connection = await dialing
            assert connection is not None
            connection[1].close()
            server.close()

    asyncio.run(main())


@pytest.mark.parametrize("deaf", [0, 99])
def test_at_the_deadline_nothing_is_left_of_the_attempts(deaf: int) -> None:
    """There are neither connections nor unretrieved errors, which would end an agent.

    The time is enough for more attempts than are kept.
    """

    async def main() -> list[object]:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: errors.append(context)
        )
        with refusing() as held:
            async with listener(deaf) as server:
                address = server.address if deaf else held.getsockname()
                assert await dial(lambda: address, TOKEN, time.monotonic() + 2.2) is None
                await asyncio.sleep(0)
                gc.collect()
                await asyncio.sleep(0)
        return [*errors]

    assert asyncio.run(main()) == []


def test_whether_a_link_works() -> None:
    """A link works if the kernel of the other side accepts a connection."""

    async def main() -> None:
        async with listener() as server:
            assert await can_connect(server.address)
        with refusing() as held:
            assert not await can_connect(held.getsockname())

    asyncio.run(main())


def test_a_link_that_is_refused_once_is_tried_again_later() -> None:
    """A refusal does not end the test of a link: the route to the host may just be changing."""

    async def main() -> None:
        with refusing() as held:
            trying = asyncio.ensure_future(can_connect(held.getsockname(), tries=1000))
            await asyncio.wait([trying], timeout=0.2)
            assert not trying.done()
            server = await asyncio.start_server(lambda reader, writer: writer.close(), sock=held)
            assert await trying
            server.close()

    asyncio.run(main())
