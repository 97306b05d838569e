"""Effects on packets: addresses that are cut off, lost packets, and connections that are reset.

-> ``hand/network/operations.py`` begins them; ``hand/network/packet_rules.py`` makes the rules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..effects import LastingEffect
from ..fields import Network
from ..refusals import Unable
from . import packet_rules
from .connections import TcpConnection, connections_to
from .packet_rules import Elements


class PacketEffect(LastingEffect):
    """A table with rules for packets, whose addresses time out in the kernel.

    Args:
        kind: the operation that begins it.
        table: name of the table.
        script: script that makes the table.
        elements: the elements of its sets, which a renewal adds again.
        outlives_hand: True if the end of the hand leaves the rules to the kernel's time.

    Raises:
        Unable: if the kernel or ``nft`` cannot do it.
    """

    def __init__(
        self,
        kind: str,
        table: str,
        script: str,
        elements: Elements,
        *,
        outlives_hand: bool = False,
    ) -> None:
        self.kind, self.outlives_hand = kind, outlives_hand
        self._table, self._elements = table, elements
        self._last_signs: dict[str, Any] = {}
        packet_rules.apply(script)
        self._began_s = time.monotonic()

    def renew(self, lasts_s: float) -> None:
        """Let the time of the addresses begin anew in the kernel."""
        packet_rules.apply(packet_rules.renew_elements(self._table, self._elements, lasts_s))

    def evidence(self) -> dict[str, Any]:
        """Return the packets that the rules have counted in each direction.

        ``armed`` is true while the kernel applies the rules to any address.
        """
        evidence: dict[str, Any] = {"lasted_s": round(time.monotonic() - self._began_s, 3)}
        try:
            text = packet_rules.listing(self._table)
        except Unable as failure:
            return {**evidence, "armed": False, "failure": str(failure)}
        return {
            **evidence,
            "armed": packet_rules.has_elements(text),
            "packets": packet_rules.packets(text),
        }

    def end(self) -> dict[str, Any]:
        """Delete the table, and return the packets that its rules have counted.

        Raises:
            Unable: if the table may be left. The next call tries again.
        """
        signs = self.evidence()
        if "failure" not in signs:
            self._last_signs = signs
        packet_rules.delete(self._table)
        return self._last_signs or signs


class Resets(PacketEffect):
    """Rules that reset some TCP connections with their next segment.

    Args:
        table: name of the table.
        networks: the peers whose connections are reset.
        connections: the connections. New ones are left alone.
        lasts_s: time for the next segment of each, in seconds.
    """

    def __init__(
        self,
        table: str,
        networks: Sequence[Network],
        connections: Sequence[TcpConnection],
        lasts_s: float,
    ) -> None:
        self._networks, self._connections = networks, connections
        elements: dict[str, list[str]] = {}
        for connection in connections:
            element = f"{connection.peer} . {connection.peer_port} . {connection.own_port}"
            items = elements.setdefault(f"v{connection.peer.version}", [])
            if element not in items:
                items.append(element)
        script = packet_rules.resetting_table(table, elements, lasts_s)
        super().__init__("reset", table, script, elements)

    def evidence(self) -> dict[str, Any]:
        """Return the packets that were answered, and the number of connections that are left."""
        return {
            **super().evidence(),
            "remaining": len(left_of(self._connections, self._networks)),
        }


def left_of(
    connections: Sequence[TcpConnection], networks: Sequence[Network]
) -> list[TcpConnection]:
    """Return those of some connections to some peers that exist still."""
    now = set(connections_to(networks))
    return [connection for connection in connections if connection in now]
