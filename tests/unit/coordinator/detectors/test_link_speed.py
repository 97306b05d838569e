"""Tests of the detector of slow links and of the node to blame."""

from __future__ import annotations

from itertools import permutations

import pytest

from chaoskit.coordinator.detectors.link_speed import (
    FAST_MB_S,
    LinkSpeed,
    LinkSpeeds,
    blame,
    slow_links,
    speed_of,
)
from chaoskit.wire.messages import AgentHello, LinksMeasured, MeasureLinks, PairReading

NODES = ("n0", "n1", "n2", "n3")


def reading(node: str, speed: LinkSpeed) -> PairReading:
    return PairReading(
        address="h:1",
        node=node,
        connect_ms=speed.connect_ms,
        sent_mb_s=speed.mb_s,
        received_mb_s=200.0,
    )


def test_a_link_is_as_fast_as_its_slower_way_and_slow_when_nobody_answers() -> None:
    assert speed_of(reading("n1", LinkSpeed(2.0, 5.0))) == LinkSpeed(2.0, 5.0)
    assert speed_of(reading("n1", LinkSpeed(2.0, 900.0))).mb_s == 200.0
    fast = PairReading(address="h:1", connect_ms=1.0, sent_mb_s=900.0, received_mb_s=9000.0)
    assert speed_of(fast) == LinkSpeed(1.0, FAST_MB_S)
    nobody = speed_of(PairReading(address="h:1", error="silent for 2 s"))
    assert nobody.mb_s == 0
    assert nobody.connect_ms > 1000


def speeds(**slow: LinkSpeed) -> dict[tuple[str, str], LinkSpeed]:
    """Return the speeds of all links of four nodes, with others for ``n1n2=`` or all links of
    ``n1=``.
    """
    by_pair = {}
    for node, other in permutations(NODES, 2):
        odd = slow.get(f"{node}{other}") or slow.get(node) or slow.get(other)
        by_pair[node, other] = odd or LinkSpeed(2.0, 100.0)
    return by_pair


def test_links_that_are_alike_are_not_slow_however_slow_they_are() -> None:
    assert slow_links(speeds()) == []
    assert slow_links({pair: LinkSpeed(900.0, 0.1) for pair in permutations(NODES, 2)}) == []
    assert slow_links({("n0", "n1"): LinkSpeed(900.0, 0.0)}) == [], (
        "there is none to compare it with"
    )
    assert slow_links({}) == []
    assert blame([]) == ""


@pytest.mark.parametrize(
    "speed", [LinkSpeed(80.0, 100.0), LinkSpeed(2.0, 5.0), LinkSpeed(2.0, 0.0)]
)
def test_a_node_that_is_slow_to_reach_is_named(speed: LinkSpeed) -> None:
    links = slow_links(speeds(n2=speed))
    assert len(links) == 6
    assert blame(links).startswith("n2 is slow to reach (")


def test_a_single_link_is_named() -> None:
    links = slow_links(speeds(n0n3=LinkSpeed(2.0, 5.0)))
    assert [link.nodes for link in links] == [("n0", "n3")]
    assert links[0].score == pytest.approx(20.0)
    assert blame(links) == "1 slow link (n0-n3: 2 ms to connect, 5.0 MB/s)"


def test_links_are_judged_when_all_have_answered() -> None:
    link_speeds, table = LinkSpeeds(first=7), speeds(n2=LinkSpeed(2.0, 1.0))
    for number, node in enumerate(NODES):
        link_speeds.introduce(AgentHello(node, "host", 1, host="h", port=number))
    assert link_speeds.order(["n0", "unknown"]) == []
    link_speeds.order(NODES)  # no node answers this one
    orders = link_speeds.order(NODES)
    assert [send.node for send in orders] == list(NODES)
    assert isinstance(orders[0].message, MeasureLinks)
    assert [node for node, _, _ in orders[0].message.targets] == ["n1", "n2", "n3"]
    links_of = {
        node: tuple(reading(to, speed) for (by, to), speed in table.items() if by == node)
        for node in NODES
    }
    answers = [LinksMeasured(node, 9, links) for node, links in links_of.items()]
    assert link_speeds.answer(LinksMeasured("n0", 8, ())) is None, "of the question before"
    assert link_speeds.answer(LinksMeasured("n0", 2, ())) is None, (
        "of a question of the coordinator before"
    )
    for answer in (*answers[:3], answers[0]):
        assert link_speeds.answer(answer) is None
    slow = link_speeds.answer(answers[3])
    assert slow is not None
    assert blame(slow).startswith("n2")
    assert link_speeds.answer(answers[3]) is None
