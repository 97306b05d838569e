"""The health of a node, and of the links to others."""

from __future__ import annotations

from typing import Literal

import msgspec

from chaoskit.wire.messages.base import Message


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that a health probe looked at on ``node``.

    ``what`` names it with its unit, as ``disk.free_bytes`` or ``gpu0.temperature_c``. ``limit``: what ``value`` was
    compared with, "" for nothing. ``remedy``: what would help; "" where nothing is wrong.
    """

    what: str
    severity: Literal["ok", "warn", "bad"]
    value: float | str
    limit: float | str = ""
    detail: str = ""
    remedy: str = ""
    node: str = ""


class HealthReport(Message, frozen=True):
    """All that an agent has found on its node; the last report counts. ``took_ms``: how long it looked."""

    node: str
    findings: tuple[Finding, ...]
    took_ms: float


class TestLinks(Message, frozen=True):
    """Asks an agent to connect to other nodes: node, host and port of each."""

    number: int
    targets: tuple[tuple[str, str, int], ...]


class LinksTested(Message, frozen=True):
    """Answers :class:`TestLinks`: the nodes that could not be connected to."""

    node: str
    number: int
    unreachable: tuple[str, ...]


class PairReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A test of the way to ``address``, of ``node``. With an ``error`` the rest is what was measured before it.

    ``offset_ms``: how far the other wall clock is ahead of ours, give or take half the shortest round trip.
    ``path_ms``, ``path_sent_mb_s``, ``path_received_mb_s``: round trip and streams as the kernels of both sides have
    seen them, whether anybody had a CPU or not; 0 where they do not tell.
    """

    address: str
    node: str = ""
    error: str = ""
    connect_ms: float = 0.0
    rtt_ms: tuple[float, ...] = ()
    offset_ms: float = 0.0
    sent_mb_s: float = 0.0
    received_mb_s: float = 0.0
    intact: bool = True
    path_ms: float = 0.0
    path_sent_mb_s: float = 0.0
    path_received_mb_s: float = 0.0


class MeasureLinks(Message, frozen=True):
    """Asks a node how good its links to others are: node, host and port of each. ``joins``: it is new here."""

    number: int
    targets: tuple[tuple[str, str, int], ...]
    joins: bool = False


class LinksMeasured(Message, frozen=True):
    """Answers :class:`MeasureLinks`."""

    node: str
    number: int
    links: tuple[PairReading, ...]
    joins: bool = False
