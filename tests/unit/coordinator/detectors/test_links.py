"""Tests of the choice of nodes that go on together when some cannot reach others."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.links import ANSWER_S, Links, to_leave_out
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.job import JobSpec
from chaoskit.wire import messages
from chaoskit.wire.messages import AgentHello, Endpoint, NodeLost, WorkerReady

NODES = [f"node{number}" for number in range(6)]
PAIRS = [frozenset(pair) for pair in combinations(NODES, 2)]


def test_where_all_links_work_nobody_is_left_out() -> None:
    assert to_leave_out(NODES, set(), NODES) == []


def test_the_one_that_is_cut_off_from_all_others_is_left_out() -> None:
    apart = {pair for pair in PAIRS if "node0" in pair}
    assert to_leave_out(NODES, apart, NODES) == ["node0"]


def test_of_two_halves_the_one_with_the_first_nodes_stays() -> None:
    apart = {frozenset((node, other)) for node in NODES[:3] for other in NODES[3:]}
    assert sorted(to_leave_out(NODES, apart, NODES)) == NODES[3:]


def test_of_a_minority_and_a_majority_the_majority_stays() -> None:
    apart = {frozenset((node, other)) for node in NODES[:2] for other in NODES[2:]}
    assert sorted(to_leave_out(NODES, apart, NODES)) == NODES[:2]


def test_a_bridge_between_two_halves_stays_with_one_of_them() -> None:
    """node2 reaches all others, and these only their own half."""
    apart = {frozenset((node, other)) for node in NODES[:2] for other in NODES[3:]}
    assert sorted(to_leave_out(NODES, apart, NODES)) == NODES[:2]


def test_who_does_not_answer_is_left_out_before_those_who_do() -> None:
    apart = {frozenset(("node0", other)) for other in NODES[1:3]}
    assert to_leave_out(NODES[:3], apart, NODES, silent_nodes=()) == ["node0"]
    assert sorted(to_leave_out(NODES[:3], apart, NODES, silent_nodes=NODES[1:3])) == NODES[1:3]


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
    assert all(any(frozenset((node, other)) in apart for other in NODES) for node in out)


class Cluster:
    """A world with one rank a node, and the links of its nodes.

    The ranks wait for each other all the time.
    """

    def __init__(self, count: int) -> None:
        self.nodes = NODES[:count]
        self.membership = Membership(RunConfig(job=JobSpec("job.py"), nodes=count, spares=0))
        self.links = Links()
        self.attached = set(self.nodes)
        self.now_s = 0.0
        for node in self.nodes:
            self.links.introduce(AgentHello(node, "host", 1, host=node, port=1))
            handle(self.membership, events.NodeJoined(node), 0.0)
        for node in self.nodes:
            handle(
                self.membership, WorkerReady(f"{node}.0", node, Endpoint("host", "", 0, 1, 1)), 0.0
            )
        handle(self.membership, events.Settled(1), 0.0)

    def ask(self) -> dict[str, messages.TestLinks]:
        """Return the questions to the nodes that are due now."""
        asked = self.links.test(self.membership, self.attached, self.now_s)
        return {
            send.node: send.message
            for send in asked
            if isinstance(send.message, messages.TestLinks)
        }

    def answer(
        self, asked: dict[str, messages.TestLinks], unreachable: dict[str, tuple[str, ...]]
    ) -> None:
        """Let these nodes answer; each names the nodes to which it could not connect."""
        for node, others in unreachable.items():
            self.links.answer(node, asked[node].number, others)

    def left_out(self) -> list[str]:
        """Return the nodes that are left out by the answers so far."""
        judged = self.links.judge(self.membership, self.attached, self.now_s, stuck=True)
        return [
            node for event in judged if isinstance(event, events.LeftOut) for node in event.nodes
        ]

    def lose(self, node: str) -> None:
        """Let the coordinator learn that ``node`` is gone."""
        self.attached.discard(node)
        handle(self.membership, NodeLost(node, "its agent has ended"), self.now_s)


def test_a_node_that_ends_during_the_test_is_lost_and_not_left_out() -> None:
    """The last node had answered before it ended, so the others found no connection to it."""
    cluster = Cluster(4)
    first = cluster.ask()
    dead = cluster.nodes[3]
    cluster.answer(first, {dead: (), **dict.fromkeys(cluster.nodes[:3], (dead,))})
    assert cluster.left_out() == []
    again = cluster.ask()
    assert set(again) == set(cluster.nodes)
    cluster.answer(again, dict.fromkeys(cluster.nodes[:3], ()))
    assert cluster.left_out() == [], "the coordinator has yet to hear that it ended"
    cluster.lose(dead)
    assert cluster.left_out() == []


def test_no_healthy_node_is_left_out_in_the_place_of_one_that_has_ended() -> None:
    """A single node tried its links after the end of another one: either of these two may be left
    out.
    """
    cluster = Cluster(3)
    dead, early, late = cluster.nodes
    first = cluster.ask()
    cluster.answer(first, {dead: (), early: (), late: (dead,)})
    assert cluster.left_out() == []
    again = cluster.ask()
    assert set(again) == {dead, late}
    cluster.answer(again, {late: ()})
    cluster.lose(dead)
    assert cluster.left_out() == []


def test_a_broken_link_between_nodes_that_both_answer_again_costs_one_of_them() -> None:
    cluster = Cluster(3)
    first = cluster.ask()
    cut = cluster.nodes[2]
    cluster.answer(
        first, {cut: tuple(cluster.nodes[:2]), **dict.fromkeys(cluster.nodes[:2], (cut,))}
    )
    assert cluster.left_out() == []
    again = cluster.ask()
    assert {order.targets for order in again.values()} == {()}, "this question takes one round trip"
    cluster.answer(again, dict.fromkeys(cluster.nodes, ()))
    assert cluster.left_out() == [cut]


def test_a_node_that_does_not_answer_again_is_left_out_before_those_that_do() -> None:
    cluster = Cluster(3)
    silent, left, right = cluster.nodes
    cluster.answer(cluster.ask(), {silent: (left, right), left: (silent,), right: (silent, left)})
    assert cluster.left_out() == []
    again = cluster.ask()
    cluster.answer(again, {left: (), right: ()})
    assert cluster.left_out() == []
    cluster.now_s += ANSWER_S
    assert cluster.left_out()[0] == silent


def test_nothing_is_asked_again_where_all_links_work() -> None:
    cluster = Cluster(3)
    cluster.answer(cluster.ask(), dict.fromkeys(cluster.nodes, ()))
    assert cluster.left_out() == []
    assert cluster.ask() == {}
