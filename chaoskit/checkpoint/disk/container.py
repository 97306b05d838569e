"""The container of a stored tensor: what ``torch.save`` would have put around its bytes, and no more.

Plain ``torch.distributed.checkpoint`` hands each stored tensor to ``torch.load``, which opens a zip archive. Here the
archive is built around bytes that stay where they are: a head and a tail of a few hundred bytes are all that is made.
The tensor's bytes are aligned in the file, so our own reader places them straight into a parameter. Their checksum is
left out, as after ``torch.serialization.set_crc32_options(False)``: torch never looks at it; the manifest has digests.

Sizes are always in the 64-bit fields of the format, so that a small tensor tests the code of a large one.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from typing import NamedTuple

#: Of the first byte of a tensor in its file.
ALIGN_BYTES = 64

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_EXTRA = struct.Struct("<2H")
_SIZES64 = struct.Struct("<2H2Q")
_SIZES64_ID, _PADDING_ID = 1, 0x4246  # the second is torch's own
_IN_64_BITS = 0xFFFFFFFF
_VERSION = 45  # the first with 64-bit sizes
_DATE = 0x21  # 1980-01-01, the first there is
_TENSOR = b"archive/data/0"


class Wrap(NamedTuple):
    """What goes before and after the bytes of a tensor."""

    head: bytes
    tail: bytes


def wrap(dtype: str, shape: tuple[int, ...], size_bytes: int, file_offset: int) -> Wrap:
    """The container for a contiguous tensor, if it begins at ``file_offset``.

    Args:
        dtype: such as ``float32``.
        shape: of the tensor.
        size_bytes: of its elements.
    """
    records = (
        (b"archive/data.pkl", _pickled(dtype, shape, size_bytes)),
        (b"archive/version", b"3\n"),
        (b"archive/byteorder", b"little"),
    )
    head, directory = b"", b""
    for name, data in records:
        crc = zlib.crc32(data)
        directory += _central(name, crc, len(data), len(head), b"")
        head += _local(name, crc, len(data), b"") + data
    sizes = _SIZES64.pack(_SIZES64_ID, 16, size_bytes, size_bytes)
    directory += _central(_TENSOR, 0, _IN_64_BITS, len(head), sizes)
    unpadded = file_offset + len(head) + _LOCAL.size + len(_TENSOR) + len(sizes) + _EXTRA.size
    padding = -unpadded % ALIGN_BYTES
    head += _local(
        _TENSOR, 0, _IN_64_BITS, sizes + _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
    )
    return Wrap(head, directory + _end(len(records) + 1, len(directory), len(head) + size_bytes))


def _local(name: bytes, crc: int, size: int, extra: bytes) -> bytes:
    fields = (b"PK\3\4", _VERSION, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    return _LOCAL.pack(*fields) + name + extra


def _central(name: bytes, crc: int, size: int, offset: int, extra: bytes) -> bytes:
    fields = (
        b"PK\1\2",
        _VERSION,
        _VERSION,
        0,
        0,
        0,
        _DATE,
        crc,
        size,
        size,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        offset,
    )
    return _CENTRAL.pack(*fields) + name + extra


def _end(count: int, directory_bytes: int, directory_offset: int) -> bytes:
    end64 = (
        b"PK\6\6",
        _END64.size - 12,
        _VERSION,
        _VERSION,
        0,
        0,
        count,
        count,
        directory_bytes,
        directory_offset,
    )
    locator = (b"PK\6\7", 0, directory_offset + directory_bytes, 1)
    end = (b"PK\5\6", 0, 0, count, count, directory_bytes, _IN_64_BITS, 0)
    return _END64.pack(*end64) + _LOCATOR.pack(*locator) + _END.pack(*end)


def _pickled(dtype: str, shape: tuple[int, ...], size_bytes: int) -> bytes:
    """The pickle that calls torch's own rebuilding function on the record with the bytes."""
    strides, length = [], 1
    for extent in reversed(shape):
        strides.append(length)
        length *= max(extent, 1)
    storage = (
        *(b"(", _atom("storage"), b"ctorch.storage\nUntypedStorage\n"),
        *(_atom("0"), _atom("cpu"), _atom(size_bytes), b"tQ"),
    )
    hooks, first, requires_grad = b"ccollections\nOrderedDict\n)R", _atom(0), _atom(False)
    arguments = (
        *storage,
        first,
        _atom(shape),
        _atom(tuple(reversed(strides))),
        requires_grad,
        hooks,
    )
    kind = f"ctorch\n{dtype}\n".encode()
    return b"".join((b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(", *arguments, kind, b"tR."))


def _atom(value: str | bool | int | tuple[int, ...]) -> bytes:
    """The opcodes that put a plain value on the stack."""
    return pickle.dumps(value, 2)[2:-1]
