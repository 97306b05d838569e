"""Server side of the rendezvous: keys and barriers of the current generation. A pure state machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from chaoskit.errors import Refused
from chaoskit.wire import messages
from chaoskit.wire.messages import Exchange, Exchanged, Get, Put, Superseded, Value

Client = Hashable


class Reply(NamedTuple):
    """What a client is told."""

    client: Client
    message: messages.Message


class RendezvousBoard:
    """Holds one generation; everybody who waits for an older one is told that it is over."""

    def __init__(self) -> None:
        self._generation, self._world = 0, 0
        self._values: dict[str, messages.Message] = {}
        self._waiting: dict[str, list[Client]] = defaultdict(list)
        self._arrived: dict[str, dict[int, bytes]] = {}

    def begin(self, generation: int, world: int) -> list[Reply]:
        """Open a generation of ``world`` ranks and close the one before."""
        over = Superseded(self._generation)
        replies = [Reply(client, over) for clients in self._waiting.values() for client in clients]
        self._generation, self._world = generation, world
        self._values, self._arrived = {}, {}
        self._waiting.clear()
        return replies

    def arrived(self, name: str) -> frozenset[int]:
        """Ranks of the current generation that have come to the barrier ``name``."""
        return frozenset(self._arrived.get(name, ()))

    def ask(self, client: Client, request: Any) -> list[Reply]:
        """Take in a request of a worker: its answer, now or when another request allows it.

        Raises:
            Refused: if it is no request to a rendezvous, or of a rank that the world does not have.
        """
        if not isinstance(request, (Put, Get, Exchange)):
            raise Refused(f"unexpected {type(request).__name__} in a rendezvous")
        if request.generation != self._generation:
            return (
                [] if isinstance(request, Put) else [Reply(client, Superseded(request.generation))]
            )
        if isinstance(request, Put):
            return self._resolve(f"key/{request.key}", Value(request.value))
        if isinstance(request, Get):
            return self._wait(client, f"key/{request.key}")
        if not 0 <= request.rank < self._world:
            raise Refused(f"rank {request.rank} of a world of {self._world} in a rendezvous")
        return [*self._arrive(request), *self._wait(client, f"exchange/{request.name}")]

    def forget(self, client: Client) -> None:
        """A client hung up."""
        for clients in self._waiting.values():
            if client in clients:
                clients.remove(client)

    def _arrive(self, request: Exchange) -> list[Reply]:
        arrived = self._arrived.setdefault(request.name, {})
        arrived[request.rank] = request.value
        if len(arrived) < self._world:
            return []
        return self._resolve(f"exchange/{request.name}", Exchanged(_by_rank(arrived.items())))

    def _resolve(self, key: str, value: messages.Message) -> list[Reply]:
        value = self._values.setdefault(key, value)
        return [Reply(client, value) for client in self._waiting.pop(key, ())]

    def _wait(self, client: Client, key: str) -> list[Reply]:
        if key in self._values:
            return [Reply(client, self._values[key])]
        self._waiting[key].append(client)
        return []


def _by_rank(arrived: Iterable[tuple[int, bytes]]) -> tuple[bytes, ...]:
    return tuple(value for _, value in sorted(arrived))
