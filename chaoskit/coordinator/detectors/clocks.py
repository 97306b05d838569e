"""The offsets of the wall clocks of nodes and workers from the coordinator's clock.

No decision depends on these findings. A pure state machine.

-> agent/coordinator_link.py measures the offset of a node; health/limits.py has the limit.
coordinator/handlers/on_measurement.py reports the findings.
"""

from __future__ import annotations

import math

from chaoskit.health.clock import judge_offset
from chaoskit.health.limits import HealthLimits
from chaoskit.wire.messages import ClockOffset, Finding, Heartbeat

#: A clock that was off is right again below this share of the limit. Without such a margin, a clock
#: near the limit would be reported all the time.
_CALM = 0.5


class Clocks:
    """Watch over the clocks of nodes.

    A node is reported when its clocks are first read, when one is off, and when all are right
    again.
    """

    def __init__(self) -> None:
        self._limits = HealthLimits()
        # node -> the node, or a worker there, with a clock that is off; "" for none
        self._clocks_off: dict[str, str] = {}

    def forget(self, node: str) -> None:
        """Forget the clocks of a node that has a new agent: its first reading is reported again."""
        self._clocks_off.pop(node, None)

    def hear(self, heartbeat: Heartbeat) -> Finding | None:
        """Take in a heartbeat. Return a finding if the state of a clock has changed, else None.

        The first reading of a node is a finding, too, also if all is right. None is returned for a
        heartbeat without a reading.
        """
        offset = heartbeat.clock
        if offset is None:
            return None
        aheads_ms, limit_ms = _aheads_ms(heartbeat, offset), self._limits.clock_offset_warn_ms
        reported_name = self._clocks_off.get(heartbeat.node)
        if reported_name and abs(aheads_ms.get(reported_name, 0.0)) > limit_ms * _CALM:
            return None
        worst = max(aheads_ms, key=lambda name: abs(aheads_ms[name]))
        name_off = worst if abs(aheads_ms[worst]) > limit_ms else ""
        if name_off == reported_name:
            return None
        self._clocks_off[heartbeat.node] = name_off
        side = "ahead of" if aheads_ms[worst] > 0 else "behind"
        detail = (
            f"{worst} is {side} the coordinator, within {offset.error_ms:.3g} ms"
            if name_off
            else ""
        )
        return judge_offset(aheads_ms[worst], self._limits, detail)


def _aheads_ms(heartbeat: Heartbeat, offset: ClockOffset) -> dict[str, float]:
    """Return how far the clocks of a node are ahead of the coordinator's, in milliseconds.

    The keys are the names of the node and of its workers. The error of the measurement is
    subtracted.

    Args:
        offset: the offset of the node's clock.
    """
    measured_ms = {heartbeat.node: offset.ahead_ms} | {
        beat.worker: offset.ahead_ms + beat.clock_ms for beat in heartbeat.beats
    }
    return {
        name: math.copysign(max(0.0, abs(ahead_ms) - offset.error_ms), ahead_ms)
        for name, ahead_ms in measured_ms.items()
    }
