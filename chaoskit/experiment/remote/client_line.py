"""A driver's line to its client: orders, answers, and external commands that the client runs
meanwhile.

-> substrate/core/external_commands.py: how the client runs and undoes such a command.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
from collections import deque

from chaoskit.errors import HarnessError
from chaoskit.experiment.remote.messages import (
    ExternalCommandDone,
    FromDriver,
    Order,
    RunExternalCommand,
    ToDriver,
    UndoExternalCommand,
    pieces,
)
from chaoskit.substrate.supervisor.socket_relay import LINE_BYTES_MAX
from chaoskit.wire import frames

_decode = frames.decoder(ToDriver)


class ClientLine:
    """A line to the client, and the external commands that the client runs.

    Args:
        line: a Unix socket that preserves message boundaries.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line, self._send_lock = line, threading.Lock()
        self._splitter = frames.FrameSplitter(_decode)
        self._orders = deque[Order]()
        self._command_numbers = itertools.count(1)
        # number of a command that has ended -> its error
        self._command_failures: dict[int, str] = {}

    def say(self, answer: FromDriver) -> None:
        """Send a message to the client. Any thread may call this method."""
        with self._send_lock:
            for piece in pieces(answer):
                self._line.send(piece)

    def next_order(self) -> Order | None:
        """Wait for an order and return it; None when the client has disconnected."""
        while not self._orders:
            if not self._receive(0):
                return None
        return self._orders.popleft()

    def _receive(self, flags: int) -> bool:
        """Read from the line and dispatch the messages; return False at the end of the line."""
        try:
            data = self._line.recv(LINE_BYTES_MAX, flags)
        except ConnectionResetError:  # the client disconnected with unread data
            data = b""
        for message in self._splitter.feed(data):
            if isinstance(message, ExternalCommandDone):
                self._command_failures[message.number] = message.failure
            else:
                self._orders.append(message)
        return bool(data)

    # -- external commands -------------------------------------------------------------------------

    def begin(self, name: str, machine: str, lasts_s: float = math.inf) -> int:
        """Ask the client to run an external command, and return the command's number at once.

        Args:
            name: the name of the command.
            machine: the name of the machine on which it is run.
            lasts_s: the time in seconds after which the client undoes the effect; infinity for the
                end of the order.
        """
        number = next(self._command_numbers)
        self.say(
            RunExternalCommand(number, name, machine, None if lasts_s == math.inf else lasts_s)
        )
        return number

    def is_done(self, number: int) -> bool:
        """Return whether the client has reported the end of a command.

        Raises:
            HarnessError: if the command failed.
        """
        try:
            while number not in self._command_failures and self._receive(socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return False
        if failure := self._command_failures.get(number):
            raise HarnessError(failure)
        return number in self._command_failures

    def end(self, number: int) -> None:
        """Ask the client to undo the effect of a command; there is no answer."""
        self.say(UndoExternalCommand(number))

    def settle(self) -> None:
        """Do nothing: the client undoes all commands when it has the answer to its order."""
