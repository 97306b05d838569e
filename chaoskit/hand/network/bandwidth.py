"""A limit of the bandwidth that a pod sends with, by a token bucket of the kernel (``tc tbf``).

The kernel has no time for it: the hand removes it. A table of nftables names it before it is made,
so that ``hand/network/liveness.py`` finds what a dead hand has left.

-> ``hand/network/operations.py`` begins it.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from typing import Any

from ..effects import LastingEffect
from ..refusals import RefusedRequest, Unable
from . import packet_rules
from .tools import run_tool

_MARKER = re.compile(r"set tbf_([0-9a-f]{4})_(\d+) ")
_SENT = re.compile(r"Sent (\d+) bytes (\d+) pkt \(dropped (\d+), overlimits (\d+)")
_DEFAULT_ROUTE = "00000000"
_LATENCY_MS = 400  # time that a packet may wait in the queue, as in the examples of tc-tbf(8)
_BURST_S = 0.02  # two ticks of a kernel with 100 Hz
_BURST_MIN_BYTES = 3200  # two packets of Ethernet


class BandwidthLimit(LastingEffect):
    """A limit of what one interface sends, from :meth:`start` on. Its table is made at once.

    Args:
        table: name of the table that names the limit.
        handle: number of the queueing discipline, by which it is recognized.
        interface: name of the interface; "" for the one of the default route.
        rate_bit_s: the limit in bits per second.

    Raises:
        RefusedRequest: if there is no such interface, or it has a queueing discipline of its own.
        Unable: if the kernel, ``nft`` or ``tc`` cannot do it.
    """

    kind = "bandwidth"

    def __init__(self, table: str, handle: int, interface: str, rate_bit_s: int) -> None:
        self._table, self._handle = table, f"{handle:04x}"
        self.interface = interface or _default_interface()
        self._rate_bit_s = rate_bit_s
        self._last_signs: dict[str, Any] = {}
        self._began_s = time.monotonic()
        self._check_free()
        self._index = socket.if_nametoindex(self.interface)
        packet_rules.apply(
            f"table inet {table} {{\n"
            f"set tbf_{self._handle}_{self._index} {{ type ipv4_addr; flags timeout; }}\n}}\n"
        )

    def start(self) -> None:
        """Give the interface its limit.

        Raises:
            Unable: if the kernel or ``tc`` cannot do it. A ``tc`` that did not end in time may have
                done it nevertheless, and the table is left: :meth:`end` removes both.
        """
        burst_bytes = max(_BURST_MIN_BYTES, round(self._rate_bit_s / 8 * _BURST_S))
        run_tool(
            *("tc", "qdisc", "add", "dev", self.interface, "root"),
            *("handle", f"{self._handle}:", "tbf", "rate", f"{self._rate_bit_s}bit"),
            *("burst", str(burst_bytes), "latency", f"{_LATENCY_MS}ms"),
        )

    def evidence(self) -> dict[str, Any]:
        """Return the bytes and packets that the queue has sent, dropped and held up."""
        try:
            return self._look()
        except Unable as failure:
            signs = {"lasted_s": self._lasted_s(), "interface": self.interface}
            return {**signs, "failure": str(failure)}

    def end(self) -> dict[str, Any]:
        """Remove the limit and then its table, and return the signs of the limit.

        Raises:
            Unable: if the limit or the table may be left. The next call tries again.
        """
        signs = self._look()
        if signs["armed"]:
            self._last_signs = signs
            _delete(self.interface, self._handle)
            signs["lasted_s"] = self._lasted_s()
        packet_rules.delete(self._table)
        return self._last_signs or signs

    def _look(self) -> dict[str, Any]:
        """Return the signs of the limit. Raise Unable if ``tc`` does not tell them."""
        text = ""
        if interface := _interface_name(self._index):
            self.interface = interface
            text = run_tool("tc", "-s", "qdisc", "show", "dev", interface)
        _, is_there, text = text.partition(f"qdisc tbf {self._handle}: root")
        signs: dict[str, Any] = {
            "lasted_s": self._lasted_s(),
            "interface": self.interface,
            "armed": bool(is_there),
        }
        if match := _SENT.search(text):
            names = ("sent_bytes", "sent", "dropped", "held_up")
            signs.update((name, int(count)) for name, count in zip(names, match.groups()))
        return signs

    def _lasted_s(self) -> float:
        return round(time.monotonic() - self._began_s, 3)

    def _check_free(self) -> None:
        try:
            socket.if_nametoindex(self.interface)
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise RefusedRequest("interface", self.interface, f"use one of {names}") from None
        text = run_tool("tc", "qdisc", "show", "dev", self.interface)
        lines = [line.split() for line in text.splitlines() if " root " in line]
        if any(line[2] != "0:" for line in lines):
            raise RefusedRequest(
                "interface",
                self.interface,
                f"use another interface: this one has a queue of its own ({' '.join(lines[0][:3])})",
            )


def remove_marked(text: str) -> list[str]:
    """Remove the limits that the listing of a table names, and return their interfaces."""
    interfaces = []
    for handle, index in _MARKER.findall(text):
        interface = _interface_name(int(index))
        if interface and _remove(interface, handle):
            interfaces.append(interface)
    return interfaces


def _interface_name(index: int) -> str:
    """Return the name of an interface; "" if it is gone, and its queue with it."""
    try:
        return socket.if_indextoname(index)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENODEV):
            raise Unable(f"interface {index}: {error}", "try again") from None
        return ""


def _remove(interface: str, handle: str) -> bool:
    """Remove the limit with a handle. Return False if the interface does not have it."""
    text = run_tool("tc", "qdisc", "show", "dev", interface)
    if f"qdisc tbf {handle}: root" not in text:
        return False
    _delete(interface, handle)
    return True


def _delete(interface: str, handle: str) -> None:
    run_tool("tc", "qdisc", "del", "dev", interface, "root", "handle", f"{handle}:")


def _default_interface() -> str:
    """Return the interface of the default route, or else the only one besides ``lo``.

    Raises:
        RefusedRequest: if there is neither.
    """
    with open("/proc/net/route", encoding="ascii") as file:  # noqa: PTH123  # as in proc
        routes = [line.split() for line in file.read().splitlines()[1:]]
    for route in routes:
        if route[1] == _DEFAULT_ROUTE == route[7]:
            return route[0]
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    if len(names) == 1:
        return names[0]
    raise RefusedRequest("interface", "", f"name an interface: {', '.join(names) or 'lo'}")
