"""The connection of an agent to the coordinator, over real sockets and on a clock that the tests
move.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.clocks import FakeClock
from support.waiting import LIMIT_S

from chaoskit.agent.coordinator_link import Uplink, attach_first
from chaoskit.config import RunConfig
from chaoskit.job import JobSpec
from chaoskit.wire import frames
from chaoskit.wire.coordinator_files import Address, CoordinatorAddress, address_file
from chaoskit.wire.messages import (
    AgentHello,
    EndJob,
    HealthReport,
    Heard,
    Heartbeat,
    Probe,
    Recall,
    Sealed,
    Welcome,
    WorkerFailed,
    WorkerLost,
)

TOKEN = "token"
BEAT_S = 0.02
SILENT_BEATS = 10  # a coordinator may leave less than six intervals without an answer
OUTAGE_S = 60
#: An address that no machine may have.
NOWHERE = ("255.255.255.255", 1)
HELLO = AgentHello("node0", "host", 1)


class Server:
    """A coordinator that answers heartbeats if told to; each connection of the agent is one of its
    lines.
    """

    def __init__(self, outage_s: float) -> None:
        self.config = RunConfig(
            job=JobSpec("job.py"), heartbeat_ms=round(BEAT_S * 1000), coordinator_outage_s=outage_s
        )
        self.answers = True
        self.lines: list[asyncio.StreamWriter] = []
        self.ended: list[int] = []  # lines that the agent has closed
        self.heard_ns = 0  # the time of the newest heartbeat
        self.received: list[Any] = []  # messages of all lines
        self.moved = asyncio.Condition()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await frames.accept_async(reader, writer, TOKEN)
        assert isinstance(await frames.read_message(reader), AgentHello)
        number = len(self.lines)
        self.lines.append(writer)
        writer.write(frames.encode(Welcome(self.config, 1, 1)))
        with contextlib.suppress(ConnectionError):
            while True:
                await self._tell()
                message = await frames.read_message(reader)
                self.received.append(message)
                if isinstance(message, Heartbeat):
                    self.heard_ns = message.sent_ns
                    if self.answers:
                        writer.write(frames.encode(Heard(message.sent_ns)))
        self.ended.append(number)
        await self._tell()

    async def _tell(self) -> None:
        async with self.moved:
            self.moved.notify_all()

    async def until(self, lines: int) -> None:
        async with self.moved:
            await asyncio.wait_for(self.moved.wait_for(lambda: len(self.lines) >= lines), LIMIT_S)

    async def until_received(self, count: int) -> None:
        async with self.moved:
            await asyncio.wait_for(
                self.moved.wait_for(lambda: len(self.received) >= count), LIMIT_S
            )

    async def until_heard(self, sent_ns: int) -> None:
        async with self.moved:
            await asyncio.wait_for(self.moved.wait_for(lambda: self.heard_ns >= sent_ns), LIMIT_S)


class Agent:
    """An agent with a clock that stands still: it sends heartbeats and checks on demand, and takes
    incoming messages.
    """

    def __init__(self, uplink: Uplink, clock: FakeClock) -> None:
        self.uplink, self.clock, self.heard = uplink, clock, asyncio.Queue[Any]()
        self.following = asyncio.ensure_future(self._follow())

    def beat(self) -> None:
        """Send a heartbeat, an interval after the last, and check whether the coordinator has
        fallen silent.
        """
        self.clock.sleep(BEAT_S)
        self.uplink.send(Heartbeat("node0", (), self.clock.now_ns()))
        self.uplink.look(self.clock.now_s())

    def beat_in_silence(self) -> None:
        """Send heartbeats for longer than a coordinator may be silent."""
        for _ in range(SILENT_BEATS):
            self.beat()

    async def _follow(self) -> None:
        async for message in self.uplink.follow():
            await self.heard.put(message)
        await self.heard.put(None)

    async def next(self) -> Any:
        return await asyncio.wait_for(self.heard.get(), LIMIT_S)


@contextlib.asynccontextmanager
async def attached(
    outage_s: float = OUTAGE_S, run_directory: Path = Path("/nonexistent")
) -> AsyncIterator[tuple[Server, Agent]]:
    server, clock = Server(outage_s), FakeClock()
    listener = await asyncio.start_server(server.greet, "127.0.0.1", 0)
    address = listener.sockets[0].getsockname()
    first = CoordinatorAddress(address, address)

    def where() -> Address:
        return first.latest(run_directory).control

    line, welcome = await asyncio.to_thread(attach_first, where, TOKEN, HELLO)
    line.setblocking(False)
    patient = {"return_s": LIMIT_S, "answer_s": LIMIT_S}
    agent = Agent(
        Uplink(line, where, TOKEN, welcome, lambda: HELLO, clock=clock.now_ns, **patient), clock
    )
    server.lines[0].write(frames.encode(Recall()))
    assert await agent.next() == Recall(), "it follows"
    try:
        yield server, agent
    finally:
        listener.close()
        agent.following.cancel()
        for writer in server.lines:
            writer.close()
        await asyncio.gather(agent.following, return_exceptions=True)


def test_a_coordinator_that_falls_silent_is_attached_to_again_before_the_first_connection_ends() -> (
    None
):
    """The first connection to a silent coordinator is kept until the second one is welcome."""

    async def main() -> None:
        async with attached() as (server, agent):
            server.answers = False
            agent.beat_in_silence()
            await server.until(lines=2)
            assert server.ended == []
            server.lines[1].write(frames.encode(EndJob(True, "")))
            assert await agent.next() == EndJob(True, "")
            assert await agent.next() is None

    asyncio.run(main())


def test_messages_before_the_first_connection_is_in_use_are_sent_first_and_in_order() -> None:
    """The fork server may report before the agent reads from its connection, and no message is sent
    twice.
    """
    early = [
        WorkerFailed("node0.zygote", "ModuleNotFoundError", fatal=True),
        Sealed("node0", (), 0),
        HealthReport("node0", (), 0.0),
        WorkerLost("node0.0", "node0", "raised", "could not be started", 1),
        Heartbeat("node0", (), 1),
    ]

    async def main() -> None:
        server, clock = Server(OUTAGE_S), FakeClock()
        listener = await asyncio.start_server(server.greet, "127.0.0.1", 0)
        address = listener.sockets[0].getsockname()
        line, welcome = await asyncio.to_thread(attach_first, lambda: address, TOKEN, HELLO)
        line.setblocking(False)
        uplink = Uplink(line, lambda: address, TOKEN, welcome, lambda: HELLO, clock=clock.now_ns)
        for message in early:
            uplink.send(message)
        agent = Agent(uplink, clock)
        server.lines[0].write(frames.encode(Recall()))
        assert await agent.next() == Recall(), "it follows"
        uplink.send(Heartbeat("node0", (), 2))
        await server.until_received(len(early) + 1)
        assert server.received == [*early, Heartbeat("node0", (), 2)]
        listener.close()
        server.lines[0].write(frames.encode(EndJob(True, "")))
        assert await agent.next() == EndJob(True, "")
        await agent.following

    asyncio.run(main())


def test_a_coordinator_that_has_moved_is_found(tmp_path: Path) -> None:
    """The current address is written into the run's directory, and read for each attempt."""

    async def main() -> None:
        async with attached(run_directory=tmp_path) as (server, agent):
            moved = Server(OUTAGE_S)
            listener = await asyncio.start_server(moved.greet, "127.0.0.1", 0)
            address = listener.sockets[0].getsockname()
            address_file(tmp_path).write_bytes(
                msgspec.json.encode(CoordinatorAddress(address, address))
            )
            server.lines[0].close()
            await moved.until(lines=1)
            moved.lines[0].write(frames.encode(Recall()))
            assert await agent.next() == Recall()
            assert len(server.lines) == 1
            listener.close()
            moved.lines[0].close()

    asyncio.run(main())


def test_a_new_agent_asks_again_where_its_coordinator_is() -> None:
    """The coordinator's former machine may be gone, and have no address any more."""

    async def main() -> None:
        server, attempts = Server(OUTAGE_S), list[Address]()
        listener = await asyncio.start_server(server.greet, "127.0.0.1", 0)
        places: list[Address] = [NOWHERE, listener.sockets[0].getsockname()]

        def where() -> Address:
            attempts.append(places[min(len(attempts), 1)])
            return attempts[-1]

        line, _ = await asyncio.to_thread(attach_first, where, TOKEN, HELLO)
        assert attempts == places
        line.close()
        listener.close()

    with pytest.raises(OSError, match="Errno") as raised:
        socket.create_connection(NOWHERE, 1.0)
    assert not isinstance(raised.value, ConnectionError)
    asyncio.run(main())


def test_an_agent_that_is_answered_keeps_its_connection() -> None:
    """A coordinator that answers heartbeats is not attached to again, at any length of the run."""

    async def main() -> None:
        async with attached() as (server, agent):
            for _ in range(5 * SILENT_BEATS):
                agent.beat()
                await server.until_heard(agent.clock.now_ns())
                server.lines[0].write(frames.encode(Recall()))
                assert await agent.next() == Recall(), "what was answered before it was heard, too"
            assert agent.uplink.lease_until_ns == agent.clock.now_ns() + OUTAGE_S * 10**9
            assert len(server.lines) == 1

    asyncio.run(main())


def test_only_the_answer_to_a_newer_heartbeat_extends_the_lease() -> None:
    """A long delayed answer says nothing about the present."""

    async def main() -> None:
        async with attached() as (server, agent):
            server.answers = False
            agent.clock.sleep(BEAT_S)
            before_ns = agent.uplink.lease_until_ns
            server.lines[0].write(frames.encode(Heard(1)) + frames.encode(Recall()))
            assert await agent.next() == Recall()
            assert agent.uplink.lease_until_ns == before_ns
            sent_ns = agent.clock.now_ns()
            server.lines[0].write(frames.encode(Heard(sent_ns)) + frames.encode(Recall()))
            assert await agent.next() == Recall()
            assert agent.uplink.lease_until_ns == sent_ns + OUTAGE_S * 10**9 > before_ns

    asyncio.run(main())


def test_a_probe_is_for_the_kernel_and_no_answer() -> None:
    """The probe extends no lease, and a coordinator that sends only probes is silent."""

    async def main() -> None:
        async with attached() as (server, agent):
            server.answers = False
            before_ns = agent.uplink.lease_until_ns
            for _ in range(SILENT_BEATS // 2):
                agent.beat()
                server.lines[0].write(frames.encode(Probe()))
                assert await agent.next() == Probe()
            assert agent.uplink.lease_until_ns == before_ns
            agent.beat()
            agent.beat()
            await server.until(lines=2)
            server.lines[1].write(frames.encode(EndJob(True, "")))
            assert await agent.next() == EndJob(True, "")

    asyncio.run(main())


def test_an_agent_that_has_slept_through_its_lease_may_come_back() -> None:
    """The agent's workers commit no step meanwhile, and the coordinator decides their fate."""

    async def main() -> None:
        async with attached(outage_s=1) as (server, agent):
            agent.clock.sleep(10.0)
            server.lines[0].close()  # the agent was given up
            await server.until(lines=2)
            server.lines[1].write(frames.encode(EndJob(True, "")))
            assert await agent.next() == EndJob(True, "")

    asyncio.run(main())
