"""The runner's side of an undo file.

Entries are written before acts, and a guard is started before the first entry.

-> ``undo/guard.py``: what undoes them if the runner is killed. ``undo/entries.py``: the entries.
"""

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
    """The entries of one act in an undo log."""

    def __init__(self, log: UndoLog, numbers: tuple[int, ...]) -> None:
        self._log, self._numbers = log, numbers

    def done(self) -> None:
        """Mark the entries as done: nothing is left to undo. A second call changes nothing.

        Nothing is raised if the disk is full: the last replay finds them done.
        """
        with contextlib.suppress(HarnessError):  # disk full: the last replay finds it done
            self._log.write(*({"done": number} for number in self._numbers))
        self._numbers = ()


class UndoLog:
    """An undo file of this process, with a guard of its own. Thread-safe.

    File and guard are created with the first entry. Entries are not synced to disk: their targets
    are gone when the machine goes down.

    Args:
        directory: a runtime directory; None for this user's.

    Raises:
        BadInput: if none can be written to.
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
        """The pid of the guard; None before the first entry."""
        return None if self._guard is None else self._guard.pid

    def plan(self, *entries: UndoEntry) -> Undo:
        """Write undo entries for an act that is about to happen.

        They are replayed even if this process is killed. Return the object by which they are marked
        as done once the act is undone.

        Raises:
            HarnessError: if no guard can start, the disk is full, or this process is a fork of the
                log's owner.
            OSError: if the undo file cannot be created.
        """
        if os.getpid() != self._owner:
            raise HarnessError(
                "an undo log can be used only by the process that created it: create another one"
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
        """Return the path of the undo file, which is created at the first call."""
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
        """Append lines, all or none. Nothing is written after the end, or in a fork of the owner.

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
                    f"the undo log cannot be written to {self._directory}: {error}"
                ) from error
            if not is_whole:
                os.ftruncate(self._descriptor, size_bytes)
                raise HarnessError(
                    f"the undo log cannot be written to {self._directory}: no space is left"
                )

    def forget(self) -> None:
        """Close the file in a fork of the process that made the log.

        An open descriptor would keep the file locked.
        """
        if self._descriptor >= 0 and os.getpid() != self._owner:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()

    def close(self) -> None:
        """Undo the open entries, and remove the file.

        It stays for the next start if something fails. Nothing is done in a fork of the owner.
        """
        with self._lock:
            if self._path is None or os.getpid() != self._owner:
                return
            is_left = self._guard is None or not _dismiss_guard(self._guard)
            if is_left and is_over(*replay_file(self._descriptor, _PATIENCE_S)):
                files.remove(self._path, self._descriptor)
            descriptor = self._descriptor
            self._path, self._descriptor, self._guard = None, -1, None
            os.close(descriptor)


def temporary_directory(name: str, undo: UndoLog) -> tuple[Path, Undo]:
    """Create a temporary directory of chaoskit. Its removal is written to the undo log first.

    Return its path, and the entry to be marked as done after its removal. Raises HarnessError or
    OSError if the entry cannot be written or the directory cannot be created.
    """
    path = Path(tempfile.gettempdir()) / f"{PREFIX}{name}-{secrets.token_hex(8)}"
    planned = undo.plan(DirectoryEntry(str(path)))
    path.mkdir(mode=0o700)
    return path, planned


def _start_guard(path: Path) -> subprocess.Popen[bytes]:
    """Start a guard, wait until it holds the file, and return its process.

    Raises HarnessError if it does not start.
    """
    command = [sys.executable, *guard.command(path, os.getpid())]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, start_new_session=True, cwd="/"
        )
    except OSError as error:
        raise HarnessError(f"the undo guard cannot be started: {error}") from error
    assert process.stdout is not None
    with process.stdout as output:
        if await_readable([output.fileno()], _READY_S) and output.readline().strip() == guard.READY:
            return process
    process.kill()
    process.wait()
    raise HarnessError("the undo guard did not start; see its output above")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the guard runs no code any more. If it is exiting, wait for its end."""
    if process.poll() is None and is_ending(process.pid):
        process.wait()  # until then ``poll`` reports it as running
    return process.poll() is not None


def _dismiss_guard(process: subprocess.Popen[bytes]) -> bool:
    """Signal the runner's orderly end to the guard, and wait until it has undone the open entries.

    Returns:
        False if the guard was gone, or did not end and was killed: the entries may still be open.
    """
    assert process.stdin is not None
    try:
        if not process.stdin.closed:  # else an earlier call was interrupted
            with process.stdin as pipe:
                pipe.write(b"end\n")
        return process.wait(_END_S) == 0
    except (BrokenPipeError, subprocess.TimeoutExpired):
        process.kill()  # two processes must not replay one file
        process.wait()
        return False
