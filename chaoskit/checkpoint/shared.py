"""Directories in shared memory for jobs that no agent watches over: slots as files, which outlive their processes.

    directory = claim("my-job")                                  # /dev/shm/chaoskit-UID-my-job
    slots = Slots.at(directory, piece=f"rank{rank}")
    ...
    release("my-job")                                            # by whoever owns the job, when it is done

The owner is a process, by default the parent of the one that claims: under ``torchrun`` that is its agent, which
outlives the workers that it restarts. What a dead owner leaves lasts for a while, so that the job can be started again
and read it; :func:`sweep` then removes it, and every claim sweeps.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from chaoskit.errors import BadInput
from chaoskit.osprocess import is_ending, kernel_id, start_ticks

_ROOT = Path("/dev/shm")
_OWNER = "owner.json"
#: How long the copies of a job whose owner is gone are kept after their last change.
KEPT_S = 3600.0


class _Owner(msgspec.Struct, frozen=True):
    """A process, on one kernel: elsewhere its number means nothing."""

    kernel: str
    pid: int
    ticks: int

    @property
    def lives(self) -> bool:
        return start_ticks(self.pid) == self.ticks and not is_ending(self.pid)


def directory_of(job: str, root: Path = _ROOT) -> Path:
    """Where the slots of ``job`` lie.

    Raises:
        BadInput: if it cannot be part of a file name.
    """
    if not re.fullmatch(r"[\w.-]{1,100}", job):
        raise BadInput("job", job, "use letters, digits, dots, dashes and underscores")
    return root / f"chaoskit-{os.getuid()}-{job}"


def claim(job: str, owner_pid: int | None = None, root: Path = _ROOT) -> Path:
    """Make the directory of ``job``, or find it, and enter who owns it. Every rank may do so.

    Raises:
        BadInput: if it belongs to another user or to another job that runs.
    """
    directory = directory_of(job, root)
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise BadInput("job", job, "choose another name: this directory is another user's")
    pid = os.getppid() if owner_pid is None else owner_pid
    owner, before = _Owner(kernel_id(), pid, start_ticks(pid) or 0), _owner(directory)
    if before is not None and before != owner and before.kernel == owner.kernel and before.lives:
        raise BadInput("job", job, f"choose another name: process {before.pid} runs a job of this name")
    written = directory / f"{_OWNER}.{os.getpid()}"
    written.write_bytes(msgspec.json.encode(owner))
    written.replace(directory / _OWNER)
    sweep(root=root)
    return directory


def release(job: str, root: Path = _ROOT) -> None:
    """The job is done: its copies are of no use any more."""
    shutil.rmtree(directory_of(job, root), ignore_errors=True)


def sweep(unused_s: float = KEPT_S, root: Path = _ROOT) -> list[Path]:
    """Remove what jobs of this user left whose owner is gone, if it was not written for so long; returns what."""
    removed = []
    for directory in sorted(root.glob(f"chaoskit-{os.getuid()}-*")):
        with suppress(OSError):  # another sweep is faster
            owner = _owner(directory)
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            if owner is not None and (owner.kernel != kernel_id() or owner.lives):
                continue
            written = max(path.stat().st_mtime for path in [directory, *directory.iterdir()])
            if time.time() - written >= unused_s:
                shutil.rmtree(directory)
                removed.append(directory)
    return removed


def _owner(directory: Path) -> _Owner | None:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((directory / _OWNER).read_bytes(), type=_Owner)
    return None
