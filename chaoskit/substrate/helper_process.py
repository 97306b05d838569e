"""A process of ours that does what it is asked over a socket, one thing after the other, and ends with its launcher."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from chaoskit.errors import HarnessError
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.undo import EndEntry, UndoLog

BYTES_MAX = 2**20
DESCRIPTORS_MAX = 253  # the kernel's limit for one message
_ANSWER_S = 20.0
_END_S = 5.0


class Answer(Protocol):
    """What it answers with. ``error``: why it could not do what it was asked, or ""."""

    @property
    def error(self) -> str: ...


Done = TypeVar("Done", bound=Answer)


class Servant(Generic[Done]):
    """Starts the process, and asks it. It says once, unasked, that it is ready.

    Args:
        name: for messages. command: its standard input is the socket. answers: of all kinds of answers.
        undo: gets the entry that ends the process if the launcher cannot.

    Raises:
        HarnessError: if it does not get ready.
    """

    def __init__(
        self, name: str, command: Sequence[str], answers: msgspec.json.Decoder[Done], undo: UndoLog
    ) -> None:
        self._name, self._answers = name, answers
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_ANSWER_S)
        self.process = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=2, start_new_session=True
        )
        theirs.close()
        self._undo = undo.plan(EndEntry(self.process.pid, start_ticks(self.process.pid)))
        try:
            self._receive()
        except HarnessError:
            self.close()
            raise

    def ask(self, request: msgspec.Struct, *descriptors: int) -> tuple[Done, list[int]]:
        """Have it done; ``descriptors`` go with it. Gives the answer and the descriptors that came with it.

        Raises:
            HarnessError: with the reason, if it could not be done.
        """
        try:
            socket.send_fds(self._connection, [msgspec.json.encode(request)], list(descriptors))
        except OSError as error:
            raise HarnessError(f"{self._name} is gone: {error}") from error
        return self._receive()

    def _receive(self) -> tuple[Done, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, BYTES_MAX, DESCRIPTORS_MAX)
        except TimeoutError:
            raise HarnessError(f"{self._name} said nothing for {_ANSWER_S:g} s") from None
        except OSError as error:
            raise HarnessError(f"{self._name} is gone: {error}") from error
        if not data:
            raise HarnessError(f"{self._name} is gone; see its output above")
        answer = self._answers.decode(data)
        if answer.error:
            raise HarnessError(answer.error)
        return answer, descriptors

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._undo.done()


def serve_launcher() -> socket.socket:
    """In the process itself: its launcher's socket, which was its standard input."""
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return connection
