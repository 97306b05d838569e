"""A small file system for one test, which can be filled and freed again."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A file system that is mounted at ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filling = root / "filling"

    def fill(self, room_bytes: int = 0) -> None:
        """Fill the disk, but leave ``room_bytes`` of room, in whole pages."""
        with self._filling.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(65536))
        if room_bytes:
            os.truncate(self._filling, self._filling.stat().st_size // 4096 * 4096 - room_bytes)

    def free(self) -> None:
        """Free the room again."""
        self._filling.unlink()


@contextlib.contextmanager
def small_disk(root: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a tmpfs of ``size`` (as mount takes it) at ``root``.

    Skip the test if mounting is not allowed.
    """
    root.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        yield SmallDisk(root)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)
