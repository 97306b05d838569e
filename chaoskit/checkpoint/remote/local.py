"""Store for ``file://``: a directory, such as a mount, with durable writes.

-> ``remote/store.py``: all other operations. ``disk/tier.py``: a tier in a directory without a URL.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from chaoskit.checkpoint.remote.store import Store


class LocalStore(Store):
    """A store whose objects are files. A small object appears by renaming."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small object and its name durably, by renaming a draft."""
        path = Path(self._path(name))
        draft = path.with_name(f".{path.name}.{os.getpid()}")

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            # makes the names of files sent before durable, too
            for directory in (path.parent, path.parent.parent):
                _sync(directory)

        self._retry(f"write {name}", write)

    def _make_durable(self, file: Any) -> None:
        """Write the bytes of an open file to the disk."""
        file.flush()
        os.fsync(file.fileno())

    def forget(self, directory: str) -> None:
        """Remove the directory if it is empty. No error is raised."""
        with contextlib.suppress(OSError):  # the directory may hold files of another writer
            Path(self._path(directory)).rmdir()


def _sync(directory: Path) -> None:
    """Write the names in a directory to the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
