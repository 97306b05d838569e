"""Map-style datasets over memory-mapped files. Opening one reads a page; all processes of a host share the others.

Mappings are copy-on-write: a tensor that shares memory with the file may be written to, which changes this process's
copy of the page and nothing else.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from chaoskit.checkpoint.manifest import Damaged
from chaoskit.data.header import HEADER_BYTES, Header, read_header, require, require_dtype
from chaoskit.errors import BadInput

#: For which the kernel sets no memory aside: the file may be larger than all of it. Python 3.13 has a name for it.
_MAP_NORESERVE = 0x4000
_DIGESTED_BYTES = 2**24  # at a time

Indices = Sequence[int] | NDArray[np.int64]


class Ragged(NamedTuple):
    """Records of different lengths, one after the other: of record ``i``, ``values[offsets[i] : offsets[i + 1]]``.

    Attributes:
        values: of shape (N,).
        offsets: int64 of shape (B + 1,): what kernels for packed sequences call ``cu_seqlens``.
    """

    values: Tensor
    offsets: Tensor


class TokenFile(Dataset[Tensor]):
    """A stream of tokens, cut into windows: sample ``i`` is ``context + 1`` tokens, from ``i * context`` on.

    The last token of a window is the first one of the next: each is once an input, and once a target.

    Args:
        path: made by :func:`chaoskit.data.write_tokens`, or any file that is nothing but tokens, with ``dtype``.
        context: T, tokens of input.
        dtype: of a file without a header, as NumPy calls it.
        as_dtype: of samples. None for that of the file: ``tokens[i]`` then shares memory with it, and copies nothing.

    Raises:
        BadInput: if it is truncated, of another type, or shorter than one window.
    """

    def __init__(
        self, path: str | Path, context: int, dtype: str | None = None, as_dtype: torch.dtype | None = torch.int64
    ) -> None:
        self.path, self._arguments = Path(path), (context, dtype, as_dtype)
        if context < 1:
            raise BadInput("context", context, "use 1 or more")
        self.header = read_header(self.path)
        if self.header is not None:
            self.header = require(self.path, "tokens")
            if dtype not in (None, self.header.dtype):
                raise BadInput("dtype", dtype, f"leave it out: the file holds {self.header.dtype}")
            dtype = self.header.dtype
        elif dtype is None:
            raise BadInput("dtype", None, f"say what the tokens in {self.path} are, such as uint16: it has no header")
        tokens = _array(self.path, self.header, require_dtype(dtype))
        count = (len(tokens) - 1) // context
        if count < 1:
            raise BadInput("path", str(path), f"use a file of at least {context + 1} tokens; it has {len(tokens)}")
        self._windows = np.lib.stride_tricks.as_strided(
            tokens, (count, context + 1), (context * tokens.itemsize, tokens.itemsize)
        )
        self._as_dtype = as_dtype

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor:
        """One window, of shape (T + 1,)."""
        return self._tensor(self._windows[index])

    def __getitems__(self, indices: Indices) -> Tensor:
        """Several windows, of shape (B, T + 1)."""
        return self._tensor(self._windows[np.asarray(indices, np.int64)])

    def _tensor(self, tokens: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(tokens)
        return tensor if self._as_dtype is None else tensor.to(self._as_dtype)

    def verify(self) -> None:
        """Read the whole file.

        Raises:
            Damaged: if it is not what was written. BadInput: if it has no header to tell.
        """
        _verify(self.path, self.header)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, *self._arguments)  # a spawned worker maps it again


class RecordFile(Dataset[Tensor]):
    """Samples of different lengths, such as documents or encoded images.

    Args:
        path: made by :func:`chaoskit.data.write_records`.

    Raises:
        BadInput: if it is truncated, or of another type.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header = require(self.path, "records")
        everything = _array(self.path, self.header, "uint8")
        index_bytes = 8 * (self.header.count + 1)
        self._offsets: NDArray[np.int64] = everything[-index_bytes:].view(np.int64)
        dtype = np.dtype(require_dtype(self.header.dtype))
        self._values = everything[: int(self._offsets[-1]) * dtype.itemsize].view(dtype)

    def __len__(self) -> int:
        return self.header.count

    def __getitem__(self, index: int) -> Tensor:
        """One record, of shape (N,); shares memory with the file."""
        return torch.from_numpy(self._record(range(len(self))[index]))

    def __getitems__(self, indices: Indices) -> Ragged:
        """Several records, in one copy."""
        count = range(len(self))
        records = [self._record(count[index]) for index in indices]
        offsets = np.zeros(len(records) + 1, np.int64)
        np.cumsum([len(record) for record in records], out=offsets[1:])
        values = np.concatenate(records) if records else self._values[:0].copy()
        return Ragged(torch.from_numpy(values), torch.from_numpy(offsets))

    def _record(self, index: int) -> NDArray[Any]:
        return self._values[self._offsets[index] : self._offsets[index + 1]]

    def verify(self) -> None:
        """Read the whole file.

        Raises:
            Damaged: if it is not what was written.
        """
        _verify(self.path, self.header)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)


def _array(path: Path, header: Header | None, dtype: str) -> NDArray[Any]:
    """The values of a file, mapped."""
    begin, size, itemsize = HEADER_BYTES if header else 0, path.stat().st_size, np.dtype(dtype).itemsize
    if (size - begin) % itemsize or size == begin:
        raise BadInput("path", str(path), f"use a file of whole {dtype}: it has {size - begin} bytes of data")
    with path.open("rb") as file:
        mapping = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    return np.frombuffer(mapping, np.dtype(dtype).newbyteorder("<"), offset=begin)


def _verify(path: Path, header: Header | None) -> None:
    if header is None:
        raise BadInput("path", str(path), "write it with chaoskit.data.write_tokens: without a header nothing can tell")
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while chunk := file.read(_DIGESTED_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != header.digest:
        raise Damaged(f"{path}: its data does not have the digest of its header")
