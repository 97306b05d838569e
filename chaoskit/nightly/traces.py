"""What a night may leave on a machine, as it can be seen from outside."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from chaoskit.process.linux import descendants, process_name
from chaoskit.substrate.undo import left_behind
from chaoskit.substrate.undo.entries import PREFIX
from chaoskit.substrate.undo.files import candidates

_CGROUPS = Path("/sys/fs/cgroup")
_NAMESPACES = Path("/run/netns")
_OF_OURS = (PREFIX, "ck-")


def own_traces() -> set[str]:
    """What nothing but this process can have left: processes below it, and what its runs should have put back."""
    below = {pid: process_name(pid) for pid in descendants(os.getpid())}
    return {*(f"process {pid} ({name})" for pid, name in below.items() if name), *left_behind()}


def shared_traces() -> set[str]:
    """Network namespaces, control groups, mounts and temporary directories that any run of chaoskit may have made.

    Not the directory of undo files: it stays.
    """
    kept = {f"directory {path.name}" for path in candidates()}
    return {
        *_named(_NAMESPACES, "network namespace"),
        *_cgroups(),
        *_mounts(),
        *_named(Path(tempfile.gettempdir()), "directory"),
    } - kept


def _named(place: Path, what: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (f"{what} {name}" for name in os.listdir(place) if name.startswith(_OF_OURS))


def _cgroups() -> Iterator[str]:
    for folder, below, _ in os.walk(_CGROUPS):
        yield from (f"control group {folder}/{name}" for name in below if name.startswith(PREFIX))


def _mounts() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if PREFIX in line:
                yield f"mount {line.split()[1]}"
