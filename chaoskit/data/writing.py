"""Data files, written so that they are complete or not there, whatever is killed and whenever."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from chaoskit.checkpoint.files import sync_directory, write_all
from chaoskit.data.header import HEADER_BYTES, Header, Kind, require_dtype
from chaoskit.errors import BadInput

_INDEX_ALIGNMENT = 8


def write_tokens(path: str | Path, chunks: Iterable[ArrayLike | bytes], dtype: str = "uint16") -> Header:
    """Write a stream of tokens, for :class:`chaoskit.data.TokenFile`. Replaces the file at once, when it is complete.

    Args:
        chunks: arrays, lists or tensors of any lengths; bytes with ``dtype="uint8"``. One is in memory at a time.

    Raises:
        BadInput: if a token does not fit the type, or another process writes this file. OSError: if the disk is full
            or fails; the file is what it was before.
    """
    with _Draft(Path(path), require_dtype(dtype)).opened() as draft:
        for chunk in chunks:
            draft.append(chunk)
        return draft.publish("tokens", draft.count)


def write_records(path: str | Path, records: Iterable[ArrayLike | bytes], dtype: str = "uint8") -> Header:
    """Write samples of different lengths, for :class:`chaoskit.data.RecordFile`. Otherwise as :func:`write_tokens`."""
    with _Draft(Path(path), require_dtype(dtype)).opened() as draft:
        offsets = [0]
        for record in records:
            draft.append(record)
            offsets.append(draft.count)
        draft.add(b"\0" * (-draft.size_bytes % _INDEX_ALIGNMENT))
        draft.add(np.asarray(offsets, "<i8").tobytes())
        return draft.publish("records", len(offsets) - 1)


class _Draft:
    """The file under a name that nobody looks for. It is locked: what a killed writer left is taken over."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, np.dtype(dtype).newbyteorder("<")
        self._draft = path.with_name(f".{path.name}.draft")
        self._digest = xxhash.xxh3_128()
        self._fd = -1
        self.count = self.size_bytes = 0

    @contextmanager
    def opened(self) -> Iterator[_Draft]:
        self._fd = self._open()
        try:
            os.lseek(self._fd, HEADER_BYTES, os.SEEK_SET)
            yield self
        except BaseException:
            self._draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(self._fd)

    def _open(self) -> int:
        while True:
            fd = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_draft(fd):
                    os.ftruncate(fd, 0)
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise BadInput("path", str(self._path), "wait until the other process has written it") from None
            os.close(fd)  # it was published between our two calls

    def _is_draft(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._draft.stat())
        except FileNotFoundError:
            return False

    def append(self, values: ArrayLike | bytes) -> None:
        """Add values of the type."""
        array = self._converted(values)
        self.count += array.size
        self.add(array.data.cast("B") if array.size else b"")

    def _converted(self, values: ArrayLike | bytes) -> NDArray[Any]:
        given = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else np.asarray(values)
        if given.dtype == self._dtype or given.size == 0:
            return np.ascontiguousarray(given, self._dtype).reshape(-1)
        if self._dtype.kind in "iu":
            limits = np.iinfo(self._dtype)
            if given.dtype.kind not in "iub":
                raise BadInput("dtype", str(self._dtype), f"use a floating-point type: there is {given.dtype}")
            for value in (int(given.min()), int(given.max())):
                if not limits.min <= value <= limits.max:
                    raise BadInput("dtype", str(self._dtype), f"use a wider type: there is a {value}")
        return np.ascontiguousarray(given, self._dtype).reshape(-1)

    def add(self, data: bytes | memoryview) -> None:
        """Add bytes as they are."""
        if data:
            self._digest.update(data)
            self.size_bytes += write_all(self._fd, [memoryview(data)])

    def publish(self, kind: Kind, count: int) -> Header:
        """Make it the file of that name. When this returns, that outlives a loss of power."""
        header = Header(kind, self._dtype.name, count, self.size_bytes, self._digest.hexdigest())
        os.pwrite(self._fd, header.encode(), 0)
        os.fsync(self._fd)
        self._draft.rename(self._path)
        sync_directory(self._path.parent)
        return header
