"""Tests of the effect of a change on each way between two stations; no network is used."""

from __future__ import annotations

import json

import pytest

from chaoskit.substrate.core.traffic import (
    Block,
    Degrade,
    between,
    nft_packets,
    nft_table,
    profiles,
    towards,
)

PORTS = {"a": "port1", "b": "port2", "c": "port3"}
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3"}


def test_ways_lead_from_each_to_each_but_itself() -> None:
    assert towards(["a", "b"], ["b", "c"]) == (("a", "b"), ("a", "c"), ("b", "c"))
    assert between(["a"], ["b", "c"]) == (("a", "b"), ("a", "c"), ("b", "a"), ("c", "a"))
    assert between(["a"], ["a"]) == ()


def test_a_silent_cut_drops_where_packets_come_from() -> None:
    table = nft_table("one", Block(ways=(("a", "b"), ("a", "c"), ("c", "a"))), PORTS, ADDRESSES)
    assert table.splitlines() == [
        "table netdev one {",
        "chain port1 {",
        'type filter hook ingress device "port1" priority 0',
        "ip daddr 10.77.0.2 counter drop",
        "ip daddr 10.77.0.3 counter drop",
        "}",
        "chain port3 {",
        'type filter hook ingress device "port3" priority 0',
        "ip daddr 10.77.0.1 counter drop",
        "}",
        "}",
    ]


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (
            Block(ways=(("a", "b"),), loud=True),
            ["ip daddr 10.77.0.2 meta l4proto tcp counter reject with tcp reset"],
        ),
        (
            Block(ways=(("a", "b"),), share=0.05),
            ["ip daddr 10.77.0.2 numgen random mod 1000000 < 50000 counter drop"],
        ),
        (
            Block(ways=(("a", "b"),), port=80),
            [
                "ip daddr 10.77.0.2 tcp dport 80 counter drop",
                "ip daddr 10.77.0.2 tcp sport 80 counter drop",
            ],
        ),
    ],
)
def test_each_change_has_its_rules(change: Block, rules: list[str]) -> None:
    _, _, _, *table_rules, _, _ = nft_table("one", change, PORTS, ADDRESSES).splitlines()
    assert table_rules == rules


def test_packets_of_all_rules_are_counted_together() -> None:
    def rule(packets: int) -> dict[str, object]:
        return {
            "rule": {
                "expr": [
                    {"match": {}},
                    {"counter": {"packets": packets, "bytes": 9}},
                    {"drop": None},
                ]
            }
        }

    listing = {
        "nftables": [{"metainfo": {}}, {"table": {"name": "one"}}, rule(3), rule(0), rule(4)]
    }
    assert nft_packets(json.dumps(listing).encode()) == 7


def test_changes_of_one_way_add_up() -> None:
    late = Degrade(ways=(("a", "b"), ("b", "a")), delay_ms=10.0, jitter_ms=2.0)
    later = Degrade(ways=(("a", "b"),), delay_ms=5.0)
    merged = profiles([late, later])
    assert set(merged) == {("a", "b"), ("b", "a")}
    there, back = merged["a", "b"], merged["b", "a"]
    assert (there.delay_ms, there.jitter_ms) == (15.0, 2.0)
    assert (back.delay_ms, back.jitter_ms) == (10.0, 2.0)
