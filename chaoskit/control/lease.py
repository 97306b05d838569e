"""Which nodes have fallen silent: a pure state machine."""

from __future__ import annotations

import math

#: Reports are sent so much of an interval apart. Thus as many as a lease has intervals are missing, the last one for
#: some time, when it runs out; and it does so within as many intervals of whatever has silenced the node.
REPORT_SHARE = 0.8


class Leases:
    """A node that misses ``beats`` reports in a row is lost.

    Silence only counts while we were listening ourselves: when the coordinator had no CPU for a while, everybody's
    lease is extended by that while.

    Attributes:
        lease_s: silence after which a node is lost.
    """

    def __init__(self, interval_s: float, beats: int) -> None:
        self.lease_s = interval_s * (beats - 1 + REPORT_SHARE)
        self._interval_s = interval_s
        self._heard_s: dict[str, float] = {}
        self._ticked_s: float | None = None

    def beat(self, node: str, now_s: float) -> None:
        """A report of ``node`` arrived."""
        self._heard_s[node] = now_s

    def extend(self, node: str, by_s: float) -> None:
        """``node`` could not have reported for ``by_s`` seconds, through no fault of its own."""
        if node in self._heard_s:
            self._heard_s[node] += by_s

    def drop(self, node: str) -> None:
        """Stop to expect reports of ``node``."""
        self._heard_s.pop(node, None)

    def first_expiry_s(self) -> float:
        """When the next lease runs out, if nobody is heard meanwhile; infinity where nobody has one."""
        return min(self._heard_s.values(), default=math.inf) + self.lease_s

    def expired(self, now_s: float) -> list[str]:
        """Nodes whose lease has run out; to be called a few times an interval, when all input was read."""
        if self._ticked_s is not None:
            deaf_s = now_s - self._ticked_s - self._interval_s
            if deaf_s > 0:
                self._heard_s = {
                    node: max(heard_s, min(heard_s + deaf_s, now_s))  # what was heard on waking up is not extended
                    for node, heard_s in self._heard_s.items()
                }
        self._ticked_s = now_s
        lost = [node for node, heard_s in self._heard_s.items() if now_s - heard_s > self.lease_s]
        for node in lost:
            self.drop(node)
        return lost
