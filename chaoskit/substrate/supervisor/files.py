"""The files of a run on a node that others read elsewhere: shipped as they are written."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from chaoskit.osprocess import DirectoryWatch
from chaoskit.substrate.supervisor.messages import FileChunk

#: Of the directory of a run. What else lies there stays on the node.
FOLDERS = ("journal", "log")
CHUNK_BYTES = 2**18


class RunFiles:
    """Journals and logs of one run, as far as they have been shipped. They only grow.

    Attributes:
        settles: number of the request that wants to know when all is shipped; None until it comes.
    """

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        for folder in FOLDERS:
            (run_directory / folder).mkdir(parents=True, exist_ok=True)
        self._changes = DirectoryWatch(run_directory / folder for folder in FOLDERS)
        self._behind = {*self._all()}  # of which something may not have been shipped
        self._shipped: dict[Path, int] = {}
        self.settles: int | None = None

    def fileno(self) -> int:
        """Readable when something has been written."""
        return self._changes.fileno()

    def _all(self) -> Iterator[Path]:
        for folder in FOLDERS:
            yield from (self._directory / folder).iterdir()

    def settle(self, number: int) -> None:
        """Nothing is written any more."""
        self.settles, self._behind = number, {*self._all()}

    def look(self) -> None:
        """Take note of what has been written."""
        self._behind |= self._changes.changed()

    def unshipped(self) -> Iterator[FileChunk]:
        """What is to be shipped now; what is taken of it counts as shipped."""
        for path in sorted(self._behind):
            yield from self._rest(path)
            self._behind.discard(path)

    def _rest(self, path: Path) -> Iterator[FileChunk]:
        name = str(path.relative_to(self._directory))
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), path.open("rb", buffering=0) as file:
            while True:
                offset = self._shipped.get(path, 0)
                data = os.pread(file.fileno(), CHUNK_BYTES, offset)
                if not data and path in self._shipped:
                    return
                self._shipped[path] = offset + len(data)
                yield FileChunk(str(self._directory), name, offset, data)  # empty, too: then the file is there

    def sizes(self) -> dict[str, int]:
        """How much of each file was shipped."""
        return {str(path.relative_to(self._directory)): size for path, size in self._shipped.items()}

    def close(self) -> None:
        """Ship no more."""
        self._changes.close()

    def remove(self) -> None:
        """Remove everything that the run has left on the node."""
        shutil.rmtree(self._directory, ignore_errors=True)


class FileMirror:
    """The runner's copies of the files that one supervisor ships.

    A node that was replaced writes under the names of the one before it: what it writes is appended.

    Args:
        run_directory: where the copies lie.

    Attributes:
        failure: why it goes on no more; "" while it does.
    """

    def __init__(self, run_directory: Path) -> None:
        self._directory, self.failure = run_directory, ""
        self._files: dict[str, int] = {}  # name -> descriptor
        self._came: dict[str, int] = {}  # name -> bytes

    def take(self, chunk: FileChunk) -> None:
        """Append what has come. Where that fails, no more is taken."""
        if not self.failure:
            try:
                self._write(chunk)
            except (OSError, ValueError) as error:
                self.failure = str(error)

    def _write(self, chunk: FileChunk) -> None:
        came = self._came.get(chunk.name, 0)
        if chunk.offset != came:
            raise ValueError(f"{chunk.name} goes on at byte {chunk.offset}, and {came} have come")
        data, file = chunk.data, self._open(chunk.name)
        while data:
            data = data[os.write(file, data) :]
        self._came[chunk.name] = came + len(chunk.data)

    def _open(self, name: str) -> int:
        if name not in self._files:
            folder, _, last = name.partition("/")
            if folder not in FOLDERS or "/" in last or last.strip(".") == "":
                raise ValueError(f"{name!r} is no journal and no log")
            path = self._directory / folder / last
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
        return self._files[name]

    def short(self, sizes: dict[str, int]) -> list[str]:
        """Names of files of which not all has come."""
        return sorted(name for name, size in sizes.items() if self._came.get(name, 0) != size)

    def close(self) -> None:
        """What has come stays."""
        files, self._files = self._files, {}
        for file in files.values():
            os.close(file)
