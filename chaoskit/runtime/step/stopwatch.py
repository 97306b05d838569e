"""Where the time of a rank's steps goes: measured in the training thread, shown on its board once a step."""

from __future__ import annotations

import time
from enum import IntEnum

import torch

from chaoskit.process.heartbeat_page import Board, Spent


class Lap(IntEnum):
    """What a piece of time was spent on. The values are places in :class:`Spent`."""

    COMPUTE = 2
    INPUT = 3
    WAIT = 4
    OTHER = 5


class Stopwatch:
    """Adds laps up. Costs one reading of the clock a lap.

    What was not counted at its end, as shards that are computed to be compared or steps that came to nothing, is
    forgotten with the next :meth:`start`.
    """

    def __init__(self, board: Board, device: torch.device) -> None:
        self._board, self._device = board, device
        self._total = [0] * len(Spent._fields)
        self._laps = [0] * len(Spent._fields)
        self._since_ns = 0
        self._stepped_ns, self._accounted_ns = (
            0,
            0,
        )  # when the last step was committed, and laps until then

    def start(self) -> None:
        """Begin a shard, or what follows after the last one."""
        self._laps = [0] * len(self._laps)
        self._since_ns = time.monotonic_ns()

    def lap(self, lap: Lap) -> None:
        """The time since the last reading was spent on this."""
        now_ns = time.monotonic_ns()
        self._laps[lap] += now_ns - self._since_ns
        self._since_ns = now_ns

    def count_shard(self) -> None:
        """The shard that was begun is a part of this rank's contribution."""
        self.lap(Lap.COMPUTE)
        self._laps[1] += 1
        self._count()

    def drain(self) -> None:
        """An accelerator may still compute what was counted. The next thing is to read its losses, so all wait here."""
        if self._device.type == "cuda":
            self.start()
            torch.cuda.current_stream(self._device).synchronize()
            self.lap(Lap.COMPUTE)
            self._count()

    def count_step(self) -> None:
        """The step is committed. What has passed since the one before, and was no lap, went elsewhere."""
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
        for place, spent in enumerate(self._laps):
            self._total[place] += spent
