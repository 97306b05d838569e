"""How the members of a generation meet: between a worker and the coordinator."""

from __future__ import annotations

from chaoskit.wire.messages.base import Message


class RendezvousHello(Message, frozen=True):
    worker: str


class Put(Message, frozen=True):
    generation: int
    key: str
    value: bytes


class Get(Message, frozen=True):
    """Answered by :class:`Value` as soon as the key exists, or by :class:`Superseded`."""

    generation: int
    key: str


class Value(Message, frozen=True):
    value: bytes


class Exchange(Message, frozen=True):
    """A barrier that carries one small value a rank; answered by :class:`Exchanged` when the last one arrived."""

    generation: int
    name: str
    rank: int
    value: bytes


class Exchanged(Message, frozen=True):
    values: tuple[bytes, ...]


class Superseded(Message, frozen=True):
    """The generation asked for is not the current one any more."""

    generation: int
