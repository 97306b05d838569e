"""How the members of a generation find each other: a small key-value store and a barrier, both interruptible.

torch's own TCPStore blocks every survivor when a second rank is lost during a rendezvous. Here the coordinator answers
``Superseded`` as soon as a newer generation exists, and :meth:`Rendezvous.interrupt` frees the caller at once.
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
    """A newer membership exists; what was begun for the old one must be dropped."""


class Rendezvous:
    """A connection to the coordinator's store. One thread uses it at a time; any thread may interrupt it."""

    def __init__(self, address: tuple[str, int], token: str, worker: str) -> None:
        self._connection = frames.connect(address, token, made=disown)
        self._interrupted = threading.Event()
        frames.send(self._connection, RendezvousHello(worker))

    def interrupt(self) -> None:
        """Make the current and every later call raise GenerationSuperseded."""
        self._interrupted.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed by the other side

    def close(self) -> None:
        reown(self._connection.fileno())
        self._connection.close()

    def put(self, generation: int, key: str, value: bytes) -> None:
        self._send(Put(generation, key, value))

    def get(self, generation: int, key: str) -> bytes:
        """The value of ``key``, as soon as some member has put it."""
        self._send(Get(generation, key))
        return self._receive(Value).value

    def exchange(self, generation: int, name: str, rank: int, value: bytes) -> tuple[bytes, ...]:
        """Everybody's ``value`` by rank, once every member of the generation has called this."""
        self._send(Exchange(generation, name, rank, value))
        return self._receive(Exchanged).values

    def _send(self, message: messages.Message) -> None:
        try:
            frames.send(self._connection, message)
        except OSError as error:
            raise self._reason(error) from error

    def _receive(self, kind: type[Reply]) -> Reply:
        try:
            reply = frames.receive(self._connection)
        except OSError as error:
            raise self._reason(error) from error
        if isinstance(reply, Superseded):
            raise GenerationSuperseded(f"generation {reply.generation} is over")
        if not isinstance(reply, kind):
            raise Refused(f"expected {kind.__name__}, got {type(reply).__name__}")
        return reply

    def _reason(self, error: OSError) -> Exception:
        if self._interrupted.is_set():
            return GenerationSuperseded("interrupted by a newer plan")
        return ConnectionError(f"lost the coordinator during a rendezvous: {error}")


class RendezvousStore(Store):
    """The part of torch's Store that gloo and NCCL use to exchange addresses, for one generation.

    Args:
        rank: given for gloo, where every rank puts one key that ends in its number and then asks for all others: one
            exchange answers them all, instead of a round trip each.
    """

    def __init__(self, rendezvous: Rendezvous, generation: int, rank: int | None = None) -> None:
        super().__init__()
        self._rendezvous, self._generation, self._rank = rendezvous, generation, rank
        self._cache: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        prefix, _, number = key.rpartition("/")
        if self._rank is None or number != str(self._rank):
            self._rendezvous.put(self._generation, key, data)
            return
        values = self._rendezvous.exchange(self._generation, f"store {prefix}", self._rank, data)
        self._cache.update((f"{prefix}/{rank}", theirs) for rank, theirs in enumerate(values))

    def get(self, key: str) -> bytes:
        if key not in self._cache:
            self._cache[key] = self._rendezvous.get(self._generation, key)
        return self._cache[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)
