"""``file://``: a directory, such as a mount of another host's disk. Here what is written can be made durable."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from chaoskit.checkpoint.remote.store import Store


class LocalStore(Store):
    """Objects are files; a small one appears by renaming."""

    def put(self, name: str, data: bytes) -> None:
        path = Path(self._path(name))
        draft = path.with_name(f".{path.name}.{os.getpid()}")

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            for directory in (
                path.parent,
                path.parent.parent,
            ):  # files that were sent before are made durable, too
                _sync(directory)

        self._attempts(f"write {name}", write)

    def _settle(self, file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())

    def forget(self, directory: str) -> None:
        with contextlib.suppress(OSError):  # somebody else's file is in it
            Path(self._path(directory)).rmdir()


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
