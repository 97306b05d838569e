"""How a file is cut into the parts of a multipart upload, and what S3 says of them. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES

#: S3 takes no more parts of one object.
PARTS_MAX = 10_000


class Part(NamedTuple):
    """Bytes of a file; ``number`` counts from 1."""

    number: int
    offset: int
    size_bytes: int


class Taken(NamedTuple):
    """A part that the store has. ``etag``: without quotes."""

    size_bytes: int
    etag: str


def part_bytes(size_bytes: int) -> int:
    """Size of the parts: whole chunks, so that each can be checked before it is sent; no more of them than S3 takes."""
    return FILE_CHUNK_BYTES * max(1, -(-size_bytes // (FILE_CHUNK_BYTES * PARTS_MAX)))


def cut(size_bytes: int) -> list[Part]:
    """The parts of a file; one empty part for an empty one."""
    step = part_bytes(size_bytes)
    offsets = range(0, max(1, size_bytes), step)
    return [
        Part(number, offset, min(step, size_bytes - offset))
        for number, offset in enumerate(offsets, 1)
    ]


def md5(data: bytes) -> str:
    """What S3 calls the ETag of a part, unless it encrypts with keys of a customer. Against accidents alone."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def content_md5(etag: str) -> str:
    """The same for the header by which the store checks what it takes."""
    return base64.b64encode(bytes.fromhex(etag)).decode()


def whole_etag(etags: Sequence[str]) -> str:
    """What S3 calls the ETag of an object made of parts."""
    return f"{md5(b''.join(map(bytes.fromhex, etags)))}-{len(etags)}"
