"""Parts of a multipart upload, and the ETags that S3 computes for them. Pure.

-> ``remote/s3.py``: sends the parts. ``disk/parts.py``: the part of a snapshot that a rank writes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES

#: The most parts that S3 accepts of one object.
PARTS_MAX = 10_000


class UploadPart(NamedTuple):
    """A range of bytes of a file; ``number`` counts from 1."""

    number: int
    offset: int
    size_bytes: int


class UploadedPart(NamedTuple):
    """A part that the store has. ``etag`` has no quotes."""

    size_bytes: int
    etag: str


def part_bytes(size_bytes: int) -> int:
    """Return the size of the parts of a file of ``size_bytes``, in bytes.

    A part has whole chunks, so that it can be verified before it is sent. There are at most as many
    parts as S3 accepts.
    """
    return FILE_CHUNK_BYTES * max(1, -(-size_bytes // (FILE_CHUNK_BYTES * PARTS_MAX)))


def cut(size_bytes: int) -> list[UploadPart]:
    """Return the parts of a file of ``size_bytes``; one empty part for an empty file."""
    step = part_bytes(size_bytes)
    offsets = range(0, max(1, size_bytes), step)
    return [
        UploadPart(number, offset, min(step, size_bytes - offset))
        for number, offset in enumerate(offsets, 1)
    ]


def md5(data: bytes) -> str:
    """Return the MD5 of a part in hexadecimal, which is its ETag in S3.

    If S3 encrypts with keys of KMS or of the customer, the ETag is another one. MD5 detects
    accidents only.
    """
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def content_md5(etag: str) -> str:
    """Return the Content-MD5 header with which the store verifies a part, from the part's ETag."""
    return base64.b64encode(bytes.fromhex(etag)).decode()


def whole_etag(etags: Sequence[str]) -> str:
    """Return the ETag in S3 of an object made of parts."""
    return f"{md5(b''.join(map(bytes.fromhex, etags)))}-{len(etags)}"
