"""Which nodes are heard of, and which silent ones may be given up: a pure state machine.

Every member takes part in every commit, so as soon as one of them has left a generation the others can commit nothing
more in it: they may be given up, whatever became of them. It is another matter when no node that has the state is in
contact any more. Then it may be this coordinator that is cut off, while all of them train on; they are only given up
when their own leases have run out, too, and they have ended by themselves. Where no node has the state, as before the
first step, a node that starts its ranks counts like one that trains.

A node whose agent says nothing while its kernel acknowledges what it is sent is slow, and not silent: its ranks train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from chaoskit.wire.lease import Leases

#: A node that was heard within so many intervals is in contact. The last words of nodes that fall silent together may
#: be one interval apart, and a little more: by the time that the lease of the first has run out, none is in contact.
#: Then none is given up until one is heard again, or all leases have run out.
_CONTACT_BEATS = 1.5
#: Once the first node is heard again after a time in which none was, the others have so long to return, too.
RETURN_S = 1.0
#: Clocks of two machines may run differently, and the last reading of a lease was a beat ago.
_FENCE_MARGIN = 1.02


def may_give_up(free: bool, until_s: float, now_s: float) -> bool:
    """Whether a silent node may be given up.

    Args:
        free: the others can commit nothing that it takes part in, and this coordinator is not cut off from them.
        until_s: when its own lease runs out, and its workers end by themselves.
    """
    return free or now_s > until_s


class Contact:
    """Keeps the leases of the nodes, and remembers those that have run out.

    Args:
        interval_s: of the nodes' reports. beats: missed reports after which a lease has run out.
        fence_s: a node that hears nothing of us for so long ends its workers.
        slow_s: an agent may be silent for so long while the kernel of its node acknowledges.
        may_give_up: whether a silent node may be given up.
    """

    def __init__(
        self,
        interval_s: float,
        beats: int,
        fence_s: float,
        slow_s: float,
        may_give_up: Callable[[bool, float, float], bool] = may_give_up,
    ) -> None:
        self._may_give_up = may_give_up
        self._leases = Leases(interval_s, beats, slow_s)
        self._contact_s = interval_s * _CONTACT_BEATS
        self._detail = f"silent for {beats} beats"
        self._slow_detail = (
            f"no report for {self._leases.slow_s:g} s, although the kernel of the node acknowledges"
        )
        self._fence_s = fence_s * _FENCE_MARGIN
        self._silent: dict[str, tuple[float, str]] = {}  # since when, and how that shows
        self._left: dict[str, str] = {}  # node without a connection -> how that ended
        self._heard_s: dict[str, float] = {}
        self._returned_s: dict[str, float] = {}
        self._cut_off = False  # the leases of all who have the state have run out
        self._patient_until_s = -math.inf

    def beat(self, node: str, now_s: float) -> None:
        """``node`` was heard."""
        self._left.pop(node, None)
        was_late = self._silent.pop(node, None) is not None or node in self._leases.slow
        if was_late or node not in self._heard_s:
            self._returned_s[node] = now_s
        self._heard_s[node] = now_s
        self._leases.beat(node, now_s)

    def expect(self, node: str, from_s: float) -> None:
        """``node`` will be heard from this time on, or is silent then."""
        self._silent.pop(node, None)
        self._leases.beat(node, from_s)

    def steady(self, node: str, now_s: float) -> bool:
        """Whether ``node`` has had the time to say what it could not say while it was silent, or slow."""
        if node not in self._heard_s or node in self._silent or node in self._leases.slow:
            return False
        return now_s > self._returned_s[node] + RETURN_S

    def extend(self, node: str, by_s: float) -> None:
        """``node`` could not have reported for ``by_s`` seconds, through no fault of its own."""
        self._leases.extend(node, by_s)

    def leave(self, node: str, detail: str) -> None:
        """Its connection has ended. It may make another one until its lease has run out."""
        self._left[node] = detail

    def drop(self, node: str) -> None:
        """It is given up, or dead."""
        self._leases.drop(node)
        for table in (self._silent, self._left, self._heard_s, self._returned_s):
            table.pop(node, None)

    def next_look_s(self) -> float:
        """When :meth:`listen` should be called, at the latest, to notice the next silence at once."""
        return self._leases.next_look_s()

    def ask(self, now_s: float) -> list[str]:
        """Nodes that miss a report, and whose kernels are to be sent something that they acknowledge."""
        return self._leases.ask(now_s)

    def listen(
        self, keepers: Collection[str], now_s: float, acknowledged: Collection[str] = ()
    ) -> None:
        """Look which leases have run out; to be called a few times an interval, when all input was read.

        Args:
            keepers: nodes with a worker that has the state of the training; without any, all nodes count as such.
            acknowledged: nodes whose kernels have acknowledged what was sent to them when :meth:`ask` said so.
        """
        self._leases.acknowledge(acknowledged)
        for node in self._leases.expired(now_s):
            slow = node in self._leases.slow
            since_s = now_s - (self._leases.slow_s if slow else self._leases.lease_s)
            detail = self._slow_detail if slow else self._detail
            self._silent[node] = (since_s, self._left.pop(node, detail))
        keepers = keepers or self._heard_s
        if self._may_be_cut_off(keepers):
            self._cut_off = True
        elif self._cut_off and self._is_kept(keepers, now_s):  # not all come back at once
            self._cut_off, self._patient_until_s = False, now_s + RETURN_S

    def _may_be_cut_off(self, keepers: Collection[str]) -> bool:
        """Whether all nodes that have the state are silent, or have yet to come to this coordinator."""
        silent = [node for node in keepers if node in self._silent]
        return bool(silent) and all(node in silent or node not in self._heard_s for node in keepers)

    def lost(self, keepers: Collection[str], now_s: float) -> list[tuple[str, str]]:
        """Silent nodes that may be given up now, each with how it was lost."""
        free = self._is_kept(keepers or self._heard_s, now_s) and now_s >= self._patient_until_s
        return [
            (node, detail)
            for node, (since_s, detail) in self._silent.items()
            if self._may_give_up(free, since_s + self._fence_s, now_s)
        ]

    def _is_kept(self, keepers: Collection[str], now_s: float) -> bool:
        """Whether a node that has the state is in contact."""
        return any(now_s - self._heard_s.get(node, -math.inf) < self._contact_s for node in keepers)
