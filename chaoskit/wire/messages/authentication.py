"""Both sides of a connection show that they know the token."""

from __future__ import annotations

from chaoskit.wire.messages.base import Message


class Challenge(Message, frozen=True):
    nonce: bytes


class Proof(Message, frozen=True):
    nonce: bytes
    digest: bytes


class Accepted(Message, frozen=True):
    digest: bytes
