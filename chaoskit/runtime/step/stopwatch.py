"""The times that a rank spends on computing, input and waiting, shown on its board.

-> coordinator/detectors/stragglers.py and balance.py judge them; process/progress_board.py is the
board.
"""

from __future__ import annotations

import time
from enum import IntEnum

import torch

from chaoskit.process.progress_board import Board, Spent


class Lap(IntEnum):
    """The kind of work that an interval was spent on.

    The values are indices into :class:`Spent`.
    """

    COMPUTE = 2
    INPUT = 3
    WAIT = 4
    OTHER = 5


class Stopwatch:
    """Sums of the intervals of a rank's steps. Each interval costs one reading of the clock.

    Intervals that are not counted are dropped by the next :meth:`start`: those of shards that are
    computed for comparison, or of steps that fail.
    """

    def __init__(self, board: Board, device: torch.device) -> None:
        self._board, self._device = board, device
        self._total = [0] * len(Spent._fields)
        self._laps = [0] * len(Spent._fields)
        self._since_ns = 0
        self._stepped_ns, self._accounted_ns = 0, 0  # at the last commit: time, and sum of laps

    def start(self) -> None:
        """Begin a shard, or the work after the last one. Laps that were not counted are dropped."""
        self._laps = [0] * len(self._laps)
        self._since_ns = time.monotonic_ns()

    def lap(self, lap: Lap) -> None:
        """Add the time since the last :meth:`start` or lap to ``lap``."""
        now_ns = time.monotonic_ns()
        self._laps[lap] += now_ns - self._since_ns
        self._since_ns = now_ns

    def count_shard(self) -> None:
        """Count the current shard as a part of this rank's contribution."""
        self.lap(Lap.COMPUTE)
        self._laps[1] += 1
        self._count()

    def drain(self) -> None:
        """Wait for the accelerator, which may still compute shards that were counted.

        The losses are read next, so that the wait itself costs nothing.
        """
        if self._device.type == "cuda":
            self.start()
            torch.cuda.current_stream(self._device).synchronize()
            self.lap(Lap.COMPUTE)
            self._count()

    def count_step(self) -> None:
        """Count a committed step, and show the sums on the board.

        The time since the previous commit that belongs to no lap is added to ``OTHER``.
        """
        self._count()
        now_ns, total = time.monotonic_ns(), self._total
        accounted_ns = sum(total[Lap.COMPUTE : Lap.OTHER])
        if self._stepped_ns:
            total[Lap.OTHER] += max(
                0, now_ns - self._stepped_ns - (accounted_ns - self._accounted_ns)
            )
        self._stepped_ns, self._accounted_ns = now_ns, accounted_ns
        total[0] += 1
        self._board.spend(total)

    def _count(self) -> None:
        """Add the current laps to the sums."""
        for index, spent in enumerate(self._laps):
            self._total[index] += spent
