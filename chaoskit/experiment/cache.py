"""Results that are kept on this machine for later sessions: where they lie, and what they depend on."""

from __future__ import annotations

import fcntl
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from chaoskit.osprocess import cpu_model


def directory_of(kind: str) -> Path:
    """Where results of this kind are kept, by ``XDG_CACHE_HOME``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chaoskit" / kind


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(data)
    draft.rename(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Held by one process of the machine at a time: others that want the same result wait until it is there.

    A record lock: forked children do not inherit it, and it ends with its process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def machine_facts() -> str:
    """What numbers depend on beside their code: torch, all that is installed, Python, the processor."""
    return repr((version("torch"), _installed(), platform.python_version(), cpu_model()))


def _installed() -> list[str]:
    """Names and versions of all distributions, as their folders bear them: a job may compute with any of them."""
    folders = (path for entry in {*sys.path} for path in Path(entry).glob("*.*-info"))
    return sorted({path.name for path in folders})
