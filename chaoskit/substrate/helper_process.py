"""Helper process that serves requests on a socket, and ends with its launcher.

Requests are served one after the other.

-> ``disk/process.py``, ``object_store/process.py`` and ``netns/switch_process.py``: the helper
processes. ``undo/entries.py`` (``EndEntry``): what ends one whose launcher was killed.
"""

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


class HelperAnswer(Protocol):
    """Answer of a helper process.

    Attributes:
        error: why the request failed; "" if it did not.
    """

    @property
    def error(self) -> str: ...


Answer = TypeVar("Answer", bound=HelperAnswer)


class HelperProcess(Generic[Answer]):
    """Launcher's end of a helper process. The process sends one answer unasked when it is ready.

    Args:
        name: name of the process, for messages.
        command: command line; its standard input is the socket.
        answer_decoder: decoder of all kinds of answers.
        undo: log for the entry that ends the process if the launcher cannot.

    Raises:
        HarnessError: if the process does not become ready within 20 s.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        answer_decoder: msgspec.json.Decoder[Answer],
        undo: UndoLog,
    ) -> None:
        self._name, self._answer_decoder = name, answer_decoder
        self._connection, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_ANSWER_S)
        self.process = subprocess.Popen(
            command, stdin=remote.fileno(), stdout=2, start_new_session=True
        )
        remote.close()
        self._undo = undo.plan(EndEntry(self.process.pid, start_ticks(self.process.pid)))
        try:
            self._receive()
        except HarnessError:
            self.close()
            raise

    def ask(self, request: msgspec.Struct, *descriptors: int) -> tuple[Answer, list[int]]:
        """Send a request with ``descriptors``, and wait for the answer.

        Return the answer and the descriptors that came with it, which the caller must close.

        Raises:
            HarnessError: if the request failed, with the reason. Also if the process is gone, or
                does not answer within 20 s.
        """
        try:
            socket.send_fds(self._connection, [msgspec.json.encode(request)], list(descriptors))
        except OSError as error:
            raise HarnessError(f"{self._name} is gone: {error}") from error
        return self._receive()

    def _receive(self) -> tuple[Answer, list[int]]:
        """Return the next answer and its descriptors. Raises HarnessError as :meth:`ask`."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, BYTES_MAX, DESCRIPTORS_MAX)
        except TimeoutError:
            raise HarnessError(f"{self._name} did not answer for {_ANSWER_S:g} s") from None
        except OSError as error:
            raise HarnessError(f"{self._name} is gone: {error}") from error
        if not data:
            raise HarnessError(f"{self._name} is gone; see its output above")
        answer = self._answer_decoder.decode(data)
        if answer.error:
            raise HarnessError(answer.error)
        return answer, descriptors

    def close(self) -> None:
        """End the process, and wait for that. It is killed if it does not end within 5 s."""
        self._connection.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._undo.done()


def take_launcher_socket() -> socket.socket:
    """Return the launcher's socket, which is standard input of the helper process.

    Standard input is then connected to /dev/null.
    """
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return connection
