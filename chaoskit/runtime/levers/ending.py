"""Levers that end the process, or the training thread."""

from __future__ import annotations

import os
import sys
from typing import Any

from chaoskit.runtime.levers.rig import Bench

_CHUNK_BYTES = 2**20


class InjectedError(Exception):
    """Raised in a worker by the fault ``Raise``."""


def fail(bench: Bench, options: dict[str, Any]) -> None:
    """Raise ``message``."""
    bench.report(True, f"raising InjectedError({options['message']!r})")
    raise InjectedError(options["message"])


def leave(bench: Bench, options: dict[str, Any]) -> None:
    """End the process with ``status``, as code does that believes it has finished."""
    os._exit(options["status"])


def run_out_of_memory(bench: Bench, options: dict[str, Any]) -> None:
    """Ask the allocator for more than there can be; it raises MemoryError."""
    bytearray(sys.maxsize)


def allocate(bench: Bench, options: dict[str, Any]) -> None:
    """Take memory until the kernel ends the process; give up, and it back, after ``give_up_bytes``."""
    hoard: list[bytearray] = []
    while len(hoard) * _CHUNK_BYTES < options["give_up_bytes"]:
        hoard.append(bytearray(b"\1") * _CHUNK_BYTES)  # written to, so that the pages exist
    bench.report(False, f"took {len(hoard)} MiB, and was not ended")
