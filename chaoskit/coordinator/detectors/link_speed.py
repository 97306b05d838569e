"""The detector of slow links, for when all ranks wait and none computes.

A pure state machine. Each node tests its link to each other one (:mod:`chaoskit.health.pair`). No
speed is too low by itself: a link is slow if it is much slower than the good ones of the same run.

-> coordinator/handlers/on_workload.py orders the tests; on_measurement.py writes the slow links to
the journal: no node is given up. daemon/link_probe.py tests. Broken links:
coordinator/detectors/links.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from chaoskit.coordinator.outputs import Send
from chaoskit.wire.messages import AgentHello, LinksMeasured, MeasureLinks, PairReading

#: Factor by which a link must be slower than the good ones to count as slow.
SCORE = 3.0
#: A shorter time to connect may be that of a busy machine.
LATE_MS = 5.0
#: Speeds above this count as equal, because the test is too small to distinguish them.
FAST_MB_S = 200.0
#: The time to connect that is assumed for a link on which the connection failed.
_NEVER_MS = 2000.0


class LinkSpeed(NamedTuple):
    """The speed of a link.

    Attributes:
        connect_ms: time until the connection was authenticated; 2,000 if it failed.
        mb_s: throughput in the slower direction, 200 at most; 0 if the data did not arrive.
    """

    connect_ms: float
    mb_s: float


class SlowLink(NamedTuple):
    """A link that is much slower than the others.

    Attributes:
        nodes: the node that tested the link, and the other one.
        score: how many times slower it is than the good ones, in latency or in throughput.
        speed: the measurement.
    """

    nodes: tuple[str, str]
    score: float
    speed: LinkSpeed


def speed_of(reading: PairReading) -> LinkSpeed:
    """Return the speed of a link by the reading of one test."""
    return LinkSpeed(
        reading.connect_ms or _NEVER_MS, min(reading.sent_mb_s, reading.received_mb_s, FAST_MB_S)
    )


def slow_links(measured: Mapping[tuple[str, str], LinkSpeed]) -> list[SlowLink]:
    """Return the links that are much slower than the good ones, the slowest first.

    The good ones are represented by the quartile, not by the median: among three nodes, a single
    bad node is part of two of the three links. There are none of fewer than two links.

    Args:
        measured: (node, other node) -> speed.
    """
    if len(measured) < 2:
        return []
    usual_ms = sorted(speed.connect_ms for speed in measured.values())[len(measured) // 4]
    usual_mb_s = sorted((speed.mb_s for speed in measured.values()), reverse=True)[
        len(measured) // 4
    ]
    slow = []
    for nodes, speed in measured.items():
        latency_ratio = speed.connect_ms / max(usual_ms, LATE_MS)
        throughput_ratio = usual_mb_s / max(speed.mb_s, usual_mb_s / 1e3, 1e-9)
        if max(latency_ratio, throughput_ratio) > SCORE:
            slow.append(SlowLink(nodes, max(latency_ratio, throughput_ratio), speed))
    return sorted(slow, key=lambda link: -link.score)


def blame(links: Collection[SlowLink]) -> str:
    """Return a description of what these slow links have in common, or "" if there are none."""
    if not links:
        return ""
    link_count = len(links)
    ends = Counter(node for link in links for node in link.nodes)
    commonest_node, its_link_count = ends.most_common(1)[0]
    worst = max(links, key=lambda link: link.score)
    speed = f"{worst.speed.connect_ms:.0f} ms to connect, {worst.speed.mb_s:.1f} MB/s"
    slowest = f"{'-'.join(worst.nodes)}: {speed}"
    where = (
        f"{commonest_node} is slow to reach"
        if its_link_count == link_count > 1
        else f"{link_count} slow link{'s' * (link_count > 1)}"
    )
    return f"{where} ({slowest})"


class LinkSpeeds:
    """Measurement of links in rounds of tests. A new round replaces an incomplete one.

    Args:
        first: the numbers of the rounds start above it; lower ones may belong to another
            coordinator.
    """

    def __init__(self, first: int = 0) -> None:
        self._addresses: dict[str, tuple[str, int]] = {}
        self._number = first
        self._asked: frozenset[str] = frozenset()
        self._measured: dict[tuple[str, str], LinkSpeed] = {}

    def introduce(self, hello: AgentHello) -> None:
        """Take in the address of a node that has connected."""
        self._addresses[hello.node] = (hello.host, hello.port)

    def order(self, nodes: Sequence[str]) -> list[Send]:
        """Return the orders to these nodes to test their links to each other.

        Nodes without a known address are left out. Nothing is ordered if fewer than two
        remain.
        """
        asked = sorted({node for node in nodes if node in self._addresses})
        if len(asked) < 2:
            return []
        self._number, self._asked, self._measured = self._number + 1, frozenset(asked), {}
        addresses = [(node, *self._addresses[node]) for node in asked]
        return [
            Send(
                node,
                MeasureLinks(
                    self._number, tuple(address for address in addresses if address[0] != node)
                ),
            )
            for node in asked
        ]

    def answer(self, answer: LinksMeasured) -> list[SlowLink] | None:
        """Take in the measurements of a node.

        Return the slow links of all nodes, the slowest first, once the last node has answered. None
        before, and for an answer to another round.
        """
        if answer.number != self._number or answer.node not in self._asked:
            return None
        self._asked -= {answer.node}
        self._measured |= {(answer.node, link.node): speed_of(link) for link in answer.links}
        return None if self._asked else slow_links(self._measured)
