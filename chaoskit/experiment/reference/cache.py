"""Results that are kept on this machine for later sessions: where they lie, and what they depend on.

Where they cannot be written, they are kept in memory for this session.
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

#: Names the directory below which results are kept.
VARIABLE = "XDG_CACHE_HOME"

_IN_MEMORY: dict[
    Path, bytes
] = {}  # results that could not be written, by the path that they should have


def directory_of(kind: str) -> Path:
    """Return the directory of results of one kind; below a file for a user without a home: it cannot be made."""
    try:
        return user_directory(VARIABLE, ".cache") / kind
    except BadInput:
        return Path(os.devnull) / kind


def keep(path: Path, data: bytes) -> None:
    """Write a result for later sessions, or keep it for this one and say on stderr which variable helps."""
    try:
        write_whole(path, data)
    except OSError as error:
        _IN_MEMORY[path] = data
        _tell_not_kept(f"{path.parent}: {error.strerror}")


def kept(path: Path) -> bytes:
    """Return what :func:`keep` has kept. Raises OSError where that is nothing."""
    data = _IN_MEMORY.get(path)
    return path.read_bytes() if data is None else data


@cache
def _tell_not_kept(reason: str) -> None:
    """Say once that a directory keeps nothing for later sessions."""
    sys.stderr.write(
        f"chaoskit: unbroken runs are kept for this session only ({reason}): set {VARIABLE} to a directory "
        "that can be written\n"
    )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all."""
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
    """Held by one process of the machine at a time: others that want the same result wait until it is there.

    A record lock: forked children do not inherit it, and it ends with its process. Where there can be no lock, several
    processes may make the same result.
    """
    with ExitStack() as opened:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def machine_facts() -> str:
    """What numbers depend on beside their code: torch, all that is installed, Python, the processor."""
    return repr((version("torch"), _installed(), platform.python_version(), cpu_model()))


def _installed() -> list[str]:
    """Names and versions of all distributions, as their folders bear them: a job may compute with any of them."""
    folders = (path for entry in {*sys.path} for path in Path(entry).glob("*.*-info"))
    return sorted({path.name for path in folders})
