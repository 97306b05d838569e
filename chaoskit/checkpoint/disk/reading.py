"""Read stored files into given memory. Every byte that is read is digested and compared.

A file is read in whole chunks, because a chunk has one digest. Requested bytes go straight to their
place, the rest into a scratch buffer. The digest is computed over both while they are in the CPU's
cache. A chunk with a wrong digest raises Damaged.

-> ``disk/snapshot.py``: which bytes are read for a tensor.
-> ``runtime/state/from_store.py``: a job quarantines the damaged snapshot and reports it.
-> ``coordinator/membership/copy_search.py``: an older snapshot is taken then.
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

_PIECE_BYTES = 2**20  # fits into a core's cache
_THREADS_MAX = 8


class Segment(NamedTuple):
    """A range of bytes of a file from ``offset`` on, and the memory to fill with it."""

    offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        """The offset in the file behind the last byte."""
        return self.offset + len(self.memory)


class _Chunk(NamedTuple):
    """A chunk of an open file, with the segments that lie in it."""

    fd: int
    entry: FileEntry
    number: int
    segments: Sequence[Segment]


def read_files(directory: Path, requests: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> None:
    """Fill the memory of all segments, which must not overlap in one file.

    The memory holds garbage after an error.

    Raises:
        Damaged: if a file is missing, a chunk that overlaps a segment is too short or wrong, or the
            disk cannot read it (EIO).
        OSError: if a file cannot be opened or read for another reason.
    """
    with _opened(directory, [entry for entry, _ in requests]) as fds:
        _read_chunks(
            _Chunk(fd, entry, number, segments)
            for fd, (entry, all_segments) in zip(fds, requests, strict=True)
            for number, segments in by_chunk(all_segments)
        )


def verify_file(directory: Path, entry: FileEntry) -> None:
    """Read a whole file, and compare all digests.

    Raises:
        Damaged: if the file is missing, has another size, or a digest is wrong, or the disk cannot
            read it (EIO).
        OSError: if the file cannot be opened or read for another reason.
    """
    with _opened(directory, [entry]) as (fd,):
        if (size_bytes := os.fstat(fd).st_size) != entry.size_bytes:
            raise Damaged(f"{entry.name} has {size_bytes} bytes instead of {entry.size_bytes}")
        _read_chunks(_Chunk(fd, entry, number, ()) for number in range(len(entry.chunks)))


@contextmanager
def _opened(directory: Path, entries: Iterable[FileEntry]) -> Iterator[list[int]]:
    """Yield the descriptors of the opened files, and close them when the block ends.

    Raise Damaged if a file is missing, and OSError if it cannot be opened for another reason.
    """
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


def _read_chunks(chunks: Iterable[_Chunk]) -> None:
    """Read all chunks on up to 8 threads: reading and digesting release the interpreter's lock.

    An error of a thread is raised once the chunks under way are read. Those not begun are left out.
    """
    all_chunks = list(chunks)
    threads = min(len(all_chunks), len(os.sched_getaffinity(0)), _THREADS_MAX)
    if threads < 2:
        for chunk in all_chunks:
            _read_chunk(chunk)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
        try:
            for _ in pool.map(_read_chunk, all_chunks):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def by_chunk(segments: Sequence[Segment]) -> Iterator[tuple[int, list[Segment]]]:
    """Yield the number of each chunk that a segment touches, with the parts of segments in it.

    Chunks are numbered from 0. The offsets of the parts are in the file, not in the chunk.
    """
    chunks: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=lambda segment: segment.offset):
        for number in range(
            segment.offset // FILE_CHUNK_BYTES, -(-segment.end // FILE_CHUNK_BYTES)
        ):
            first = max(segment.offset, number * FILE_CHUNK_BYTES)
            last = min(segment.end, (number + 1) * FILE_CHUNK_BYTES)
            part = segment.memory[first - segment.offset : last - segment.offset]
            chunks.setdefault(number, []).append(Segment(first, part))
    yield from chunks.items()


def _read_chunk(chunk: _Chunk) -> None:
    """Read one chunk into the memory of its segments.

    Raise Damaged if its digest is wrong, the file is too short, or the disk cannot read it (EIO).
    """
    entry, number = chunk.entry, chunk.number
    digest, position = xxhash.xxh3_128(), number * FILE_CHUNK_BYTES
    end = min(position + FILE_CHUNK_BYTES, entry.size_bytes)
    for memory in _memory_for(chunk.segments, position, end):
        for first in range(0, len(memory), _PIECE_BYTES):
            piece = memory[first : first + _PIECE_BYTES]
            _fill(chunk.fd, piece, position, entry.name)
            digest.update(piece)
            position += len(piece)
    if digest.hexdigest() != entry.chunks[number]:
        first = number * FILE_CHUNK_BYTES
        raise Damaged(
            f"{entry.name} was changed in its bytes {first} to {end}: their digest is wrong"
        )


def _memory_for(segments: Sequence[Segment], position: int, end: int) -> Iterator[memoryview]:
    """Yield memory for all bytes from ``position`` to ``end``.

    Bytes within segments go to the memory of the segments, those between to scratch memory.
    """
    scratch = memoryview(b"")
    for segment in (*segments, Segment(end, memoryview(b""))):
        while position < segment.offset:
            gap_bytes = min(segment.offset - position, _PIECE_BYTES)
            if len(scratch) < gap_bytes:
                scratch = memoryview(bytearray(gap_bytes))
            yield scratch[:gap_bytes]
            position += gap_bytes
        yield segment.memory
        position = segment.end


def _fill(fd: int, memory: memoryview, position: int, name: str) -> None:
    """Fill ``memory`` from the file at ``position``.

    Raise Damaged at the file's end, or if the disk cannot read the bytes (EIO).
    """
    filled_bytes = 0
    while filled_bytes < len(memory):
        try:
            count = os.preadv(fd, [memory[filled_bytes:]], position + filled_bytes)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Damaged(
                f"{name} cannot be read at byte {position + filled_bytes}: {error.strerror}"
            ) from None
        if not count:
            raise Damaged(f"{name} ends at byte {position + filled_bytes}")
        filled_bytes += count
