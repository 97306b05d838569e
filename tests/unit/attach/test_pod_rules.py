"""Rules of network hands for the ways between nodes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.attach.hands.pod_rules import (
    PodRules,
    block_operation,
    block_rules,
    narrowed_nodes,
    rules_of_ways,
)
from chaoskit.errors import HarnessError
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.traffic import (
    Block,
    Narrow,
    Way,
    between,
    towards,
)

NAMES = ("a", "b", "c", "d", "e")
ALL_WAYS = list(itertools.permutations(NAMES, 2))
WAYS = st.lists(st.sampled_from(ALL_WAYS), unique=True)


def blocked(rules: list[PodRules]) -> Counter[Way]:
    ways = Counter[Way]()
    for rule in rules:
        for peer, direction in itertools.product(rule.peers, rule.directions):
            ways[(peer, rule.node) if direction == "in" else (rule.node, peer)] += 1
    return ways


@given(WAYS)
def test_each_way_is_blocked_once_and_no_other(ways: list[Way]) -> None:
    assert blocked(rules_of_ways(ways)) == Counter(ways)


@given(WAYS)
def test_the_first_pod_touches_most_ways_and_each_pod_comes_once(ways: list[Way]) -> None:
    rules = rules_of_ways(ways)
    pods = [node for node, _ in itertools.groupby(rules, key=lambda rule: rule.node)]
    assert len(set(pods)) == len(pods) < len(NAMES)
    left = set(ways)
    for pod in pods:
        touched = {node: sum(node in way for way in left) for node in NAMES}
        assert touched[pod] == max(touched.values())
        left = {way for way in left if pod not in way}


@given(st.sets(st.sampled_from(NAMES), min_size=1, max_size=4))
def test_one_side_of_one_node_needs_one_hand(others: set[str]) -> None:
    near = next(name for name in NAMES if name not in others)
    far = sorted(others)
    assert {rule.node for rule in rules_of_ways(towards([near], far))} <= {near, *far[:1]}
    (rules,) = rules_of_ways(between([near], far))
    assert rules.directions == ("in", "out")
    if len(far) > 1:
        assert (rules.node, sorted(rules.peers)) == (near, far)


def test_one_way_is_blocked_at_its_target() -> None:
    assert rules_of_ways([("a", "b")]) == [PodRules("b", ("a",), ("in",))]


def test_ways_of_the_coordinator_and_repeated_ways_are_left_out() -> None:
    ways = (*between(["a"], [COORDINATOR, "b"]), ("a", "b"), ("a", "a"))
    assert blocked(block_rules(Block(ways=ways))) == Counter([("a", "b"), ("b", "a")])


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (Block(ways=between(["a"], [COORDINATOR])), "name nodes in apart_from"),
        (Block(ways=()), "name nodes"),
        (Block(ways=(("a", "b"),), port=29_500), "leave out apart_from"),
        (Block(ways=(("a", "b"),), loud=True, share=0.5), "use a share of 1"),
    ],
)
def test_other_blocks_are_refused_with_a_remedy(change: Block, remedy: str) -> None:
    with pytest.raises(HarnessError, match=remedy):
        block_rules(change)


@pytest.mark.parametrize(
    ("change", "operation"),
    [
        (Block(ways=()), ("cut", {})),
        (Block(ways=(), share=0.25), ("loss", {"share": 0.25})),
        (Block(ways=(), loud=True), ("refuse", {})),
    ],
)
def test_operation_of_a_block(change: Block, operation: object) -> None:
    assert block_operation(change) == operation


def test_nodes_of_a_limit() -> None:
    stations = Narrow(bits_per_s=1e6, stations=("b", COORDINATOR, "a", "b"))
    assert narrowed_nodes(stations) == ["b", "a"]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (Narrow(bits_per_s=1e6, ways=between(["a"], ["b"])), "all that a pod sends"),
        (Narrow(bits_per_s=1e6, stations=(COORDINATOR,)), "name nodes"),
        (Narrow(bits_per_s=1e6), "name nodes"),
    ],
)
def test_other_limits_are_refused_with_a_remedy(change: Narrow, remedy: str) -> None:
    with pytest.raises(HarnessError, match=remedy):
        narrowed_nodes(change)
