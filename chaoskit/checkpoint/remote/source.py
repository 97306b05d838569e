"""The source of an upload: a committed snapshot in a local directory.

-> ``remote/upload.py``: sends its files. ``remote/uploader.py``: which snapshot is next.
"""

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
_HELD_MAX = 256  # a quarter of the usual limit of open files


class DirectorySource:
    """A committed snapshot on a local disk.

    Its first 256 files stay open, so that it may be pruned meanwhile.

    Attributes:
        manifest: the manifest of the snapshot.

    Raises:
        Damaged: if its manifest is damaged.
        ChaoskitError: if there is no snapshot, or it cannot be read.
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
        """Return a part of a file, shorter at its end, not verified. Any thread may call this.

        Raise ChaoskitError if it cannot be read.
        """
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
    """Close the files."""
    for fd in held.values():
        os.close(fd)


def read_checked(source: DirectorySource, entry: FileEntry, offset: int, size_bytes: int) -> bytes:
    """Return whole chunks of a file, verified.

    Damage on the disk must not become a good remote copy. ``offset`` must be that of a chunk.

    Raises:
        Damaged: if the chunks do not match the manifest.
        ChaoskitError: if the file cannot be read.
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
    """Raise Damaged if a chunk of a file does not match the manifest."""
    if xxhash.xxh3_128_hexdigest(data) != entry.chunks[number]:
        raise Damaged(f"chunk {number} of {entry.name} was changed: its digest is wrong")
