"""Acts that end the process, or the training thread."""

from __future__ import annotations

import os
import sys
from typing import Any

from chaoskit.runtime.injection.context import InjectionContext

_CHUNK_BYTES = 2**20


class InjectedError(Exception):
    """Raised in a worker by the fault ``Raise``."""


def fail(context: InjectionContext, options: dict[str, Any]) -> None:
    """Raise ``message``."""
    context.report(True, f"raising InjectedError({options['message']!r})")
    raise InjectedError(options["message"])


def leave(context: InjectionContext, options: dict[str, Any]) -> None:
    """End the process with ``status``, as code does that believes it has finished."""
    os._exit(options["status"])


def run_out_of_memory(context: InjectionContext, options: dict[str, Any]) -> None:
    """Ask the allocator for more than there can be; it raises MemoryError."""
    bytearray(sys.maxsize)


def allocate(context: InjectionContext, options: dict[str, Any]) -> None:
    """Take memory until the kernel ends the process; give up, and it back, after ``give_up_bytes``."""
    hoard: list[bytearray] = []
    while len(hoard) * _CHUNK_BYTES < options["give_up_bytes"]:
        hoard.append(bytearray(b"\1") * _CHUNK_BYTES)  # written to, so that the pages exist
    context.report(False, f"took {len(hoard)} MiB, and was not ended")
