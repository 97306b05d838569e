"""The role on the network of a pod: cuts, lost packets, resets, limits of bandwidth, connections.

It needs root with the capability NET_ADMIN, and no target container.

-> ``hand/network/traffic.py`` and ``hand/network/bandwidth.py``: the effects; ``hand/network/liveness.py``: left-overs.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Any

from ..fields import (
    ADDRESSES,
    DIRECTION_LIST,
    DIRECTIONS,
    LASTS_S,
    SHARE,
    HandOperation,
    RequestField,
    address,
    decimal,
    interface,
    whole,
    word,
)
from ..refusals import Unable
from ..role import EffectKeeper
from . import connections, liveness, packet_rules
from .bandwidth import BandwidthLimit
from .connect import connect
from .liveness import HandName
from .traffic import PacketEffect, Resets, left_of

#: Time for which packets of connections are answered by resets, unless the request has another.
_RESET_LASTS_S = 2.0
#: Numbers of queues that the kernel never gives by itself: those begin at 8001.
_HANDLE_MIN, _HANDLE_COUNT = 0x1000, 0x7000
_RATE_BIT_S = RequestField(whole(1_000, 10**12))
_INTERFACE = RequestField(interface, "")
_MEANS = RequestField(word("any", "sockets", "packets"), "any")
_CONNECT_WITHIN_S = RequestField(decimal(0.0, 3.0), 1.0)  # no other request is answered meanwhile
_ADDRESS = RequestField(address)
_PORT = RequestField(whole(1, 2**16 - 1))
_RESET_LASTS = RequestField(decimal(0.0, 60.0), _RESET_LASTS_S)
#: Elements of the sets of addresses that match every packet.
_ALL = {"v4": ["0.0.0.0/0"], "v6": ["::/0"]}
_TRIAL_NETWORKS = (ipaddress.ip_network("192.0.2.1"), ipaddress.ip_network("2001:db8::1"))


class NetworkRole:
    """Operations on the network.

    Args:
        keeper: keeps the effects.
    """

    name = "network"

    def __init__(self, keeper: EffectKeeper) -> None:
        self._keeper = keeper
        self._hand = HandName()
        self._next_handle = int.from_bytes(os.urandom(2), "big")
        cut = {"addresses": ADDRESSES, "directions": DIRECTION_LIST, "lasts_s": LASTS_S}
        self.operations: Mapping[str, HandOperation] = {
            "cut": HandOperation(cut, self._cut),
            "loss": HandOperation({**cut, "share": SHARE}, self._loss),
            "refuse": HandOperation(cut, self._refuse),
            "silence": HandOperation({"lasts_s": LASTS_S}, self._silence),
            "reset": HandOperation(
                {"addresses": ADDRESSES, "by": _MEANS, "lasts_s": _RESET_LASTS}, self._reset
            ),
            "bandwidth": HandOperation(
                {"rate_bit_s": _RATE_BIT_S, "interface": _INTERFACE, "lasts_s": LASTS_S},
                self._bandwidth,
            ),
            "connect": HandOperation(
                {"address": _ADDRESS, "port": _PORT, "within_s": _CONNECT_WITHIN_S}, self._connect
            ),
            "sweep": HandOperation({}, self._sweep),
        }

    def hello(self) -> dict[str, Any]:
        """Return this hand's name, and the operations that the kernel refuses.

        The kernel checks rules without applying them. The operation ``bandwidth`` is not tried.
        """
        return {"uid": os.geteuid(), "hand": self._hand.id, "unable": self._trials()}

    def collect(self) -> None:
        """Do nothing: the kernel reports nothing."""

    def _trials(self) -> dict[str, dict[str, str]]:
        table = self._hand.table(0)
        elements = packet_rules.address_elements(_TRIAL_NETWORKS)
        pairs = {"v4": ["192.0.2.1 . 1 . 1"]}
        scripts = {
            "cut": packet_rules.dropping_table(table, elements, DIRECTIONS, 1.0, 1.0),
            "loss": packet_rules.dropping_table(table, elements, DIRECTIONS, 0.5, 1.0),
            "refuse": packet_rules.refusing_table(table, elements, DIRECTIONS, 1.0),
            "reset": packet_rules.resetting_table(table, pairs, 1.0),
        }
        refusals = {}
        for operation, script in scripts.items():
            try:
                packet_rules.check(script)
            except Unable as unable:
                refusals[operation] = {"reason": unable.reason, "remedy": unable.remedy}
        return refusals

    def _cut(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return self._drop("cut", number, values, 1.0)

    def _loss(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return self._drop("loss", number, values, values["share"])

    def _refuse(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        table, lasts_s = self._hand.table(number), values["lasts_s"]
        elements = packet_rules.address_elements(values["addresses"])
        script = packet_rules.refusing_table(table, elements, values["directions"], lasts_s)
        return self._begin(number, PacketEffect("refuse", table, script, elements), lasts_s)

    def _silence(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Drop all packets. The pod is to end next: no end of this hand may let it speak again."""
        table, lasts_s = self._hand.table(number), values["lasts_s"]
        script = packet_rules.dropping_table(table, _ALL, DIRECTIONS, 1.0, lasts_s)
        effect = PacketEffect("silence", table, script, _ALL, outlives_hand=True)
        return self._begin(number, effect, lasts_s)

    def _drop(
        self, kind: str, number: int, values: Mapping[str, Any], share: float
    ) -> dict[str, Any]:
        table, lasts_s = self._hand.table(number), values["lasts_s"]
        elements = packet_rules.address_elements(values["addresses"])
        script = packet_rules.dropping_table(table, elements, values["directions"], share, lasts_s)
        return self._begin(number, PacketEffect(kind, table, script, elements), lasts_s)

    def _begin(self, number: int, effect: PacketEffect, lasts_s: float) -> dict[str, Any]:
        self._keeper.begin(number, effect, lasts_s)
        return {"table": self._hand.table(number), **effect.evidence()}

    def _reset(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """End connections by their sockets, and those that are left by answers to their packets."""
        networks, means = values["addresses"], values["by"]
        existing = connections.connections_to(networks)
        results = connections.destroy(existing) if means != "packets" else {}
        remaining = left_of(existing, networks)
        answer = {"connections": len(existing), "sockets": results, "remaining": len(remaining)}
        if not remaining:
            return answer
        if means == "sockets":
            raise Unable(
                f"{len(remaining)} of {len(existing)} connections are left:"
                f" {connections.explain(results)}",
                "use by=packets, or a kernel with INET_DIAG_DESTROY and the capability NET_ADMIN",
            )
        resets = Resets(self._hand.table(number), networks, remaining, values["lasts_s"])
        self._keeper.begin(number, resets, values["lasts_s"])
        return {**answer, "lasts_s": values["lasts_s"]}

    def _bandwidth(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        handle = _HANDLE_MIN + self._next_handle % _HANDLE_COUNT
        self._next_handle += 1
        effect = BandwidthLimit(
            self._hand.table(number), handle, values["interface"], values["rate_bit_s"]
        )
        try:
            effect.start()
        except Unable:
            self._keeper.begin_failed(number, effect)
            raise
        self._keeper.begin(number, effect, values["lasts_s"])
        return effect.evidence()

    def _connect(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return connect(values["address"], values["port"], values["within_s"])

    def _sweep(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return liveness.sweep()
