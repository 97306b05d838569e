"""Cache of results on this machine for later sessions, and the facts that they depend on.

Results that cannot be written are kept in memory for this session.

-> experiment/twin/twin.py (_key) and experiment/reference/plain_process.py (_key): when a cached
result is used again.
"""

from __future__ import annotations

import fcntl
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from chaoskit.errors import BadInput
from chaoskit.process.host_checks import user_directory
from chaoskit.process.linux import cpu_model

#: Environment variable with the directory below which results are kept.
VARIABLE = "XDG_CACHE_HOME"

# results that could not be written, by the path that they should have
_IN_MEMORY: dict[Path, bytes] = {}


def directory_of(kind: str) -> Path:
    """Return the directory of results of one kind.

    A user without a home directory gets a path below a file, where nothing can be written.
    """
    try:
        return user_directory(VARIABLE, ".cache") / kind
    except BadInput:
        return Path(os.devnull) / kind


def keep(path: Path, data: bytes) -> None:
    """Write a result for later sessions, or keep it in memory for this one and print a warning."""
    try:
        write_whole(path, data)
    except OSError as error:
        _IN_MEMORY[path] = data
        _warn_not_kept(f"{path.parent}: {error.strerror}")


def kept(path: Path) -> bytes:
    """Return a result that :func:`keep` has stored.

    Raises:
        OSError: if there is no such result.
    """
    data = _IN_MEMORY.get(path)
    return path.read_bytes() if data is None else data


@cache
def _warn_not_kept(reason: str) -> None:
    """Warn, once for a reason, that nothing is kept for later sessions; name the remedy."""
    sys.stderr.write(
        f"chaoskit: unbroken runs are kept for this session only ({reason}): set {VARIABLE} to a directory "
        "that can be written\n"
    )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, and its directory, so that readers see the whole of it or none.

    Raises:
        OSError: if it cannot be written; no part of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a result during a ``with`` block; other processes of the machine wait.

    It is a record lock: forked children do not inherit it, and it ends with its process. If the
    lock cannot be taken, several processes may make the same result.
    """
    with ExitStack() as opened:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def machine_facts() -> str:
    """Return, as text to be compared, what computed numbers depend on beside the code of the job.

    These are the versions of Python and of all packages, and the processor.
    """
    return repr((version("torch"), _installed(), platform.python_version(), cpu_model()))


def _installed() -> list[str]:
    """Return names and versions of all installed packages, any of which a job may use."""
    folders = (path for folder in {*sys.path} for path in Path(folder).glob("*.*-info"))
    return sorted({path.name for path in folders})
