"""The contact to the nodes: which of them are silent, and which silent ones may be given up.

A pure state machine. Every member takes part in every commit. As soon as one member has left a
generation, the others can commit nothing more in it. So silent nodes may be given up at once.

This does not hold when no node that has the state is in contact any more. Then the coordinator
itself may be cut off, while all of them train on. They are given up only when their own leases have
run out, too, and they have ended by themselves. While no node has the state, as before the first
step, a node that starts its ranks counts like a node that trains.

A node is slow, not silent, if its agent sends nothing but its kernel acknowledges messages: its
ranks train.

-> wire/lease.py: the lease of a node; coordinator/handlers/on_node.py gives the lost nodes up.
coordinator/membership/policies.py (``may_give_up``): the last word on it.
coordinator/detectors/hang.py: a rank that hangs on a node that reports. agent/coordinator_link.py:
when a node without a coordinator ends its workers; agent/agent.py (``_end_all``) kills them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from chaoskit.wire.lease import Leases

#: A node that has reported within this many intervals is in contact. The last reports of nodes that
#: fall silent together may be a little more than one interval apart. By the time that the first
#: lease has run out, none of them is in contact. Then no node is given up until one reports again,
#: or all leases have run out.
_CONTACT_BEATS = 1.5
#: Time that the other nodes have to return, too, once the first one reports after all were silent.
RETURN_S = 1.0
#: Factor for the different rates of two machines' clocks, and for a lease that was read a beat ago.
_FENCE_MARGIN = 1.02


class Contact:
    """Leases of the nodes, and the nodes with leases that have run out.

    Args:
        interval_s: interval of the nodes' reports, in seconds.
        beats: missed reports after which a lease has run out.
        fence_s: time without a message of the coordinator after which a node ends its workers, in
            seconds.
        slow_s: time that an agent may be silent while the kernel of its node acknowledges, in
            seconds.
        may_give_up: the policy that returns True if a silent node may be given up. Its arguments
            are: a node with the state is in contact, the end of the silent node's lease, and now.
    """

    def __init__(
        self,
        interval_s: float,
        beats: int,
        fence_s: float,
        slow_s: float,
        may_give_up: Callable[[bool, float, float], bool],
    ) -> None:
        self._may_give_up = may_give_up
        self._leases = Leases(interval_s, beats, slow_s)
        self._contact_s = interval_s * _CONTACT_BEATS
        self._detail = f"silent for {beats} beats"
        self._slow_detail = (
            f"no report for {self._leases.slow_s:g} s, although the kernel of the node acknowledges"
        )
        self._fence_s = fence_s * _FENCE_MARGIN
        # node -> silent since, and the detail of its loss
        self._silent: dict[str, tuple[float, str]] = {}
        self._ended_connections: dict[
            str, str
        ] = {}  # node without a connection -> how the connection ended
        self._heard_s: dict[str, float] = {}
        self._returned_s: dict[str, float] = {}
        self._is_cut_off = False  # the leases of all nodes that have the state have run out
        self._patient_until_s = -math.inf

    def beat(self, node: str, now_s: float) -> None:
        """Renew the lease of ``node``, which has just reported."""
        self._ended_connections.pop(node, None)
        was_late = self._silent.pop(node, None) is not None or node in self._leases.slow
        if was_late or node not in self._heard_s:
            self._returned_s[node] = now_s
        self._heard_s[node] = now_s
        self._leases.beat(node, now_s)

    def expect(self, node: str, from_s: float) -> None:
        """Start the lease of ``node``, from which no report is expected before ``from_s``."""
        self._silent.pop(node, None)
        self._leases.beat(node, from_s)

    def is_steady(self, node: str, now_s: float) -> bool:
        """Return whether ``node`` is in contact, and has been for long enough to send late reports.

        A node that was silent or slow has :data:`RETURN_S` for these after its return.
        """
        if node not in self._heard_s or node in self._silent or node in self._leases.slow:
            return False
        return now_s > self._returned_s[node] + RETURN_S

    def extend(self, node: str, by_s: float) -> None:
        """Extend the lease of ``node``, which could not report for ``by_s`` seconds."""
        self._leases.extend(node, by_s)

    def leave(self, node: str, detail: str) -> None:
        """Note that the connection to ``node`` has ended, and how.

        The node may return until its lease has run out.
        """
        self._ended_connections[node] = detail

    def drop(self, node: str) -> None:
        """Forget a node that is given up or dead. An unknown node changes nothing."""
        self._leases.drop(node)
        for table in (self._silent, self._ended_connections, self._heard_s, self._returned_s):
            table.pop(node, None)

    def next_look_s(self) -> float:
        """Return the time by which to call :meth:`listen`, to notice the next silence at once.

        Return infinity without a node.
        """
        return self._leases.next_look_s()

    def ask(self, now_s: float) -> list[str]:
        """Return the late nodes, once an interval: each is to get a message to acknowledge."""
        return self._leases.ask(now_s)

    def listen(
        self, keepers: Collection[str], now_s: float, acknowledged: Collection[str] = ()
    ) -> None:
        """Note the leases that have run out; called several times an interval, after all input.

        Args:
            keepers: nodes with a worker that has the state of the training; without any, all nodes
                count as such.
            acknowledged: nodes with kernels that have acknowledged the message after :meth:`ask`.
        """
        self._leases.acknowledge(acknowledged)
        for node in self._leases.expired(now_s):
            is_slow = node in self._leases.slow
            since_s = now_s - (self._leases.slow_s if is_slow else self._leases.lease_s)
            detail = self._slow_detail if is_slow else self._detail
            self._silent[node] = (since_s, self._ended_connections.pop(node, detail))
        keepers = keepers or self._heard_s
        if self._may_be_cut_off(keepers):
            self._is_cut_off = True
        elif self._is_cut_off and self._is_keeper_in_contact(
            keepers, now_s
        ):  # the others return a little later
            self._is_cut_off, self._patient_until_s = False, now_s + RETURN_S

    def _may_be_cut_off(self, keepers: Collection[str]) -> bool:
        """Return whether all nodes that have the state are silent or yet to connect."""
        silent = [node for node in keepers if node in self._silent]
        return bool(silent) and all(node in silent or node not in self._heard_s for node in keepers)

    def lost(self, keepers: Collection[str], now_s: float) -> list[tuple[str, str]]:
        """Return the silent nodes that may be given up now, each with the detail of its loss.

        They are returned again until :meth:`drop`.
        """
        has_contact = (
            self._is_keeper_in_contact(keepers or self._heard_s, now_s)
            and now_s >= self._patient_until_s
        )
        return [
            (node, detail)
            for node, (since_s, detail) in self._silent.items()
            if self._may_give_up(has_contact, since_s + self._fence_s, now_s)
        ]

    def _is_keeper_in_contact(self, keepers: Collection[str], now_s: float) -> bool:
        """Return whether a node that has the state is in contact."""
        return any(now_s - self._heard_s.get(node, -math.inf) < self._contact_s for node in keepers)
