"""Tests of resized worlds: a leaver stays until the others can go on without it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from chaoskit.config import BatchScaling, RunConfig
from chaoskit.coordinator.membership.events import (
    Action,
    AskForCopies,
    Evicted,
    FinishJob,
    MembershipEvent,
    NodeJoined,
    OrderStart,
    OrderStop,
    Publish,
    Resized,
    Settled,
    Stalled,
    Tick,
)
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.job import JobSpec
from chaoskit.wire.messages import (
    Endpoint,
    Healed,
    NodeLost,
    Plan,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)


class Job:
    """A membership of nodes ``a`` to ``d``, and its orders."""

    def __init__(
        self,
        nodes: str = "abcd",
        *,
        sharded: bool = False,
        spares: int = 0,
        most: int = 6,
        follow: BatchScaling | None = None,
    ) -> None:
        policy = ElasticPolicy(min_replicas=1, max_replicas=most)
        job = JobSpec("train.py", sharded=sharded)
        self.machine = Membership(
            RunConfig(
                job=job,
                nodes=len(nodes),
                spares=spares,
                elastic=policy,
                shards=2 * most,
                follow=follow,
            )
        )
        self.now_s = 0.0
        self.plans: list[Plan] = []
        self.started: list[str] = []
        self.stopped: list[tuple[str, str]] = []
        self.join(*nodes)
        self.become_ready()
        self.settle()

    def tell(self, event: MembershipEvent) -> Sequence[Action]:
        actions = handle(self.machine, event, self.now_s)
        for action in actions:
            match action:
                case Publish(plan):
                    self.plans.append(plan)
                case OrderStart(_, worker):
                    self.started.append(worker)
                case OrderStop(worker, cause):
                    self.stopped.append((worker, cause))
        return actions

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.tell(NodeJoined(node))

    def become_ready(self) -> None:
        for worker in self.started:
            if self.machine.host_of(worker) is not None and not self.machine.is_ready(worker):
                self.tell(
                    WorkerReady(worker, worker.partition(".")[0], Endpoint("host", worker, 1, 2, 3))
                )

    def settle(self) -> None:
        self.tell(Settled(self.machine.generation))

    def heal(self, *workers: str) -> None:
        for worker in workers or self.members:
            self.tell(Healed(worker))

    def resize(self, size: int, idle: str = "", swap_by_s: float | None = None) -> Sequence[Action]:
        return self.tell(Resized(size, tuple(idle), "", swap_by_s))

    @property
    def members(self) -> tuple[str, ...]:
        return self.machine.members

    @property
    def plan(self) -> Plan:
        return self.plans[-1]

    @property
    def world(self) -> tuple[str, ...]:
        return tuple(member.worker for member in self.plan.members)


# -- a world shrinks -------------------------------------------------------------------------------


def test_who_leaves_is_told_by_a_plan_that_aborts_nothing_and_is_stopped_once_the_others_have_met() -> (
    None
):
    job = Job()
    job.resize(3, "b")
    assert (job.plan.abort, job.world, job.plan.leavers) == (False, ("a.0", "d.0", "c.0"), ("b.0",))
    assert job.stopped == []
    assert job.machine.crew == ("a.0", "d.0", "c.0", "b.0")
    job.settle()
    assert job.stopped == [("b.0", "left")]
    assert job.machine.crew == job.world
    assert job.machine.workers_on("b") == frozenset()


def test_nobody_is_started_for_whoever_has_left() -> None:
    job = Job()
    job.resize(3, "b")
    job.settle()
    assert job.started == ["a.0", "b.0", "c.0", "d.0"]


def test_leaving_costs_no_budget_and_is_no_strike() -> None:
    job = Job()
    for _ in range(40):  # more than max_failures
        job.resize(3, "b")
        job.settle()
        job.heal()
        job.resize(4)
        job.become_ready()
        job.settle()
        job.heal()
    assert not job.machine.finished
    assert len(job.world) == 4


def test_who_is_too_many_leaves_though_its_node_is_wanted() -> None:
    """Ranks that share a node leave first, once the node of a lost rank is back."""
    job = Job("abc")
    job.tell(NodeLost("a"))
    job.become_ready()
    for _ in range(2):  # without the lost rank, and with the one in its place
        job.settle()
        job.heal()
    assert {worker[0] for worker in job.world} == {"b", "c"}
    assert len(job.world) == 3
    job.join("a")
    job.resize(2, "a")
    assert len(job.plan.leavers) == 1
    job.settle()
    assert {worker[0] for worker in job.world} == {"b", "c"}
    assert len(job.world) == 2


def test_a_world_grows_on_the_node_that_came_though_a_spare_beside_a_member_is_ready_sooner() -> (
    None
):
    job = Job("ab", spares=1)
    assert len(job.machine.spares) == 1
    job.join("c")
    job.resize(3)
    assert len(job.world) == 2
    job.become_ready()
    assert {worker[0] for worker in job.world} == {"a", "b", "c"}


def test_a_spare_beside_a_member_is_taken_where_no_other_node_starts_one() -> None:
    job = Job("ab", spares=1)
    job.resize(3)
    assert len(job.world) == 3


def test_who_is_too_many_of_a_sharded_job_goes_at_once() -> None:
    job = Job("abc", sharded=True)
    job.heal()
    job.resize(2)
    assert job.stopped == [("c.0", "left")]


def test_the_only_one_with_the_state_stays_until_another_one_has_it() -> None:
    """All others are new: they must take the state over before it may go."""
    job = Job("ab")
    job.tell(WorkerLost("b.0"))
    job.settle()
    job.become_ready()  # b.1, which has a rank from now on
    job.settle()
    job.tell(Healed("a.0"))
    job.resize(1, "a")
    assert "a.0" in job.world
    job.tell(Healed("b.1"))
    assert (job.world, job.plan.leavers) == (("b.1",), ("a.0",))


def test_all_nodes_but_a_new_one_leave_when_that_has_the_state() -> None:
    job = Job("abc")
    job.join("d")
    job.resize(1, "abc")
    assert job.world == ("a.0",), "somebody who has the state stays"
    job.settle()
    job.become_ready()
    job.heal()
    assert job.world == ("a.0", "d.0")
    job.settle()
    assert job.plan.leavers == ()
    job.heal()
    assert job.world == ("d.0",)
    job.settle()
    assert {worker for worker, cause in job.stopped if cause == "left"} == {"a.0", "b.0", "c.0"}


@pytest.mark.parametrize(("follow", "world"), [(None, 3), (BatchScaling(rule="none"), 2)])
def test_a_batch_that_follows_the_world_never_grows_further_than_was_said(
    follow: BatchScaling | None, world: int
) -> None:
    """A rank that stays with the state may be one too many, if there are shards for it."""
    job = Job("ab", most=2, follow=follow)
    job.join("c", "d")
    job.resize(2, "ab")
    job.settle()
    job.become_ready()
    job.heal()
    assert len(job.world) == world
    assert sum(len(member.shards) for member in job.plan.members) == 4
    job.settle()
    job.heal()
    job.settle()
    assert set(job.world) == {"c.0", "d.0"}


def test_who_leaves_does_not_make_a_member_dispensable_that_may_train_without_it() -> None:
    """The smaller world may have formed without a report: then the leaver is behind."""
    job = Job("ab")
    job.resize(1, "b")
    assert job.machine.crew == ("a.0", "b.0")
    assert job.machine.keepers == {"a"}
    job.tell(WorkerLost("a.0"))
    assert job.machine.keepers == {"b"}


# -- something goes wrong on the way ---------------------------------------------------------------


def test_a_rank_lost_before_the_others_have_met_brings_the_leavers_back() -> None:
    """The lost ranks may have gone one step further than the remaining one."""
    job = Job()
    job.resize(3, "b")
    job.tell(WorkerLost("c.0"))
    assert job.plan.abort
    assert set(job.world) == {"a.0", "b.0", "d.0"}
    assert job.plan.leavers == ()
    job.settle()
    assert ("b.0", "left") not in job.stopped
    job.heal()
    assert job.plan.leavers == ("b.0",), "it leaves at the next boundary"


@pytest.mark.parametrize("world", [1, 2])
def test_leavers_stay_if_all_members_have_ended_when_their_generation_settles(world: int) -> None:
    """The leavers are then the last ranks with the state."""
    job = Job()
    job.resize(world, "abcd"[world:])
    ended, leavers = job.world, job.plan.leavers
    job.tell(Settled(job.plan.generation, ended))
    for worker in ended:
        job.tell(WorkerLost(worker))
    assert leavers
    assert not set(leavers) & {worker for worker, _ in job.stopped}
    assert job.plan.abort
    assert set(leavers) <= set(job.world)


def test_leavers_go_if_a_member_lives_when_their_generation_settles() -> None:
    job = Job()
    job.resize(2, "c")
    job.tell(Settled(job.plan.generation, (job.world[0],)))
    assert ("c.0", "left") in job.stopped


def test_a_departing_rank_has_no_state_any_more_if_the_others_trained_without_it() -> None:
    """A rank that became a member again does not stand for steps that a lost rank took after it had left.

    The others could not say that they went on without it; that a step was committed there is read
    from the board of the lost rank.
    """
    job = Job("abc")
    job.resize(2, "c")
    job.tell(Evicted("b"))
    assert job.world == ("a.0", "c.0")
    actions = job.tell(WorkerLost("a.0", trained_in=2))
    assert job.world == ("a.0", "c.0")
    assert [action.node for action in actions if isinstance(action, AskForCopies)] == [
        "a",
        "b",
        "c",
    ]
    job.tell(Healed("c.0", 1))  # is said again, of the time before
    assert not any(isinstance(action, Publish) for action in job.tell(Tick()))
    assert job.plan.generation == 3


def test_a_departing_rank_that_took_the_state_over_again_has_it() -> None:
    """The state of a rank that was in a later generation is as new as that of the lost rank."""
    job = Job("abc")
    job.resize(2, "c")
    job.tell(Evicted("b"))
    job.tell(Healed("c.0", 3))
    job.tell(WorkerLost("a.0", trained_in=2))
    assert (job.plan.generation, job.world) == (4, ("c.0",))


def test_a_departing_rank_is_behind_until_it_has_taken_the_state_over() -> None:
    """A generation with it that has formed is not enough: it has yet to copy the steps of the time without it."""
    job = Job("abc")
    job.resize(2, "c")
    job.tell(Evicted("b"))
    job.settle()
    assert job.world == ("a.0", "c.0")
    actions = job.tell(WorkerLost("a.0", trained_in=2))
    assert [action.node for action in actions if isinstance(action, AskForCopies)] == [
        "a",
        "b",
        "c",
    ]


def test_a_departing_rank_has_no_state_once_it_is_known_that_the_others_trained_without_it() -> (
    None
):
    """The word of it may come after the next plan, and the rank that gave it may then be lost unheard."""
    job = Job("abc")
    job.resize(2, "c")
    job.tell(Evicted("b"))
    job.tell(Settled(2))
    actions = job.tell(NodeLost("a"))
    assert [action.node for action in actions if isinstance(action, AskForCopies)] == ["b", "c"]


@pytest.mark.parametrize("settles", [False, True])
def test_a_departing_rank_makes_no_member_dispensable_before_it_has_taken_the_state_over(
    settles: bool,
) -> None:
    """The others may have trained without it, even if no node has reported that."""
    job = Job("abc")
    job.resize(2, "c")
    job.tell(NodeLost("b"))
    assert job.world == ("a.0", "c.0")
    if settles:
        job.settle()
    assert job.machine.keepers == {"a"}
    job.tell(Healed("c.0", 3))
    assert job.machine.keepers == {"a", "c"}


def test_a_leaver_that_is_lost_before_the_others_have_met_is_a_loss() -> None:
    """The leaver may have committed a step that the others have not."""
    job = Job()
    job.resize(3, "b")
    job.tell(WorkerLost("b.0"))
    assert job.plan.abort
    assert set(job.world) == {"a.0", "c.0", "d.0"}
    assert len(job.plans) == 3


def test_a_leaver_whose_node_is_lost_after_it_left_is_nobodys_loss() -> None:
    job = Job()
    job.resize(3, "b")
    job.settle()
    job.tell(NodeLost("b"))
    assert len(job.plans) == 2
    assert job.machine.settled


def test_nobody_leaves_before_all_stand_in_the_generation() -> None:
    """A rank that hangs on its way into it never reaches a boundary, and no rank could be blamed."""
    job = Job()
    job.tell(WorkerLost("d.0"))
    job.settle()
    job.resize(2, "cd")
    assert job.plan.leavers == ()
    job.heal("a.0", "b.0")
    assert job.plan.leavers == ()
    job.heal("c.0")
    assert job.plan.leavers == ("c.0",)


def test_nobody_leaves_when_somebody_is_at_its_end() -> None:
    job = Job()
    job.tell(WorkerDone("a.0", 9))
    job.resize(3, "b")
    assert len(job.plans) == 1


@pytest.mark.parametrize("settles", [False, True])
def test_the_job_is_over_when_those_that_leave_are_done_too(settles: bool) -> None:
    """A script that returns at the resize may still save what it has on the node that goes."""
    job = Job("abc")
    job.resize(2, "c")
    assert job.plan.leavers == ("c.0",)
    assert not [*job.tell(WorkerDone("a.0", 20)), *job.tell(WorkerDone("b.0", 20))]
    if settles:  # ranks that are done build the next group, for others that may need their state
        job.settle()
    assert job.stopped == []
    (finish,) = job.tell(WorkerDone("c.0", 20))
    assert isinstance(finish, FinishJob)
    assert finish.ok


def test_a_leaver_that_is_lost_or_takes_too_long_does_not_hold_up_the_end_of_the_job() -> None:
    for is_lost, settles in product((True, False), repeat=2):
        job = Job("abc")
        job.resize(2, "c")
        assert not [*job.tell(WorkerDone("a.0", 20)), *job.tell(WorkerDone("b.0", 20))]
        if settles:
            job.settle()
        job.now_s += ElasticPolicy(min_replicas=1, max_replicas=6).graceful_shutdown_timeout_s - 1.0
        assert not job.tell(Tick())
        job.now_s += 0.0 if is_lost else 1.0
        (finish,) = job.tell(WorkerLost("c.0") if is_lost else Tick())
        assert isinstance(finish, FinishJob)
        assert finish.ok


def test_the_last_step_of_a_departing_rank_counts_when_it_is_a_member_again() -> None:
    """The job is over if a leaver has ended its training and the others are lost.

    It reports its end once. The loss of a remaining rank makes it a member again, and no message
    follows.
    """
    job = Job("ab")
    job.resize(1, "b")
    assert job.plan.leavers == ("b.0",)
    job.tell(WorkerDone("b.0", 20))
    job.tell(WorkerLost("a.0"))
    assert job.world == ("b.0",)
    (finish,) = job.tell(Settled(job.plan.generation))
    assert isinstance(finish, FinishJob)
    assert finish.ok


def test_a_stalled_generation_without_a_successor_need_not_be_followed() -> None:
    """A stall publishes no plan if no rank has the state any more, and no rank hangs."""
    job = Job("ab")
    job.tell(WorkerLost("a.0"))
    job.tell(WorkerLost("b.0"))
    assert not job.machine.is_gathering
    job.tell(Stalled(job.plan.generation))
    assert job.machine.is_gathering


def test_an_evicted_node_is_a_loss_and_gets_no_workers_while_it_idles() -> None:
    job = Job()
    job.resize(3, "b")
    job.tell(Evicted("b"))
    assert ("b.0", "evicted") in job.stopped
    assert job.plan.abort
    assert set(job.world) == {"a.0", "c.0", "d.0"}
    job.settle()
    assert not any(worker.startswith("b.1") for worker in job.started)


def test_an_eviction_may_take_the_word_that_the_first_generation_settled() -> None:
    """The others may have trained, so the job does not begin anew with fresh workers."""
    policy = ElasticPolicy(min_replicas=1, max_replicas=3)
    machine = Membership(RunConfig(job=JobSpec("train.py"), nodes=2, spares=0, elastic=policy))
    for node in "ab":
        handle(machine, NodeJoined(node), 0.0)
    for node in "ab":
        handle(machine, WorkerReady(f"{node}.0", node, Endpoint("host", node, 1, 2, 3)), 0.0)
    handle(machine, Evicted("b"), 0.0)
    assert machine.keepers == {"a"}
    assert any(
        isinstance(action, AskForCopies) for action in handle(machine, WorkerLost("a.0"), 0.0)
    )


# -- idle nodes, and growth ------------------------------------------------------------------------


@pytest.mark.parametrize("idle", ["e", ""])
def test_an_idle_node_gets_no_workers(idle: str) -> None:
    job = Job()
    job.resize(4, idle)
    job.join("e")
    job.resize(5, idle)
    assert ("e.0" in job.started) == (not idle)


def test_a_world_grows_at_a_boundary_when_the_newcomers_are_ready() -> None:
    job = Job("ab")
    job.join("c", "d")
    job.resize(4)
    assert job.started[2:] == ["c.0", "d.0"]
    assert len(job.plans) == 1
    job.become_ready()
    assert not job.plan.abort
    job.settle()
    job.heal()
    assert set(job.world) == {"a.0", "b.0", "c.0", "d.0"}


def test_whoever_comes_in_place_of_a_node_that_leaves_is_started_at_once() -> None:
    """The former node may still be there: it may have to wait for its successor."""
    job = Job("abc")
    job.join("d")
    job.resize(3, "a")
    assert job.started[-1] == "d.0"
    job.settle()
    job.heal()
    job.become_ready()
    assert set(job.world) == {"b.0", "c.0", "d.0"}


def test_who_is_replaced_stays_until_its_successor_is_ready_and_the_world_moves_once() -> None:
    job = Job("abc")
    job.join("d")
    job.resize(3, "a", swap_by_s=9.0)
    job.now_s = 8.0
    job.tell(Tick())
    assert len(job.plans) == 1
    job.become_ready()
    assert (job.plan.abort, set(job.world), job.plan.leavers) == (
        False,
        {"b.0", "c.0", "d.0"},
        ("a.0",),
    )
    job.settle()
    job.heal()
    assert job.stopped == [("a.0", "left")]
    assert len(job.plans) == 2


def test_who_is_replaced_goes_without_a_successor_when_its_time_is_over() -> None:
    job = Job("abc")
    job.join("d")
    job.resize(3, "a", swap_by_s=9.0)
    job.now_s = 9.0
    job.tell(Tick())
    assert (set(job.world), job.plan.leavers) == ({"b.0", "c.0"}, ("a.0",))


def test_who_is_replaced_goes_when_no_successor_is_on_its_way() -> None:
    """The worker was lost, and the pause before the next start may be long."""
    job = Job("abc")
    job.join("d")
    job.resize(3, "a", swap_by_s=9.0)
    for turn in range(3):
        job.tell(WorkerLost(f"d.{turn}"))
    assert (set(job.world), job.plan.leavers) == ({"b.0", "c.0"}, ("a.0",))


def test_a_rank_that_is_lost_while_another_waits_for_its_successor_is_not_waited_for() -> None:
    job = Job("abc")
    job.join("d")
    job.resize(3, "a", swap_by_s=9.0)
    job.tell(WorkerLost("b.0"))
    assert (job.plan.abort, set(job.world)) == (True, {"a.0", "c.0"})


def test_what_is_not_ready_on_a_node_that_idles_is_ended_at_once() -> None:
    job = Job("ab")
    job.join("c")
    job.resize(3)
    job.resize(2, "c")
    assert job.stopped == [("c.0", "left")]
    assert len(job.plans) == 1


# -- sharded jobs ----------------------------------------------------------------------------------


def test_a_sharded_world_is_vacated_at_once_and_begins_with_copies() -> None:
    """A rank that leaves takes its piece along: all begin the smaller world with what is stored."""
    job = Job(sharded=True)
    job.heal()
    actions = job.resize(3, "b")
    assert ("b.0", "left") in job.stopped
    assert {action.node for action in actions if isinstance(action, AskForCopies)} == set("abcd"), (
        "copies are there, too"
    )
    assert len(job.plans) == 1


def test_a_start_that_was_not_ordered_yet_spends_no_budget() -> None:
    """The loss of the first of two nodes has workers started on the second, which were never ordered."""
    machine = Membership(RunConfig(job=JobSpec("train.py"), nodes=2, spares=0, max_failures=2))
    handle(machine, NodeJoined("a"), 0.0)
    handle(machine, NodeJoined("b"), 0.0)
    assert machine.workers_on("b") == {"b.0"}
    handle(machine, NodeLost("a"), 1.0)
    assert machine.workers_on("b") == {"b.0", "b.1"}
    handle(machine, NodeLost("b"), 1.0)
    assert not machine.finished
