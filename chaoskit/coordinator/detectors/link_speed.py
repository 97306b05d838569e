"""Which of the links between nodes is to blame when all ranks wait and nobody computes: a pure state machine.

Each node tests its link to each other one (:mod:`chaoskit.health.pair`). No speed is too low by itself: a link is slow
when it is much slower than the good ones of the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from chaoskit.coordinator.outputs import Send
from chaoskit.wire.messages import AgentHello, LinksMeasured, MeasureLinks, PairReading

#: How many times slower than the good ones a link must be.
SCORE = 3.0
#: What is less late than this is a busy machine.
LATE_MS = 5.0
#: What is faster than this cannot be told apart by so small a test.
FAST_MB_S = 200.0
#: Of a link to which nobody could connect.
_NEVER_MS = 2000.0


class LinkSpeed(NamedTuple):
    """Until an authenticated connection, and what came over it the slower way; 0 if that did not come."""

    connect_ms: float
    mb_s: float


class SlowLink(NamedTuple):
    """``score``: how many times slower than the good ones, in latency or in throughput."""

    nodes: tuple[str, str]
    score: float
    speed: LinkSpeed


def speed_of(reading: PairReading) -> LinkSpeed:
    """What a test says of a link."""
    return LinkSpeed(
        reading.connect_ms or _NEVER_MS, min(reading.sent_mb_s, reading.received_mb_s, FAST_MB_S)
    )


def slow_links(measured: Mapping[tuple[str, str], LinkSpeed]) -> list[SlowLink]:
    """The links that are much slower than the best of them, the slowest first. (node, other) -> speed.

    A single bad node is in two of three links where there are three nodes: so not the median, but the quartile counts.
    """
    if len(measured) < 2:
        return []
    usual_ms = sorted(speed.connect_ms for speed in measured.values())[len(measured) // 4]
    usual_mb_s = sorted((speed.mb_s for speed in measured.values()), reverse=True)[
        len(measured) // 4
    ]
    found = []
    for nodes, speed in measured.items():
        later = speed.connect_ms / max(usual_ms, LATE_MS)
        slower = usual_mb_s / max(speed.mb_s, usual_mb_s / 1e3, 1e-9)
        if max(later, slower) > SCORE:
            found.append(SlowLink(nodes, max(later, slower), speed))
    return sorted(found, key=lambda link: -link.score)


def blame(links: Collection[SlowLink]) -> str:
    """What these links have in common, in words; "" without any."""
    if not links:
        return ""
    count, most = (
        len(links),
        Counter(node for link in links for node in link.nodes).most_common(1)[0],
    )
    worst = max(links, key=lambda link: link.score)
    shown = f"{'-'.join(worst.nodes)}: {worst.speed.connect_ms:.0f} ms to connect, {worst.speed.mb_s:.1f} MB/s"
    where = (
        f"{most[0]} is slow to reach"
        if most[1] == count > 1
        else f"{count} slow link{'s' * (count > 1)}"
    )
    return f"{where} ({shown})"


class LinkSpeeds:
    """Measurements of links, one at a time; a later order replaces one that is not complete. Pure.

    Args:
        first: no measurement has this number or a smaller one, as those may be measurements of another coordinator.
    """

    def __init__(self, first: int = 0) -> None:
        self._doors: dict[str, tuple[str, int]] = {}
        self._number = first
        self._asked: frozenset[str] = frozenset()
        self._measured: dict[tuple[str, str], LinkSpeed] = {}

    def introduce(self, hello: AgentHello) -> None:
        """A node has come, perhaps again."""
        self._doors[hello.node] = (hello.host, hello.port)

    def order(self, nodes: Sequence[str]) -> list[Send]:
        """Have these nodes try their links to each other."""
        asked = sorted({node for node in nodes if node in self._doors})
        if len(asked) < 2:
            return []
        self._number, self._asked, self._measured = self._number + 1, frozenset(asked), {}
        doors = [(node, *self._doors[node]) for node in asked]
        return [
            Send(node, MeasureLinks(self._number, tuple(door for door in doors if door[0] != node)))
            for node in asked
        ]

    def answer(self, answer: LinksMeasured) -> list[SlowLink] | None:
        """What a node has found; the slow links of all, once it is the last one to say so."""
        if answer.number != self._number or answer.node not in self._asked:
            return None
        self._asked -= {answer.node}
        self._measured |= {(answer.node, link.node): speed_of(link) for link in answer.links}
        return None if self._asked else slow_links(self._measured)
