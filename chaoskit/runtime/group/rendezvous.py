"""The rendezvous of a generation: an interruptible key-value store and barrier.

torch's own TCPStore blocks every survivor when a second rank is lost during a rendezvous. Here the
coordinator answers ``Superseded`` as soon as a newer generation exists, and
:meth:`Rendezvous.interrupt` frees the caller at once.

-> coordinator/rendezvous.py: the server side. group/regroup.py: what members exchange here.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in __all__

from chaoskit.errors import Refused
from chaoskit.runtime.group.process_group import disown, reown
from chaoskit.wire import frames, messages
from chaoskit.wire.messages import Exchange, Exchanged, Get, Put, RendezvousHello, Superseded, Value

Reply = TypeVar("Reply", Value, Exchanged)


class GenerationSuperseded(Exception):
    """The error of a wait that a newer membership ends. Drop what was begun for the old one."""


class Rendezvous:
    """A connection to the coordinator's store.

    One thread uses it at a time; any thread may interrupt it.

    A call that waits for an answer raises GenerationSuperseded once there is a newer generation.
    Every call raises it after :meth:`interrupt`, and ConnectionError if the coordinator is lost.
    Refused stands for an answer of another kind.

    Raises:
        OSError: if the coordinator cannot be reached.
        Refused: if the coordinator does not know the token.
    """

    def __init__(self, address: tuple[str, int], token: str, worker: str) -> None:
        self._connection = frames.connect(address, token, made=disown)
        self._interrupted = threading.Event()
        frames.send(self._connection, RendezvousHello(worker))

    def interrupt(self) -> None:
        """Make the current and every later call raise GenerationSuperseded. For any thread."""
        self._interrupted.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed by the other side

    def close(self) -> None:
        """Close the connection. No other call may follow, or be in progress."""
        reown(self._connection.fileno())
        self._connection.close()

    def put(self, generation: int, key: str, value: bytes) -> None:
        """Store ``value`` for all members of the generation. Does not wait for an answer."""
        self._send(Put(generation, key, value))

    def get(self, generation: int, key: str) -> bytes:
        """Return the value of ``key``, as soon as a member has put it. Blocks until then."""
        self._send(Get(generation, key))
        return self._receive(Value).value

    def exchange(self, generation: int, name: str, rank: int, value: bytes) -> tuple[bytes, ...]:
        """Return the ``value`` of all members by rank, once every member has called this.

        Args:
            name: the name of this barrier, which is used once in a generation.
        """
        self._send(Exchange(generation, name, rank, value))
        return self._receive(Exchanged).values

    def _send(self, message: messages.Message) -> None:
        try:
            frames.send(self._connection, message)
        except OSError as error:
            raise self._reason(error) from error

    def _receive(self, answer_type: type[Reply]) -> Reply:
        """Wait for the answer, which must be of this kind, and return it."""
        try:
            answer = frames.receive(self._connection)
        except OSError as error:
            raise self._reason(error) from error
        if isinstance(answer, Superseded):
            raise GenerationSuperseded(f"generation {answer.generation} is over")
        if not isinstance(answer, answer_type):
            raise Refused(f"expected {answer_type.__name__}, got {type(answer).__name__}")
        return answer

    def _reason(self, error: OSError) -> Exception:
        """Return the exception to raise for a connection error."""
        if self._interrupted.is_set():
            return GenerationSuperseded("interrupted by a newer plan")
        return ConnectionError(f"lost the coordinator during a rendezvous: {error}")


class RendezvousStore(Store):
    """The part of torch's Store with which gloo and NCCL exchange addresses, for one generation.

    Its methods raise the errors of :class:`Rendezvous`.

    Args:
        rank: given for gloo, where every rank puts one key that ends in its number and then reads
            those of all others. One exchange answers them all, instead of a round trip each.
    """

    def __init__(self, rendezvous: Rendezvous, generation: int, rank: int | None = None) -> None:
        super().__init__()
        self._rendezvous, self._generation, self._rank = rendezvous, generation, rank
        self._cache: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value. For gloo, wait until every rank has stored its own, and keep all."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        prefix, _, number = key.rpartition("/")
        if self._rank is None or number != str(self._rank):
            self._rendezvous.put(self._generation, key, data)
            return
        values = self._rendezvous.exchange(self._generation, f"store {prefix}", self._rank, data)
        self._cache.update(
            (f"{prefix}/{rank}", member_value) for rank, member_value in enumerate(values)
        )

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, as soon as a rank has stored it."""
        if key not in self._cache:
            self._cache[key] = self._rendezvous.get(self._generation, key)
        return self._cache[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all ``keys`` are stored. ``timeout`` is ignored: an interrupt ends the wait."""
        for key in keys:
            self.get(key)
