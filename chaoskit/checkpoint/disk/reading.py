"""Reads of a stored file into memory that is there already. What is read is what is digested: nothing is trusted.

A file is read chunk by chunk, each of them whole, because a chunk has one digest. What is wanted of it goes straight to
its place, the rest into a scratch buffer, and the digest is computed over both while they are in the CPU's cache.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, Damaged, FileEntry

_PIECE_BYTES = 2**20  # what fits a core's cache
_MOST_THREADS = 8


class Segment(NamedTuple):
    """Bytes of a file from ``offset`` on, and the memory they belong in."""

    offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.offset + len(self.memory)


class _Chunk(NamedTuple):
    fd: int
    entry: FileEntry
    number: int
    segments: Sequence[Segment]


def read_files(directory: Path, wanted: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> None:
    """Fill the memory of all segments, which may not overlap in one file. After an error it holds anything.

    Raises:
        Damaged: if a file is missing, too short or not what was written, in a chunk that overlaps a segment.
        OSError: if a file cannot be opened for another reason.
    """
    with _opened(directory, [entry for entry, _ in wanted]) as fds:
        _each(
            _Chunk(fd, entry, number, segments)
            for fd, (entry, all_segments) in zip(fds, wanted, strict=True)
            for number, segments in by_chunk(all_segments)
        )


def verify_file(directory: Path, entry: FileEntry) -> None:
    """Read a whole file, and compare all digests.

    Raises:
        Damaged, OSError: as :func:`read_files`.
    """
    with _opened(directory, [entry]) as (fd,):
        if (size_bytes := os.fstat(fd).st_size) != entry.size_bytes:
            raise Damaged(f"{entry.name} has {size_bytes} bytes instead of {entry.size_bytes}")
        _each(_Chunk(fd, entry, number, ()) for number in range(len(entry.chunks)))


@contextmanager
def _opened(directory: Path, entries: Iterable[FileEntry]) -> Iterator[list[int]]:
    fds: list[int] = []
    try:
        for entry in entries:
            try:
                fds.append(os.open(directory / entry.name, os.O_RDONLY | os.O_CLOEXEC))
            except FileNotFoundError:
                raise Damaged(f"{entry.name} is missing") from None
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _each(chunks: Iterable[_Chunk]) -> None:
    """Read all chunks, several at a time: copying from the page cache and digesting both leave other threads alone."""
    todo = list(chunks)
    threads = min(len(todo), len(os.sched_getaffinity(0)), _MOST_THREADS)
    if threads < 2:
        for chunk in todo:
            _read_chunk(chunk)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
        try:
            for _ in pool.map(_read_chunk, todo):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def by_chunk(segments: Sequence[Segment]) -> Iterator[tuple[int, list[Segment]]]:
    """The chunks that the segments touch, each with its parts of them."""
    found: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=lambda one: one.offset):
        for number in range(
            segment.offset // FILE_CHUNK_BYTES, -(-segment.end // FILE_CHUNK_BYTES)
        ):
            first = max(segment.offset, number * FILE_CHUNK_BYTES)
            last = min(segment.end, (number + 1) * FILE_CHUNK_BYTES)
            part = segment.memory[first - segment.offset : last - segment.offset]
            found.setdefault(number, []).append(Segment(first, part))
    yield from found.items()


def _read_chunk(chunk: _Chunk) -> None:
    entry, number = chunk.entry, chunk.number
    digest, position = xxhash.xxh3_128(), number * FILE_CHUNK_BYTES
    end = min(position + FILE_CHUNK_BYTES, entry.size_bytes)
    for memory in _places(chunk.segments, position, end):
        for first in range(0, len(memory), _PIECE_BYTES):
            piece = memory[first : first + _PIECE_BYTES]
            _fill(chunk.fd, piece, position, entry.name)
            digest.update(piece)
            position += len(piece)
    if digest.hexdigest() != entry.chunks[number]:
        first = number * FILE_CHUNK_BYTES
        raise Damaged(
            f"{entry.name} is not what was written in its bytes {first} to {end}: their digest is wrong"
        )


def _places(segments: Sequence[Segment], position: int, end: int) -> Iterator[memoryview]:
    """Memory for all bytes from ``position`` to ``end``: that of the segments, and scratch memory between them."""
    scratch = memoryview(b"")
    for segment in (*segments, Segment(end, memoryview(b""))):
        while position < segment.offset:
            gap = min(segment.offset - position, _PIECE_BYTES)
            if len(scratch) < gap:
                scratch = memoryview(bytearray(gap))
            yield scratch[:gap]
            position += gap
        yield segment.memory
        position = segment.end


def _fill(fd: int, memory: memoryview, position: int, name: str) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(fd, [memory[done:]], position + done)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Damaged(
                f"{name} cannot be read at byte {position + done}: {error.strerror}"
            ) from None
        if not count:
            raise Damaged(f"{name} ends at byte {position + done}")
        done += count
