"""Names of network hands, by which the left-overs of dead ones are recognized and removed.

A hand that lives has bound an abstract Unix socket with its name. The kernel keeps such names for
each network namespace, and gives them up with their process. So hands of other containers of the
pod are recognized, too, whose processes are not visible.

-> ``hand/network/operations.py`` has the operation ``sweep``.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Any

from ..refusals import Unable
from . import bandwidth, packet_rules

_TABLE = re.compile(r"chaoskit_hand_([0-9a-f]{8})_\d+")
_ID_SIZE_BYTES = 4


class HandName:
    """The name of this hand among those of its network namespace, as long as it lives."""

    def __init__(self) -> None:
        self.id = os.urandom(_ID_SIZE_BYTES).hex()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{_socket_name(self.id)}")

    def table(self, number: int) -> str:
        """Return the name of the table of an effect."""
        return f"chaoskit_hand_{self.id}_{number}"


def sweep() -> dict[str, Any]:
    """Remove the tables and the bandwidth limits of dead hands, and return their names.

    A table that cannot be removed is among ``failed``, with the reason. Another hand may remove it
    at the same time.

    Raises:
        Unable: if the tables cannot be listed.
    """
    tables = packet_rules.tables()
    alive = _alive_ids()  # after the list: a hand takes its name before it makes a table
    removed: list[str] = []
    kept: list[str] = []
    interfaces: list[str] = []
    failed: dict[str, str] = {}
    for table in tables:
        match = _TABLE.fullmatch(table)
        if match is None:
            continue
        if match.group(1) in alive:
            kept.append(table)
            continue
        try:
            interfaces += bandwidth.remove_marked(packet_rules.listing(table))
            packet_rules.delete(table)
            removed.append(table)
        except Unable as unable:
            failed[table] = unable.reason
    return {"removed": removed, "interfaces": interfaces, "alive": kept, "failed": failed}


def _alive_ids() -> set[str]:
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return set(re.findall(rf"@{_socket_name('([0-9a-f]{8})')}$", file.read(), re.MULTILINE))


def _socket_name(hand_id: str) -> str:
    return f"chaoskit-hand-{hand_id}"
