"""Leases of nodes: a pure state machine that finds nodes that have fallen silent.

-> coordinator/detectors/contact.py judges silent nodes; coordinator/acknowledgement.py: the answers
of kernels. agent/coordinator_link.py has a lease on the coordinator; agent/agent.py (``_end_all``)
kills the workers with it. runtime/step/commit.py: a worker without a lease commits nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection

#: Distance between two reports, as a share of the interval. When a lease runs out, as many reports
#: are missing as it has intervals, the last one for some time. It runs out within as many intervals
#: of the moment at which the node fell silent.
REPORT_SHARE = 0.8


class Leases:
    """Leases of nodes: a node that misses ``beats`` reports in a row is lost, unless it is slow.

    A node that is late is asked (:meth:`ask`). An acknowledgement by its kernel counts like a
    report of the time at which it was asked, for up to ``slow_s`` after the last report. The lease
    of a node that is cut off, or paused as a whole, runs from its last report.

    Silence counts only while this process runs: if it had no CPU for a while, all leases are
    extended by that time.

    Args:
        interval_s: time between two reports of a node, in seconds.
        beats: missed reports in a row after which a lease has run out.
        slow_s: longest time in seconds without a report, whatever the kernel acknowledges; 0 if no
            kernel is asked.

    Attributes:
        lease_s: silence after which a node is lost, in seconds.
        slow_s: the argument, or ``lease_s`` if that is longer.
        slow: nodes with a last report older than a lease at the last :meth:`expired`, although
            their kernels had acknowledged within a lease.
    """

    def __init__(self, interval_s: float, beats: int, slow_s: float = 0.0) -> None:
        self.lease_s = interval_s * (beats - 1 + REPORT_SHARE)
        self.slow_s = max(slow_s, self.lease_s)
        self.slow: frozenset[str] = frozenset()
        self._interval_s = interval_s
        self._heard_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}  # last question since the last report
        self._acknowledged_s: dict[str, float] = {}  # last acknowledged question of these
        self._ticked_s: float | None = None

    def beat(self, node: str, now_s: float) -> None:
        """Renew the lease of ``node``: a report has arrived."""
        self.drop(node)
        self._heard_s[node] = now_s

    def ask(self, now_s: float) -> list[str]:
        """Return the late nodes that must be asked now; each is returned once an interval."""
        asked = [node for node in self._heard_s if now_s >= self._ask_s(node)]
        self._asked_s.update(dict.fromkeys(asked, now_s))
        return asked

    def acknowledge(self, nodes: Collection[str]) -> None:
        """Note that the kernels of ``nodes`` have acknowledged their last question.

        A node without a question since its last report is unchanged.
        """
        self._acknowledged_s.update(
            {node: self._asked_s[node] for node in nodes if node in self._asked_s}
        )

    def extend(self, node: str, by_s: float) -> None:
        """Extend the lease of ``node`` by ``by_s`` seconds in which it could not report."""
        if node in self._heard_s:
            self._heard_s[node] += by_s

    def drop(self, node: str) -> None:
        """End the lease of ``node``: no more reports are expected."""
        self.slow -= {node}
        for table in (self._heard_s, self._asked_s, self._acknowledged_s):
            table.pop(node, None)

    def next_look_s(self) -> float:
        """Return the time of the next end of a lease or question; infinity without a node."""
        return min(
            (min(self._until_s(node), self._ask_s(node)) for node in self._heard_s),
            default=math.inf,
        )

    def expired(self, now_s: float) -> list[str]:
        """Return the nodes with leases that have run out, and drop them.

        Called a few times an interval, after all input was read.
        """
        if self._ticked_s is not None:
            paused_s = now_s - self._ticked_s - self._interval_s
            if paused_s > 0:
                for table in (self._heard_s, self._asked_s, self._acknowledged_s):
                    for node, at_s in table.items():
                        # reports that were read after the pause are not extended
                        table[node] = max(at_s, min(at_s + paused_s, now_s))
        self._ticked_s = now_s
        lost = [node for node in self._heard_s if now_s > self._until_s(node)]
        late = [node for node, heard_s in self._heard_s.items() if now_s - heard_s > self.lease_s]
        slow = frozenset(node for node in late if now_s - self._sign_s(node) <= self.lease_s)
        for node in lost:
            self.drop(node)
        self.slow = slow
        return lost

    def _sign_s(self, node: str) -> float:
        """Return the time of the last sign that the machine is alive."""
        return max(self._heard_s[node], self._acknowledged_s.get(node, -math.inf))

    def _until_s(self, node: str) -> float:
        """Return the time at which the lease of ``node`` runs out."""
        return min(self._sign_s(node) + self.lease_s, self._heard_s[node] + self.slow_s)

    def _ask_s(self, node: str) -> float:
        """Return the time at which to ask ``node``; infinity if that would not extend its lease."""
        if self.slow_s <= self.lease_s:
            return math.inf
        return max(self._heard_s[node], self._asked_s.get(node, -math.inf)) + self._interval_s
