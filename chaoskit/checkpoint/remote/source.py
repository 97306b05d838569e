"""The source of an upload: a committed snapshot in a local directory."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import xxhash

from chaoskit.checkpoint.layout.manifest import (
    FILE_CHUNK_BYTES,
    MANIFEST,
    Damaged,
    FileEntry,
    decode_manifest,
)
from chaoskit.errors import ChaoskitError

Bytes = bytes | bytearray | memoryview
_HELD_MAX = (
    256  # of the files that a process may have open, no more than a quarter of what is usual
)


class DirectorySource:
    """A committed snapshot on a local disk. Its files are kept open: it may be pruned while it is uploaded.

    Raises:
        ChaoskitError: if there is none; Damaged if its manifest is.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[str, int] = {}
        weakref.finalize(self, _close_all, self._held)
        try:
            self.manifest = decode_manifest((directory / MANIFEST).read_bytes())
            for entry in self.manifest.files[:_HELD_MAX]:
                self._held[entry.name] = os.open(directory / entry.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ChaoskitError(f"no committed snapshot in {directory}: {error}") from None

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Read so many bytes of a file, on any thread. Raises ChaoskitError if they cannot be read."""
        try:
            if name in self._held:
                return os.pread(self._held[name], size_bytes, offset)
            with (self._directory / name).open("rb") as file:
                return os.pread(file.fileno(), size_bytes, offset)
        except OSError as error:
            raise ChaoskitError(
                f"the snapshot in {self._directory} cannot be read any more: {error}"
            ) from None


def _close_all(held: dict[str, int]) -> None:
    for fd in held.values():
        os.close(fd)


def read_checked(source: DirectorySource, entry: FileEntry, offset: int, size_bytes: int) -> bytes:
    """Whole chunks of a file, if they are what the manifest says: damage here must not become a good copy there.

    Raises:
        Damaged: if they are not.
    """
    data = source.read(entry.name, offset, size_bytes)
    if len(data) != size_bytes:
        raise Damaged(f"{entry.name} ends at {offset + len(data)} of {entry.size_bytes} bytes")
    view = memoryview(data)
    for begin in range(0, size_bytes, FILE_CHUNK_BYTES):
        check_chunk(
            entry, (offset + begin) // FILE_CHUNK_BYTES, view[begin : begin + FILE_CHUNK_BYTES]
        )
    return data


def check_chunk(entry: FileEntry, number: int, data: Bytes) -> None:
    """Raises Damaged if a chunk of a file is not what the manifest says."""
    if xxhash.xxh3_128_hexdigest(data) != entry.chunks[number]:
        raise Damaged(f"chunk {number} of {entry.name} has another digest")
