"""Copying of a run's files from a node to the runner, as they are written.

-> ``supervisor/server.py`` sends the chunks, and ``supervisor/client.py`` acknowledges them.
``cluster/node_files.py``: when copies begin, and what is recorded if a node is gone too early.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from chaoskit.process.linux import DirectoryWatch
from chaoskit.substrate.supervisor.messages import FileChunk
from chaoskit.wire.coordinator_files import COORDINATOR_LOG

#: Folders of a run's directory that are copied. Everything else stays on the node.
LOGS = "log"
FOLDERS = ("journal", LOGS)
CHUNK_BYTES = 2**14
#: A runner acknowledges chunks whenever it has received this many bytes.
TAKEN_BYTES = 2**13
#: Most bytes in flight. They fit into the socket buffers of a runner that does not read, so that
#: its kernel accepts them and the connection does not break.
IN_FLIGHT_BYTES = 2**15


class RunFiles:
    """Journals and logs of one run on the node, and how much of them was sent.

    Only the coordinator's log ever shrinks. Files that are not regular, or whose names are not
    valid text, are not sent.

    Args:
        with_log: True to send the coordinator's log, too, from its first byte whenever another file
            has replaced it.

    Attributes:
        settle_request: number of the request that waits until all is sent; None until it comes.
    """

    def __init__(self, run_directory: Path, *, with_log: bool = False) -> None:
        self._directory = run_directory
        self._log = run_directory / COORDINATOR_LOG if with_log else None
        folders = [run_directory / folder for folder in FOLDERS]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._changes = DirectoryWatch([*folders, run_directory] if with_log else folders)
        self._unsent = set[Path]()  # files that may have unsent data
        self._sent_bytes: dict[Path, int] = {}
        self._log_inode = -1  # inode of the coordinator's log
        self._log_bytes_left: float = math.inf  # bytes of logs that may still be sent
        self.settle_request: int | None = None
        self.look_at_all()

    def fileno(self) -> int:
        """Return a descriptor that is readable when something has been written."""
        return self._changes.fileno()

    def settle(self, number: int, log_bytes: int | None = None) -> None:
        """Note that no file is written any more, and which request waits for the rest.

        Args:
            log_bytes: most bytes of logs that are sent from now on; None for all.
        """
        self.settle_request = number
        self._log_bytes_left = math.inf if log_bytes is None else log_bytes
        self.look_at_all()

    def look(self) -> None:
        """Mark the files that have changed as unsent."""
        self._unsent.update(
            path
            for path in self._changes.changed()
            if path.parent != self._directory or path == self._log
        )

    def look_at_all(self) -> None:
        """Mark all files as unsent."""
        for folder in FOLDERS:
            with contextlib.suppress(OSError):  # it was removed
                self._unsent.update((self._directory / folder).iterdir())
        if self._log is not None:
            self._unsent.add(self._log)

    @property
    def has_unsent(self) -> bool:
        """True if some data may not have been sent."""
        return bool(self._unsent)

    def unsent_chunks(self) -> Iterator[FileChunk]:
        """Yield the chunks to send. A chunk that has been yielded counts as sent."""
        for path in sorted(self._unsent):
            if (file := _plain_file(path)) is not None:
                try:
                    yield from self._chunks_of(path, file)
                finally:
                    os.close(file)
            self._unsent.discard(path)

    def _chunks_of(self, path: Path, file: int) -> Iterator[FileChunk]:
        """Yield the unsent chunks of an open file; an empty one for an empty new file."""
        name = str(path.relative_to(self._directory))
        if path == self._log:
            status = os.fstat(file)
            if status.st_ino != self._log_inode or status.st_size < self._sent_bytes.get(path, 0):
                self._sent_bytes.pop(path, None)
            self._log_inode = status.st_ino
        while True:
            offset = self._sent_bytes.get(path, 0)
            is_log = path.parent.name == LOGS
            size_bytes = min(CHUNK_BYTES, self._log_bytes_left) if is_log else CHUNK_BYTES
            data = os.pread(file, int(size_bytes), offset)
            if not data and path in self._sent_bytes:
                return
            if is_log:
                self._log_bytes_left -= len(data)
            self._sent_bytes[path] = offset + len(data)
            yield FileChunk(str(self._directory), name, offset, data)  # creates it if empty

    def sizes(self) -> dict[str, int]:
        """Return how many bytes of each file were sent, by its path below the run's directory."""
        return {
            str(path.relative_to(self._directory)): size for path, size in self._sent_bytes.items()
        }

    def close(self) -> None:
        """Stop watching the files."""
        self._changes.close()

    def remove(self) -> None:
        """Remove everything that the run has left on the node."""
        shutil.rmtree(self._directory, ignore_errors=True)


def _plain_file(path: Path) -> int | None:
    """Return a descriptor of a regular file for the caller to close.

    None is returned if the file is gone or must not be sent.
    """
    try:
        path.name.encode()
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, UnicodeEncodeError):
        return None
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    return None


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers find the old or the new content.

    Raises OSError if it cannot be written; its directory must exist.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


class FileMirror:
    """The runner's copies of the files that one supervisor sends.

    A replaced node writes files of the same names as its predecessor, and these are appended. The
    coordinator's log starts again.

    Args:
        run_directory: directory of the copies.
        station: the node or coordinator that the files must belong to: their names begin with it.
            "" for any.

    Attributes:
        failure: why copying has stopped; "" while it works.
    """

    def __init__(self, run_directory: Path, station: str) -> None:
        self._directory, self._station, self.failure = run_directory, station, ""
        self._received: dict[str, int] = {}  # name -> bytes received

    def take(self, chunk: FileChunk) -> None:
        """Append a chunk to its file.

        A failure is noted in ``failure``, and all later chunks are dropped.
        """
        if not self.failure:
            try:
                self._write(chunk)
            except (OSError, ValueError) as error:
                self.failure = str(error)

    def _write(self, chunk: FileChunk) -> None:
        """Append a chunk.

        Raises ValueError if it does not follow the last one, and OSError if it cannot be written.
        """
        is_new = chunk.name == COORDINATOR_LOG and chunk.offset == 0
        received = 0 if is_new else self._received.get(chunk.name, 0)
        if chunk.offset != received:
            raise ValueError(
                f"{chunk.name}: the next chunk begins at byte {chunk.offset}, "
                f"but {received} bytes were received"
            )
        data, file = chunk.data, self._open(chunk.name, replaces=is_new)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)
        self._received[chunk.name] = received + len(chunk.data)

    def _open(self, name: str, *, replaces: bool) -> int:
        """Open a copy for appending, and return its descriptor.

        Raises ValueError if the name is not one of the station's files, and OSError if it cannot be
        opened.

        Args:
            replaces: True to remove an earlier copy first.
        """
        folder, _, file_name = name.partition("/")
        is_of_station = not self._station or name.removeprefix(f"{folder}/").startswith(
            f"{self._station}."
        )
        is_plain = folder in FOLDERS and "/" not in file_name and file_name
        if not is_of_station or not (is_plain or name == COORDINATOR_LOG):
            raise ValueError(f"{name!r} is not a journal or log of {self._station}")
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if replaces:
            path.unlink(missing_ok=True)
        flags = (
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )
        file = os.open(path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file

    def incomplete(self, sizes: dict[str, int]) -> list[str]:
        """Return the sorted names of files that are incomplete, given the sizes that were sent."""
        return sorted(name for name, size in sizes.items() if self._received.get(name, 0) != size)
