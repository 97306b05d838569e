"""Base of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""
