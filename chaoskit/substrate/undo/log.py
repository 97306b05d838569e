"""The runner's end of an undo file: entries are written before acts, and a guard is there before the first entry."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from chaoskit.errors import BadInput, HarnessError
from chaoskit.process.linux import await_readable, is_ending, kernel_id
from chaoskit.substrate.undo import files, guard
from chaoskit.substrate.undo.entries import PREFIX, DirectoryEntry, UndoEntry, to_json
from chaoskit.substrate.undo.replay import is_over, replay_file

_READY_S = 30.0
_END_S = 10.0
_PATIENCE_S = 5.0


class Undo:
    """What must be put back for one act."""

    def __init__(self, log: UndoLog, numbers: tuple[int, ...]) -> None:
        self._log, self._numbers = log, numbers

    def done(self) -> None:
        """Nothing is left to undo."""
        with contextlib.suppress(HarnessError):  # no room: it is found done at the end
            self._log.write(*({"done": number} for number in self._numbers))
        self._numbers = ()


class UndoLog:
    """An undo file of this process, with a guard of its own; both begin with the first entry. Any thread may use it.

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
        self._owner, self._lock = os.getpid(), threading.RLock()

    @property
    def guard_pid(self) -> int | None:
        """Pid of the guard; None before the first entry."""
        return None if self._guard is None else self._guard.pid

    def plan(self, *entries: UndoEntry) -> Undo:
        """Write down how to undo what is about to be done. It is, from then on, also if this process is killed.

        Raises:
            HarnessError: if there can be no guard, no room, or this is a fork of the process that made the log.
        """
        if os.getpid() != self._owner:
            raise HarnessError(
                "an undo log is of use only to the process that made it: make another one"
            )
        with self._lock:
            path = self._make()
            if self._guard is None or _has_ended(self._guard):
                self._guard = _start_guard(path)
            numbers = tuple(range(self._count + 1, self._count + 1 + len(entries)))
            self._count += len(entries)
            self.write(
                *(to_json(entry, number) for entry, number in zip(entries, numbers, strict=True))
            )
            return Undo(self, numbers)

    def _make(self) -> Path:
        if self._path is None:
            path, self._descriptor = files.make(self._directory)
            try:
                self.write({"kernel": kernel_id()})
            except HarnessError:
                files.remove(path, self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1
                raise
            self._path = path
        return self._path

    def write(self, *lines: Mapping[str, object]) -> None:
        """Append lines, all or none.

        Raises:
            HarnessError: if there is no room for them.
        """
        with self._lock:
            if not lines or self._descriptor < 0 or os.getpid() != self._owner:
                return
            data = "".join(json.dumps(line) + "\n" for line in lines).encode()
            size_bytes = os.fstat(self._descriptor).st_size
            try:
                is_whole = os.write(self._descriptor, data) == len(data)
            except OSError as error:
                raise HarnessError(
                    f"undo cannot be written to {self._directory}: {error}"
                ) from error
            if not is_whole:
                os.ftruncate(self._descriptor, size_bytes)
                raise HarnessError(f"undo cannot be written to {self._directory}: there is no room")

    def forget(self) -> None:
        """In a fork of the process that made the log: let go of its file, which is locked as long as it is open."""
        if self._descriptor >= 0 and os.getpid() != self._owner:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()

    def close(self) -> None:
        """Put back what is still open, and remove the file; it stays, for the next start, where something fails."""
        with self._lock:
            if self._path is None or os.getpid() != self._owner:
                return
            is_left = self._guard is None or not _let_go(self._guard)
            if is_left and is_over(*replay_file(self._descriptor, _PATIENCE_S)):
                files.remove(self._path, self._descriptor)
            descriptor = self._descriptor
            self._path, self._descriptor, self._guard = None, -1, None
            os.close(descriptor)


def temporary_directory(name: str, undo: UndoLog) -> tuple[Path, Undo]:
    """Make a directory of ours among the temporary files; its removal is written ahead."""
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{name}-{secrets.token_hex(8)}"
    planned = undo.plan(DirectoryEntry(str(path)))
    path.mkdir(mode=0o700)
    return path, planned


def _start_guard(path: Path) -> subprocess.Popen[bytes]:
    """Start it, and wait until it holds the file."""
    command = [sys.executable, *guard.command(path, os.getpid())]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, start_new_session=True, cwd="/"
        )
    except OSError as error:
        raise HarnessError(f"the undo guard cannot be started: {error}") from error
    assert process.stdout is not None
    with process.stdout as said:
        if await_readable([said.fileno()], _READY_S) and said.readline().strip() == guard.READY:
            return process
    process.kill()
    process.wait()
    raise HarnessError("the undo guard did not start; see its output above")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the guard runs no code any more; the rest of its exit is waited for."""
    if process.poll() is None and is_ending(process.pid):
        process.wait()  # until then ``poll`` takes it for one that runs
    return process.poll() is not None


def _let_go(process: subprocess.Popen[bytes]) -> bool:
    """Tell the guard that the runner ends in order, and wait until it has put back what was open.

    Returns:
        False if the guard is gone, or does not end.
    """
    assert process.stdin is not None
    try:
        if not process.stdin.closed:  # else an earlier call was interrupted
            with process.stdin as told:
                told.write(b"end\n")
        return process.wait(_END_S) == 0
    except (BrokenPipeError, subprocess.TimeoutExpired):
        process.kill()  # two must not replay one file
        process.wait()
        return False
