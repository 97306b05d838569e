"""An agent's line to the coordinator, over real sockets: it falls silent, and is replaced before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from chaoskit import wire
from chaoskit.config import JobSpec, RunConfig
from chaoskit.control.uplink import Uplink, attach_first
from chaoskit.messages import AgentHello, EndJob, Heard, Heartbeat, Recall, Welcome

TOKEN = "token"
WAIT_S = 30.0
HELLO = AgentHello("node0", "host", 1)


class Server:
    """A coordinator that answers heartbeats as long as it likes; each connection of the agent is one of its lines."""

    def __init__(self, outage_s: float) -> None:
        self.config = RunConfig(job=JobSpec("job.py"), heartbeat_ms=20, coordinator_outage_s=outage_s)
        self.answers = True
        self.lines: list[asyncio.StreamWriter] = []
        self.ended: list[int] = []  # lines that the agent has closed
        self.moved = asyncio.Condition()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.accept_async(reader, writer, TOKEN)
        assert isinstance(await wire.read_message(reader), AgentHello)
        number = len(self.lines)
        self.lines.append(writer)
        writer.write(wire.encode(Welcome(self.config, (), 1, 1)))
        with contextlib.suppress(ConnectionError):
            while True:
                await self._tell()
                message = await wire.read_message(reader)
                if isinstance(message, Heartbeat) and self.answers:
                    writer.write(wire.encode(Heard(message.sent_ns)))
        self.ended.append(number)
        await self._tell()

    async def _tell(self) -> None:
        async with self.moved:
            self.moved.notify_all()

    async def until(self, lines: int) -> None:
        async with self.moved:
            await asyncio.wait_for(self.moved.wait_for(lambda: len(self.lines) >= lines), WAIT_S)


class Agent:
    """What an agent does with its uplink: it beats, and takes what comes."""

    def __init__(self, uplink: Uplink) -> None:
        self.uplink, self.heard = uplink, asyncio.Queue[Any]()
        self.beating = asyncio.ensure_future(self._beat())
        self.following = asyncio.ensure_future(self._follow())

    async def _beat(self) -> None:
        while True:
            self.uplink.tell(Heartbeat("node0", (), time.monotonic_ns()))
            self.uplink.look(time.monotonic())
            await asyncio.sleep(0.02)

    async def _follow(self) -> None:
        async for message in self.uplink.follow():
            await self.heard.put(message)
        await self.heard.put(None)

    async def next(self) -> Any:
        return await asyncio.wait_for(self.heard.get(), WAIT_S)


@contextlib.asynccontextmanager
async def attached(outage_s: float = 60.0) -> AsyncIterator[tuple[Server, Agent]]:
    server = Server(outage_s)
    listener = await asyncio.start_server(server.greet, "127.0.0.1", 0)
    address = listener.sockets[0].getsockname()
    line, welcome = await asyncio.to_thread(attach_first, address, TOKEN, HELLO)
    line.setblocking(False)
    agent = Agent(Uplink(line, address, TOKEN, welcome, lambda: HELLO))
    try:
        yield server, agent
    finally:
        listener.close()
        for task in (agent.beating, agent.following):
            task.cancel()
        for writer in server.lines:
            writer.close()
        await asyncio.gather(agent.beating, agent.following, return_exceptions=True)


def test_a_coordinator_that_falls_silent_is_attached_to_again_before_the_first_connection_ends() -> None:
    async def main() -> None:
        async with attached() as (server, agent):
            server.lines[0].write(wire.encode(Recall()))
            assert await agent.next() == Recall()
            server.answers = False
            await server.until(lines=2)
            assert server.ended == [], "the first one is kept until the second is welcome"
            server.answers = True
            server.lines[1].write(wire.encode(EndJob(True, "")))
            assert await agent.next() == EndJob(True, "")
            assert await agent.next() is None

    asyncio.run(main())


def test_who_is_answered_stays_where_it_is() -> None:
    async def main() -> None:
        async with attached() as (server, agent):
            await asyncio.wait([agent.following], timeout=0.5)
            assert len(server.lines) == 1

    asyncio.run(main())


def test_only_the_answer_to_a_newer_heartbeat_extends_the_lease() -> None:
    """What a network held back for long says nothing of now."""

    async def main() -> None:
        async with attached() as (server, agent):
            server.answers = False
            await server.until(lines=2)
            before_ns = agent.uplink.lease_until_ns
            server.lines[1].write(wire.encode(Heard(1)) + wire.encode(Recall()))
            assert await agent.next() == Recall()
            assert agent.uplink.lease_until_ns == before_ns
            sent_ns = time.monotonic_ns()
            server.lines[-1].write(wire.encode(Heard(sent_ns)) + wire.encode(Recall()))
            assert await agent.next() == Recall()
            assert agent.uplink.lease_until_ns == sent_ns + 60 * 10**9

    asyncio.run(main())


def test_who_has_slept_through_its_lease_may_come_back() -> None:
    """Its workers commit nothing in the meantime, and the coordinator decides what becomes of them."""

    async def main() -> None:
        async with attached(outage_s=0.001) as (server, agent):
            await asyncio.wait([agent.following], timeout=0.05)
            server.lines[0].close()  # it was given up
            await server.until(lines=2)
            server.lines[1].write(wire.encode(EndJob(True, "")))
            assert await agent.next() == EndJob(True, "")

    asyncio.run(main())
