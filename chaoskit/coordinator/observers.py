"""Observers of a coordinator: each gets messages at its own rate, and must read them.

-> substrate/cluster/job_cluster.py: the connection of a launcher or harness, which is an observer;
coordinator/server.py handles its requests. wire/announcements.py: what a new observer receives.
"""

from __future__ import annotations

import asyncio
import math

from chaoskit.process.linux import print_line
from chaoskit.wire import frames, messages
from chaoskit.wire.messages import Heartbeat, ObserverHello

#: Heartbeats are not queued behind more unread bytes: the next ones have newer values.
_SKIPPED_BYTES = 2**16
#: An observer with more unread bytes is disconnected. The first messages of a large job fit in it.
_UNREAD_BYTES_MAX = 2**23
#: Every heartbeat is shown for this long after any other message: observers measure times then.
_EVENTFUL_S = 2.0


class ObserverPace:
    """Selection of the messages that an observer is shown. A pure state machine.

    Args:
        heartbeat_s: least time between two shown heartbeats of a node while nothing else happens.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._shown_s: dict[str, float] = {}  # by node: its last heartbeat
        self._eventful_until_s = -math.inf

    def shows(self, message: messages.Message, now_s: float) -> bool:
        """Return whether a message is shown. To be called with every message, in order.

        A heartbeat may be left out; every other message is shown.
        """
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
    """The connected observers."""

    def __init__(self) -> None:
        self._paces: dict[asyncio.StreamWriter, ObserverPace] = {}

    @property
    def writers(self) -> tuple[asyncio.StreamWriter, ...]:
        """The connections of all observers."""
        return tuple(self._paces)

    def add(self, writer: asyncio.StreamWriter, hello: ObserverHello) -> None:
        """Add an observer that has connected, or change the pace of a known one."""
        self._paces[writer] = ObserverPace(hello.heartbeat_s)

    def discard(self, writer: asyncio.StreamWriter) -> None:
        """Remove the observer of a connection that has ended."""
        self._paces.pop(writer, None)

    def show(self, message: messages.Message, now_s: float) -> None:
        """Send a message to the observers that are to see it, by their pace.

        An observer with too many unread bytes is disconnected. A heartbeat is also left out for an
        observer with fewer, but still many.
        """
        data = b""
        for writer, pace in list(self._paces.items()):
            if not pace.shows(message, now_s):
                continue
            unread_bytes = writer.transport.get_write_buffer_size()
            if unread_bytes > _UNREAD_BYTES_MAX:
                print_line(f"disconnecting an observer that has left {unread_bytes} bytes unread")
                self.discard(writer)
                writer.transport.abort()
            elif not isinstance(message, Heartbeat) or unread_bytes <= _SKIPPED_BYTES:
                data = data or frames.encode(message)
                writer.write(data)
