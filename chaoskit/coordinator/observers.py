"""Observers of a coordinator: each is shown what happens, at its own rate, and costs nothing when it does not read."""

from __future__ import annotations

import asyncio
import math

from chaoskit.process.linux import print_line
from chaoskit.wire import frames, messages
from chaoskit.wire.messages import Heartbeat, ObserverHello

#: Heartbeats are not queued behind more than this: the next ones say the same again.
_SKIPPED_BYTES = 2**16
#: An observer that has left more than this unread is disconnected. The picture of a job of many nodes fits in it.
_UNREAD_BYTES_MAX = 2**23
#: Every heartbeat is shown for so long after anything else was: that is when observers measure times.
_EVENTFUL_S = 2.0


class Pace:
    """Which messages an observer is shown. A pure state machine.

    Args:
        heartbeat_s: at least so far apart are the heartbeats of a node while nothing else happens.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._shown_s: dict[str, float] = {}  # by node: its last heartbeat
        self._eventful_until_s = -math.inf

    def shows(self, message: messages.Message, now_s: float) -> bool:
        """Whether this message is shown. To be asked of every message, in order."""
        if not isinstance(message, Heartbeat):
            self._eventful_until_s = now_s + _EVENTFUL_S
            return True
        if now_s < self._eventful_until_s:
            return True
        if now_s < self._shown_s.get(message.node, -math.inf) + self._heartbeat_s:
            return False
        self._shown_s[message.node] = now_s
        return True


class Observers:
    """Those that are connected."""

    def __init__(self) -> None:
        self._paces: dict[asyncio.StreamWriter, Pace] = {}

    @property
    def writers(self) -> tuple[asyncio.StreamWriter, ...]:
        """Their connections."""
        return tuple(self._paces)

    def add(self, writer: asyncio.StreamWriter, hello: ObserverHello) -> None:
        """One has connected."""
        self._paces[writer] = Pace(hello.heartbeat_s)

    def discard(self, writer: asyncio.StreamWriter) -> None:
        """Its connection has ended."""
        self._paces.pop(writer, None)

    def show(self, message: messages.Message, now_s: float) -> None:
        """Show a message to those that are to see it. It is encoded only if there is one."""
        data = b""
        for writer, pace in list(self._paces.items()):
            if not pace.shows(message, now_s):
                continue
            unread_bytes = writer.transport.get_write_buffer_size()
            if unread_bytes > _UNREAD_BYTES_MAX:
                print_line(f"an observer has left {unread_bytes} bytes unread: it is disconnected")
                self.discard(writer)
                writer.transport.abort()
            elif not isinstance(message, Heartbeat) or unread_bytes <= _SKIPPED_BYTES:
                data = data or frames.encode(message)
                writer.write(data)
