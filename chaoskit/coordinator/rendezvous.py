"""Server side of the rendezvous: keys and barriers of the current generation.

A pure state machine. Requests of any other generation are refused.

-> runtime/group/rendezvous.py: the client in a worker; runtime/group/regroup.py: what the members
exchange. coordinator/server.py authenticates the clients, and sends the replies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from chaoskit.errors import Refused
from chaoskit.wire import messages
from chaoskit.wire.messages import Exchange, Exchanged, Get, Put, Superseded, Value

Client = Hashable


class RendezvousReply(NamedTuple):
    """A message to be sent to the client of a rendezvous."""

    client: Client
    message: messages.Message


class RendezvousBoard:
    """The rendezvous of the current generation.

    A client that waits when a new generation begins receives :class:`Superseded`. So does a client
    that asks for any other generation than the current one.
    """

    def __init__(self) -> None:
        self._generation, self._world = 0, 0
        self._values: dict[str, messages.Message] = {}
        self._waiting: dict[str, list[Client]] = defaultdict(list)
        self._arrived: dict[str, dict[int, bytes]] = {}

    def begin(self, generation: int, world: int) -> list[RendezvousReply]:
        """Open a generation of ``world`` ranks, without any keys, and close the one before.

        Return the replies to the clients that still wait in the older generation.
        """
        superseded = Superseded(self._generation)
        replies = [
            RendezvousReply(client, superseded)
            for clients in self._waiting.values()
            for client in clients
        ]
        self._generation, self._world = generation, world
        self._values, self._arrived = {}, {}
        self._waiting.clear()
        return replies

    def arrived(self, name: str) -> frozenset[int]:
        """Return the ranks of the current generation that have come to the barrier ``name``."""
        return frozenset(self._arrived.get(name, ()))

    def ask(self, client: Client, request: Any) -> list[RendezvousReply]:
        """Take in a request of a worker, and return the replies that it makes possible.

        A client without a reply waits until another request, or the next generation, answers it. A
        :class:`Put` has no reply of its own, and is ignored if it is of another generation. The
        first value of a key stays.

        Raises:
            Refused: if it is no request to a rendezvous, or of a rank that the world does not have.
        """
        if not isinstance(request, (Put, Get, Exchange)):
            raise Refused(f"unexpected {type(request).__name__} in a rendezvous")
        if request.generation != self._generation:
            return (
                []
                if isinstance(request, Put)
                else [RendezvousReply(client, Superseded(request.generation))]
            )
        if isinstance(request, Put):
            return self._resolve(f"key/{request.key}", Value(request.value))
        if isinstance(request, Get):
            return self._wait(client, f"key/{request.key}")
        if not 0 <= request.rank < self._world:
            raise Refused(f"no rank {request.rank} in a rendezvous of {self._world} ranks")
        return [*self._arrive(request), *self._wait(client, f"exchange/{request.name}")]

    def forget(self, client: Client) -> None:
        """Forget a client that hung up: it waits for no more replies."""
        for clients in self._waiting.values():
            if client in clients:
                clients.remove(client)

    def _arrive(self, request: Exchange) -> list[RendezvousReply]:
        arrived = self._arrived.setdefault(request.name, {})
        arrived[request.rank] = request.value
        if len(arrived) < self._world:
            return []
        return self._resolve(f"exchange/{request.name}", Exchanged(_by_rank(arrived.items())))

    def _resolve(self, key: str, value: messages.Message) -> list[RendezvousReply]:
        value = self._values.setdefault(key, value)
        return [RendezvousReply(client, value) for client in self._waiting.pop(key, ())]

    def _wait(self, client: Client, key: str) -> list[RendezvousReply]:
        if key in self._values:
            return [RendezvousReply(client, self._values[key])]
        self._waiting[key].append(client)
        return []


def _by_rank(arrived: Iterable[tuple[int, bytes]]) -> tuple[bytes, ...]:
    return tuple(value for _, value in sorted(arrived))
