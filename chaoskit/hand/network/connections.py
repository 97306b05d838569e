"""TCP connections of this network namespace: their list, and the end of each by the kernel.

-> ``hand/network/traffic.py`` resets them.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Union

from ..fields import Network

_NETLINK_SOCK_DIAG = 4
_SOCK_DESTROY = 21
_NLM_REQUEST_ACK = 0x1 | 0x4
_NLMSG_ERROR = 2
_NO_COOKIE = 0xFFFFFFFF
_ALL_STATES = 0xFFFFFFFF
#: States of /proc/net/tcp without a connection: TIME_WAIT, CLOSE and LISTEN.
_NO_CONNECTION = (0x06, 0x07, 0x0A)
_ANSWER_WITHIN_S = 1.0
#: Time for all connections. Some 10 us are usual for each.
_DESTROY_WITHIN_S = 3.0
Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


class TcpConnection(NamedTuple):
    """A connection: addresses and ports of its two ends, and the inode of its socket."""

    own: Address
    own_port: int
    peer: Address
    peer_port: int
    inode: int


def connections_to(networks: Sequence[Network]) -> list[TcpConnection]:
    """Return the connections whose peer has one of some addresses."""
    return [
        connection
        for connection in _connections()
        if any(connection.peer in network for network in networks)
    ]


def destroy(connections: Sequence[TcpConnection]) -> dict[str, int]:
    """Have the kernel end connections; the peer gets a reset.

    Returns:
        How many connections had each result: ``done``, or the name of an error. EOPNOTSUPP stands
        for a kernel without INET_DIAG_DESTROY, EPERM for a process without NET_ADMIN, ETIME for
        connections that were not reached within 3 s.
    """
    results: dict[str, int] = {}
    deadline_s = time.monotonic() + _DESTROY_WITHIN_S
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_ANSWER_WITHIN_S)
        for connection in connections:
            is_late = time.monotonic() > deadline_s
            number = errno.ETIME if is_late else _destroy(netlink, connection)
            name = errno.errorcode.get(number, str(number)) if number else "done"
            results[name] = results.get(name, 0) + 1
    return results


def parse_connections(text: str) -> Iterator[TcpConnection]:
    """Yield the connections that /proc/net/tcp or tcp6 lists.

    IPv4 addresses in an IPv6 socket become plain ones.
    """
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or int(fields[3], 16) in _NO_CONNECTION:
            continue
        own, own_port = _parse_end(fields[1])
        peer, peer_port = _parse_end(fields[2])
        yield TcpConnection(own, own_port, peer, peer_port, int(fields[9]))


def _connections() -> Iterator[TcpConnection]:
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as file:  # noqa: PTH123  # as in proc
                text = file.read()
        except FileNotFoundError:  # a kernel without IPv6
            continue
        yield from parse_connections(text)


def _parse_end(text: str) -> tuple[Address, int]:
    """Return address and port of ``0100007F:0050``: words of 32 bits in the CPU's byte order."""
    digits, _, port = text.partition(":")
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, int(port, 16)


def _destroy(netlink: socket.socket, connection: TcpConnection) -> int:
    """Return 0, or the number of the kernel's error."""
    family = socket.AF_INET if connection.peer.version == 4 else socket.AF_INET6
    sockid = struct.pack(
        "!HH16s16sI",
        connection.own_port,
        connection.peer_port,
        connection.own.packed,
        connection.peer.packed,
        0,
    ) + struct.pack("=II", _NO_COOKIE, _NO_COOKIE)
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + sockid
    head = struct.pack("=IHHII", 16 + len(body), _SOCK_DESTROY, _NLM_REQUEST_ACK, 1, 0)
    try:
        netlink.send(head + body)
        answer = netlink.recv(4096)
    except OSError as error:
        return error.errno or errno.ETIMEDOUT
    kind = struct.unpack_from("=IH", answer)[1]
    if kind != _NLMSG_ERROR:
        return errno.EPROTO
    number: int = struct.unpack_from("=i", answer, 16)[0]
    return -number


def explain(results: dict[str, int]) -> str:
    """Return the results that are not ``done`` in words; "" if there are none."""
    return ", ".join(
        f"{count} x {os.strerror(getattr(errno, name, 0))}"
        for name, count in results.items()
        if name != "done"
    )
