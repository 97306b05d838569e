"""Where undo files lie, and the locks by which it is known that a runner or a guard still answers for one."""

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
    """Directories for what lives until the next boot, the best one first.

    ``$XDG_RUNTIME_DIR/chaoskit``; ``/run/chaoskit`` for root; ``chaoskit-UID`` among the temporary files. Never the
    home directory: other machines may share it, and their processes have other pids.
    """
    runtime, user = os.environ.get("XDG_RUNTIME_DIR"), os.geteuid()
    found = [Path(runtime) / "chaoskit"] if runtime and _is_of(Path(runtime), user) else []
    found += [Path("/run/chaoskit")] if user == 0 else []
    return [*found, Path(os.environ.get("TMPDIR") or "/tmp") / f"chaoskit-{user}"]


def _is_of(directory: Path, user: int) -> bool:
    """Whether a directory is the user's, or can still be made: under sudo the variable may name another user's."""
    try:
        return directory.stat().st_uid == user
    except OSError:
        return True


def runtime_directory() -> Path:
    """Return the first candidate that this user owns alone, or can make.

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
    """Make a directory that is this user's alone. Raises OSError if it is there, and another user may write into it."""
    directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    if not is_private(directory):
        raise PermissionError(f"{directory} belongs to another user, or others may write into it")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory} cannot be written")


def is_private(directory: Path) -> bool:
    """Whether only this user can have written what is in a directory."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    writable_by_others = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not writable_by_others


def folder(directory: Path) -> Path:
    """Where below a runtime directory the undo files are."""
    return directory / _FOLDER


def make(directory: Path) -> tuple[Path, int]:
    """Make an undo file, locked by this process. Return its path and a descriptor that appends to it."""
    make_private(folder(directory))
    while True:
        path = folder(directory) / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        descriptor = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_at(path, descriptor):  # else a janitor has found it before it was locked, and empty
            return path, descriptor
        os.close(descriptor)


def share(path: Path) -> int:
    """Return a descriptor of an undo file, which is locked as long as that is open, beside other holders."""
    descriptor = _open(path)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one that has this path now."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def remove(path: Path, descriptor: int) -> None:
    """Remove an undo file, if it is still the open one."""
    with contextlib.suppress(OSError):  # the directory cannot be written, or is gone
        if is_at(path, descriptor):
            path.unlink()


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[int | None]:
    """A descriptor of an undo file of which neither runner nor guard is left; None where one is, or it is not ours.

    Raises:
        OSError: if it cannot be read.
    """
    try:
        descriptor = _open(path)
    except FileNotFoundError:  # its runner ended in order just now, or another janitor was faster
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


def listed(directory: Path) -> list[Path]:
    """Return the undo files of a runtime directory; none where others may write into it."""
    below = folder(directory)
    return sorted(below.glob(f"*{_SUFFIX}")) if is_private(directory) and is_private(below) else []


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is not a file of this user")
    return descriptor
