"""Bandwidth limit: a schedule on which each piece of data reserves its time. Pure.

-> ``remote/store.py``: waits before it sends a piece.
"""

from __future__ import annotations


class UploadPace:
    """A limit of ``bytes_per_s``, evenly over time; 0 for no limit. Not thread-safe."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def wait_s(self, size_bytes: int, now_s: float) -> float:
        """Reserve time for a piece that is ready at ``now_s``, and return its delay in seconds."""
        if not self._bytes_per_s:
            return 0.0
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + size_bytes / self._bytes_per_s
        return begin_s - now_s
