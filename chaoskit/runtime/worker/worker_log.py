"""Standard output and error of a worker, which go to a log in the run directory.

-> worker/zygote.py opens the log.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from chaoskit.process.linux import NO_ROOM


class WorkerLog(io.RawIOBase):
    """A log that drops text while its disk is full, where ``print`` would end the training.

    Once there is room, a line in the log says how many bytes are missing.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lost_bytes = 0

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it while the disk is full.

        Return the number of bytes that were written or dropped. Other errors are raised.
        """
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
    """Redirect standard output and error to line-buffered logs.

    Workers mostly end by SIGKILL, and cannot flush.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        log = io.BufferedWriter(WorkerLog(stream.fileno()))
        setattr(
            sys, name, io.TextIOWrapper(log, stream.encoding, stream.errors, line_buffering=True)
        )
