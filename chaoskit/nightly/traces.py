"""Traces that a night may leave on a machine, as seen from outside.

-> substrate/undo/janitor.py: left-over resources are put back.
-> nightly/run.py compares the traces before and after a night.
"""

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
_PREFIXES = (PREFIX, "ck-")


def own_traces() -> set[str]:
    """Return a line for each trace that counts as left by this process.

    Such traces are its descendants, and the abandoned entries of the undo logs of this user.
    """
    names = {pid: process_name(pid) for pid in descendants(os.getpid())}
    return {*(f"process {pid} ({name})" for pid, name in names.items() if name), *left_behind()}


def shared_traces() -> set[str]:
    """Return a line for each trace that any run of chaoskit may have left.

    Such traces are network namespaces, control groups, mounts and temporary directories. The
    directory of undo files is left out, as it stays.
    """
    kept = {f"directory {path.name}" for path in candidates()}
    return {
        *_prefixed_files(_NAMESPACES, "network namespace"),
        *_cgroups(),
        *_mounts(),
        *_prefixed_files(Path(tempfile.gettempdir()), "directory"),
    } - kept


def _prefixed_files(directory: Path, kind: str) -> Iterator[str]:
    """Yield a line for each file of a directory that has a prefix of chaoskit.

    Args:
        kind: the first word of each line.
    """
    with contextlib.suppress(OSError):
        yield from (
            f"{kind} {name}" for name in os.listdir(directory) if name.startswith(_PREFIXES)
        )


def _cgroups() -> Iterator[str]:
    """Yield a line for each control group of chaoskit."""
    for folder, subdirectories, _ in os.walk(_CGROUPS):
        yield from (
            f"control group {folder}/{name}" for name in subdirectories if name.startswith(PREFIX)
        )


def _mounts() -> Iterator[str]:
    """Yield a line for each mount of chaoskit."""
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if PREFIX in line:
                yield f"mount {line.split()[1]}"
