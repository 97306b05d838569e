"""An agent's line to the coordinator, whichever process that is.

Coordinators come and go; workers train on meanwhile. An agent attaches to the next one and says again what the one
before may have taken to its grave.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from chaoskit.agent.reconnect import dial
from chaoskit.errors import Refused
from chaoskit.health.clock import OffsetWindow
from chaoskit.process.linux import print_line
from chaoskit.process.run_clock import to_own
from chaoskit.wire import frames, messages
from chaoskit.wire.announcements import Facts
from chaoskit.wire.coordinator_files import Address
from chaoskit.wire.lease import Leases
from chaoskit.wire.messages import AgentHello, EndJob, Heard, Welcome

_CONNECT_S, _ATTEMPT_S = 20.0, 3.0
_RETRY_S = 0.02
#: A node that has slept through its lease may come back within this time, with nothing that could still commit.
_RETURN_S = 2.0
_ANSWER_S = 2.0  # a coordinator that accepts and then says nothing is given up
#: Leases that a silent coordinator has: it may be slow when it is busy, and a new connection is no help then.
_PATIENCE = 2
_COORDINATOR = "coordinator"


class _Silent(Exception):
    """The coordinator has not answered for too long."""


class Uplink:
    """Sends to the coordinator of the moment, and attaches to the next one.

    Silence counts like the end of the connection: a network may lose everything without a word. The connection is kept
    until there is another one, for a coordinator that was only slow.

    Args:
        connection: authenticated and welcomed.
        where: tells the address of the coordinator, which may move.
        welcome: what the first coordinator said.
        hello: describes the node as it is now.
        clock: tells CLOCK_MONOTONIC, in nanoseconds.
        return_s: time to come back for a node that has slept through its lease.
        answer_s: time for a coordinator that accepts to say welcome.
    """

    def __init__(
        self,
        connection: socket.socket,
        where: Callable[[], Address],
        token: str,
        welcome: Welcome,
        hello: Callable[[], AgentHello],
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        return_s: float = _RETURN_S,
        answer_s: float = _ANSWER_S,
    ) -> None:
        config = welcome.config
        self._now_ns, self._return_s, self._answer_s = clock, return_s, answer_s
        self._connection, self._where, self._token = connection, where, token
        self._hello, self._outage_s = hello, config.coordinator_outage_s
        self._term = welcome.term
        self._writer: asyncio.StreamWriter | None = None
        self._early: (
            list[messages.Message] | None
        ) = []  # told before :meth:`follow` runs; None since then
        self._leases = Leases(config.heartbeat_ms / 1000, _PATIENCE * config.lease_beats)
        self._reader: asyncio.StreamReader | None = None  # of the coordinator that is followed
        self._acknowledged_ns = self._now_ns()
        self.facts = Facts()
        self.clock = OffsetWindow()  # beside that of the coordinator

    @property
    def term(self) -> int:
        """Of the coordinator of the moment, or the last one."""
        return self._term

    @property
    def lease_until_ns(self) -> int:
        """When this node must have ended its workers, unless it is heard again: on CLOCK_MONOTONIC."""
        return self._acknowledged_ns + int(self._outage_s * 1e9)

    def tell(self, message: messages.Message) -> None:
        """Send a message to the coordinator, if there is one.

        A message that comes before the first connection is in use is kept and sent first, in order. Between two
        coordinators messages are dropped: the facts among them are told again to the next one.
        """
        self.facts.note(message)
        if self._early is not None:
            self._early.append(message)
        elif self._writer is not None:
            self._writer.write(frames.encode(message))

    def look(self, now_s: float) -> None:
        """To be called with every heartbeat: has the coordinator fallen silent?"""
        if self._leases.expired(now_s) and self._reader is not None:
            self._reader.set_exception(_Silent())

    async def follow(self) -> AsyncIterator[Any]:
        """Every message of every coordinator, until one ends the job or none is left."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection)
        early, self._early = self._early or [], None
        for message in early:
            self._writer.write(frames.encode(message))
        self._begin(self._now_ns())
        while self._reader is not None:
            try:
                while True:
                    message = await frames.read_message(self._reader)
                    if isinstance(message, Heard):
                        self._acknowledge(message)
                        continue
                    self.facts.note(message)
                    if isinstance(message, EndJob):
                        self._hang_up()  # the coordinator waits for it
                    yield message
                    if isinstance(message, EndJob):
                        return
            except _Silent:
                pass  # the connection is kept: it may only be slow
            except (ConnectionError, Refused):
                self._hang_up()
            self._reader = await self._attach()

    def _begin(self, sent_ns: int) -> None:
        """A coordinator has answered what was sent then."""
        self._leases.beat(_COORDINATOR, self._now_ns() / 1e9)
        self._acknowledged_ns = max(self._acknowledged_ns, sent_ns)

    def _acknowledge(self, heard: Heard) -> None:
        sent_ns, now_ns, wall_ns = to_own(heard.sent_ns), self._now_ns(), time.time_ns()
        self.clock.hear(heard.wall_ns, wall_ns - (now_ns - sent_ns), now_ns - sent_ns)
        if (
            sent_ns > self._acknowledged_ns
        ):  # an answer that the network held back for long says nothing of now
            self._acknowledged_ns = sent_ns
            self._leases.beat(_COORDINATOR, self._now_ns() / 1e9)

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _attach(self) -> asyncio.StreamReader | None:
        """Find the next coordinator, or the same one again; None when there is none for too long."""
        left_s = (self.lease_until_ns - self._now_ns()) / 1e9
        deadline_s = time.monotonic() + max(left_s, self._return_s)
        while (connection := await dial(self._where, self._token, deadline_s)) is not None:
            try:
                return await asyncio.wait_for(self._introduce(*connection), self._answer_s)
            except (OSError, TimeoutError, Refused):
                connection[1].close()
                await asyncio.sleep(_RETRY_S)
        print_line(f"no coordinator for {self._outage_s:g} s: giving up")
        return None

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> asyncio.StreamReader:
        sent_ns = self._now_ns()
        writer.write(frames.encode(self._hello()))
        welcome = await frames.read_message(reader)
        if not isinstance(welcome, Welcome) or welcome.term < self._term:
            raise Refused("not the coordinator of this term")
        self._hang_up()
        self._term, self._writer = welcome.term, writer
        self._begin(sent_ns)
        for message in self.facts.tell():
            writer.write(frames.encode(message))
        return reader


def attach_first(
    where: Callable[[], Address], token: str, hello: AgentHello
) -> tuple[socket.socket, Welcome]:
    """Connect a node that is new, before its agent has an event loop.

    Raises:
        OSError: if there is no coordinator.
        Refused: if it does not know the token.
    """
    deadline_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            connection = frames.connect(where(), token, _ATTEMPT_S)
            try:
                frames.send(connection, hello)
                welcome = frames.receive(connection)
            except BaseException:
                connection.close()
                raise
            assert isinstance(welcome, Welcome)
            return connection, welcome
        except OSError:  # the coordinator ended in this moment: there will be another
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)
