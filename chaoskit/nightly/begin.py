"""What must hold before a night begins: no other one runs here, and its guard lets it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from chaoskit.errors import BadInput
from chaoskit.nightly.plan import Guard
from chaoskit.nightly.watch import ask


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the lock of a directory, which the kernel releases however this process ends.

    Raises:
        BadInput: if another night holds it, or it cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(
            "directory", str(root), f"name one that can be written ({error.strerror})"
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
    """Refuse a night outside of its window, or where its condition does not hold. Raises BadInput."""
    now = datetime.now(UTC)
    if guard.window is not None and not guard.window.is_open(now):
        raise BadInput("guard.window", f"{now:%a %H:%M} UTC", f"begin it from {guard.window}")
    if guard.require:
        status, line = ask(guard.require)
        if status:
            raise BadInput(
                "guard.require",
                " ".join(guard.require),
                f"wait until it ends with 0: {line or status}",
            )
