"""Messages between a worker and the coordinator by which the members of a generation meet.

-> runtime/group/rendezvous.py: the client; coordinator/rendezvous.py: the server.
"""

from __future__ import annotations

from chaoskit.wire.messages.base import Message


class RendezvousHello(Message, frozen=True):
    """Registration of a worker at the rendezvous."""

    worker: str


class Put(Message, frozen=True):
    """Request to set a key to a value; the first value of a key stays.

    There is no answer. A request of another generation than the current one is ignored.
    """

    generation: int
    key: str
    value: bytes


class Get(Message, frozen=True):
    """Request for a value.

    The answer is :class:`Value` as soon as the key exists, or :class:`Superseded`.
    """

    generation: int
    key: str


class Value(Message, frozen=True):
    """Answer to :class:`Get`."""

    value: bytes


class Exchange(Message, frozen=True):
    """Arrival of a rank at a barrier, with a small value.

    The answer is :class:`Exchanged` when the last rank has arrived, or :class:`Superseded`.
    """

    generation: int
    name: str
    rank: int
    value: bytes


class Exchanged(Message, frozen=True):
    """Answer to :class:`Exchange`: the values of all ranks, by rank."""

    values: tuple[bytes, ...]


class Superseded(Message, frozen=True):
    """Answer to a request for another generation than the current one.

    ``generation`` is that of the request.
    """

    generation: int
