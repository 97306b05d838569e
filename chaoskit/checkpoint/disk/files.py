"""Files that are digested while they are written, and that are on the disk when they are said to be."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import xxhash

from chaoskit.checkpoint.layout.boundaries import Hook, undisturbed
from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, FileEntry

_MOST_BUFFERS = 1024  # of one system call: IOV_MAX
_UNDIGESTED_CHUNKS = 4  # more would keep too many copies of device memory alive
_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)  # other C libraries lack it
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class DigestedFile:
    """A new file, to which memory is appended. Digests are computed in a second thread, while the write is under way.

    The memory must not change until :meth:`close` returns: what differs between digest and disk is found as damage.
    """

    def __init__(self, path: Path, at: Hook = undisturbed) -> None:
        self.path, self._at = path, at
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
        self._digests: list[Future[str]] = []
        self._pending: list[memoryview] = []
        self._pending_bytes = self._written_bytes = 0

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def size_bytes(self) -> int:
        """Of all that was appended."""
        return self._written_bytes + self._pending_bytes

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes at the end. They are written no later than a chunk is full.

        Raises:
            OSError: if the disk is full or fails.
        """
        view = memoryview(data)
        while view:
            piece = view[: FILE_CHUNK_BYTES - self._pending_bytes]
            self._pending.append(piece)
            self._pending_bytes += len(piece)
            view = view[len(piece) :]
            if self._pending_bytes == FILE_CHUNK_BYTES:
                self._flush()

    def _flush(self) -> None:
        self._at("write")
        self._digests.append(self._thread.submit(_digest, self._pending))
        start = self._written_bytes
        for first in range(0, len(self._pending), _MOST_BUFFERS):
            self._written_bytes += write_all(self._fd, self._pending[first : first + _MOST_BUFFERS])
        self._pending, self._pending_bytes = [], 0
        if (
            _sync_file_range is not None
        ):  # the disk begins while the next chunk is copied; the sync is what counts
            _sync_file_range(self._fd, start, self._written_bytes - start, _SYNC_FILE_RANGE_WRITE)
        if len(self._digests) > _UNDIGESTED_CHUNKS:
            self._digests[-_UNDIGESTED_CHUNKS].result()

    def close(self) -> FileEntry:
        """Write the rest, and return when all of it is on the disk.

        Raises:
            OSError: if the disk is full or fails.
        """
        if self._pending:
            self._flush()
        self._at("sync")
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        digests = tuple(digest.result() for digest in self._digests)
        self._thread.shutdown()
        return FileEntry(self.path.name, self._written_bytes, digests)

    def discard(self) -> None:
        """Remove the file, if it was not closed."""
        self._thread.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> DigestedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()


def _digest(buffers: Sequence[memoryview]) -> str:
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def write_all(fd: int, buffers: Sequence[memoryview]) -> int:
    """Write all of at most 1024 buffers, in spite of interruptions; returns how many bytes that were."""
    written = total = os.writev(fd, buffers)
    while total < sum(map(len, buffers)):
        rest, skip = [], total
        for buffer in buffers:
            if skip < len(buffer):
                rest.append(buffer[skip:])
            skip = max(0, skip - len(buffer))
        written = os.writev(fd, rest)
        total += written
    return total


def write_file(
    path: Path, data: bytes, at: Hook = undisturbed, boundary: str = "sync"
) -> FileEntry:
    """A small new file, on the disk when this returns. ``boundary`` is reached between its write and its sync."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        at(boundary)
        os.fsync(file.fileno())
    chunks = (
        data[first : first + FILE_CHUNK_BYTES] for first in range(0, len(data), FILE_CHUNK_BYTES)
    )
    return FileEntry(path.name, len(data), tuple(map(xxhash.xxh3_128_hexdigest, chunks)))


def sync_directory(path: Path) -> None:
    """Have the disk know which names are in the directory."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, so that the disk knows of them."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory that others may be removing, too, or writing to: what cannot be removed now stays."""
    shutil.rmtree(path, ignore_errors=True)
