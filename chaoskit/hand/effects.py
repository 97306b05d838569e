"""Effects that last: their times to live, and what each kind of effect offers.

-> ``hand/server.py`` ends them; ``hand/processes/held.py`` and ``hand/network/traffic.py`` are the kinds.
"""

from __future__ import annotations

import math
from typing import Any


class EffectSchedule:
    """The end of each effect, on a clock that the caller reads. All times are in seconds."""

    def __init__(self) -> None:
        self._ends_s: dict[int, float] = {}

    def begin(self, number: int, lasts_s: float, now_s: float) -> None:
        """Note that an effect has begun, or that its time to live begins anew."""
        self._ends_s[number] = now_s + lasts_s

    def end(self, number: int) -> None:
        """Forget an effect that has ended. An unknown number is ignored."""
        self._ends_s.pop(number, None)

    def due(self, now_s: float) -> list[int]:
        """Return the effects whose time to live is over, the one that ended first at the front."""
        numbers = [number for number, end_s in self._ends_s.items() if end_s <= now_s]
        return sorted(numbers, key=lambda number: self._ends_s[number])

    def next_s(self) -> float:
        """Return the time of the next end; infinity if no effect lasts."""
        return min(self._ends_s.values(), default=math.inf)

    def left_s(self, number: int, now_s: float) -> float:
        """Return the rest of an effect's time to live; 0 for an unknown number."""
        return max(0.0, self._ends_s.get(number, now_s) - now_s)


class Silence:
    """The time since the client was heard, and the limit at which the client counts as dead."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        self._heard_s = now_s

    def hear(self, now_s: float) -> None:
        """Note that the client has sent a line."""
        self._heard_s = now_s

    def end_s(self) -> float:
        """Return the time at which the client counts as dead, unless it is heard before."""
        return self._heard_s + self.limit_s

    def is_over(self, now_s: float) -> bool:
        """Return whether the client counts as dead."""
        return now_s >= self.end_s()


class LastingEffect:
    """An effect that lasts until it is ended.

    Attributes:
        kind: the operation that has begun it.
        pid: the process on which it acts; 0 for none.
        outlives_hand: True if the end of the hand does not end it. The kernel has its time.
    """

    kind = ""
    pid = 0
    outlives_hand = False

    def next_act_s(self) -> float:
        """Return the time of ``time.monotonic`` for the next :meth:`act`; infinity for none."""
        return math.inf

    def act(self, now_s: float) -> str:
        """Carry out what is due.

        Returns:
            The reason for which the effect has ended by itself, or "" while it lasts.
        """
        return ""

    def renew(self, lasts_s: float) -> None:
        """Let the effect last for so long from now on, where the kernel keeps its time.

        Raises:
            Unable: if the kernel refuses; the effect ends at its former time then.
        """

    def evidence(self) -> dict[str, Any]:
        """Return signs of the effect so far."""
        return {}

    def end(self) -> dict[str, Any]:
        """End the effect, and return the signs of it.

        Raises:
            Unable: if the effect, or a trace of it, may be left. The next call tries again.
        """
        return {}
