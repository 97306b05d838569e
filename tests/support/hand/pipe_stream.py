"""The stream of a hand that runs on this machine.

-> ``support/hand/pipes.py`` and ``support/hand/traffic.py`` start such hands.
"""

from __future__ import annotations

import os
import select
import subprocess

_CLOSED = -1


class PipeStream:
    """The standard streams of a hand, by their descriptors.

    Args:
        input_fd: descriptor to which requests are written. It is closed by :meth:`close`.
        output_fd: descriptor from which answers are read.
    """

    def __init__(self, input_fd: int, output_fd: int) -> None:
        self._input_fd, self._output_fd = input_fd, output_fd

    def receive(self, limit_s: float) -> bytes | None:
        if not select.select([self._output_fd], [], [], limit_s)[0]:
            return None
        return os.read(self._output_fd, 65536)

    def send(self, data: bytes) -> None:
        os.write(self._input_fd, data)

    def close(self) -> None:
        input_fd, self._input_fd = self._input_fd, _CLOSED
        if input_fd != _CLOSED:
            os.close(input_fd)


def stream_of(process: subprocess.Popen[bytes]) -> PipeStream:
    """Return the stream of a hand that was started with pipes."""
    assert process.stdin is not None
    assert process.stdout is not None
    input_fd = os.dup(process.stdin.fileno())
    process.stdin.close()
    return PipeStream(input_fd, process.stdout.fileno())
