"""An agent's line to the coordinator, whichever process that is.

Coordinators come and go; workers train on meanwhile. An agent attaches to the next one and says again what the one
before may have taken to its grave.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from chaoskit import messages, wire
from chaoskit.control.facts import Facts
from chaoskit.errors import Refused
from chaoskit.messages import AgentHello, EndJob, Welcome

_RETRY_S = 0.02
_ANSWER_S = 5.0  # a coordinator that accepts and then says nothing is given up


class Uplink:
    """Sends to the coordinator of the moment, and attaches to the next one.

    Args:
        connection: authenticated and welcomed.
        welcome: what the first coordinator said.
        hello: describes the node as it is now.
        outage_s: how long a coordinator may be missing.
    """

    def __init__(
        self,
        connection: socket.socket,
        address: tuple[str, int],
        token: str,
        welcome: Welcome,
        hello: Callable[[], AgentHello],
        outage_s: float,
    ) -> None:
        self._connection, self._address, self._token = connection, address, token
        self._hello, self._outage_s = hello, outage_s
        self._term = welcome.term
        self._writer: asyncio.StreamWriter | None = None
        self.facts = Facts()

    def tell(self, message: messages.Message) -> None:
        """Say it to the coordinator, if there is one. What must not be lost is told again to the next."""
        self.facts.note(message)
        if self._writer is not None:
            self._writer.write(wire.encode(message))

    async def follow(self) -> AsyncIterator[Any]:
        """Every message of every coordinator, until one ends the job or none is left."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        while self._writer is not None:
            try:
                while True:
                    message = await wire.read_message(reader)
                    self.facts.note(message)
                    yield message
                    if isinstance(message, EndJob):
                        return
            except (ConnectionError, Refused):
                writer, self._writer = self._writer, None
                writer.close()
            found = await self._attach()
            if found is None:
                return
            reader = found

    async def _attach(self) -> asyncio.StreamReader | None:
        """Find the next coordinator; None when there is none for too long."""
        deadline_s = time.monotonic() + self._outage_s
        while time.monotonic() < deadline_s:
            try:
                return await asyncio.wait_for(self._try_attach(), _ANSWER_S)
            except (OSError, TimeoutError, Refused):
                await asyncio.sleep(_RETRY_S)
        sys.stderr.write(f"no coordinator for {self._outage_s:g} s: giving up\n")
        return None

    async def _try_attach(self) -> asyncio.StreamReader:
        reader, writer = await wire.connect_async(self._address, self._token)
        try:
            writer.write(wire.encode(self._hello()))
            welcome = await wire.read_message(reader)
            if not isinstance(welcome, Welcome) or welcome.term < self._term:
                raise Refused("not the coordinator of this term")
        except BaseException:
            writer.close()
            raise
        self._term, self._writer = welcome.term, writer
        for message in self.facts.tell():
            writer.write(wire.encode(message))
        return reader
