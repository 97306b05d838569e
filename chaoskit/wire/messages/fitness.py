"""Messages about the health of a node, and of its links to others.

-> daemon/node_check.py, daemon/link_probe.py and agent/agent.py measure;
coordinator/handlers/on_measurement.py acts on the results. health/finding.py makes a finding.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from chaoskit.wire.messages.base import Message


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a health probe for one property of ``node``.

    ``what`` names the property with its unit, such as ``disk.free_bytes`` or
    ``gpu0.temperature_c``. ``limit`` is the limit of ``value``, or "" if it has none. ``remedy`` is
    "" if nothing is wrong.
    """

    what: str
    severity: Literal["ok", "warn", "bad"]
    value: float | str
    limit: float | str = ""
    detail: str = ""
    remedy: str = ""
    node: str = ""


class HealthReport(Message, frozen=True):
    """All findings of an agent about its node; the last report counts.

    ``took_ms`` is the time that the examination took.
    """

    node: str
    findings: tuple[Finding, ...]
    took_ms: float


class TestLinks(Message, frozen=True):
    """Request to an agent to connect to other nodes. ``targets``: name, host and port of each.

    Without targets, it asks only for a sign of life. ``number`` is repeated in the answer.
    """

    number: int
    targets: tuple[tuple[str, str, int], ...]


class LinksTested(Message, frozen=True):
    """Answer to :class:`TestLinks`: the nodes to which no connection could be made."""

    node: str
    number: int
    unreachable: tuple[str, ...]


class PairReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurement of the path to ``node`` at ``address``.

    With an ``error``, the other fields hold the measurements before it. ``connect_ms``: time until
    the connection was authenticated; 0 if it failed. ``rtt_ms``: each round trip. ``intact``: the
    data arrived unchanged. ``offset_ms``: how far the other wall clock is ahead of this one, give
    or take half the shortest round trip. ``path_ms``, ``path_sent_mb_s``, ``path_received_mb_s``:
    round trip and streams as the kernels of both sides have measured them; 0 if they do not report
    them. A wait of the processes for a CPU does not count.
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
    """Request to a node to measure its links to others. ``targets``: name, host and port of each.

    ``joins``: the node is new in the run. ``number`` and ``joins`` are repeated in the answer.
    """

    number: int
    targets: tuple[tuple[str, str, int], ...]
    joins: bool = False


class LinksMeasured(Message, frozen=True):
    """Answer to :class:`MeasureLinks`, with one reading for each target."""

    node: str
    number: int
    links: tuple[PairReading, ...]
    joins: bool = False
