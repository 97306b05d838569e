"""Preconditions of a night: a lock against other nights, and the guard of its plan.

-> nightly/watch.py: conditions that end a night later. nightly/places.py: nights of other machines
in one namespace. nightly/plan.py: the guard in the plan.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from chaoskit.errors import BadInput
from chaoskit.nightly.plan import Guard
from chaoskit.nightly.watch import run_command


@contextmanager
def night_lock(root: Path) -> Iterator[None]:
    """Hold the lock of a directory. The kernel releases it however this process ends.

    The directory and its file ``.lock`` are created; the file has the id of this process.

    Raises:
        BadInput: if another night holds the lock, or the directory cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(
            "directory", str(root), f"name a directory that can be written ({error.strerror})"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
            raise BadInput(
                "directory", str(root), f"wait: another night runs there ({other})"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def require_guard(guard: Guard) -> None:
    """Raise BadInput if the window of the guard is closed, or its command fails or cannot run."""
    now = datetime.now(UTC)
    if guard.window is not None and not guard.window.is_open(now):
        raise BadInput(
            "guard.window", f"{now:%a %H:%M} UTC", f"start the night within {guard.window}"
        )
    if guard.require:
        status, line = run_command(guard.require)
        if status:
            raise BadInput(
                "guard.require",
                " ".join(guard.require),
                f"wait until this command ends with 0: {line or status}",
            )
