"""Which link is slow: what is measured over real sockets, and who is to blame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import permutations

import pytest

from chaoskit.control.dialing import can_connect
from chaoskit.control.link_speed import PROBE_BYTES, PROBE_S, LinkSpeeds, answer_probe, blame, probe, slow_links
from chaoskit.messages import AgentHello, LinksMeasured, LinkSpeed, MeasureLinks

TOKEN, HOST = "token", "127.0.0.1"
NODES = ("n0", "n1", "n2", "n3")


@contextlib.asynccontextmanager
async def door(pause_s: float = 0.0) -> AsyncIterator[tuple[str, int]]:
    """The door of an agent that answers after a pause."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(pause_s)
        await answer_probe(reader, writer, TOKEN)

    server = await asyncio.start_server(greet, HOST, 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()


def measured(pause_s: float = 0.0, token: str = TOKEN) -> LinkSpeed:
    async def main() -> LinkSpeed:
        async with door(pause_s) as address:
            return await probe("other", address, token)

    return asyncio.run(main())


def test_a_link_is_measured() -> None:
    speed = measured()
    assert speed.node == "other"
    assert speed.mb_s > PROBE_BYTES / 1e6 / PROBE_S
    assert measured(pause_s=0.1).connect_ms >= 100


def test_who_does_not_know_the_token_learns_nothing() -> None:
    assert measured(token="another").mb_s == 0


def test_a_door_that_nobody_answers_is_as_slow_as_can_be() -> None:
    speed = measured(pause_s=2 * PROBE_S)
    assert speed.mb_s == 0
    assert speed.connect_ms == pytest.approx(PROBE_S * 1e3)


def test_the_door_still_shows_whether_anybody_can_connect() -> None:
    async def main() -> None:
        async with door() as address:
            assert await can_connect(address)

    asyncio.run(main())


# -- who is to blame ----------------------------------------------------------------------------------------------


def speeds(**slow: LinkSpeed) -> dict[tuple[str, str], LinkSpeed]:
    """All links of four nodes; those of ``n1n2=`` or, for all of a node, ``n1=`` are different."""
    found = {}
    for one, other in permutations(NODES, 2):
        odd = slow.get(f"{one}{other}") or slow.get(one) or slow.get(other)
        found[one, other] = odd or LinkSpeed(other, 2.0, 100.0)
    return found


def test_links_that_are_alike_are_not_slow_however_slow_they_are() -> None:
    assert slow_links(speeds()) == []
    assert slow_links({pair: LinkSpeed(pair[1], 900.0, 0.1) for pair in permutations(NODES, 2)}) == []
    assert slow_links({("n0", "n1"): LinkSpeed("n1", 900.0, 0.0)}) == [], "there is none to compare it with"
    assert slow_links({}) == []
    assert blame([]) == ""


@pytest.mark.parametrize("speed", [LinkSpeed("", 80.0, 100.0), LinkSpeed("", 2.0, 5.0), LinkSpeed("", 2.0, 0.0)])
def test_a_node_that_is_slow_to_reach_is_named(speed: LinkSpeed) -> None:
    links = slow_links(speeds(n2=speed))
    assert len(links) == 6
    assert blame(links).startswith("n2 is slow to reach (")


def test_a_single_link_is_named() -> None:
    links = slow_links(speeds(n0n3=LinkSpeed("n3", 2.0, 5.0)))
    assert [link.nodes for link in links] == [("n0", "n3")]
    assert links[0].score == pytest.approx(20.0)
    assert blame(links) == "1 slow link (n0-n3: 2 ms to connect, 5.0 MB/s)"


def test_links_are_judged_when_all_have_answered() -> None:
    known, table = LinkSpeeds(), speeds(n2=LinkSpeed("", 2.0, 1.0))
    for number, node in enumerate(NODES):
        known.introduce(AgentHello(node, "host", 1, host="h", port=number))
    assert known.order(["n0", "unknown"]) == []
    known.order(NODES)  # nobody answers this one
    orders = known.order(NODES)
    assert [send.node for send in orders] == list(NODES)
    assert isinstance(orders[0].message, MeasureLinks)
    assert [node for node, _, _ in orders[0].message.targets] == ["n1", "n2", "n3"]
    heard = {
        node: tuple(LinkSpeed(to, one.connect_ms, one.mb_s) for (by, to), one in table.items() if by == node)
        for node in NODES
    }
    answers = [LinksMeasured(node, 2, links) for node, links in heard.items()]
    assert known.answer(LinksMeasured("n0", 1, ())) is None, "of the question before"
    for answer in (*answers[:3], answers[0]):
        assert known.answer(answer) is None
    found = known.answer(answers[3])
    assert found is not None
    assert blame(found).startswith("n2")
    assert known.answer(answers[3]) is None
