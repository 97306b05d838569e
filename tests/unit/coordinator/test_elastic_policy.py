"""The size of the world: single stories, and any history of requests, losses, notices and demands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.elasticity import Elasticity
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.elastic.events import (
    Answer,
    Arrived,
    Decision,
    Demand,
    Event,
    Evict,
    Left,
    Lost,
    Notice,
    NoticeCancelled,
    Resize,
    Returned,
    Scale,
    Tick,
)
from chaoskit.elastic.policy import World
from chaoskit.elastic.settings import ElasticPolicy, read_policy
from chaoskit.errors import BadInput
from chaoskit.job import JobSpec

POLICY = ElasticPolicy(
    min_replicas=2,
    max_replicas=8,
    replica_discrete_values=(2, 4, 8),
    graceful_shutdown_timeout_s=20,
    scaling_timeout_s=10,
    faulty_scale_down_timeout_s=5,
    scale_up_snooze_time_s=30,
)


def started(nodes: int, policy: ElasticPolicy = POLICY, at_s: float = 0.0) -> World:
    world = World(policy, [f"n{number}" for number in range(nodes)])
    world.handle(Tick(), at_s)
    return world


def resizes(decisions: list[Decision]) -> list[Resize]:
    return [one for one in decisions if isinstance(one, Resize)]


def answer(decisions: list[Decision]) -> Answer:
    (found,) = [one for one in decisions if isinstance(one, Answer)]
    return found


# -- stories ------------------------------------------------------------------------------------------------------


def test_a_world_starts_with_the_largest_size_that_there_is_room_for() -> None:
    assert started(5).members == ("n0", "n1", "n2", "n3")
    assert started(1).size == 0


def test_a_reason_is_a_sentence() -> None:
    """It says what happened, and how many nodes there were and are."""

    def reason(world: World, event: Event, now_s: float) -> str:
        return resizes(world.handle(event, now_s))[0].reason

    assert (
        reason(World(POLICY, ["n0", "n1"]), Tick(), 0)
        == "enough nodes are there, so training runs on 2 nodes"
    )
    shrinking = started(4)
    shrinking.handle(Lost("n1"), 1)
    changes = "so the world changes from 4 nodes to 2"
    assert reason(shrinking, Tick(), 6) == f"the wait for a replacement is over, {changes}"
    growing = started(2)
    for number in (2, 3):
        growing.handle(Arrived(f"n{number}"), 25)
    assert (
        reason(growing, Tick(), 35)
        == "the wait for more nodes is over, so the world changes from 2 nodes to 4"
    )
    assert reason(started(5), Lost("n1"), 1) == "n1 was lost, and the world stays at 4 nodes"
    assert (
        reason(started(4), Scale("r", 2, "an HTTP call"), 1)
        == f"an HTTP call asked for 2 nodes, {changes}"
    )
    assert reason(started(4), Scale("r", 2), 1) == f"a request asked for 2 nodes, {changes}"
    emptied = started(2)
    emptied.handle(Lost("n0"), 1)
    waits = "the wait for a replacement is over, so training waits for more nodes"
    assert reason(emptied, Tick(), 6) == waits, "two nodes are the least"


def test_a_lost_node_is_replaced_at_once_by_one_that_idles() -> None:
    world = started(5)
    (resize,) = resizes(world.handle(Lost("n1"), 1))
    assert (resize.size, resize.joins, resize.leaves) == (4, ("n4",), ())
    assert "n1 was lost" in resize.reason


def test_a_lost_nodes_place_is_kept_until_the_faulty_timeout() -> None:
    world = started(4)
    world.handle(Lost("n1"), 1)
    assert (world.size, world.members, world.next_s()) == (4, ("n0", "n2", "n3"), 6)
    assert not world.handle(Tick(), 5.9)
    (resize,) = resizes(world.handle(Tick(), 6))
    assert (resize.size, [leave.node for leave in resize.leaves]) == (2, ["n3"])


def test_a_replacement_within_the_timeout_takes_the_place() -> None:
    world = started(4)
    world.handle(Lost("n1"), 1)
    (resize,) = resizes(world.handle(Arrived("n9"), 4))
    assert (resize.size, resize.joins) == (4, ("n9",))
    assert world.next_s() == math.inf


def test_growth_waits_for_the_scaling_timeout_and_the_snooze() -> None:
    world = started(2)
    for number in (2, 3):
        assert not world.handle(Arrived(f"n{number}"), 25)
    assert world.next_s() == 35  # 25 + 10; the snooze of the start ends at 30
    assert resizes(world.handle(Tick(), 35))[0].size == 4
    for number in range(4, 8):
        world.handle(Arrived(f"n{number}"), 36)
    assert world.next_s() == 65
    assert not world.handle(Tick(), 64.9)
    assert resizes(world.handle(Tick(), 65))[0].size == 8


def test_a_request_to_grow_skips_the_scaling_timeout_but_not_the_snooze() -> None:
    world = started(8)
    world.handle(Scale("r1", 4, "ann"), 1)
    for node in ("n4", "n5", "n6", "n7"):
        world.handle(Left(node), 2)
    assert "in 25 s" in answer(world.handle(Scale("r2", 8, "ann"), 5)).reason
    assert world.next_s() == 30
    assert resizes(world.handle(Tick(), 30))[0].size == 8
    world.handle(Scale("r3", 4), 70)
    for node in ("n4", "n5", "n6", "n7"):
        world.handle(Left(node), 71)
    assert resizes(world.handle(Scale("r4", 8), 72))[0].size == 8


def test_a_size_that_is_not_allowed_is_refused_with_those_that_are() -> None:
    world = started(8)
    decisions = world.handle(Scale("r", 6), 1)
    assert answer(decisions) == Answer("r", False, "6 is no allowed size: use 2, 4, 8")
    assert not resizes(decisions)


def test_the_least_costly_leave_for_a_job_of_priority_and_come_back() -> None:
    world = World(POLICY)
    for number in range(4):
        world.handle(Arrived(f"n{number}", cost=10 - number), 0)
    world.handle(Tick(), 40)
    assert world.size == 4
    decisions = world.handle(Demand("d", "big", nodes=2, grace_s=7), 41)
    assert answer(decisions).nodes == ("n2", "n3")
    (resize,) = resizes(decisions)
    assert [(leave.node, leave.by_s) for leave in resize.leaves] == [("n2", 48), ("n3", 48)]
    world.handle(Left("n2"), 43)
    assert world.handle(Tick(), 48) == [Evict("n3", "it has not left in time", 48)]
    assert world.lent == {"n2": "big", "n3": "big"}
    assert not world.handle(Tick(), 500)
    world.handle(Returned("big"), 600)
    assert resizes(world.handle(Tick(), 610))[0].joins == ("n2", "n3")


def test_a_demand_never_takes_the_smallest_world() -> None:
    found = answer(started(4).handle(Demand("d", "big", nodes=3, grace_s=7), 1))
    assert (found.accepted, found.nodes) == (True, ("n2", "n3"))
    assert "only 2 of 3" in found.reason
    assert not answer(started(2).handle(Demand("d", "big", nodes=1, grace_s=7), 1)).accepted


def test_a_node_with_a_notice_is_swapped_or_leaves_in_time() -> None:
    world = started(5)
    (resize,) = resizes(world.handle(Notice("n0", deadline_s=11), 1))
    assert (resize.size, resize.joins) == (4, ("n4",))
    assert [(leave.node, leave.by_s) for leave in resize.leaves] == [("n0", 9)]
    assert resize.swap_by_s == 5, "half of that it may stay for its successor"
    assert world.handle(Tick(), 9) == [Evict("n0", "it has not left in time", 10)]


def test_who_leaves_for_nobody_leaves_at_once() -> None:
    (resize,) = resizes(started(4).handle(Scale("r", 2), 1))
    assert resize.swap_by_s is None


def test_a_notice_that_is_taken_back_leaves_the_node_as_it_was() -> None:
    world = started(2)
    world.handle(Notice("n0", deadline_s=11), 1)
    assert not world.handle(NoticeCancelled("n0"), 2)
    assert world.members == ("n0", "n1")
    assert world.next_s() == math.inf


def test_a_node_that_has_left_after_a_notice_comes_back_when_that_is_taken_back() -> None:
    """At once: it is no new capacity, and nobody waits for another node to stay."""
    world = started(4)
    assert resizes(world.handle(Notice("n0", deadline_s=101), 1))[0].size == 2
    world.handle(Left("n0"), 35)
    (resize,) = resizes(world.handle(NoticeCancelled("n0"), 40))
    assert (resize.size, resize.joins, resize.reason) == (
        4,
        ("n0", "n3"),
        "n0 is not taken away after all, so the world changes from 2 nodes to 4",
    )


def test_a_node_that_is_about_to_leave_stays_when_its_notice_is_taken_back() -> None:
    world = started(4)
    world.handle(Notice("n0", deadline_s=101), 1)
    assert not world.handle(NoticeCancelled("n0"), 15)  # the snooze after the shrink ends at 31
    assert world.handle(Tick(), 21) == [Evict("n3", "it has not left in time", 21)], (
        "of four two were to go"
    )
    (resize,) = resizes(world.handle(Tick(), 31))
    assert resize.joins == ("n0", "n3")


def test_a_notice_that_is_taken_back_of_a_node_that_another_job_has_changes_nothing() -> None:
    world = started(4)
    world.handle(Demand("d", "big", nodes=2, grace_s=7), 1)
    world.handle(Notice("n3", deadline_s=101), 2)
    assert not world.handle(NoticeCancelled("n3"), 3)
    assert world.lent == {"n2": "big", "n3": "big"}
    assert [one.node for one in world.handle(Tick(), 8) if isinstance(one, Evict)] == ["n2", "n3"]


def test_a_notice_that_never_was_is_taken_back_without_consequences() -> None:
    world = started(3)
    assert not world.handle(NoticeCancelled("n0"), 1)
    assert not world.handle(NoticeCancelled("n9"), 1)


def test_the_smallest_world_keeps_a_node_with_a_notice_while_it_may() -> None:
    world = started(2)
    assert not world.handle(Notice("n0", deadline_s=11), 1)
    assert world.next_s() == 6
    (resize,) = resizes(world.handle(Tick(), 6))
    assert (resize.size, [leave.by_s for leave in resize.leaves]) == (0, [9, 26])


def test_a_notice_hurries_a_node_that_is_leaving() -> None:
    world = started(4)
    world.handle(Scale("r", 2), 1)
    (resize,) = resizes(world.handle(Notice("n3", deadline_s=12), 2))
    assert [(leave.node, leave.by_s) for leave in resize.leaves] == [("n3", 10)]


def test_a_node_that_is_made_to_leave_may_be_in_the_next_world() -> None:
    world = started(2)
    world.handle(Notice("n0", deadline_s=11), 1)
    world.handle(Tick(), 6)
    world.handle(Lost("n0"), 11)
    assert not world.handle(Arrived("n2"), 12)  # n1 still leaves
    evict, resize = world.handle(Tick(), 26)
    assert isinstance(evict, Evict)
    assert resizes([resize])[0].joins == ("n1", "n2")


def test_a_demand_for_no_nodes_is_refused() -> None:
    with pytest.raises(BadInput, match="ask for 1 or more"):
        started(4).handle(Demand("d", "big", nodes=0, grace_s=1), 1)


# -- any history --------------------------------------------------------------------------------------------------

NODES = st.sampled_from([f"n{number}" for number in range(10)])
SECONDS = st.sampled_from([0.0, 0.5, 3.0, 12.0, 50.0])
EVENTS = st.one_of(
    st.builds(Scale, st.uuids().map(str), st.integers(0, 9)),
    st.builds(Arrived, NODES, st.sampled_from([0.0, 1.0, 2.0])),
    st.builds(Arrived, NODES),
    st.builds(Lost, NODES),
    st.builds(Left, NODES),
    st.builds(Notice, NODES, SECONDS),  # here: seconds from now
    st.builds(NoticeCancelled, NODES),
    st.builds(
        Demand, st.uuids().map(str), st.sampled_from(["big", "huge"]), st.integers(1, 4), SECONDS
    ),
    st.builds(Returned, st.sampled_from(["big", "huge"])),
    st.just(Tick()),
)
HISTORIES = st.lists(st.tuples(SECONDS, EVENTS), max_size=40)
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

    world: World
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
            self.feed(Tick())
        else:
            raise AssertionError("it asks for ticks for ever")
        self.now_s = to_s

    def feed(self, event: Event) -> list[Decision]:
        size, members = self.world.size, set(self.world.members)
        match event:
            case Arrived():
                self.present.add(event.node)
            case Lost():
                self.present.discard(event.node)
                self.in_use.discard(event.node)
                self.deadlines.pop(event.node, None)
                if event.node in members:
                    self.lost_at_s = self.now_s
            case Left():
                self.in_use -= {event.node} - members
            case Notice() if event.node in self.present:
                self.deadlines[event.node] = min(
                    self.deadlines.get(event.node, math.inf), event.deadline_s
                )
            case NoticeCancelled():
                self.deadlines.pop(event.node, None)
        decisions = self.world.handle(event, self.now_s)
        self.look(event, decisions, size, members)
        assert self.world.handle(Tick(), self.now_s) == [], "it is not done with one decision"
        self.decided += decisions
        return decisions

    def look(self, event: Event, decisions: list[Decision], size: int, members: set[str]) -> None:
        world, policy, now_s = self.world, self.world.policy, self.now_s
        new = set(world.members)
        self.in_use |= new
        for decision in decisions:
            if isinstance(decision, Evict):
                self.in_use.discard(decision.node)
            if isinstance(decision, Resize):
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
        answers = [one for one in decisions if isinstance(one, Answer)]
        asked = [event.request] if isinstance(event, Scale | Demand) else []
        assert [one.request for one in answers] == asked

    def play(self, history: list[tuple[float, Event]]) -> None:
        for wait_s, event in history:
            self.advance(self.now_s + wait_s)
            is_notice = isinstance(event, Notice)
            self.feed(
                Notice(event.node, self.now_s + max(0.1, event.deadline_s)) if is_notice else event
            )


@settings(max_examples=examples(150))
@given(POLICIES, HISTORIES)
def test_any_history_keeps_the_rules(
    policy: ElasticPolicy, history: list[tuple[float, Event]]
) -> None:
    Watched(World(policy)).play(history)


@settings(max_examples=examples(100))
@given(POLICIES, HISTORIES)
def test_in_peace_it_comes_to_rest_at_the_best_size_with_debts_paid(
    policy: ElasticPolicy, history: list[tuple[float, Event]]
) -> None:
    watched = Watched(World(policy))
    watched.play(history)
    for event in (Returned("big"), Returned("huge"), *map(Lost, sorted(watched.deadlines))):
        watched.feed(event)
    watched.advance(watched.now_s + 1000)
    world = watched.world
    assert world.lent == {}
    assert world.size == len(world.members) == policy.fit(min(world.target, len(watched.present)))
    assert world.next_s() == math.inf


# -- the file -----------------------------------------------------------------------------------------------------


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
    """What happens to nodes bears no name of a request either, and is no request that was answered before."""
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
    for event in (*story, events.Elastic(Scale("", 3)), events.NodeLost("n2")):
        membership.handle(event, 0.0)
        elasticity.take_in(event, membership, 0.0)
    wish = elasticity.wish(membership)
    assert wish is not None
    assert wish.size == 2


@pytest.mark.parametrize("returns", [False, True])
def test_a_notice_for_a_machine_that_was_replaced_before_anybody_trained_is_void(
    returns: bool,
) -> None:
    elasticity = Elasticity(msgspec.structs.replace(POLICY, replica_discrete_values=()))
    membership = Membership(RunConfig(job=JobSpec("job.py"), nodes=3))
    story: list[events.AnyEvent] = [events.NodeJoined(node) for node in ("n0", "n1", "n2")]
    story.append(events.Elastic(Notice("n1", deadline_s=50)))
    story += [events.NodeLost("n1"), events.NodeJoined("n1")] if returns else []
    for event in (*story, events.Settled(1)):
        membership.handle(event, 0.0)
        elasticity.take_in(event, membership, 0.0)
    assert (elasticity.wish(membership) is None) == returns


@pytest.mark.parametrize("deadlines_s", [(50.0, 3.0), (3.0, 50.0)])
def test_a_machine_that_comes_after_one_of_two_deadlines_has_neither_notice(
    deadlines_s: tuple[float, float],
) -> None:
    """Both were for the machine that was to be gone by the earlier one."""
    elasticity = Elasticity(msgspec.structs.replace(POLICY, replica_discrete_values=()))
    membership = Membership(RunConfig(job=JobSpec("job.py"), nodes=3))
    notices = [
        (events.Elastic(Notice("n1", deadline_s=deadline_s)), 0.0) for deadline_s in deadlines_s
    ]
    joined = [(events.NodeJoined(node), 4.0) for node in ("n0", "n1", "n2")]
    for event, now_s in (*notices, *joined, (events.Settled(1), 4.0)):
        membership.handle(event, now_s)
        elasticity.take_in(event, membership, now_s)
    assert elasticity.wish(membership) is None


@pytest.mark.parametrize("again", [False, True])
def test_a_notice_that_was_taken_back_says_nothing_of_the_next_one(again: bool) -> None:
    elasticity = Elasticity(msgspec.structs.replace(POLICY, replica_discrete_values=()))
    membership = Membership(RunConfig(job=JobSpec("job.py"), nodes=3))
    happenings = [
        Notice("n1", deadline_s=3.0),
        NoticeCancelled("n1"),
        *[Notice("n1", deadline_s=50.0)] * again,
    ]
    joined = [(events.NodeJoined(node), 4.0) for node in ("n0", "n1", "n2")]
    for event, now_s in (
        *((events.Elastic(one), 0.0) for one in happenings),
        *joined,
        (events.Settled(1), 4.0),
    ):
        membership.handle(event, now_s)
        elasticity.take_in(event, membership, now_s)
    wish = elasticity.wish(membership)
    assert (wish is not None) == again
