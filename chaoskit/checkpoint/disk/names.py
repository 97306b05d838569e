"""Names in a directory of snapshots, which tell complete ones from others, and their owners.

    step-000000120.g3       a complete snapshot: step 120, committed by generation 3
    .staging/NAME~OWNER     a snapshot that is being written, with its process and the id of its run
    .trash/NAME~NONCE       a snapshot that is being deleted
    quarantine/NAME~NONCE   a snapshot that failed its digests, with a note of the reason

Only the first kind is ever offered to a restore.

-> ``disk/tier.py``: makes the directories, and removes those of dead owners.
-> ``remote/upload.py``: an object store has only the first kind; its manifest completes it.
"""

from __future__ import annotations

import os
import re
import secrets
from typing import NamedTuple

import xxhash

from chaoskit.process.linux import is_ending, kernel_id, start_ticks

STAGING, TRASH, QUARANTINE = ".staging", ".trash", "quarantine"
_name_pattern = re.compile(r"step-(\d{9,})\.g(\d+)")
_staging_pattern = re.compile(
    r"(?P<name>[^~]+)~(?P<kernel>[0-9a-f]{16})-(?P<pid>\d+)-(?P<ticks>\d+)-[0-9a-f]+(-[0-9a-f]+)?"
)


def snapshot_name(step: int, generation: int) -> str:
    """Return the name of a snapshot, such as ``step-000000120.g3``.

    Names sort like steps, up to a thousand million steps.
    """
    return f"step-{step:09}.g{generation}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and generation, or None for a name that :func:`snapshot_name` does not give."""
    match = _name_pattern.fullmatch(name)
    age = (int(match[1]), int(match[2])) if match else None
    return age if age is not None and snapshot_name(*age) == name else None


def unique(name: str) -> str:
    """Return ``name`` with a suffix that no other process will use."""
    return f"{name}~{secrets.token_hex(8)}"


class Owner(NamedTuple):
    """A process that writes a snapshot, as identified by processes that share its file system.

    Attributes:
        kernel: digest of the id of the kernel and process namespace in which it runs.
        pid: its process id.
        ticks: its start time in clock ticks since the boot, which tells it from later processes
            with the same id.
    """

    kernel: str
    pid: int
    ticks: int

    @classmethod
    def this(cls) -> Owner:
        """Return the owner that stands for this process."""
        pid = os.getpid()
        return cls(_kernel(), pid, start_ticks(pid) or 0)

    def staging_name(self, name: str, run: str = "") -> str:
        """Return the name of the directory in which this process writes the snapshot ``name``.

        Args:
            run: hexadecimal id of the run whose processes write it; "" for none.
        """
        owned_name = f"{name}~{self.kernel}-{self.pid}-{self.ticks}-{secrets.token_hex(4)}"
        return f"{owned_name}-{run}" if run else owned_name

    @property
    def is_alive(self) -> bool | None:
        """True if the process is alive, and False if it has ended.

        None if it is on another host or in another process namespace, where it cannot be seen.
        """
        if self.kernel != _kernel():
            return None
        return start_ticks(self.pid) == self.ticks and not is_ending(self.pid)


def owner_of(staging_name: str) -> Owner | None:
    """Return the owner of a staging directory, or None for a name of another form."""
    match = _staging_pattern.fullmatch(staging_name)
    return Owner(match["kernel"], int(match["pid"]), int(match["ticks"])) if match else None


def _kernel() -> str:
    """Return the digest of the id of this process's kernel and process namespace."""
    return xxhash.xxh3_64_hexdigest(kernel_id().encode())
