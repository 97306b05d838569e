"""Tests of the size of the world: single stories, and random histories of events."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.elasticity import Elasticity
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.elastic.decisions import Answer, Decision, Evict, ResizeWorld
from chaoskit.elastic.policy import PolicyWorld
from chaoskit.elastic.settings import ElasticPolicy, read_policy
from chaoskit.errors import BadInput
from chaoskit.job import JobSpec
from chaoskit.wire.messages import NodeLost, NoticeCancelled, ScaleTo, SpotNotice

POLICY = ElasticPolicy(
    min_replicas=2,
    max_replicas=8,
    replica_discrete_values=(2, 4, 8),
    graceful_shutdown_timeout_s=20,
    scaling_timeout_s=10,
    faulty_scale_down_timeout_s=5,
    scale_up_snooze_time_s=30,
)


def started(nodes: int, policy: ElasticPolicy = POLICY, at_s: float = 0.0) -> PolicyWorld:
    world = PolicyWorld(policy, [f"n{number}" for number in range(nodes)])
    world.tick(at_s)
    return world


def resizes(decisions: list[Decision]) -> list[ResizeWorld]:
    return [decision for decision in decisions if isinstance(decision, ResizeWorld)]


def answer(decisions: list[Decision]) -> Answer:
    (reply,) = [decision for decision in decisions if isinstance(decision, Answer)]
    return reply


# -- stories ---------------------------------------------------------------------------------------


def test_a_world_starts_with_the_largest_size_that_there_is_room_for() -> None:
    assert started(5).members == ("n0", "n1", "n2", "n3")
    assert started(1).size == 0


def test_a_reason_is_a_sentence() -> None:
    """The reason names the event, and the numbers of nodes before and after."""

    def reason(decisions: list[Decision]) -> str:
        return resizes(decisions)[0].reason

    first = PolicyWorld(POLICY, ["n0", "n1"])
    assert reason(first.tick(0)) == "enough nodes are there, so training runs on 2 nodes"
    shrinking = started(4)
    shrinking.node_lost("n1", 1)
    changes = "so the world changes from 4 nodes to 2"
    assert reason(shrinking.tick(6)) == f"the wait for a replacement is over, {changes}"
    growing = started(2)
    for number in (2, 3):
        growing.node_arrived(f"n{number}", 25)
    grown = "the wait for more nodes is over, so the world changes from 2 nodes to 4"
    assert reason(growing.tick(35)) == grown
    assert reason(started(5).node_lost("n1", 1)) == "n1 was lost, and the world stays at 4 nodes"
    asked = started(4).scale("r", 2, "an HTTP call", 1)
    assert reason(asked) == f"an HTTP call asked for 2 nodes, {changes}"
    assert reason(started(4).scale("r", 2, "", 1)) == f"a request asked for 2 nodes, {changes}"
    emptied = started(2)
    emptied.node_lost("n0", 1)
    waits = "the wait for a replacement is over, so training waits for more nodes"
    assert reason(emptied.tick(6)) == waits, "two nodes are the least"


def test_a_lost_node_is_replaced_at_once_by_one_that_idles() -> None:
    world = started(5)
    (resize,) = resizes(world.node_lost("n1", 1))
    assert (resize.size, resize.joins, resize.leaves) == (4, ("n4",), ())
    assert "n1 was lost" in resize.reason


def test_a_lost_nodes_place_is_kept_until_the_faulty_timeout() -> None:
    world = started(4)
    world.node_lost("n1", 1)
    assert (world.size, world.members, world.next_s()) == (4, ("n0", "n2", "n3"), 6)
    assert not world.tick(5.9)
    (resize,) = resizes(world.tick(6))
    assert (resize.size, [leave.node for leave in resize.leaves]) == (2, ["n3"])


def test_a_replacement_within_the_timeout_takes_the_place() -> None:
    world = started(4)
    world.node_lost("n1", 1)
    (resize,) = resizes(world.node_arrived("n9", 4))
    assert (resize.size, resize.joins) == (4, ("n9",))
    assert world.next_s() == math.inf


def test_growth_waits_for_the_scaling_timeout_and_the_snooze() -> None:
    world = started(2)
    for number in (2, 3):
        assert not world.node_arrived(f"n{number}", 25)
    assert world.next_s() == 35  # 25 + 10; the snooze of the start ends at 30
    assert resizes(world.tick(35))[0].size == 4
    for number in range(4, 8):
        world.node_arrived(f"n{number}", 36)
    assert world.next_s() == 65
    assert not world.tick(64.9)
    assert resizes(world.tick(65))[0].size == 8


def test_a_request_to_grow_skips_the_scaling_timeout_but_not_the_snooze() -> None:
    world = started(8)
    world.scale("r1", 4, "ann", 1)
    for node in ("n4", "n5", "n6", "n7"):
        world.node_left(node, 2)
    assert "in 25 s" in answer(world.scale("r2", 8, "ann", 5)).reason
    assert world.next_s() == 30
    assert resizes(world.tick(30))[0].size == 8
    world.scale("r3", 4, "", 70)
    for node in ("n4", "n5", "n6", "n7"):
        world.node_left(node, 71)
    assert resizes(world.scale("r4", 8, "", 72))[0].size == 8


def test_a_size_that_is_not_allowed_is_refused_with_those_that_are() -> None:
    world = started(8)
    decisions = world.scale("r", 6, "", 1)
    assert answer(decisions) == Answer("r", False, "6 is no allowed size: use 2, 4, 8")
    assert not resizes(decisions)


def test_the_least_costly_leave_for_a_job_of_priority_and_come_back() -> None:
    world = PolicyWorld(POLICY)
    for number in range(4):
        world.node_arrived(f"n{number}", 0, cost=10 - number)
    world.tick(40)
    assert world.size == 4
    decisions = world.lend("d", "big", nodes=2, grace_s=7, now_s=41)
    assert answer(decisions).nodes == ("n2", "n3")
    (resize,) = resizes(decisions)
    assert [(leave.node, leave.by_s) for leave in resize.leaves] == [("n2", 48), ("n3", 48)]
    world.node_left("n2", 43)
    assert world.tick(48) == [Evict("n3", "it has not left in time", 48)]
    assert world.lent == {"n2": "big", "n3": "big"}
    assert not world.tick(500)
    world.give_back("big", 600)
    assert resizes(world.tick(610))[0].joins == ("n2", "n3")


def test_a_demand_never_takes_the_smallest_world() -> None:
    reply = answer(started(4).lend("d", "big", nodes=3, grace_s=7, now_s=1))
    assert (reply.accepted, reply.nodes) == (True, ("n2", "n3"))
    assert "only 2 of 3" in reply.reason
    assert not answer(started(2).lend("d", "big", nodes=1, grace_s=7, now_s=1)).accepted


def test_a_node_with_a_notice_is_swapped_or_leaves_in_time() -> None:
    world = started(5)
    (resize,) = resizes(world.notice("n0", deadline_s=11, now_s=1))
    assert (resize.size, resize.joins) == (4, ("n4",))
    assert [(leave.node, leave.by_s) for leave in resize.leaves] == [("n0", 9)]
    assert resize.swap_by_s == 5, "half of that it may stay for its successor"
    assert world.tick(9) == [Evict("n0", "it has not left in time", 10)]


def test_who_leaves_for_nobody_leaves_at_once() -> None:
    (resize,) = resizes(started(4).scale("r", 2, "", 1))
    assert resize.swap_by_s is None


def test_a_notice_that_is_taken_back_leaves_the_node_as_it_was() -> None:
    world = started(2)
    world.notice("n0", deadline_s=11, now_s=1)
    assert not world.cancel_notice("n0", 2)
    assert world.members == ("n0", "n1")
    assert world.next_s() == math.inf


def test_a_node_that_has_left_after_a_notice_comes_back_when_that_is_taken_back() -> None:
    """The return takes effect at once: it is no new capacity, and no other node has to stay."""
    world = started(4)
    assert resizes(world.notice("n0", deadline_s=101, now_s=1))[0].size == 2
    world.node_left("n0", 35)
    (resize,) = resizes(world.cancel_notice("n0", 40))
    assert (resize.size, resize.joins, resize.reason) == (
        4,
        ("n0", "n3"),
        "n0 is not taken away after all, so the world changes from 2 nodes to 4",
    )


def test_a_node_that_is_about_to_leave_stays_when_its_notice_is_taken_back() -> None:
    world = started(4)
    world.notice("n0", deadline_s=101, now_s=1)
    assert not world.cancel_notice("n0", 15)  # the snooze after the shrink ends at 31
    assert world.tick(21) == [Evict("n3", "it has not left in time", 21)], "of four two were to go"
    (resize,) = resizes(world.tick(31))
    assert resize.joins == ("n0", "n3")


def test_a_notice_that_is_taken_back_of_a_node_that_another_job_has_changes_nothing() -> None:
    world = started(4)
    world.lend("d", "big", nodes=2, grace_s=7, now_s=1)
    world.notice("n3", deadline_s=101, now_s=2)
    assert not world.cancel_notice("n3", 3)
    assert world.lent == {"n2": "big", "n3": "big"}
    assert [decision.node for decision in world.tick(8) if isinstance(decision, Evict)] == [
        "n2",
        "n3",
    ]


def test_a_notice_that_never_was_is_taken_back_without_consequences() -> None:
    world = started(3)
    assert not world.cancel_notice("n0", 1)
    assert not world.cancel_notice("n9", 1)


def test_the_smallest_world_keeps_a_node_with_a_notice_while_it_may() -> None:
    world = started(2)
    assert not world.notice("n0", deadline_s=11, now_s=1)
    assert world.next_s() == 6
    (resize,) = resizes(world.tick(6))
    assert (resize.size, [leave.by_s for leave in resize.leaves]) == (0, [9, 26])


def test_a_notice_hurries_a_node_that_is_leaving() -> None:
    world = started(4)
    world.scale("r", 2, "", 1)
    (resize,) = resizes(world.notice("n3", deadline_s=12, now_s=2))
    assert [(leave.node, leave.by_s) for leave in resize.leaves] == [("n3", 10)]


def test_a_node_that_is_made_to_leave_may_be_in_the_next_world() -> None:
    world = started(2)
    world.notice("n0", deadline_s=11, now_s=1)
    world.tick(6)
    world.node_lost("n0", 11)
    assert not world.node_arrived("n2", 12)  # n1 still leaves
    evict, resize = world.tick(26)
    assert isinstance(evict, Evict)
    assert resizes([resize])[0].joins == ("n1", "n2")


def test_a_demand_for_no_nodes_is_refused() -> None:
    with pytest.raises(BadInput, match="ask for 1 or more"):
        started(4).lend("d", "big", nodes=0, grace_s=1, now_s=1)


# -- any history -----------------------------------------------------------------------------------

NODES = st.sampled_from([f"n{number}" for number in range(10)])
SECONDS = st.sampled_from([0.0, 0.5, 3.0, 12.0, 50.0])
JOBS = st.sampled_from(["big", "huge"])
REQUESTS = st.uuids().map(str)


@dataclass(frozen=True)
class Call:
    """A call of a method of a world, without the time; the deadline of a notice is relative."""

    method: str
    arguments: tuple[Any, ...] = ()


def calls(method: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return st.builds(Call, st.just(method), st.tuples(*arguments))


CALLS = st.one_of(
    calls("scale", REQUESTS, st.integers(0, 9), st.just("")),
    calls("node_arrived", NODES, st.sampled_from([0.0, 1.0, 2.0])),
    calls("node_arrived", NODES, st.just(0.0)),
    calls("node_lost", NODES),
    calls("node_left", NODES),
    calls("notice", NODES, SECONDS),
    calls("cancel_notice", NODES),
    calls("lend", REQUESTS, JOBS, st.integers(1, 4), SECONDS),
    calls("give_back", JOBS),
    calls("tick"),
)
HISTORIES = st.lists(st.tuples(SECONDS, CALLS), max_size=40)
POLICIES = st.sampled_from(
    [
        POLICY,
        msgspec.structs.replace(POLICY, replica_discrete_values=()),
        msgspec.structs.replace(
            POLICY, replica_discrete_values=(), replica_increment_step=3, max_replicas=8
        ),
        ElasticPolicy(
            min_replicas=1, max_replicas=6, graceful_shutdown_timeout_s=0, scaling_timeout_s=0
        ),
    ]
)


@dataclass
class Watched:
    """A world that is ticked whenever it asks, and looked at after everything."""

    world: PolicyWorld
    now_s: float = 0.0
    present: set[str] = field(default_factory=set)
    in_use: set[str] = field(default_factory=set)
    deadlines: dict[str, float] = field(default_factory=dict)
    lost_at_s: float = -math.inf
    grown_at_s: float = -math.inf
    decided: list[Decision] = field(default_factory=list)

    def advance(self, to_s: float) -> None:
        for _ in range(200):
            if self.world.next_s() > to_s:
                break
            self.now_s = max(self.now_s, self.world.next_s())
            self.feed(Call("tick"))
        else:
            raise AssertionError("it asks for ticks for ever")
        self.now_s = to_s

    def feed(self, call: Call) -> list[Decision]:
        size, members = self.world.size, set(self.world.members)
        match call:
            case Call("node_arrived", (node, _)):
                self.present.add(node)
            case Call("node_lost", (node,)):
                self.present.discard(node)
                self.in_use.discard(node)
                self.deadlines.pop(node, None)
                if node in members:
                    self.lost_at_s = self.now_s
            case Call("node_left", (node,)):
                self.in_use -= {node} - members
            case Call("notice", (node, deadline_s)) if node in self.present:
                self.deadlines[node] = min(self.deadlines.get(node, math.inf), deadline_s)
            case Call("cancel_notice", (node,)):
                self.deadlines.pop(node, None)
        decisions = self._call(call)
        self.look(call, decisions, size, members)
        assert self.world.tick(self.now_s) == [], "it is not done with one decision"
        self.decided += decisions
        return decisions

    def _call(self, call: Call) -> list[Decision]:
        if call.method == "node_arrived":
            name, cost = call.arguments
            return self.world.node_arrived(name, self.now_s, cost)
        decisions: list[Decision] = getattr(self.world, call.method)(*call.arguments, self.now_s)
        return decisions

    def look(self, call: Call, decisions: list[Decision], size: int, members: set[str]) -> None:
        world, policy, now_s = self.world, self.world.policy, self.now_s
        new = set(world.members)
        self.in_use |= new
        for decision in decisions:
            if isinstance(decision, Evict):
                self.in_use.discard(decision.node)
            if isinstance(decision, ResizeWorld):
                assert decision.reason
                assert set(decision.joins) == new - members
                swaps = bool(decision.leaves and decision.joins)
                assert swaps >= (decision.swap_by_s is not None)
                assert all((decision.swap_by_s or 0.0) <= leave.by_s for leave in decision.leaves)
        assert world.size in (0, *policy.sizes)
        assert len(new) <= world.size
        assert new <= self.present
        assert not new & set(world.lent)
        if len(new) < world.size:  # only while a lost node's place is kept
            assert now_s < self.lost_at_s + policy.faulty_scale_down_timeout_s
        if size and not world.size:
            usable = self.present - set(world.lent) - set(self.deadlines)
            assert len(usable) < policy.min_replicas + len(self.in_use - new)
        if world.size > size > 0:
            assert now_s >= self.grown_at_s + policy.scale_up_snooze_time_s
        if world.size > size:
            self.grown_at_s = now_s
        for node, deadline_s in self.deadlines.items():
            assert node not in self.in_use or now_s < deadline_s
        answers = [decision for decision in decisions if isinstance(decision, Answer)]
        asked = [call.arguments[0]] if call.method in ("scale", "lend") else []
        assert [decision.request for decision in answers] == asked

    def play(self, history: list[tuple[float, Call]]) -> None:
        for wait_s, call in history:
            self.advance(self.now_s + wait_s)
            self.feed(self._with_deadline(call))

    def _with_deadline(self, call: Call) -> Call:
        """Return ``call``, with an absolute deadline if it is a notice."""
        if call.method != "notice":
            return call
        node, grace_s = call.arguments
        return Call("notice", (node, self.now_s + max(0.1, grace_s)))


@settings(max_examples=examples(150))
@given(POLICIES, HISTORIES)
def test_any_history_keeps_the_rules(
    policy: ElasticPolicy, history: list[tuple[float, Call]]
) -> None:
    Watched(PolicyWorld(policy)).play(history)


@settings(max_examples=examples(100))
@given(POLICIES, HISTORIES)
def test_in_peace_it_comes_to_rest_at_the_best_size_with_debts_paid(
    policy: ElasticPolicy, history: list[tuple[float, Call]]
) -> None:
    watched = Watched(PolicyWorld(policy))
    watched.play(history)
    for job in ("big", "huge"):
        watched.feed(Call("give_back", (job,)))
    for node in sorted(watched.deadlines):
        watched.feed(Call("node_lost", (node,)))
    watched.advance(watched.now_s + 1000)
    world = watched.world
    assert world.lent == {}
    assert world.size == len(world.members) == policy.fit(min(world.target, len(watched.present)))
    assert world.next_s() == math.inf


# -- the file --------------------------------------------------------------------------------------


def test_a_policy_is_read_as_hyperpod_spells_it() -> None:
    yaml = """
    elasticPolicy:
      minReplicas: 2
      maxReplicas: 8
      replicaIncrementStep: 3
      gracefulShutdownTimeoutInSeconds: 600
      scalingTimeoutInSeconds: 60
      faultyScaleDownTimeoutInSeconds: 30
    """
    policy = read_policy(yaml)
    assert policy.sizes == (2, 5, 8)
    assert [policy.fit(nodes) for nodes in (1, 2, 4, 5, 100)] == [0, 2, 2, 5, 8]
    assert policy.faulty_scale_down_timeout_s == 30
    assert read_policy(msgspec.json.encode(policy)) == policy


@pytest.mark.parametrize(
    "text",
    [
        "{minReplicas: 1, maxReplicas: 4, scaleUpSnoozeTimeInSeconds: 90}",
        "elasticPolicy: {minReplicas: 1, maxReplicas: 4, scaleUpSnoozeTimeInSeconds: 90}",
        """
        elasticPolicy: {minReplicas: 1, maxReplicas: 4}
        runPolicy: {restartPolicy: {evalPeriodSeconds: 60, scaleUpSnoozeTimeInSeconds: 90}}
        """,
    ],
    ids=["alone", "in the policy", "where HyperPod has it"],
)
def test_the_snooze_is_read_by_the_name_that_hyperpod_gives_it(text: str) -> None:
    policy = read_policy(text)
    assert policy.scale_up_snooze_time_s == 90
    assert read_policy(msgspec.json.encode(policy)) == policy


@pytest.mark.parametrize(
    "run_policy", ["{}", "{restartPolicy: {}}", "{restartPolicy: none}", "none"]
)
def test_a_run_policy_without_a_snooze_sets_none(run_policy: str) -> None:
    policy = read_policy(
        f"elasticPolicy: {{minReplicas: 1, maxReplicas: 4}}\nrunPolicy: {run_policy}"
    )
    assert policy.scale_up_snooze_time_s == 0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[]", "elasticPolicy"),
        ("a: [", "elasticPolicy"),
        ("{minReplicas: 1}", "maxReplicas"),
        ("{minReplicas: 1, maxReplicas: two}", "maxReplicas"),
        ("{minReplicas: 1, maxReplicas: 2, maxNodes: 3}", "maxNodes"),
        ("{minReplicas: 0, maxReplicas: 2}", "minReplicas"),
        ("{minReplicas: 3, maxReplicas: 2}", "maxReplicas"),
        ("{minReplicas: 1, maxReplicas: 2, replicaIncrementStep: -1}", "replicaIncrementStep"),
        (
            "{minReplicas: 1, maxReplicas: 4, replicaIncrementStep: 1, replicaDiscreteValues: [2]}",
            "replicaIncrementStep",
        ),
        (
            "{minReplicas: 1, maxReplicas: 4, replicaDiscreteValues: [2, 8]}",
            "replicaDiscreteValues",
        ),
        (
            "{minReplicas: 1, maxReplicas: 4, replicaDiscreteValues: [2, x]}",
            "replicaDiscreteValues",
        ),
        (
            "{minReplicas: 1, maxReplicas: 4, scalingTimeoutInSeconds: -1}",
            "scalingTimeoutInSeconds",
        ),
        (
            "{minReplicas: 1, maxReplicas: 4, scalingTimeoutInSeconds: .nan}",
            "scalingTimeoutInSeconds",
        ),
        (
            """
            elasticPolicy: {minReplicas: 1, maxReplicas: 4, scaleUpSnoozeTimeInSeconds: 90}
            runPolicy: {restartPolicy: {scaleUpSnoozeTimeInSeconds: 60}}
            """,
            "scaleUpSnoozeTimeInSeconds",
        ),
        (
            """
            elasticPolicy: {minReplicas: 1, maxReplicas: 4}
            runPolicy: {restartPolicy: {scaleUpSnoozeTimeInSeconds: a minute}}
            """,
            "scaleUpSnoozeTimeInSeconds",
        ),
    ],
)
def test_what_cannot_work_is_refused(text: str, name: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_policy(text)
    assert refused.value.field == name


def test_a_request_without_a_name_hides_nothing_that_happens_later() -> None:
    """Events of nodes have no request name, and are no requests that were answered before."""
    elasticity = Elasticity(
        msgspec.structs.replace(POLICY, replica_discrete_values=(), faulty_scale_down_timeout_s=0)
    )
    membership = Membership(RunConfig(job=JobSpec("job.py"), nodes=3))
    story = [
        events.NodeJoined("n0"),
        events.NodeJoined("n1"),
        events.NodeJoined("n2"),
        events.Settled(1),
    ]
    for event in (*story, ScaleTo("", 3), NodeLost("n2")):
        handle(membership, event, 0.0)
        elasticity.take_in(event, membership, 0.0)
    wanted_resize = elasticity.wanted_resize(membership)
    assert wanted_resize is not None
    assert wanted_resize.size == 2


@pytest.mark.parametrize("returns", [False, True])
def test_a_notice_for_a_machine_that_was_replaced_before_anybody_trained_is_void(
    returns: bool,
) -> None:
    elasticity = Elasticity(msgspec.structs.replace(POLICY, replica_discrete_values=()))
    membership = Membership(RunConfig(job=JobSpec("job.py"), nodes=3))
    story: list[events.MembershipEvent] = [events.NodeJoined(node) for node in ("n0", "n1", "n2")]
    story.append(SpotNotice("n1", grace_s=50))
    story += [NodeLost("n1"), events.NodeJoined("n1")] if returns else []
    for event in (*story, events.Settled(1)):
        handle(membership, event, 0.0)
        elasticity.take_in(event, membership, 0.0)
    assert (elasticity.wanted_resize(membership) is None) == returns


@pytest.mark.parametrize("deadlines_s", [(50.0, 3.0), (3.0, 50.0)])
def test_a_machine_that_comes_after_one_of_two_deadlines_has_neither_notice(
    deadlines_s: tuple[float, float],
) -> None:
    """Both were for the machine that was to be gone by the earlier one."""
    elasticity = Elasticity(msgspec.structs.replace(POLICY, replica_discrete_values=()))
    membership = Membership(RunConfig(job=JobSpec("job.py"), nodes=3))
    notices = [(SpotNotice("n1", grace_s=deadline_s), 0.0) for deadline_s in deadlines_s]
    joined = [(events.NodeJoined(node), 4.0) for node in ("n0", "n1", "n2")]
    for event, now_s in (*notices, *joined, (events.Settled(1), 4.0)):
        handle(membership, event, now_s)
        elasticity.take_in(event, membership, now_s)
    assert elasticity.wanted_resize(membership) is None


@pytest.mark.parametrize("again", [False, True])
def test_a_notice_that_was_taken_back_says_nothing_of_the_next_one(again: bool) -> None:
    elasticity = Elasticity(msgspec.structs.replace(POLICY, replica_discrete_values=()))
    membership = Membership(RunConfig(job=JobSpec("job.py"), nodes=3))
    requests: list[events.SizeRequest] = [
        SpotNotice("n1", grace_s=3.0),
        NoticeCancelled("n1"),
        *[SpotNotice("n1", grace_s=50.0)] * again,
    ]
    joined = [(events.NodeJoined(node), 4.0) for node in ("n0", "n1", "n2")]
    for event, now_s in (
        *((request, 0.0) for request in requests),
        *joined,
        (events.Settled(1), 4.0),
    ):
        handle(membership, event, now_s)
        elasticity.take_in(event, membership, now_s)
    wanted_resize = elasticity.wanted_resize(membership)
    assert (wanted_resize is not None) == again
