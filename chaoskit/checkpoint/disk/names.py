"""The names in a directory of snapshots, which say what is complete, what is not, and whose it is.

    step-000000120.g3       a complete snapshot: step 120, committed by generation 3
    .staging/NAME~OWNER     one that is being written, and the process that does it; its run, too, if that has an id
    .trash/NAME~NONCE       one that is being deleted
    quarantine/NAME~NONCE   one that failed its digests, and why

Only the first kind is ever offered to a restore.
"""

from __future__ import annotations

import os
import re
import secrets
from typing import NamedTuple

import xxhash

from chaoskit.process.linux import is_ending, kernel_id, start_ticks

STAGING, TRASH, QUARANTINE = ".staging", ".trash", "quarantine"
_name = re.compile(r"step-(\d{9,})\.g(\d+)")
_owned = re.compile(
    r"(?P<name>[^~]+)~(?P<kernel>[0-9a-f]{16})-(?P<pid>\d+)-(?P<ticks>\d+)-[0-9a-f]+(-[0-9a-f]+)?"
)


def snapshot_name(step: int, generation: int) -> str:
    """Sorts like steps do, up to a thousand million of them."""
    return f"step-{step:09}.g{generation}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and generation; None for a name that :func:`snapshot_name` does not give."""
    match = _name.fullmatch(name)
    age = (int(match[1]), int(match[2])) if match else None
    return age if age is not None and snapshot_name(*age) == name else None


def unique(name: str) -> str:
    """A name that no other process will use."""
    return f"{name}~{secrets.token_hex(8)}"


class Owner(NamedTuple):
    """A process, for whoever shares its file system. ``kernel``: in whose list of processes it is."""

    kernel: str
    pid: int
    ticks: int

    @classmethod
    def this(cls) -> Owner:
        pid = os.getpid()
        return cls(_kernel(), pid, start_ticks(pid) or 0)

    def staging_name(self, name: str, run: str = "") -> str:
        """What this process calls the snapshot ``name`` while it writes it, with others of ``run``."""
        own = f"{name}~{self.kernel}-{self.pid}-{self.ticks}-{secrets.token_hex(4)}"
        return f"{own}-{run}" if run else own

    @property
    def lives(self) -> bool | None:
        """Whether the process is there; None if it is on another host, where nobody here can see it."""
        if self.kernel != _kernel():
            return None
        return start_ticks(self.pid) == self.ticks and not is_ending(self.pid)


def owner_of(staging_name: str) -> Owner | None:
    """Whose staging directory has that name; None if it is none."""
    found = _owned.fullmatch(staging_name)
    return Owner(found["kernel"], int(found["pid"]), int(found["ticks"])) if found else None


def _kernel() -> str:
    return xxhash.xxh3_64_hexdigest(kernel_id().encode())
