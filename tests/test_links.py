"""Which nodes go on together when some cannot reach others."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.control.links import to_leave_out

NODES = [f"node{number}" for number in range(6)]
PAIRS = [frozenset(pair) for pair in combinations(NODES, 2)]


def test_where_all_links_work_nobody_is_left_out() -> None:
    assert to_leave_out(NODES, set(), NODES) == []


def test_the_one_that_is_cut_off_from_all_others_is_left_out() -> None:
    apart = {pair for pair in PAIRS if "node0" in pair}
    assert to_leave_out(NODES, apart, NODES) == ["node0"]


def test_of_two_halves_the_one_with_the_first_nodes_stays() -> None:
    apart = {frozenset((one, other)) for one in NODES[:3] for other in NODES[3:]}
    assert sorted(to_leave_out(NODES, apart, NODES)) == NODES[3:]


def test_of_a_minority_and_a_majority_the_majority_stays() -> None:
    apart = {frozenset((one, other)) for one in NODES[:2] for other in NODES[2:]}
    assert sorted(to_leave_out(NODES, apart, NODES)) == NODES[:2]


def test_a_bridge_between_two_halves_stays_with_one_of_them() -> None:
    """node2 reaches everybody, the others only their own half."""
    apart = {frozenset((one, other)) for one in NODES[:2] for other in NODES[3:]}
    assert sorted(to_leave_out(NODES, apart, NODES)) == NODES[:2]


def test_who_does_not_answer_is_left_out_before_those_who_do() -> None:
    apart = {frozenset(("node0", other)) for other in NODES[1:3]}
    assert to_leave_out(NODES[:3], apart, NODES, mute=()) == ["node0"]
    assert sorted(to_leave_out(NODES[:3], apart, NODES, mute=NODES[1:3])) == NODES[1:3]


def test_the_last_one_that_has_the_state_stays_whatever_it_costs() -> None:
    apart = {pair for pair in PAIRS if "node0" in pair}
    assert sorted(to_leave_out(NODES, apart, {"node0"})) == NODES[1:]


@given(apart=st.sets(st.sampled_from(PAIRS)), keepers=st.sets(st.sampled_from(NODES), min_size=1))
def test_all_that_stay_reach_each_other_and_one_of_them_has_the_state(
    apart: set[frozenset[str]], keepers: set[str]
) -> None:
    out = to_leave_out(NODES, apart, keepers)
    left = set(NODES) - set(out)
    assert not [pair for pair in apart if pair <= left]
    assert left & keepers
    assert all(any(frozenset((one, other)) in apart for other in NODES) for one in out)
