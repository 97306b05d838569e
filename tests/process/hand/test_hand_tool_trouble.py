"""Tests of a network hand whose tools fail, hang or are slow: no effect outlives the hand's care."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hand.network import WHY_NOT, Pair, open_pair
from support.hand.tools import ToolTrouble
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"packets: {WHY_NOT}")
REFUSE = 'echo "Error: refused" >&2; exit 1'
HANG = "exec sleep 60"
RATE = {"rate_bit_s": 2_000_000}


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair() as made:
        yield made


@pytest.fixture
def trouble(tmp_path: Path) -> ToolTrouble:
    return ToolTrouble(tmp_path)


def is_limited(pair: Pair, interface: str = "eth0") -> bool:
    return "tbf" in pair.run("tc", "qdisc", "show", "dev", interface)


@pytest.mark.parametrize(
    ("tool", "part", "act"),
    [("tc", "qdisc del", REFUSE), ("tc", "qdisc del", HANG), ("nft", "-f -", REFUSE)],
)
def test_a_limit_that_cannot_be_removed_is_tried_again_until_it_is_gone(
    pair: Pair, trouble: ToolTrouble, tool: str, part: str, act: str
) -> None:
    with pair.hand(prefix=trouble.prefix) as client:
        number = client.do("bandwidth", **RATE, lasts_s=0.3)["effect"]
        trouble.add(tool, part, act)
        failed = client.event("end_failed", number)
        assert (failed["why"], failed["kind"]) == ("expired", "bandwidth")
        wait_until(lambda: trouble.count() >= 2, "a further try")
        assert client.ask("extend", effect=number, lasts_s=9)["error"]["field"] == "effect"
        assert "unable" in client.ask("lift", effect=number)
        assert "ended" not in {line.get("event") for line in client.lines}
        assert pair.tables() != ""
        trouble.end()
        ended = client.event("ended", number)
        assert (ended["why"], ended["evidence"]["armed"]) == ("expired", True)
        assert not is_limited(pair)
        assert pair.tables() == ""


def test_a_cut_that_cannot_be_removed_is_tried_again(pair: Pair, trouble: ToolTrouble) -> None:
    with pair.hand(prefix=trouble.prefix) as client:
        number = client.do("cut", addresses=[pair.far], lasts_s=600)["effect"]
        assert not pair.arrives()
        trouble.add("nft", "-f -", REFUSE)
        assert "refused" in client.ask("lift", effect=number)["unable"]["reason"]
        assert client.do("counters", effect=number)["armed"] is True
        trouble.end()
        ended = client.event("ended", number)
        assert (ended["why"], ended["evidence"]["packets"]["out"]["dropped"]) == ("lifted", 1)
        assert pair.tables() == ""


def test_the_end_of_a_hand_tries_again_to_remove_its_limit(
    pair: Pair, trouble: ToolTrouble
) -> None:
    with pair.hand(prefix=trouble.prefix) as client:
        number = client.do("bandwidth", **RATE, lasts_s=600)["effect"]
        trouble.add("tc", "qdisc del", REFUSE)
        client.close_input()
        wait_until(lambda: trouble.count() >= 2, "a further try")
        trouble.end()
        assert client.wait() == 0
        assert client.event("ended", number)["why"] == "end of input"
        assert "left" not in client.event("ending")
        assert not is_limited(pair)
        assert pair.tables() == ""


def test_a_hand_ends_in_time_and_names_the_limit_that_sweep_has_to_remove(
    pair: Pair, trouble: ToolTrouble
) -> None:
    with pair.hand(prefix=trouble.prefix) as client:
        number = client.do("bandwidth", **RATE, lasts_s=600)["effect"]
        trouble.add("tc", "qdisc del", HANG)
        client.close_input()
        assert client.wait() == 0
        assert client.event("ending")["left"] == [number]
    assert is_limited(pair)
    with pair.hand() as sweeping:
        assert sweeping.do("sweep")["interfaces"] == ["eth0"]
        assert not is_limited(pair)


@pytest.mark.parametrize("end", ["expired", "end of input"])
def test_slow_ends_of_several_limits_do_not_count_as_a_stuck_hand(
    pair: Pair, trouble: ToolTrouble, end: str
) -> None:
    """Each end takes some 4 or 5 s, and the alarm comes after 10 s."""
    lasts_s = 2 if end == "expired" else 600
    with pair.hand("--silent-s", "600", prefix=trouble.prefix) as client:
        numbers = [
            client.do("bandwidth", **RATE, interface=interface, lasts_s=lasts_s)["effect"]
            for interface in ("eth0", "lo")
        ]
        if end == "expired":  # the second and the third end are due after the first one
            numbers.append(client.do("cut", addresses=[pair.far], lasts_s=lasts_s)["effect"])
        for tool in ("nft", "tc"):
            trouble.add(tool, "", "sleep 1.8")
        if end == "expired":
            for number in numbers:
                client.event("ended", number)
            trouble.end()
            assert client.do("ping")
        client.close_input()
        assert client.wait() == 0
        assert [client.event("ended", number)["why"] for number in numbers] == [end] * len(numbers)
        assert not is_limited(pair)
        assert not is_limited(pair, "lo")


def test_a_client_that_sends_lines_during_a_slow_end_is_not_silent(
    pair: Pair, trouble: ToolTrouble
) -> None:
    """The end takes some 5 s, in which no line is read."""
    with pair.hand("--silent-s", "3", prefix=trouble.prefix) as client:
        client.do("bandwidth", **RATE, lasts_s=1)
        for tool in ("nft", "tc"):
            trouble.add(tool, "", "sleep 1.8")

        def ping_until_the_end() -> bool:
            client.send(b'{"number": 1000, "do": "ping"}\n')
            return any(line.get("event") == "ended" for line in client.lines)

        wait_until(ping_until_the_end, "the end of the limit", poll_s=0.2)
        assert client.do("ping")
        assert client.event("ended")["why"] == "expired"


def test_a_limit_that_tc_adds_before_it_hangs_is_removed(pair: Pair, trouble: ToolTrouble) -> None:
    trouble.add("tc", "qdisc add", f'"$real" "$@"; {HANG}')
    with pair.hand(prefix=trouble.prefix) as client:
        line = client.ask("bandwidth", **RATE, lasts_s=600)
        assert "did not end within" in line["unable"]["reason"]
        assert client.event("ended", line["number"])["why"] == "failed"
        assert not is_limited(pair)
        assert pair.tables() == ""


def test_sweep_leaves_a_hand_alone_that_cuts_while_it_lists_the_tables(
    pair: Pair, trouble: ToolTrouble
) -> None:
    """The other hand takes its name after the sweep has begun, and before the list is made."""
    trouble.add("nft", "list tables", 'while [ -e "${0%/*}/trouble" ]; do sleep 0.02; done')
    with pair.hand(prefix=trouble.prefix) as sweeping:
        sweeping.send(json.dumps({"number": 1_000, "do": "sweep"}).encode() + b"\n")
        wait_until(lambda: trouble.count() == 1, "the call of nft")
        with pair.hand() as client:
            table = client.do("cut", addresses=[pair.far], lasts_s=600)["table"]
            trouble.end()
            swept = sweeping.line(lambda line: line.get("number") == 1_000, "the sweep")["answer"]
            assert (swept["removed"], swept["alive"]) == ([], [table])
            assert not pair.arrives()
