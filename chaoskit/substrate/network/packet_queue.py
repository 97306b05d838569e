"""Holds up packets without netem: the kernel hands each one's number to us (NFQUEUE), and waits for a verdict.

Queues stand where packets are received: a sender stops sending when its own queue is held up (TCP's small-queue limit).
Speaks nfnetlink_queue's protocol on a plain netlink socket: linux/netfilter/nfnetlink_queue.h.
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
    """The queues of one station. Must be made in its namespace; a thread of its own answers the kernel.

    Attributes:
        held: packets that were held up so far, by queue.
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
        self.held: Counter[int] = Counter()
        self._due: list[
            tuple[float, int, int, bytes]
        ] = []  # when, order of arrival or so, queue, verdict message
        self._chance = random.Random(os.urandom(16))
        self._order = 0
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def bind(self, queue: int, profile: Profile) -> None:
        """Have the packets of ``queue`` held up like this from now on."""
        fresh = queue not in self._profiles
        self._profiles[queue] = profile
        if fresh:
            self._configure(queue, _CFG_CMD, struct.pack("!BxH", _BIND, socket.AF_INET))
            self._configure(queue, _CFG_QUEUE_MAXLEN, struct.pack("!I", _QUEUE_LENGTH))
        self._configure(queue, _CFG_PARAMS, struct.pack("!IB", 0, _COPY_META))
        self._configure(
            queue, _CFG_FLAGS, struct.pack("!I", _FLAG_GSO), struct.pack("!I", _FLAG_GSO)
        )

    def unbind(self, queue: int) -> None:
        """Let the packets of ``queue`` pass: its rule must be gone, or say that it may be bypassed."""
        del self._profiles[queue]
        self._configure(queue, _CFG_CMD, struct.pack("!BxH", _UNBIND, socket.AF_INET))

    def close(self) -> None:
        """End the thread; the kernel lets all that waits go, or drops it."""
        self._ended.set()

    def _configure(self, queue: int, kind: int, value: bytes, mask: bytes = b"") -> None:
        body = _attribute(kind, value) + (_attribute(_CFG_MASK, mask) if mask else b"")
        self._netlink.send(_message(_CONFIG, queue, body))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        set_name("ck-queues")
        raise_priority()
        with self._netlink:
            while not self._ended.is_set():
                wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else 0.2
                if await_readable([self._netlink.fileno()], min(wait_s, 0.2)):
                    data = self._netlink.recv(2**18)
                    self._take(data, time.monotonic())
                self._let_go(time.monotonic())

    def _take(self, data: bytes, now_s: float) -> None:
        offset = 0
        while offset + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
            if kind == _PACKET:
                self._judge(data[offset + _HEADER.size : offset + length], now_s)
            offset += (length + 3) & ~3

    def _judge(self, body: bytes, now_s: float) -> None:
        _, _, queue = _FAMILY.unpack_from(body)
        attributes = _attributes(body[_FAMILY.size :])
        (packet,) = struct.unpack_from("!I", attributes[_ATTR_PACKET_HDR])
        profile = self._profiles.get(queue, _UNTOUCHED)
        verdict = _attribute(_ATTR_VERDICT_HDR, struct.pack("!II", _ACCEPT, packet))
        due_s = now_s + self._delay_s(profile)
        self.held[queue] += due_s > now_s
        self._order += 1
        heapq.heappush(self._due, (due_s, self._order, queue, verdict))

    def _delay_s(self, profile: Profile) -> float:
        return max(0.0, profile.delay_ms + profile.jitter_ms * self._chance.uniform(-1, 1)) / 1e3

    def _let_go(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, _, queue, verdict = heapq.heappop(self._due)
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


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(data: bytes) -> dict[int, bytes]:
    found, offset = {}, 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        found[kind & 0x3FFF] = data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return found
