"""Copies as a node keeps them, and what a fault can do to one where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from chaoskit.checkpoint.layout.arena import DATA_OFFSET, HEADER_BYTES, SEAL_OFFSET, ArenaView
from chaoskit.checkpoint.layout.seal import Seal, checksum

_PAGE_BYTES = 4096


class KeptCopy(NamedTuple):
    """A complete copy.

    Args:
        tier: ``memory``, of a worker of this node, or ``peer``, of another node's.
        path: where this process can open it.
        in_header: whether the copy itself bears the seal.
    """

    worker: str
    tier: str
    seal: Seal
    path: str
    in_header: bool = True

    @property
    def memory(self) -> int:
        """Number of the file in memory: another one lies elsewhere. Raises OSError if it is gone."""
        return Path(self.path).stat().st_ino

    def __str__(self) -> str:
        return f"{self.worker}, step {self.seal.step}, {self.tier} tier"


def newest(copies: Iterable[KeptCopy]) -> list[KeptCopy]:
    """Those of the newest state among them."""
    found = list(copies)
    recency = max((copy.seal.recency for copy in found), default=None)
    return [copy for copy in found if copy.seal.recency == recency]


def damage(copy: KeptCopy, how: str) -> tuple[str, bool]:
    """Change bytes of ``copy``: what is there now, in words, and whether it is no more what was sealed.

    Args:
        how: ``bit``, ``page`` (of the data), ``index`` or ``seal``.
    """
    place, mask = _place(copy.seal, how)
    file = os.open(copy.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(file, len(mask), place)
        os.pwrite(file, bytes(one ^ other for one, other in zip(before, mask, strict=False)), place)
    finally:
        os.close(file)
    after, found = _read_back(copy, place, len(before))
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    told = f"{copy}: changed bytes: {changed} ({how}), sealed as {copy.seal.checksum[:8]}, now {found[:8] or 'unsealed'}"
    return told, bool(changed) and found != copy.seal.checksum


def _place(seal: Seal, how: str) -> tuple[int, bytes]:
    """Where to write, and which bits to turn there."""
    middle = seal.size_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES
    match how:
        case "bit":
            return DATA_OFFSET + middle, b"\1"
        case "page":
            return DATA_OFFSET + middle, b"\xff" * min(_PAGE_BYTES, seal.size_bytes - middle)
        case "index":
            return HEADER_BYTES, b"\xff" * 16
        case _:
            return SEAL_OFFSET, b"\xff" * 16


def _read_back(copy: KeptCopy, place: int, size_bytes: int) -> tuple[bytes, str]:
    """Through a mapping of its own: the bytes, and the checksum of the whole; "" if its seal is no more one."""
    view = ArenaView.open(copy.path)
    try:
        if copy.in_header and not view.checksum:
            return bytes(view.bytes[place : place + size_bytes]), ""
        found = checksum(view.step, view.index_bytes(), view.scalars_bytes(), view.data())
        return bytes(view.bytes[place : place + size_bytes]), found
    finally:
        view.close()


def spoil(copy: KeptCopy) -> None:
    """Make ``copy`` one that is not complete: its writer goes on with the slot as with an empty one."""
    file = os.open(copy.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        view = ArenaView(file, writable=True)
        view.spoil()
        view.close()
    finally:
        os.close(file)
