"""A driver's line to its client: orders, answers, and errands that the client does meanwhile."""

from __future__ import annotations

import itertools
import math
import socket
import threading
from collections import deque

from chaoskit.errors import HarnessError
from chaoskit.experiment.remote.messages import (
    DoErrand,
    EndErrand,
    ErrandDone,
    FromDriver,
    Order,
    ToDriver,
    pieces,
)
from chaoskit.substrate.supervisor.socket_relay import LINE_BYTES_MAX
from chaoskit.wire import frames

_decode = frames.decoder(ToDriver)


class ClientLine:
    """The line, and the errands on it. ``line``: a Unix socket whose messages are kept apart."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._saying = line, threading.Lock()
        self._splitter = frames.Splitter(_decode)
        self._orders = deque[Order]()
        self._numbers = itertools.count(1)
        self._done: dict[int, str] = {}  # errand -> why it failed

    def say(self, answer: FromDriver) -> None:
        """Tell the client. Any thread may."""
        with self._saying:
            for piece in pieces(answer):
                self._line.send(piece)

    def next_order(self) -> Order | None:
        """Wait for an order; None when the client has hung up."""
        while not self._orders:
            if not self._hear(0):
                return None
        return self._orders.popleft()

    def _hear(self, flags: int) -> bool:
        try:
            data = self._line.recv(LINE_BYTES_MAX, flags)
        except ConnectionResetError:  # it has hung up, and had not read everything
            data = b""
        for message in self._splitter.feed(data):
            if isinstance(message, ErrandDone):
                self._done[message.number] = message.failure
            else:
                self._orders.append(message)
        return bool(data)

    # -- errands --------------------------------------------------------------------------------------------------

    def begin(self, name: str, machine: str, lasts_s: float = math.inf) -> int:
        """Have the client do it."""
        number = next(self._numbers)
        self.say(DoErrand(number, name, machine, None if lasts_s == math.inf else lasts_s))
        return number

    def is_done(self, number: int) -> bool:
        """Whether the client has said so. Raises HarnessError if it failed."""
        try:
            while number not in self._done and self._hear(socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return False
        if failure := self._done.get(number):
            raise HarnessError(failure)
        return number in self._done

    def end(self, number: int) -> None:
        """Have the client put it back."""
        self.say(EndErrand(number))

    def settle(self) -> None:
        """The client does that by itself, when it has the answer to its order."""
