"""Acts that end the process or the training thread.

-> faults/processes/raising.py, leaving.py and memory.py order them. worker/process.py
(``_report_failure``): what a worker does with an exception.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from chaoskit.runtime.injection.context import InjectionContext

_CHUNK_BYTES = 2**20


class InjectedError(Exception):
    """The exception that the fault ``Raise`` raises in a worker."""


def fail(context: InjectionContext, options: dict[str, Any]) -> None:
    """Report, and raise InjectedError with ``message``."""
    context.report(True, f"raising InjectedError({options['message']!r})")
    raise InjectedError(options["message"])


def leave(context: InjectionContext, options: dict[str, Any]) -> None:
    """End the process with ``status``, like code that has finished by mistake. Without a report."""
    os._exit(options["status"])


def run_out_of_memory(context: InjectionContext, options: dict[str, Any]) -> None:
    """Request more memory than can exist, so that the allocator raises MemoryError.

    There is no report.
    """
    bytearray(sys.maxsize)


def allocate(context: InjectionContext, options: dict[str, Any]) -> None:
    """Allocate memory until the kernel ends the process.

    Give up after ``give_up_bytes``, report that, and free the memory.
    """
    chunks: list[bytearray] = []
    while len(chunks) * _CHUNK_BYTES < options["give_up_bytes"]:
        chunks.append(bytearray(b"\1") * _CHUNK_BYTES)  # written to, so that the pages exist
    context.report(False, f"allocated {len(chunks)} MiB, and the kernel did not end the process")
