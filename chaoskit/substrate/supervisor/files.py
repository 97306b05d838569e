"""The files of a run on a node that others read elsewhere: shipped as they are written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from chaoskit.process.linux import DirectoryWatch
from chaoskit.substrate.supervisor.messages import FileChunk
from chaoskit.wire.coordinator_files import RECORD

#: Of the directory of a run. What else lies there stays on the node.
FOLDERS = ("journal", "log")
CHUNK_BYTES = 2**14
#: A runner says after so many bytes that it has taken them.
TAKEN_BYTES = 2**13
#: More are never on their way. They fit into the socket of a runner that does not read: its kernel takes them, and the
#: connection does not break.
IN_FLIGHT_BYTES = 2**15


class RunFiles:
    """Journals and logs of one run, as far as they have been shipped. They only grow, but for a record.

    What is no plain file, or has a name that is no text, is not shipped.

    Args:
        with_record: whether the record of its coordinator is shipped, too: from its first byte where a file has taken
            the place of another one.

    Attributes:
        settles: number of the request that wants to know when all is shipped; None until it comes.
    """

    def __init__(self, run_directory: Path, *, with_record: bool = False) -> None:
        self._directory = run_directory
        self._record = run_directory / RECORD if with_record else None
        folders = [run_directory / folder for folder in FOLDERS]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._changes = DirectoryWatch([*folders, run_directory] if with_record else folders)
        self._behind = set[Path]()  # of which something may not have been shipped
        self._shipped: dict[Path, int] = {}
        self._inode = -1  # of the record
        self.settles: int | None = None
        self.look_at_all()

    def fileno(self) -> int:
        """Readable when something has been written."""
        return self._changes.fileno()

    def settle(self, number: int) -> None:
        """Nothing is written any more."""
        self.settles = number
        self.look_at_all()

    def look(self) -> None:
        """Take note of what has been written."""
        self._behind.update(
            path
            for path in self._changes.changed()
            if path.parent != self._directory or path == self._record
        )

    def look_at_all(self) -> None:
        """Take note of everything that is there."""
        for folder in FOLDERS:
            with contextlib.suppress(OSError):  # it was removed
                self._behind.update((self._directory / folder).iterdir())
        if self._record is not None:
            self._behind.add(self._record)

    @property
    def is_behind(self) -> bool:
        """Whether something may not have been shipped."""
        return bool(self._behind)

    def unshipped(self) -> Iterator[FileChunk]:
        """What is to be shipped now; what is taken of it counts as shipped."""
        for path in sorted(self._behind):
            if (file := _plain_file(path)) is not None:
                try:
                    yield from self._rest(path, file)
                finally:
                    os.close(file)
            self._behind.discard(path)

    def _rest(self, path: Path, file: int) -> Iterator[FileChunk]:
        name = str(path.relative_to(self._directory))
        if path == self._record:
            found = os.fstat(file)
            if found.st_ino != self._inode or found.st_size < self._shipped.get(path, 0):
                self._shipped.pop(path, None)
            self._inode = found.st_ino
        while True:
            offset = self._shipped.get(path, 0)
            data = os.pread(file, CHUNK_BYTES, offset)
            if not data and path in self._shipped:
                return
            self._shipped[path] = offset + len(data)
            yield FileChunk(
                str(self._directory), name, offset, data
            )  # empty, too: then the file is there

    def sizes(self) -> dict[str, int]:
        """How much of each file was shipped."""
        return {
            str(path.relative_to(self._directory)): size for path, size in self._shipped.items()
        }

    def close(self) -> None:
        """Ship no more."""
        self._changes.close()

    def remove(self) -> None:
        """Remove everything that the run has left on the node."""
        shutil.rmtree(self._directory, ignore_errors=True)


def _plain_file(path: Path) -> int | None:
    """A descriptor of it, for the caller to close; None if it is gone, or nothing to be shipped."""
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
    """Write a file such that readers find all of it, or what was there before. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


class FileMirror:
    """The runner's copies of the files that one supervisor ships.

    A node that was replaced writes under the names of the one before it: what it writes is appended. A record
    begins anew.

    Args:
        run_directory: where the copies lie.
        station: the node, or the coordinator, whose files they are: their names begin with it. "" for any.

    Attributes:
        failure: why it goes on no more; "" while it does.
    """

    def __init__(self, run_directory: Path, station: str) -> None:
        self._directory, self._station, self.failure = run_directory, station, ""
        self._came: dict[str, int] = {}  # name -> bytes

    def take(self, chunk: FileChunk) -> None:
        """Append what has come. Where that fails, no more is taken."""
        if not self.failure:
            try:
                self._write(chunk)
            except (OSError, ValueError) as error:
                self.failure = str(error)

    def _write(self, chunk: FileChunk) -> None:
        begins = chunk.name == RECORD and chunk.offset == 0
        came = 0 if begins else self._came.get(chunk.name, 0)
        if chunk.offset != came:
            raise ValueError(f"{chunk.name} goes on at byte {chunk.offset}, and {came} have come")
        data, file = chunk.data, self._open(chunk.name, anew=begins)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)
        self._came[chunk.name] = came + len(chunk.data)

    def _open(self, name: str, *, anew: bool) -> int:
        folder, _, last = name.partition("/")
        is_theirs = not self._station or name.removeprefix(f"{folder}/").startswith(
            f"{self._station}."
        )
        is_plain = folder in FOLDERS and "/" not in last and last
        if not is_theirs or not (is_plain or name == RECORD):
            raise ValueError(f"{name!r} is no journal and no log of {self._station}")
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            path.unlink(missing_ok=True)
        flags = (
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        )
        file = os.open(path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "no plain file", str(path))
        return file

    def short(self, sizes: dict[str, int]) -> list[str]:
        """Names of files of which not all has come."""
        return sorted(name for name, size in sizes.items() if self._came.get(name, 0) != size)
