"""Files that are digested while they are written, and that are on the disk once they are closed.

-> ``disk/parts.py``: the tensors in such a file. ``disk/reading.py``: the digests are compared.
-> ``daemon/saving.py``: what a job does when the disk is full.
"""

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

_BUFFERS_MAX = 1024  # limit of a system call: IOV_MAX
_UNDIGESTED_CHUNKS_MAX = 4  # more would keep too many copies of device memory alive
_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)  # other C libraries lack it
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class DigestedFile:
    """A new file, to which memory is appended. A second thread computes digests during the writes.

    The memory must not change until :meth:`close` returns: a difference between digest and disk
    counts as damage. As a context manager, it removes a file that was not closed.

    Args:
        path: path of the new file.
        at: called with ``write`` before each chunk is written, and with ``sync`` before the sync.

    Raises:
        FileExistsError: if there is a file at ``path``.
        OSError: if the file cannot be made for another reason.
    """

    def __init__(self, path: Path, at: Hook = undisturbed) -> None:
        self.path, self._at = path, at
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._digester = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
        self._digests: list[Future[str]] = []
        self._pending: list[memoryview] = []
        self._pending_bytes = self._written_bytes = 0

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.path.name

    @property
    def size_bytes(self) -> int:
        """The number of bytes that were appended."""
        return self._written_bytes + self._pending_bytes

    def append(self, data: bytes | memoryview) -> None:
        """Add bytes at the end. They are written when a chunk is full.

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
        """Write the pending bytes as one chunk, and start to digest them.

        Wait for an older digest if too many are under way.
        """
        self._at("write")
        self._digests.append(self._digester.submit(_digest, self._pending))
        start = self._written_bytes
        for first in range(0, len(self._pending), _BUFFERS_MAX):
            self._written_bytes += write_all(self._fd, self._pending[first : first + _BUFFERS_MAX])
        self._pending, self._pending_bytes = [], 0
        # start the disk while the next chunk is copied; only the sync at the end is a guarantee
        if _sync_file_range is not None:
            _sync_file_range(self._fd, start, self._written_bytes - start, _SYNC_FILE_RANGE_WRITE)
        if len(self._digests) > _UNDIGESTED_CHUNKS_MAX:
            self._digests[-_UNDIGESTED_CHUNKS_MAX].result()

    def close(self) -> FileEntry:
        """Write the rest, wait until all data is on the disk, and return the file's entry.

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
        self._digester.shutdown()
        return FileEntry(self.path.name, self._written_bytes, digests)

    def discard(self) -> None:
        """Close and remove the file. A file that :meth:`close` completed stays."""
        self._digester.shutdown()
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
    """Return the XXH3-128 digest of all buffers together, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def write_all(fd: int, buffers: Sequence[memoryview]) -> int:
    """Write all of at most 1024 buffers, in spite of interruptions. Return the number of bytes.

    Raises:
        OSError: if the disk is full or fails.
    """
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
    """Write a small new file, which is on the disk when this returns.

    Return its entry for the manifest.

    Args:
        boundary: name of the place between write and sync, at which ``at`` is called.

    Raises:
        FileExistsError: if there is a file at ``path``.
        OSError: if the disk is full or fails. An incomplete file may be left.
    """
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
    """Write the names in a directory to the disk. Raise OSError if the disk fails."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, unless they exist, and write their names to the disk.

    Raises:
        OSError: if the disk is full or fails, or a path is that of a file.
    """
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and its contents, which other processes may be removing or writing.

    No error is raised: leftovers stay for a later call.
    """
    shutil.rmtree(path, ignore_errors=True)
