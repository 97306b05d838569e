"""Wall clocks of nodes and their workers beside the coordinator's: a pure state machine. Nothing is decided by them."""

from __future__ import annotations

import math

from chaoskit.health.clock import judge_offset
from chaoskit.health.limits import Limits
from chaoskit.wire.messages import Finding, Heartbeat

#: A clock that was off is right again below this share of the limit: else one near it would be told of all the time.
_CALM = 0.5


class Clocks:
    """Hears heartbeats, and says when the clock of a node is found right, off, or right again."""

    def __init__(self) -> None:
        self._limits = Limits()
        self._off: dict[str, str] = {}  # by node: whose clock is off; "" where none is

    def forget(self, node: str) -> None:
        """Another agent speaks for it from now on."""
        self._off.pop(node, None)

    def hear(self, heartbeat: Heartbeat) -> Finding | None:
        """None where that is no news."""
        if heartbeat.clock is None:
            return None
        aheads_ms, limit_ms = _aheads_ms(heartbeat), self._limits.clock_offset_warn_ms
        known = self._off.get(heartbeat.node)
        if known and abs(aheads_ms.get(known, 0.0)) > limit_ms * _CALM:
            return None
        worst = max(aheads_ms, key=lambda one: abs(aheads_ms[one]))
        off = worst if abs(aheads_ms[worst]) > limit_ms else ""
        if off == known:
            return None
        self._off[heartbeat.node] = off
        side = "ahead of" if aheads_ms[worst] > 0 else "behind"
        detail = (
            f"{worst} is {side} the coordinator, within {heartbeat.clock.error_ms:.3g} ms"
            if off
            else ""
        )
        return judge_offset(aheads_ms[worst], self._limits, detail)


def _aheads_ms(heartbeat: Heartbeat) -> dict[str, float]:
    """How far the clocks of a node and of its workers are ahead of the coordinator's, as far as that is certain."""
    assert heartbeat.clock is not None
    node_ms, error_ms = heartbeat.clock.ahead_ms, heartbeat.clock.error_ms
    found_ms = {heartbeat.node: node_ms} | {
        beat.worker: node_ms + beat.clock_ms for beat in heartbeat.beats
    }
    return {
        one: math.copysign(max(0.0, abs(ahead_ms) - error_ms), ahead_ms)
        for one, ahead_ms in found_ms.items()
    }
