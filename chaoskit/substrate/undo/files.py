"""Undo files, and the locks that show whether a runner or a guard still handles one.

-> ``undo/log.py`` and ``undo/replay.py``: what is written into a file and read from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from chaoskit.errors import BadInput

_FOLDER = "undo"
_SUFFIX = ".jsonl"
_PRIVATE = 0o700


def candidates() -> list[Path]:
    """Return the directories for files that live until the next boot, the best one first.

    ``$XDG_RUNTIME_DIR/chaoskit``; ``/run/chaoskit`` for root; ``chaoskit-UID`` among the temporary
    files. The home directory is never used: other machines may share it, and their processes have
    other pids.
    """
    runtime, user = os.environ.get("XDG_RUNTIME_DIR"), os.geteuid()
    directories = (
        [Path(runtime) / "chaoskit"] if runtime and _belongs_to(Path(runtime), user) else []
    )
    directories += [Path("/run/chaoskit")] if user == 0 else []
    return [*directories, Path(os.environ.get("TMPDIR") or "/tmp") / f"chaoskit-{user}"]


def _belongs_to(directory: Path, user: int) -> bool:
    """Return whether a directory belongs to the user or does not exist yet.

    Under sudo the environment variable may name another user's.
    """
    try:
        return directory.stat().st_uid == user
    except OSError:
        return True


def runtime_directory() -> Path:
    """Return the first candidate that only this user can write to; it is created if missing.

    Raises:
        BadInput: if there is none.
    """
    reasons = []
    for directory in candidates():
        try:
            make_private(directory)
        except OSError as error:
            reasons.append(f"{directory}: {error.strerror or error}")
        else:
            return directory
    remedy = f"choose a directory that is yours alone and can be written ({'; '.join(reasons)})"
    raise BadInput("XDG_RUNTIME_DIR", os.environ.get("XDG_RUNTIME_DIR", ""), remedy)


def make_private(directory: Path) -> None:
    """Create a directory that only this user can write to, unless it is there.

    Raises:
        OSError: if it cannot be created or written, or another user may write to it.
    """
    directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    if not is_private(directory):
        raise PermissionError(f"{directory} belongs to another user, or others may write into it")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory} cannot be written")


def is_private(directory: Path) -> bool:
    """Return whether only this user can write to a directory; False if there is none."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    writable_by_others = stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not writable_by_others


def folder(directory: Path) -> Path:
    """Return the directory of the undo files below a runtime directory."""
    return directory / _FOLDER


def make(directory: Path) -> tuple[Path, int]:
    """Create an undo file, locked by this process.

    Return its path and a descriptor that appends to it. Raises OSError if it cannot be created.

    Args:
        directory: a runtime directory.
    """
    make_private(folder(directory))
    while True:
        path = folder(directory) / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        descriptor = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_at(path, descriptor):  # else a janitor removed it while it was unlocked
            return path, descriptor
        os.close(descriptor)


def lock_shared(path: Path) -> int:
    """Lock an undo file beside other holders, and return a descriptor that appends to it.

    The call waits while a janitor has the file. Closing the descriptor releases the lock. Raises
    OSError if the file is gone or belongs to another user.
    """
    descriptor = _open(path)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is still the one at this path."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def remove(path: Path, descriptor: int) -> None:
    """Remove an undo file if the path still leads to the open file."""
    with contextlib.suppress(OSError):  # the directory cannot be written, or is gone
        if is_at(path, descriptor):
            path.unlink()


@contextlib.contextmanager
def locked_if_abandoned(path: Path) -> Iterator[int | None]:
    """Lock an undo file exclusively for the duration of a ``with``, and yield a descriptor.

    The descriptor is None if a runner or a guard still holds the file, or the file is gone.

    Raises:
        OSError: if the file cannot be read, or belongs to another user.
    """
    try:
        descriptor = _open(path)
    except FileNotFoundError:  # removed by its runner or another janitor just now
        yield None
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = is_at(path, descriptor)
        except BlockingIOError:
            is_free = False
        yield descriptor if is_free else None
    finally:
        os.close(descriptor)


def undo_files(directory: Path) -> list[Path]:
    """Return the undo files of a runtime directory; none if others may write to it."""
    below = folder(directory)
    return sorted(below.glob(f"*{_SUFFIX}")) if is_private(directory) and is_private(below) else []


def _open(path: Path) -> int:
    """Return a descriptor of a regular file of this user. Raises OSError if it is none."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is not a file of this user")
    return descriptor
