"""The copies that a node keeps, and the damage that a fault can do to them in place.

-> ``daemon/injection.py``: carries the order out. ``faults/storage/copies.py``: the fault.
-> ``checkpoint/memory/stored.py``: a reader finds the damage.
"""

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
        worker: worker whose state or piece it is.
        tier: ``memory`` for a worker of this node, or ``peer`` for one of another node.
        seal: its seal.
        path: path at which this process can open it.
        in_header: True if the copy itself has the seal in its header.
    """

    worker: str
    tier: str
    seal: Seal
    path: str
    in_header: bool = True

    @property
    def inode(self) -> int:
        """The inode of the memory file, which differs for a copy in other memory.

        Raises:
            OSError: if the memory is gone.
        """
        return Path(self.path).stat().st_ino

    def __str__(self) -> str:
        return f"{self.worker}, step {self.seal.step}, {self.tier} tier"


def newest(copies: Iterable[KeptCopy]) -> list[KeptCopy]:
    """Return the copies of the newest state among ``copies``; [] without copies."""
    candidates = list(copies)
    recency = max((copy.seal.recency for copy in candidates), default=None)
    return [copy for copy in candidates if copy.seal.recency == recency]


def damage(copy: KeptCopy, damaged_part: str) -> tuple[str, bool]:
    """Change bytes of a copy in place.

    Return a description for the report, and True if the copy no longer matches its seal.

    Args:
        damaged_part: part to change: ``bit`` or ``page`` of the data, ``index`` or ``seal``.

    Raises:
        OSError: if the memory of the copy is gone.
    """
    place, mask = _bits_to_flip(copy.seal, damaged_part)
    file = os.open(copy.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(file, len(mask), place)
        os.pwrite(file, bytes(byte ^ bits for byte, bits in zip(before, mask, strict=False)), place)
    finally:
        os.close(file)
    after, digest = _read_back(copy, place, len(before))
    changed = sum(
        byte_before != byte_after for byte_before, byte_after in zip(before, after, strict=True)
    )
    text = (
        f"{copy}: changed bytes: {changed} ({damaged_part}), "
        f"sealed as {copy.seal.checksum[:8]}, now {digest[:8] or 'unsealed'}"
    )
    return text, bool(changed) and digest != copy.seal.checksum


def _bits_to_flip(seal: Seal, damaged_part: str) -> tuple[int, bytes]:
    """Return the offset to write at, and the bits to flip there."""
    middle_page = seal.size_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES
    match damaged_part:
        case "bit":
            return DATA_OFFSET + middle_page, b"\1"
        case "page":
            return DATA_OFFSET + middle_page, b"\xff" * min(
                _PAGE_BYTES, seal.size_bytes - middle_page
            )
        case "index":
            return HEADER_BYTES, b"\xff" * 16
        case _:
            return SEAL_OFFSET, b"\xff" * 16


def _read_back(copy: KeptCopy, place: int, size_bytes: int) -> tuple[bytes, str]:
    """Return the bytes at ``place`` and the checksum of the whole copy, read through a new mapping.

    The checksum is "" if the seal is damaged.
    """
    view = ArenaView.open(copy.path)
    try:
        if copy.in_header and not view.checksum:
            return bytes(view.bytes[place : place + size_bytes]), ""
        checksum_now = checksum(view.step, view.index_bytes(), view.scalars_bytes(), view.data())
        return bytes(view.bytes[place : place + size_bytes]), checksum_now
    finally:
        view.close()


def unseal(copy: KeptCopy) -> None:
    """Mark a copy in its memory as incomplete, so that its writer treats the slot as empty.

    Raises:
        OSError: if the memory of the copy is gone.
    """
    file = os.open(copy.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        view = ArenaView(file, writable=True)
        view.invalidate()
        view.close()
    finally:
        os.close(file)
