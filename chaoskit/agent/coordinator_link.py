"""An agent's connection to the current coordinator.

Workers continue to train when a coordinator ends. The agent attaches to the next one, and repeats
the reports that the last one may not have recorded.

If no coordinator is found in time, :meth:`Uplink.follow` ends, and agent/agent.py (``_end_all``)
kills the workers.

-> coordinator/handlers/on_restart.py: the next coordinator; coordinator/handlers/on_node.py: its
answer to a node. wire/announcements.py: which reports are repeated; wire/coordinator_files.py:
where the address is. runtime/step/commit.py: no commit after the end of the lease.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from chaoskit.agent.dial import dial
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
#: Time in which a node that was suspended beyond its lease may reconnect. None of its workers can
#: commit then.
_RETURN_S = 2.0
_ANSWER_S = 2.0  # time for the welcome on an accepted connection
#: Number of leases for which a coordinator may be silent: a busy one answers no new connection.
_PATIENCE = 2
_COORDINATOR = "coordinator"


class _Silent(Exception):
    """The coordinator has not answered for too long."""


class Uplink:
    """Connection to the current coordinator, which is replaced when the next one takes over.

    Silence counts as a lost connection, as a network may drop everything without a reset. The
    connection is kept until there is another one, as the coordinator may only be slow.

    Args:
        connection: authenticated and welcomed.
        find_coordinator: returns the current address of the coordinator, which may move. An error
            that it raises ends :meth:`follow`.
        token: the run's token.
        welcome: answer of the first coordinator.
        hello: returns the registration with the current state of the node.
        clock: returns CLOCK_MONOTONIC in nanoseconds.
        return_s: least time to reconnect in seconds, for a node that was suspended beyond its
            lease.
        answer_s: seconds in which a coordinator that accepts a connection must answer the hello.

    Attributes:
        facts: messages that the next coordinator must receive.
        clock: offset of the wall clock of this node from the coordinator's.
    """

    def __init__(
        self,
        connection: socket.socket,
        find_coordinator: Callable[[], Address],
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
        self._connection, self._find_coordinator, self._token = connection, find_coordinator, token
        self._hello, self._outage_s = hello, config.coordinator_outage_s
        self._term = welcome.term
        self._writer: asyncio.StreamWriter | None = None
        self._early_messages: list[messages.Message] | None = []  # sent before :meth:`follow` runs
        self._leases = Leases(config.heartbeat_ms / 1000, _PATIENCE * config.lease_beats)
        self._reader: asyncio.StreamReader | None = None  # reads from the current coordinator
        self._acknowledged_ns = self._now_ns()
        self.facts = Facts()
        self.clock = OffsetWindow()

    @property
    def term(self) -> int:
        """The term of the current coordinator, or of the last one."""
        return self._term

    @property
    def lease_until_ns(self) -> int:
        """The CLOCK_MONOTONIC in nanoseconds at which this node must have ended its workers.

        Each answer of a coordinator extends it, unless a later answer has come before.
        """
        return self._acknowledged_ns + int(self._outage_s * 1e9)

    def send(self, message: messages.Message) -> None:
        """Send a message to the coordinator, if there is one.

        Messages before the first connection is in use are kept, and sent first, in order. Messages
        between two coordinators are dropped, but the facts in them are reported to the next one.
        """
        self.facts.note(message)
        if self._early_messages is not None:
            self._early_messages.append(message)
        elif self._writer is not None:
            self._writer.write(frames.encode(message))

    def look(self, now_s: float) -> None:
        """Make :meth:`follow` look for another connection if the coordinator is silent.

        The present connection is kept until there is another one. Called with every heartbeat.
        """
        if self._leases.expired(now_s) and self._reader is not None:
            self._reader.set_exception(_Silent())

    async def follow(self) -> AsyncIterator[Any]:
        """Yield every order of every coordinator, until the job ends or no coordinator is found.

        The order that ends the job is the last one; without it, no coordinator was found. Answers
        to heartbeats are handled here. A lost connection is replaced, and the facts are reported to
        the next coordinator.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection)
        early_messages, self._early_messages = self._early_messages or [], None
        for message in early_messages:
            self._writer.write(frames.encode(message))
        self._note_answer(self._now_ns())
        while self._reader is not None:
            try:
                while True:
                    message = await frames.read_message(self._reader)
                    if isinstance(message, Heard):
                        self._acknowledge(message)
                        continue
                    self.facts.note(message)
                    if isinstance(message, EndJob):
                        self._disconnect()  # the coordinator waits for this
                    yield message
                    if isinstance(message, EndJob):
                        return
            except _Silent:
                pass  # keep the connection: the coordinator may only be slow
            except (ConnectionError, Refused):
                self._disconnect()
            self._reader = await self._attach()

    def _note_answer(self, sent_ns: int) -> None:
        """Note that a coordinator has answered a message that was sent at ``sent_ns``."""
        self._leases.beat(_COORDINATOR, self._now_ns() / 1e9)
        self._acknowledged_ns = max(self._acknowledged_ns, sent_ns)

    def _acknowledge(self, acknowledgement: Heard) -> None:
        """Extend the lease of this node by an answer, and measure the clock offset."""
        sent_ns, now_ns, wall_ns = to_own(acknowledgement.sent_ns), self._now_ns(), time.time_ns()
        self.clock.hear(acknowledgement.wall_ns, wall_ns - (now_ns - sent_ns), now_ns - sent_ns)
        if sent_ns > self._acknowledged_ns:  # else it is a delayed answer
            self._acknowledged_ns = sent_ns
            self._leases.beat(_COORDINATOR, self._now_ns() / 1e9)

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _attach(self) -> asyncio.StreamReader | None:
        """Connect to the next coordinator, or to the same one again, and return its reader.

        Return None if no coordinator is found before the lease of this node is over. The time is
        never shorter than ``return_s``, as the node may have been suspended beyond its lease.
        """
        left_s = (self.lease_until_ns - self._now_ns()) / 1e9
        deadline_s = time.monotonic() + max(left_s, self._return_s)
        while (
            connection := await dial(self._find_coordinator, self._token, deadline_s)
        ) is not None:
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
        """Send the hello on a new connection, and use it once the coordinator welcomes the node.

        The facts are sent next. The old connection is closed, and the reader of the new one is
        returned.

        Raises:
            OSError: if the connection ends.
            Refused: if the answer is not the welcome of this coordinator or a later one.
        """
        sent_ns = self._now_ns()
        writer.write(frames.encode(self._hello()))
        welcome = await frames.read_message(reader)
        if not isinstance(welcome, Welcome) or welcome.term < self._term:
            raise Refused("not the coordinator of this term")
        self._disconnect()
        self._term, self._writer = welcome.term, writer
        self._note_answer(sent_ns)
        for message in self.facts.tell():
            writer.write(frames.encode(message))
        return reader


def attach_first(
    find_coordinator: Callable[[], Address], token: str, hello: AgentHello
) -> tuple[socket.socket, Welcome]:
    """Connect a new node, before its agent has an event loop.

    Return the connection and the coordinator's answer.

    Args:
        find_coordinator: returns the address of the coordinator; called for each attempt.

    Raises:
        OSError: if no coordinator is found within 20 s that accepts the token and the name.
        Refused: if the server there does not know the token, or is no coordinator.
    """
    deadline_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            connection = frames.connect(find_coordinator(), token, _ATTEMPT_S)
            try:
                frames.send(connection, hello)
                welcome = frames.receive(connection)
            except BaseException:
                connection.close()
                raise
            assert isinstance(welcome, Welcome)
            return connection, welcome
        except OSError:  # the coordinator may have ended just now: wait for the next one
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)
