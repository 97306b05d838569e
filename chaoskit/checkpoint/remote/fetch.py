"""Ranged reads from a remote store into memory that is there already, each chunk verified before any of it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from chaoskit.checkpoint.disk.reading import Segment, by_chunk
from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, Damaged, FileEntry
from chaoskit.checkpoint.remote.source import check_chunk
from chaoskit.checkpoint.remote.store import Store


class Chunk(NamedTuple):
    """A chunk of a file that is to be read, and the memory that parts of it belong in."""

    entry: FileEntry
    number: int
    segments: Sequence[Segment]

    @property
    def offset(self) -> int:
        return self.number * FILE_CHUNK_BYTES

    @property
    def size_bytes(self) -> int:
        return min(FILE_CHUNK_BYTES, self.entry.size_bytes - self.offset)

    def place(self, data: bytes | memoryview) -> None:
        """Copy what is wanted of the chunk's bytes to where it belongs."""
        view = memoryview(data)
        for segment in self.segments:
            first = segment.offset - self.offset
            segment.memory[:] = view[first : first + len(segment.memory)]


def chunks(wanted: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> Iterator[Chunk]:
    """What must be read so that all segments can be filled: each chunk once."""
    for entry, segments in wanted:
        for number, parts in by_chunk(segments):
            yield Chunk(entry, number, parts)


def read_chunk(store: Store, directory: str, entry: FileEntry, number: int) -> bytes:
    """A chunk of a stored file, verified.

    A chunk with a wrong digest is asked for once more: bytes can also be damaged on their way.

    Raises:
        Damaged: if the file is missing, too short or not what was written.
        RemoteRefused, RemoteUnavailable: as :class:`Store`.
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
    store: Store, directory: str, wanted: Sequence[tuple[FileEntry, Sequence[Segment]]]
) -> None:
    """Fill the memory of all segments, which may not overlap in one file. After an error it holds anything.

    Raises:
        Damaged, RemoteRefused, RemoteUnavailable: as :func:`read_chunk`.
    """

    def read(chunk: Chunk) -> None:
        chunk.place(read_chunk(store, directory, chunk.entry, chunk.number))

    for _ in store.each(read, list(chunks(wanted))):
        pass


def verify(store: Store, directory: str, entries: Sequence[FileEntry]) -> None:
    """Read whole files, and compare all digests: as much traffic as a restore of all of them.

    Raises:
        Damaged, RemoteRefused, RemoteUnavailable: as :func:`read_chunk`.
    """

    def check(entry: FileEntry, number: int) -> None:
        read_chunk(
            store, directory, entry, number
        )  # gives nothing on: what was given would be kept until the end

    _each_chunk(store, check, entries)


def download(store: Store, directory: str, entries: Sequence[FileEntry], target: Path) -> None:
    """Copy whole files into a local directory. After an error it holds anything.

    Raises:
        Damaged, RemoteRefused, RemoteUnavailable: as :func:`read_chunk`.
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
    rows = [(entry, number) for entry in entries for number in range(len(entry.chunks))]
    for _ in store.each(act, [entry for entry, _ in rows], [number for _, number in rows]):
        pass
