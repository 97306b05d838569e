"""Histories that once broke a law, as ``known.toml`` lists them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from simulation.world import Kind

_FILE = Path(__file__).with_name("known.toml")


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of ``known.toml``.

    Attributes:
        kind: ``replicated``, ``sharded`` or ``kept``.
        seed: the seed of the history.
        law: the law that was broken.
        repaired: the change that repaired it.
        settled: the history must come to the size that was asked for; otherwise the seed shows
            nothing any more.
        followed: the batch of the history must follow the world, for the same reason.
    """

    kind: Kind
    seed: int
    law: str
    repaired: str
    settled: bool = False
    followed: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    history: tuple[Known, ...]


def known() -> tuple[Known, ...]:
    """Return all entries, in the order of the file."""
    return msgspec.toml.decode(_FILE.read_bytes(), type=_File).history


def seeds(kind: str) -> list[int]:
    """Return the seeds of a kind. They find a planted mistake sooner than other seeds."""
    return [history.seed for history in known() if history.kind == kind]
