"""The first page of a data file: what the rest of it is.

    chaoskit data 1
    {"kind":"tokens","dtype":"uint16","count":1000000,"size_bytes":2000000,"digest":"..."}

and the digest of these lines at the end of the page. What follows begins at a page of its own. Tokens are one array.
Records are one array of all values, then from a multiple of 8 on ``count + 1`` offsets (int64) of values: record ``i``
lies between offsets ``i`` and ``i + 1``. Numbers are little-endian.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from chaoskit.errors import BadInput

HEADER_BYTES = 4096
_MAGIC = b"chaoskit data "
_FIRST_LINE = _MAGIC + b"1\n"
_DIGEST_BYTES = 32

#: What values may be; the names are NumPy's.
DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float16", "float32", "float64")

Kind = Literal["tokens", "records"]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a data file holds.

    Attributes:
        count: tokens or records.
        size_bytes: of all that follows the header.
        digest: XXH3-128 of that.
    """

    kind: Kind
    dtype: str
    count: int
    size_bytes: int
    digest: str

    def encode(self) -> bytes:
        page = (_FIRST_LINE + msgspec.json.encode(self) + b"\n").ljust(HEADER_BYTES - _DIGEST_BYTES, b"\0")
        return page + xxhash.xxh3_128_hexdigest(page).encode()


def read_header(path: Path) -> Header | None:
    """The header of a file; None if it has none.

    Raises:
        BadInput: if there is no such file, or its header is of a later version or damaged, or the file is truncated.
    """
    try:
        with path.open("rb") as file:
            page = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise BadInput("path", str(path), f"name a file that can be read: {error.strerror}") from error
    if not page.startswith(_MAGIC):
        return None
    if not page.startswith(_FIRST_LINE):
        raise BadInput("path", str(path), "read it with a newer chaoskit, or write it again: it is of another version")
    if len(page) < HEADER_BYTES:
        raise BadInput("path", str(path), f"write it again: it is truncated, to {size} bytes")
    header = _decode(page)
    if header is None:
        raise BadInput("path", str(path), "write it again: its header is damaged")
    if size != HEADER_BYTES + header.size_bytes:
        wanted = HEADER_BYTES + header.size_bytes
        raise BadInput("path", str(path), f"write it again: it has {size} bytes instead of {wanted}")
    return header


def require(path: Path, kind: Kind) -> Header:
    """The header of a file of that kind.

    Raises:
        BadInput: as :func:`read_header`, and if it is a file of another kind.
    """
    header = read_header(path)
    if header is None:
        raise BadInput("path", str(path), f"make it with chaoskit.data.write_{kind}: it has no header")
    if header.kind != kind:
        raise BadInput("path", str(path), f"open it as what it is: a file of {header.kind}, not of {kind}")
    return header


def require_dtype(dtype: str) -> str:
    """
    Raises:
        BadInput: if values cannot be of this type.
    """
    if dtype not in DTYPES:
        raise BadInput("dtype", dtype, f"use one of {', '.join(DTYPES)}")
    return dtype


def _decode(page: bytes) -> Header | None:
    text, digest = page[:-_DIGEST_BYTES], page[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_hexdigest(text).encode() != digest:
        return None
    try:
        return msgspec.json.decode(text[len(_FIRST_LINE) :].rstrip(b"\0"), type=Header)
    except msgspec.MsgspecError:
        return None
