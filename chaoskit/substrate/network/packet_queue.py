"""Delay of packets without netem: the kernel reports each packet (NFQUEUE) and waits for a verdict.

Queues are at the receiving side: a sender stops when its own queue is delayed (TCP's small-queue
limit). The module implements nfnetlink_queue's protocol on a plain netlink socket:
linux/netfilter/nfnetlink_queue.h.

-> ``network/wiring.py`` and ``network/packets.py`` add the rules that put packets into these
queues. ``network/shaping.py``: delays by netem, where the kernel has it.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import socket
import struct
import threading
import time
from collections import Counter

from chaoskit.process.linux import await_readable, raise_priority, set_name
from chaoskit.substrate.core.traffic import Profile

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 3 << 8
_PACKET, _VERDICT, _CONFIG = _SUBSYSTEM, _SUBSYSTEM | 1, _SUBSYSTEM | 2
_NLM_F_REQUEST = 1
_CFG_CMD, _CFG_PARAMS, _CFG_QUEUE_MAXLEN, _CFG_MASK, _CFG_FLAGS = 1, 2, 3, 4, 5
_BIND, _UNBIND = 1, 2
_COPY_META = 1
_FLAG_GSO = 4
_ATTR_PACKET_HDR, _ATTR_VERDICT_HDR = 1, 2
_ACCEPT = 1
_QUEUE_LENGTH = 65536
_BUFFER_BYTES = 8 * 2**20
_SOL_NETLINK, _NETLINK_NO_ENOBUFS = 270, 5

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_FAMILY = struct.Struct("!BBH")  # nfgenmsg: family, version, queue
_ATTRIBUTE = struct.Struct("=HH")


class PacketQueues:
    """The queues of one station, created in its namespace. A thread of its own answers the kernel.

    Attributes:
        delayed: number of packets that were delayed so far, by number of the queue.
    """

    def __init__(self) -> None:
        self._netlink = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER
        )
        with contextlib.suppress(OSError):  # not in a user namespace
            self._netlink.setsockopt(socket.SOL_SOCKET, 33, _BUFFER_BYTES)  # SO_RCVBUFFORCE
        self._netlink.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        self._netlink.bind((0, 0))
        self._profiles: dict[int, Profile] = {}
        self.delayed: Counter[int] = Counter()
        self._pending: list[
            tuple[float, int, int, bytes]
        ] = []  # time, order, queue, verdict message
        self._random = random.Random(os.urandom(16))
        self._order = 0
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def bind(self, queue: int, profile: Profile) -> None:
        """Delay the packets of ``queue`` according to a profile, which replaces an earlier one.

        A rule must put packets into this queue: none is added here.
        """
        is_new = queue not in self._profiles
        self._profiles[queue] = profile
        if is_new:
            self._configure(queue, _CFG_CMD, struct.pack("!BxH", _BIND, socket.AF_INET))
            self._configure(queue, _CFG_QUEUE_MAXLEN, struct.pack("!I", _QUEUE_LENGTH))
        self._configure(queue, _CFG_PARAMS, struct.pack("!IB", 0, _COPY_META))
        self._configure(
            queue, _CFG_FLAGS, struct.pack("!I", _FLAG_GSO), struct.pack("!I", _FLAG_GSO)
        )

    def unbind(self, queue: int) -> None:
        """Stop delaying packets of ``queue``. Its rule must be gone, or allow a bypass."""
        del self._profiles[queue]
        self._configure(queue, _CFG_CMD, struct.pack("!BxH", _UNBIND, socket.AF_INET))

    def close(self) -> None:
        """End the thread within 0.2 s, without waiting for that.

        The kernel then passes or drops all packets that wait.
        """
        self._ended.set()

    def _configure(self, queue: int, kind: int, content: bytes, mask: bytes = b"") -> None:
        """Send the kernel an attribute of a queue's configuration."""
        body = _attribute(kind, content) + (_attribute(_CFG_MASK, mask) if mask else b"")
        self._netlink.send(_message(_CONFIG, queue, body))

    # -- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Receive packets of the kernel and send due verdicts until the queues are closed."""
        set_name("ck-queues")
        raise_priority()
        with self._netlink:
            while not self._ended.is_set():
                wait_s = max(0.0, self._pending[0][0] - time.monotonic()) if self._pending else 0.2
                if await_readable([self._netlink.fileno()], min(wait_s, 0.2)):
                    data = self._netlink.recv(2**18)
                    self._parse(data, time.monotonic())
                self._send_due(time.monotonic())

    def _parse(self, data: bytes, now_s: float) -> None:
        """Schedule the verdict of each packet in a message of the kernel."""
        offset = 0
        while offset + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
            if kind == _PACKET:
                self._schedule(data[offset + _HEADER.size : offset + length], now_s)
            offset += (length + 3) & ~3

    def _schedule(self, body: bytes, now_s: float) -> None:
        """Schedule the verdict of a packet, and count the packet if it is delayed."""
        _, _, queue = _FAMILY.unpack_from(body)
        attributes = _attributes(body[_FAMILY.size :])
        (packet,) = struct.unpack_from("!I", attributes[_ATTR_PACKET_HDR])
        profile = self._profiles.get(queue, _UNTOUCHED)
        verdict = _attribute(_ATTR_VERDICT_HDR, struct.pack("!II", _ACCEPT, packet))
        due_s = now_s + self._delay_s(profile)
        self.delayed[queue] += due_s > now_s
        self._order += 1
        heapq.heappush(self._pending, (due_s, self._order, queue, verdict))

    def _delay_s(self, profile: Profile) -> float:
        """Return the delay of a packet in seconds, drawn from the profile; at least 0."""
        return max(0.0, profile.delay_ms + profile.jitter_ms * self._random.uniform(-1, 1)) / 1e3

    def _send_due(self, now_s: float) -> None:
        """Send the verdicts whose time has come: the kernel lets their packets pass."""
        while self._pending and self._pending[0][0] <= now_s:
            _, _, queue, verdict = heapq.heappop(self._pending)
            with contextlib.suppress(OSError):  # the packet is gone with its queue
                self._netlink.send(_message(_VERDICT, queue, verdict))


_UNTOUCHED = Profile()


def _message(kind: int, queue: int, body: bytes) -> bytes:
    length = _HEADER.size + _FAMILY.size + len(body)
    return (
        _HEADER.pack(length, kind, _NLM_F_REQUEST, 0, 0)
        + _FAMILY.pack(socket.AF_UNSPEC, 0, queue)
        + body
    )


def _attribute(kind: int, content: bytes) -> bytes:
    """Return a netlink attribute, padded to a multiple of four bytes."""
    return (
        _ATTRIBUTE.pack(_ATTRIBUTE.size + len(content), kind) + content + bytes(-len(content) % 4)
    )


def _attributes(data: bytes) -> dict[int, bytes]:
    """Return the contents of the netlink attributes in a message, by their kinds."""
    attributes, offset = {}, 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        attributes[kind & 0x3FFF] = data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return attributes
