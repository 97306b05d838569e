"""The container of a stored tensor: the bytes that ``torch.save`` would put around its data.

Plain ``torch.distributed.checkpoint`` passes each stored tensor to ``torch.load``, which opens a
zip archive. Here the archive is built around bytes that stay in place: only a head and a tail of a
few hundred bytes are made. The tensor's bytes are aligned in the file, so our own reader places
them straight into a parameter. Their CRC is left out, as after
``torch.serialization.set_crc32_options(False)``: torch does not check it, and the manifest has
digests.

Sizes are always in the 64-bit fields of the format, so that a small tensor tests the code of a
large one.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from typing import NamedTuple

#: Alignment of the first byte of a tensor in its file.
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
_DATE = 0x21  # 1980-01-01, the first date of the format
_TENSOR = b"archive/data/0"


class Wrap(NamedTuple):
    """The bytes before and after those of a tensor."""

    head: bytes
    tail: bytes


def wrap(dtype: str, shape: tuple[int, ...], size_bytes: int, file_offset: int) -> Wrap:
    """Return the container for a contiguous tensor, if the container begins at ``file_offset``.

    Args:
        dtype: type of the elements, such as ``float32``.
        shape: shape of the tensor.
        size_bytes: size of all elements.
    """
    records = (
        (b"archive/data.pkl", _pickled_tensor(dtype, shape, size_bytes)),
        (b"archive/version", b"3\n"),
        (b"archive/byteorder", b"little"),
    )
    head, directory = b"", b""
    for name, data in records:
        crc = zlib.crc32(data)
        directory += _central_entry(name, crc, len(data), len(head), b"")
        head += _local_header(name, crc, len(data), b"") + data
    sizes = _SIZES64.pack(_SIZES64_ID, 16, size_bytes, size_bytes)
    directory += _central_entry(_TENSOR, 0, _IN_64_BITS, len(head), sizes)
    unpadded = file_offset + len(head) + _LOCAL.size + len(_TENSOR) + len(sizes) + _EXTRA.size
    padding = -unpadded % ALIGN_BYTES
    head += _local_header(
        _TENSOR, 0, _IN_64_BITS, sizes + _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
    )
    return Wrap(
        head, directory + _archive_end(len(records) + 1, len(directory), len(head) + size_bytes)
    )


def _local_header(name: bytes, crc: int, size: int, extra: bytes) -> bytes:
    """Return the local header of a record, which precedes its data."""
    fields = (b"PK\3\4", _VERSION, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    return _LOCAL.pack(*fields) + name + extra


def _central_entry(name: bytes, crc: int, size: int, offset: int, extra: bytes) -> bytes:
    """Return the entry of a record in the central directory."""
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


def _archive_end(count: int, directory_bytes: int, directory_offset: int) -> bytes:
    """Return the end of the archive: both end-of-directory records and the locator."""
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


def _pickled_tensor(dtype: str, shape: tuple[int, ...], size_bytes: int) -> bytes:
    """Return a pickle that calls torch's rebuilding function on the record with the bytes."""
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(extent, 1)
    storage = (
        *(b"(", _pickled_value("storage"), b"ctorch.storage\nUntypedStorage\n"),
        *(_pickled_value("0"), _pickled_value("cpu"), _pickled_value(size_bytes), b"tQ"),
    )
    hooks, storage_offset, requires_grad = (
        b"ccollections\nOrderedDict\n)R",
        _pickled_value(0),
        _pickled_value(False),
    )
    arguments = (
        *storage,
        storage_offset,
        _pickled_value(shape),
        _pickled_value(tuple(reversed(strides))),
        requires_grad,
        hooks,
    )
    dtype_opcode = f"ctorch\n{dtype}\n".encode()
    return b"".join(
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(", *arguments, dtype_opcode, b"tR.")
    )


def _pickled_value(value: str | bool | int | tuple[int, ...]) -> bytes:
    """Return the opcodes that push a plain value on the stack."""
    return pickle.dumps(value, 2)[2:-1]
