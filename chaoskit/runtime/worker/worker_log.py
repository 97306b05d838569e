"""Standard output and error of a worker, which go to a log in the directory of the run."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from chaoskit.process.linux import NO_ROOM


class WorkerLog(io.RawIOBase):
    """A log that loses text while its disk is full, where ``print`` would end the training.

    Once there is room, a line says how much is missing in its place.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lost_bytes = 0

    def write(self, data: Any) -> int:
        try:
            if self._lost_bytes:
                os.write(
                    self._fd,
                    b"\n[%d bytes were lost here, as the disk was full]\n" % self._lost_bytes,
                )
                self._lost_bytes = 0
            return os.write(self._fd, data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._lost_bytes += len(data)
            return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd


def redirect_output() -> None:
    """Print through such logs, a line at once: a worker ends without flushing, mostly by SIGKILL."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        log = io.BufferedWriter(WorkerLog(stream.fileno()))
        setattr(
            sys, name, io.TextIOWrapper(log, stream.encoding, stream.errors, line_buffering=True)
        )
