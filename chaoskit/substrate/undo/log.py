"""The runner's end of an undo file: entries are written before acts, and a guard is there before the first entry."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from chaoskit.errors import BadInput, HarnessError
from chaoskit.osprocess import await_readable, kernel_id
from chaoskit.substrate.undo import files, guard
from chaoskit.substrate.undo.entries import PREFIX, DirectoryEntry, UndoEntry, to_json
from chaoskit.substrate.undo.replay import replay_file

_READY_S = 30.0
_END_S = 10.0
_PATIENCE_S = 5.0


class Undo:
    """What must be put back for one act."""

    def __init__(self, log: UndoLog, numbers: tuple[int, ...]) -> None:
        self._log, self._numbers = log, numbers

    def done(self) -> None:
        """Nothing is left to undo."""
        self._log.write(*({"done": number} for number in self._numbers))
        self._numbers = ()


class UndoLog:
    """An undo file of this process, with a guard of its own; both begin with the first entry.

    Entries are not synced to a disk: what they name is gone when the machine goes down.

    Args:
        directory: a runtime directory; None for this user's.

    Raises:
        BadInput: if there is none that can be written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or files.runtime_directory()
        try:
            files.make_private(files.folder(self._directory))
        except OSError as error:
            remedy = f"choose a directory that is yours alone and can be written ({error})"
            raise BadInput("XDG_RUNTIME_DIR", str(self._directory), remedy) from None
        self._path: Path | None = None
        self._descriptor = -1
        self._guard: subprocess.Popen[bytes] | None = None
        self._count = 0

    @property
    def guard_pid(self) -> int | None:
        """Pid of the guard; None before the first entry."""
        return None if self._guard is None else self._guard.pid

    def plan(self, *entries: UndoEntry) -> Undo:
        """Write down how to undo what is about to be done. It is, from then on, also if this process is killed.

        Raises:
            HarnessError: if there can be no guard.
        """
        path = self._make()
        if self._guard is None or self._guard.poll() is not None:
            self._guard = _start_guard(path)
        numbers = tuple(range(self._count + 1, self._count + 1 + len(entries)))
        self._count += len(entries)
        self.write(*(to_json(entry, number) for entry, number in zip(entries, numbers, strict=True)))
        return Undo(self, numbers)

    def _make(self) -> Path:
        if self._path is None:
            self._path, self._descriptor = files.make(self._directory)
            self.write({"kernel": kernel_id()})
        return self._path

    def write(self, *lines: Mapping[str, object]) -> None:
        """Append lines, all at once."""
        if lines and self._descriptor >= 0:
            os.write(self._descriptor, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def close(self) -> None:
        """Put back what is still open, and remove the file."""
        if self._path is None:
            return
        if self._guard is None or not _let_go(self._guard):
            replay_file(self._descriptor, _PATIENCE_S)
            files.remove(self._path, self._descriptor)
        os.close(self._descriptor)
        self._path, self._descriptor, self._guard = None, -1, None


def temporary_directory(name: str, undo: UndoLog) -> tuple[Path, Undo]:
    """Make a directory of ours among the temporary files; its removal is written ahead."""
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{name}-{secrets.token_hex(8)}"
    planned = undo.plan(DirectoryEntry(str(path)))
    path.mkdir(mode=0o700)
    return path, planned


def _start_guard(path: Path) -> subprocess.Popen[bytes]:
    """Start it, and wait until it holds the file."""
    process = subprocess.Popen(
        [sys.executable, *guard.command(path, os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
    )
    assert process.stdout is not None
    with process.stdout as said:
        if await_readable([said.fileno()], _READY_S) and said.readline().strip() == guard.READY:
            return process
    process.kill()
    process.wait()
    raise HarnessError("the undo guard did not start; see its output above")


def _let_go(process: subprocess.Popen[bytes]) -> bool:
    """Tell the guard that the runner ends in order, and wait until it has put back what was open.

    Returns:
        False if the guard is gone, or does not end.
    """
    assert process.stdin is not None
    try:
        with process.stdin as told:
            told.write(b"end\n")
        return process.wait(_END_S) == 0
    except (BrokenPipeError, subprocess.TimeoutExpired):
        return False
