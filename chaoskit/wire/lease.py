"""Which nodes have fallen silent: a pure state machine."""

from __future__ import annotations

import math
from collections.abc import Collection

#: Reports are sent so much of an interval apart. Thus as many as a lease has intervals are missing, the last one for
#: some time, when it runs out; and it does so within as many intervals of whatever has silenced the node.
REPORT_SHARE = 0.8


class Leases:
    """A node that misses ``beats`` reports in a row is lost, unless its kernel shows that it is only slow.

    A node that is late is asked (:meth:`ask`). What its kernel acknowledges counts like a report of the time at which
    it was asked, for up to ``slow_s`` after the last report: the lease of a node that is cut off, or stands still as a
    whole, runs from its last report.

    Silence only counts while we were listening ourselves: when the coordinator had no CPU for a while, all leases are
    extended by that while.

    Args:
        slow_s: without a report for so long a node is lost, whatever its kernel says; 0: no kernel is asked.

    Attributes:
        lease_s: silence after which a node is lost.
        slow_s: as given, or ``lease_s`` where that is longer.
        slow: nodes whose last report is older than a lease, as :meth:`expired` found them, and that are not lost, or
            only because it is older than ``slow_s``.
    """

    def __init__(self, interval_s: float, beats: int, slow_s: float = 0.0) -> None:
        self.lease_s = interval_s * (beats - 1 + REPORT_SHARE)
        self.slow_s = max(slow_s, self.lease_s)
        self.slow: frozenset[str] = frozenset()
        self._interval_s = interval_s
        self._heard_s: dict[str, float] = {}
        self._asked_s: dict[
            str, float
        ] = {}  # since its last report: when its kernel was asked last
        self._lived_s: dict[
            str, float
        ] = {}  # since its last report: when it was asked what its kernel acknowledged
        self._ticked_s: float | None = None

    def beat(self, node: str, now_s: float) -> None:
        """A report of ``node`` arrived."""
        self.drop(node)
        self._heard_s[node] = now_s

    def ask(self, now_s: float) -> list[str]:
        """Nodes that are to be sent something now, for their kernels to acknowledge; once an interval each."""
        asked = [node for node in self._heard_s if now_s >= self._ask_s(node)]
        self._asked_s.update(dict.fromkeys(asked, now_s))
        return asked

    def acknowledge(self, nodes: Collection[str]) -> None:
        """The kernels of ``nodes`` have acknowledged what they were asked last."""
        self._lived_s.update({node: self._asked_s[node] for node in nodes if node in self._asked_s})

    def extend(self, node: str, by_s: float) -> None:
        """``node`` could not have reported for ``by_s`` seconds, through no fault of its own."""
        if node in self._heard_s:
            self._heard_s[node] += by_s

    def drop(self, node: str) -> None:
        """Stop to expect reports of ``node``."""
        self.slow -= {node}
        for table in (self._heard_s, self._asked_s, self._lived_s):
            table.pop(node, None)

    def next_look_s(self) -> float:
        """When the next lease runs out or node is to be asked, if none is heard meanwhile; infinity without a node."""
        return min(
            (min(self._until_s(node), self._ask_s(node)) for node in self._heard_s),
            default=math.inf,
        )

    def expired(self, now_s: float) -> list[str]:
        """Nodes whose lease has run out; to be called a few times an interval, when all input was read."""
        if self._ticked_s is not None:
            deaf_s = now_s - self._ticked_s - self._interval_s
            if deaf_s > 0:
                for table in (self._heard_s, self._asked_s, self._lived_s):
                    for node, at_s in table.items():
                        table[node] = max(
                            at_s, min(at_s + deaf_s, now_s)
                        )  # what was heard on waking is not extended
        self._ticked_s = now_s
        lost = [node for node in self._heard_s if now_s > self._until_s(node)]
        late = [node for node, heard_s in self._heard_s.items() if now_s - heard_s > self.lease_s]
        slow = frozenset(node for node in late if now_s - self._sign_s(node) <= self.lease_s)
        for node in lost:
            self.drop(node)
        self.slow = slow
        return lost

    def _sign_s(self, node: str) -> float:
        """The last sign that the machine lives."""
        return max(self._heard_s[node], self._lived_s.get(node, -math.inf))

    def _until_s(self, node: str) -> float:
        return min(self._sign_s(node) + self.lease_s, self._heard_s[node] + self.slow_s)

    def _ask_s(self, node: str) -> float:
        if self.slow_s <= self.lease_s:
            return math.inf  # an answer would change nothing
        return max(self._heard_s[node], self._asked_s.get(node, -math.inf)) + self._interval_s
