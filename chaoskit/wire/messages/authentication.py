"""Messages by which both sides of a connection prove that they know the token.

-> wire/frames.py computes and compares the digests (``Handshake``).
"""

from __future__ import annotations

from chaoskit.wire.messages.base import Message


class Challenge(Message, frozen=True):
    """First message of a server on a connection."""

    nonce: bytes


class Proof(Message, frozen=True):
    """Answer of a client: its own nonce, and a digest of both nonces with the token."""

    nonce: bytes
    digest: bytes


class Accepted(Message, frozen=True):
    """Answer of the server to a valid proof, with a digest that proves that it knows the token."""

    digest: bytes
