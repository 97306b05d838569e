"""Ranged reads from a remote store into given memory. Each chunk is verified before it is used.

-> ``remote/tier.py``: what follows from damage. ``disk/reading.py``: the same for files on a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from chaoskit.checkpoint.disk.reading import Segment, by_chunk
from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, Damaged, FileEntry
from chaoskit.checkpoint.remote.source import check_chunk
from chaoskit.checkpoint.remote.store import Store


class FetchedChunk(NamedTuple):
    """A chunk of a file that is to be read, and the memory to fill with parts of it."""

    entry: FileEntry
    number: int
    segments: Sequence[Segment]

    @property
    def offset(self) -> int:
        """The offset of the first byte in the file."""
        return self.number * FILE_CHUNK_BYTES

    @property
    def size_bytes(self) -> int:
        """The size of the chunk."""
        return min(FILE_CHUNK_BYTES, self.entry.size_bytes - self.offset)

    def place(self, data: bytes | memoryview) -> None:
        """Copy the requested parts of ``data``, which is the whole chunk, into the segments."""
        view = memoryview(data)
        for segment in self.segments:
            first = segment.offset - self.offset
            segment.memory[:] = view[first : first + len(segment.memory)]


def chunks(requests: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> Iterator[FetchedChunk]:
    """Yield each chunk that must be read to fill all segments, once."""
    for entry, segments in requests:
        for number, parts in by_chunk(segments):
            yield FetchedChunk(entry, number, parts)


def read_chunk(store: Store, directory: str, entry: FileEntry, number: int) -> bytes:
    """Return a verified chunk of a stored file.

    A chunk with a wrong digest is read once more, because bytes can also be damaged in transit.

    Args:
        directory: name of the snapshot in the store.
        entry: the file, as the manifest describes it.
        number: number of the chunk, from 0 on.

    Raises:
        Damaged: if the file is missing, too short or was changed.
        RemoteRefused, RemoteUnavailable: see :class:`Store`.
    """
    for _ in range(2):
        try:
            data = store.get_range(
                f"{directory}/{entry.name}", number * FILE_CHUNK_BYTES, FILE_CHUNK_BYTES
            )
            check_chunk(entry, number, data)
        except FileNotFoundError:
            raise Damaged(f"{entry.name} is missing, or too short for its chunk {number}") from None
        except Damaged as error:
            damage = error
        else:
            return data
    raise damage


def fill(
    store: Store, directory: str, requests: Sequence[tuple[FileEntry, Sequence[Segment]]]
) -> None:
    """Fill the memory of all segments, which must not overlap in one file.

    The memory holds garbage after an error.

    Raises:
        Damaged, RemoteRefused, RemoteUnavailable: see :func:`read_chunk`.
    """

    def read(chunk: FetchedChunk) -> None:
        chunk.place(read_chunk(store, directory, chunk.entry, chunk.number))

    for _ in store.each(read, list(chunks(requests))):
        pass


def verify(store: Store, directory: str, entries: Sequence[FileEntry]) -> None:
    """Read whole files, and compare all digests: as much traffic as a restore of all of them.

    Raises:
        Damaged, RemoteRefused, RemoteUnavailable: see :func:`read_chunk`.
    """

    def check(entry: FileEntry, number: int) -> None:
        # not returned, as results are kept until the end
        read_chunk(store, directory, entry, number)

    _each_chunk(store, check, entries)


def download(store: Store, directory: str, entries: Sequence[FileEntry], target: Path) -> None:
    """Copy whole files into a local directory, verified.

    Files of these names are overwritten, but not shortened. They are incomplete after an error, and
    are not synced.

    Raises:
        Damaged, RemoteRefused, RemoteUnavailable: see :func:`read_chunk`.
        OSError: if the local disk is full or fails.
    """

    def copy(entry: FileEntry, number: int) -> None:
        data = read_chunk(store, directory, entry, number)
        with (target / entry.name).open("r+b") as file:
            file.seek(number * FILE_CHUNK_BYTES)
            file.write(data)

    for entry in entries:
        (target / entry.name).touch()
    _each_chunk(store, copy, entries)


def _each_chunk(
    store: Store, act: Callable[[FileEntry, int], None], entries: Sequence[FileEntry]
) -> None:
    """Call ``act`` for each chunk of the files, several at a time. Raise its first error."""
    chunk_keys = [(entry, number) for entry in entries for number in range(len(entry.chunks))]
    for _ in store.each(
        act, [entry for entry, _ in chunk_keys], [number for _, number in chunk_keys]
    ):
        pass
