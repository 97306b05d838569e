"""Requests that the reader of a log asks for: plain data, which its shell carries out.

-> attach/logs/container_log.py makes them; attach/logs/follower.py carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadStatus:
    """Request to read the status of the pod, not before ``at_s`` on the monotonic clock."""

    at_s: float


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Request to open a stream of the log, not before ``at_s``. An open stream is closed first.

    Attributes:
        previous: True for the log of the life before the current one.
        since: time of the first line in whole seconds; "" for the whole file.
        tail_lines: number of lines at the end of the file to begin with; None for all.
    """

    at_s: float
    previous: bool
    since: str
    tail_lines: int | None


@dataclass(frozen=True, slots=True)
class ReadStream:
    """Request to wait for data of the open stream."""


@dataclass(frozen=True, slots=True)
class EndReading:
    """Request to end: the pod is gone, or its log has been read to its end."""


ReaderRequest = ReadStatus | OpenStream | ReadStream | EndReading
