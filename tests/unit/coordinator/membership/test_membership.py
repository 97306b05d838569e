"""Tests of the membership: named behaviours, then random histories of a cluster that obeys its
orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.examples import examples

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership.events import (
    Action,
    AskForCopies,
    FinishJob,
    Fit,
    GenerationSeen,
    MembershipEvent,
    NodeJoined,
    OrderStart,
    OrderStop,
    Publish,
    Rebalanced,
    RunFailed,
    SetAside,
    Settled,
    Stalled,
    Tick,
    Unfit,
)
from chaoskit.coordinator.membership.failure_budget import PAUSE_MAX_S, PAUSE_S, STARTS_MAX
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.membership.limits import LIMITS
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.regroup import may_rebalance
from chaoskit.coordinator.membership.worker_placement import PROOF_S
from chaoskit.job import JobSpec
from chaoskit.wire.messages import (
    Endpoint,
    Healed,
    NodeLost,
    OfferedSnapshot,
    Plan,
    Sealed,
    SourceFailed,
    WorkerDone,
    WorkerLost,
    WorkerReady,
)

LAST_STEP = 6
MACHINE = "boot1/pid:[1]/net:[1]"


def config_of(nodes: int = 4, spares: int = 1, **changes: Any) -> RunConfig:
    return RunConfig(job=JobSpec("train.py"), nodes=nodes, spares=spares, **changes)


@dataclass
class Process:
    """The true state of a worker, of which the machine only gets reports."""

    node: str
    ready: bool = False
    alive: bool = True
    reported: bool = False  # the machine was told that it is lost
    is_cut_off: bool = False  # its node was lost: no later agent of that name has its copies
    generation: int = 0  # the newest one whose plan it acknowledged
    step: int = 0


class Cluster:
    """Processes that obey the machine; all of its decisions are checked."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.machine = config, Membership(config)
        self.now_s = 0.0
        self.nodes: list[str] = []
        self.processes: dict[str, Process] = {}
        self.plans: list[Plan] = []
        self.settled: list[int] = []
        self.doubted = False  # the first generation may have settled, and a node was lost that could have said so
        self.holders: set[str] = set()
        self.done: set[str] = set()
        self.committed = 0
        self.failed_starts = 0  # in a row
        self.finish: FinishJob | None = None
        self.question_number = 0
        self.asked: list[str] = []  # nodes that owe an answer about their copies
        self.kept: dict[str, int] = {}  # node -> step of the copy that its agent has
        self.unfit = {*config.quarantined, *config.on_probation}

    # -- what the machine hears and says -----------------------------------------------------------

    def tell(self, event: MembershipEvent) -> list[Action]:
        finished = self.finish
        actions = handle(self.machine, event, self.now_s)
        assert not (finished and actions), "spoke after the end"
        for action in actions:
            match action:
                case OrderStart(node, worker):
                    assert node in self.nodes
                    assert node not in self.unfit
                    assert worker not in self.processes, "a name was used twice"
                    self.processes[worker] = Process(node)
                case OrderStop(worker):
                    assert self.processes[worker].reported
                case Publish(plan):
                    self.check_plan(plan)
                    self.plans.append(plan)
                case AskForCopies(node, number):
                    self.question_number = number
                    assert node in self.nodes
                    assert not self.live(self.holders), (
                        "asked for copies while somebody has the state"
                    )
                    self.asked.append(node)
                case FinishJob():
                    self.check_finish(action)
                    self.finish = action
        self.check_target()
        return actions

    def check_plan(self, plan: Plan) -> None:
        config, workers = self.config, [member.worker for member in plan.members]
        assert plan.generation == len(self.plans) + 1
        assert [member.rank for member in plan.members] == list(range(len(workers)))
        assert config.min_world <= len(workers) <= config.nodes
        assert len(set(workers)) == len(workers)
        shards = sorted(shard for member in plan.members for shard in member.shards)
        assert shards == list(range(config.shard_count))
        for member in plan.members:
            process = self.processes[member.worker]
            assert process.ready
            assert not process.reported, "published a worker that was reported lost"
            assert (process.node, endpoint(member.worker)) == (member.node, member.endpoint)
        if self.trained:
            if not self.live(self.holders):
                assert plan.restore, "published a plan in which nobody has the state"
                assert plan.restore[0].step == max(snapshot.step for snapshot in plan.restore)
                assert {snapshot.node for snapshot in plan.restore} <= set(self.nodes)
            else:
                assert not plan.restore
                assert self.holders.intersection(workers), (
                    "published a plan in which nobody has the state"
                )
        if self.plans:
            assert set(self.live(self.members())) <= set(workers), "a live member was sent away"

    def check_finish(self, finish: FinishJob) -> None:
        lost = sum(process.reported for process in self.processes.values())
        if finish.ok:
            assert self.committed == LAST_STEP
            assert self.done
        elif "budget" in finish.reason:
            assert lost > self.config.max_failures
        elif "replica" in finish.reason:
            assert not self.live(self.holders)
            assert "sealed" in finish.reason or not self.readable()
        elif "start-up" in finish.reason:
            assert self.now_s >= self.config.startup_s
            assert not self.plans
        elif "in a row" in finish.reason:
            assert len(self.live(self.members())) < self.config.min_world
        else:
            assert finish.reason == "user"

    def check_target(self) -> None:
        machine, live = self.machine, self.live(self.processes)
        assert machine.finished == bool(self.finish)
        assert self.finish or set(machine.members) == set(self.live(self.members()))
        assert machine.generation == len(self.plans)
        if machine.generation and set(self.nodes) - self.unfit and not self.finish:
            missing = self.config.nodes + self.config.spares - len(live)
            assert missing == 0 or (missing > 0 and self.failed_starts > 1), (
                "it may pause, but not give up at once"
            )

    # -- what the cluster does ---------------------------------------------------------------------

    def live(self, workers: object) -> list[str]:
        assert isinstance(workers, (set, list, dict))
        return [worker for worker in sorted(workers) if not self.processes[worker].reported]

    @property
    def trained(self) -> bool:
        return bool(self.settled) or self.doubted

    def members(self) -> list[str]:
        return [member.worker for member in self.plans[-1].members] if self.plans else []

    def ranks(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {member.worker: (member.rank, member.shards) for member in self.plans[-1].members}

    def join(self, *nodes: str, incarnation: str = f"{MACHINE}/7") -> None:
        for node in nodes:
            if node not in self.nodes:
                self.nodes.append(node)
                self.tell(NodeJoined(node, incarnation))

    def become_ready(self, *workers: str) -> None:
        for worker in workers or self.live(self.processes):
            process = self.processes[worker]
            if process.alive and not process.ready and not self.finish:
                process.ready = True
                self.failed_starts = 0
                self.tell(WorkerReady(worker, process.node, endpoint(worker)))

    def lose(self, *workers: str, cause: str = "") -> list[Action]:
        """Report losses, one event each. Whether the processes still run is another matter."""
        actions = []
        for worker in workers:
            self.processes[worker].reported = True
            self.failed_starts += self.trained and not self.processes[worker].ready
            actions += self.tell(WorkerLost(worker, cause=cause))
        return actions

    def readable(self) -> list[str]:
        """Return the nodes that have a copy and could report it."""
        return [node for node in self.kept if node in self.nodes and node not in self.asked]

    def answer(self, *nodes: str) -> list[Action]:
        """Let the agents that were asked report their copies."""
        actions: list[Action] = []
        for node in nodes or list(self.asked):
            if node in self.asked:
                self.asked.remove(node)
                actions += self.tell(
                    Sealed(
                        node,
                        (snapshot(node, self.kept[node]),) if node in self.kept else (),
                        self.question_number,
                    )
                )
        return actions

    def lose_node(self, node: str) -> list[Action]:
        self.nodes.remove(node)
        self.kept.pop(node, None)
        self.unfit.discard(node)
        self.asked = [name for name in self.asked if name != node]
        self.give_up(node)
        for process in self.processes.values():
            process.is_cut_off |= process.node == node
        return self.tell(NodeLost(node))

    def find_unfit(self, node: str) -> list[Action]:
        """Its agent stays, with the copies that it keeps."""
        self.unfit.add(node)
        self.give_up(node)
        return self.tell(Unfit(node, "XID 79"))

    def give_up(self, node: str) -> None:
        """Lose a node: no report of its workers comes any more."""
        members = self.live(self.members())
        for process in self.processes.values():
            process.reported |= process.node == node
        if not self.trained and self.live(self.members()) != members:
            first = {member.worker for member in self.plans[0].members}
            self.doubted = True
            self.holders.update(first.intersection(members) or members)

    def build(self, *workers: str) -> None:
        """Members acknowledge the latest plan; the last one completes the group."""
        for worker in workers or self.members():
            process, generation = self.processes[worker], len(self.plans)
            if (
                not process.alive
                or worker not in self.members()
                or process.generation == generation
            ):
                continue
            process.generation = generation
            if all(self.processes[member].generation == generation for member in self.members()):
                if not self.trained:
                    self.holders.update(self.live(self.members()))
                self.settled.append(generation)
                self.tell(Settled(generation))

    def pull(self, *workers: str) -> None:
        """Let members of a settled generation take over the newest state of a live member."""
        for worker in workers or self.members():
            process = self.processes[worker]
            if process.alive and process.generation == len(self.plans) in self.settled:
                peers = [self.processes[member] for member in self.members()]
                steps = [peer.step for peer in [*peers, process] if peer.alive or peer is process]
                process.step = max(
                    [*steps, *(snapshot.step for snapshot in self.plans[-1].restore)]
                )
                if self.plans[-1].restore and not self.live(self.holders):
                    self.committed = (
                        process.step
                    )  # a copy may be older than what the lost ones had committed

    def commit(self) -> None:
        """Every generation that can commit a step does so: its group is whole and its members agree on the step."""
        for generation in self.settled:
            workers = [member.worker for member in self.plans[generation - 1].members]
            group = [self.processes[worker] for worker in workers]
            if not all(process.alive and process.generation == generation for process in group):
                continue
            if any(plan.restore for plan in self.plans[generation:]):
                continue  # agents end workers that they gave up before they offer copies
            if len({process.step for process in group}) > 1 or group[0].step == LAST_STEP:
                continue
            assert group[0].step == self.committed or self.plans[generation - 1].restore, (
                "a step was committed by two generations, or lost"
            )
            self.committed = group[0].step + 1
            for process in group:
                if not process.is_cut_off:
                    self.kept[process.node] = self.committed
            for process in group:
                process.step = self.committed

    def heal(self, *workers: str) -> None:
        """Members report that they have the state; before anything was trained all have it."""
        for worker in workers or self.live(self.members()):
            if not self.settled or self.processes[worker].step == self.committed:
                self.holders.add(worker)
                self.tell(Healed(worker))

    def report_done(self, *workers: str) -> None:
        for worker in workers or self.live(self.members()):
            process = self.processes[worker]
            if process.alive and process.step == LAST_STEP and worker in self.live(self.members()):
                self.done.add(worker)
                self.holders.add(worker)
                self.tell(WorkerDone(worker, LAST_STEP))

    def advance(self) -> None:
        """All that is pending happens, and a step."""
        self.become_ready()
        self.build()
        self.pull()
        self.commit()
        self.heal()

    def bury(self) -> None:
        """Report all that died."""
        self.lose(
            *(worker for worker in self.live(self.processes) if not self.processes[worker].alive)
        )


def endpoint(worker: str) -> Endpoint:
    return Endpoint("host", worker, 1, 2, 3)


def snapshot(node: str, step: int, generation: int = 1) -> OfferedSnapshot:
    return OfferedSnapshot(
        node, f"{node}.0", step, generation, 100, f"{step}/{generation}", endpoint(node)
    )


def running(nodes: int = 4, spares: int = 1, **changes: Any) -> Cluster:
    """A cluster whose first generation has settled; node ``a`` has the first spare."""
    cluster = Cluster(config_of(nodes, spares, **changes))
    cluster.join(*"abcdefgh"[:nodes])
    cluster.become_ready()
    cluster.build()
    return cluster


# -- start -----------------------------------------------------------------------------------------


def test_starts_one_worker_a_node_then_the_spares_when_all_nodes_joined() -> None:
    cluster = Cluster(config_of(nodes=2, spares=1))
    assert cluster.tell(NodeJoined("b")) == []
    cluster.nodes += ["b", "a"]
    assert cluster.tell(NodeJoined("a")) == [
        OrderStart("b", "b.0"),
        OrderStart("a", "a.0"),
        OrderStart("b", "b.1"),
    ]


def test_ranks_follow_the_order_of_joining_with_one_worker_a_node() -> None:
    cluster = Cluster(config_of(nodes=2, spares=2))
    cluster.join("b", "a")
    cluster.become_ready("b.1", "b.0")
    assert not cluster.plans, "node a would be left out"
    cluster.become_ready("a.0")
    assert cluster.members() == ["b.0", "a.0"]
    assert cluster.machine.spares == ("b.1",)
    assert cluster.machine.world == 2


def test_at_the_startup_deadline_a_smaller_world_starts_and_grows_later() -> None:
    cluster = Cluster(config_of(nodes=3, spares=0, min_world=2))
    cluster.join("a", "b", "c")
    cluster.become_ready("a.0", "b.0")
    cluster.now_s = cluster.config.startup_s
    cluster.tell(Tick())
    assert cluster.members() == ["a.0", "b.0"]
    cluster.become_ready("c.0")
    assert len(cluster.plans) == 1
    cluster.build()
    assert cluster.members() == ["a.0", "b.0", "c.0"]
    assert not cluster.plans[-1].abort


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_at_the_startup_deadline_too_few_is_the_end(nodes: str) -> None:
    cluster = Cluster(config_of(nodes=2, spares=0, min_world=2))
    cluster.join(*nodes)
    cluster.become_ready(*[worker for worker in cluster.processes if worker == "a.0"])
    cluster.now_s = cluster.config.startup_s
    (finish,) = cluster.tell(Tick())
    assert isinstance(finish, FinishJob)
    assert f"{len(nodes)} of 2 nodes joined" in finish.reason


# -- losses ----------------------------------------------------------------------------------------


def test_a_ready_spare_takes_rank_and_shards_of_a_lost_member() -> None:
    cluster = running(shards=10)
    before = cluster.ranks()
    publish, stop, start = cluster.lose("c.0")
    assert isinstance(publish, Publish)
    assert publish.plan.abort
    assert (stop, start) == (OrderStop("c.0", "lost"), OrderStart("c", "c.1"))
    assert cluster.ranks() == {
        "a.1" if worker == "c.0" else worker: place for worker, place in before.items()
    }


def test_without_a_spare_the_world_shrinks_then_grows_when_settled() -> None:
    cluster = running(spares=0)
    cluster.lose("b.0")
    assert cluster.members() == ["a.0", "d.0", "c.0"]
    cluster.become_ready("b.1")
    assert len(cluster.plans) == 2
    cluster.build()
    assert cluster.members() == ["a.0", "d.0", "c.0", "b.1"]
    assert not cluster.plans[-1].abort
    assert cluster.ranks()["a.0"] == (0, (0,))


def test_a_lost_spare_is_replaced_in_the_same_generation() -> None:
    assert running().lose("a.1") == [OrderStop("a.1", "lost"), OrderStart("a", "a.2")]


def test_of_equal_nodes_a_replacement_starts_where_the_loss_was() -> None:
    cluster = running(nodes=3, spares=1)
    cluster.lose_node("a")
    cluster.join("a")
    cluster.become_ready()
    assert cluster.lose("b.1")[-1] == OrderStart("a", "a.2")
    assert cluster.lose("c.1")[-1] == OrderStart("c", "c.2")


def test_losing_a_node_changes_the_generation_once_and_others_host_its_workers() -> None:
    cluster = running(nodes=3, spares=1)
    actions = cluster.lose_node("a")
    assert [action for action in actions if isinstance(action, OrderStart)] == [
        OrderStart("b", "b.1"),
        OrderStart("c", "c.1"),
    ]
    assert len(cluster.plans) == 2
    assert cluster.members() == ["c.0", "b.0"]


def test_a_node_that_comes_back_continues_its_numbers() -> None:
    cluster = Cluster(config_of(nodes=1, spares=0))
    cluster.join("a")
    cluster.lose_node("a")
    cluster.join("a")
    assert list(cluster.processes) == ["a.0", "a.1"]


def test_a_loss_in_an_unsettled_regroup_supersedes_it() -> None:
    cluster = running(spares=2)
    cluster.lose("c.0")
    cluster.build("a.0")
    cluster.lose("d.0")
    assert cluster.members() == ["a.0", "b.0", "a.1", "b.1"]
    assert [plan.generation for plan in cluster.plans] == [1, 2, 3]


def test_below_the_smallest_world_nothing_is_published_until_enough_are_ready() -> None:
    cluster = running(nodes=3, spares=0, min_world=3)
    cluster.lose("b.0")
    assert len(cluster.plans) == 1
    cluster.become_ready()
    assert cluster.members() == ["a.0", "b.1", "c.0"]
    assert cluster.plans[-1].abort


def test_the_failure_budget_counts_members_and_spares() -> None:
    cluster = running(max_failures=2)
    assert not any(isinstance(action, FinishJob) for action in cluster.lose("a.1", "b.0"))
    cluster.become_ready()
    (finish,) = cluster.lose("a.2")
    assert isinstance(finish, FinishJob)
    assert "budget" in finish.reason


@pytest.mark.promise("`max_failures` does not count them")
@pytest.mark.parametrize("cause", ["hung", "slow"])
def test_ranks_that_are_given_up_on_suspicion_spend_no_budget(cause: str) -> None:
    cluster = running(max_failures=1)
    for number in range(4):
        worker = cluster.members()[number % 2]
        assert not any(
            isinstance(action, FinishJob) for action in cluster.lose(worker, cause=cause)
        )
        cluster.become_ready()
    cluster.lose(cluster.members()[0])
    (finish,) = cluster.lose(cluster.members()[0])
    assert isinstance(finish, FinishJob)
    assert "2 workers were lost" in finish.reason


def test_workers_that_hang_before_the_job_has_trained_spend_the_budget() -> None:
    """There is nothing yet that would tell a slow start from one that never ends."""
    cluster = Cluster(config_of(nodes=2, spares=0, max_failures=1))
    cluster.join("a", "b")
    assert not any(isinstance(action, FinishJob) for action in cluster.lose("a.0", cause="hung"))
    (finish,) = (
        action for action in cluster.lose("b.0", cause="hung") if isinstance(action, FinishJob)
    )
    assert "budget" in finish.reason


def test_a_stalled_generation_is_published_again_with_the_same_ranks() -> None:
    cluster = running()
    before = cluster.ranks()
    assert cluster.tell(Stalled(0)) == []
    (publish,) = cluster.tell(Stalled(1))
    assert isinstance(publish, Publish)
    assert publish.plan.abort
    assert cluster.ranks() == before
    assert cluster.tell(Stalled(1)) == []


# -- owners of the state
# ------------------------------------------------------------------------------------------


def test_before_any_generation_settled_fresh_workers_may_replace_all() -> None:
    cluster = Cluster(config_of(nodes=2, spares=0))
    cluster.join("a", "b")
    cluster.become_ready()
    cluster.lose("a.0", "b.0")
    cluster.become_ready()
    cluster.heal()
    cluster.lose("a.1")
    cluster.become_ready()
    cluster.build()
    assert not cluster.finish
    assert set(cluster.members()) == {"a.2", "b.1"}


def test_a_node_that_is_lost_may_have_known_that_the_first_generation_settled() -> None:
    """The node was cut off: its ranks may have trained, and no fresh worker has their state."""
    cluster = Cluster(config_of(nodes=2, spares=0))
    cluster.join("a", "b")
    cluster.become_ready()
    cluster.join("c")
    cluster.lose_node("b")
    cluster.become_ready()
    cluster.build("a.0")
    assert set(cluster.members()) == {"a.0", "c.0"}
    cluster.build()
    assert cluster.machine.keepers == {"a"}, "a joiner has the state once it says so"
    cluster.lose_node("a")
    assert cluster.answer("c") == []
    cluster.now_s += 1.01 * LIMITS.healing_s
    (finish,) = cluster.tell(Tick())
    assert isinstance(finish, FinishJob)
    assert finish.reason.startswith("every replica was lost")


def test_nobody_begins_anew_when_all_nodes_of_the_first_generation_are_lost() -> None:
    cluster = Cluster(config_of(nodes=2, spares=0))
    cluster.join("a", "b")
    cluster.become_ready()
    assert not any(isinstance(action, FinishJob) for action in cluster.lose_node("a"))
    (finish,) = cluster.lose_node("b")
    assert isinstance(finish, FinishJob)
    assert finish.reason.startswith("every replica was lost")


def test_ranks_that_never_met_may_all_be_replaced() -> None:
    cluster = Cluster(config_of(nodes=2, spares=0))
    cluster.join("a", "b")
    cluster.become_ready()
    for node in "ab":
        assert not any(
            isinstance(action, FinishJob)
            for action in handle(cluster.machine, NodeLost(node, met=False), 0.0)
        )


def test_a_node_without_a_rank_knows_nothing_of_the_first_generation() -> None:
    cluster = Cluster(config_of(nodes=2, spares=0))
    cluster.join("a", "b")
    cluster.become_ready()
    cluster.join("c")
    cluster.lose_node("c")
    cluster.lose("a.0", "b.0")
    cluster.become_ready()
    cluster.build()
    assert not cluster.finish
    assert set(cluster.members()) == {"a.1", "b.1"}


def test_the_job_is_lost_with_its_last_holder_of_state() -> None:
    """No node that was asked has a copy."""
    cluster = running(nodes=1, spares=1)
    assert not cluster.finish
    cluster.lose("a.0")
    (finish,) = cluster.answer("a")
    assert isinstance(finish, FinishJob)
    assert finish.reason.startswith("every replica was lost")


def orphaned(nodes: int = 3, spares: int = 0, **kept: int) -> Cluster:
    """A cluster that has trained and lost all its members; ``kept``: steps of the copies that agents have."""
    cluster = running(nodes, spares)
    cluster.commit()
    cluster.kept = dict(kept)
    cluster.lose(*cluster.members())
    return cluster


def test_fresh_workers_begin_with_the_newest_copies() -> None:
    cluster = orphaned(a=3, b=4, c=4)
    assert sorted(cluster.asked) == ["a", "b", "c"]
    cluster.become_ready()
    assert len(cluster.plans) == 3
    cluster.answer()
    assert [copy.step for copy in cluster.plans[-1].restore] == [4, 4, 3]
    assert len(cluster.members()) == 3


def test_an_answer_that_does_not_come_is_not_waited_for_long() -> None:
    cluster = orphaned(a=3, b=4)
    cluster.become_ready()
    cluster.answer("a")
    assert len(cluster.plans) == 3
    cluster.now_s += 1.01 * LIMITS.recall_s
    cluster.tell(Tick())
    assert [copy.node for copy in cluster.plans[-1].restore] == ["a"]


def test_the_job_is_not_lost_while_a_node_owes_an_answer() -> None:
    """The node may be slow, or read a large state; it is lost if it is silent for too long."""
    cluster = orphaned(a=3)
    cluster.become_ready()
    cluster.answer("b", "c")
    cluster.now_s += 10 * LIMITS.recall_s
    cluster.tell(Tick())
    assert not cluster.finish
    cluster.answer("a")
    assert [copy.node for copy in cluster.plans[-1].restore] == ["a"]


def test_an_answer_that_never_comes_ends_the_job() -> None:
    cluster = orphaned(a=3)
    cluster.answer("b", "c")
    cluster.now_s += 1.01 * cluster.config.startup_s
    cluster.tell(Tick())
    assert cluster.finish
    assert cluster.finish.reason.endswith("no node a complete copy")


def test_the_node_of_a_rank_that_is_lost_while_copies_are_restored_is_asked_again() -> None:
    """The rank may have restored one and trained, and its word of that was not heard: then its state is the newest."""
    cluster = orphaned(a=3)
    cluster.answer()
    cluster.become_ready()
    assert [copy.node for copy in cluster.plans[-1].restore] == ["a"]
    assert cluster.asked == []
    cluster.kept["b"] = 5
    cluster.lose("b.1")
    assert cluster.asked == ["b"]
    cluster.answer()
    cluster.become_ready()
    assert [copy.node for copy in cluster.plans[-1].restore] == ["b", "a"]


def test_a_spare_begins_alone_and_replacements_are_gathered() -> None:
    cluster = running(nodes=2, spares=1)
    cluster.kept = {"a": 4}
    cluster.now_s = 10.0
    cluster.lose("a.0", "b.0")
    cluster.answer()
    assert cluster.members() == ["a.1"]
    cluster = orphaned(nodes=3, a=4)
    cluster.answer()
    cluster.become_ready("a.1")
    assert len(cluster.plans) == 3
    cluster.now_s += 1.01 * LIMITS.gather_s
    cluster.tell(Tick())
    assert cluster.members() == ["a.1"]


def test_copies_of_a_lost_node_are_not_offered() -> None:
    cluster = orphaned(a=3, b=4, c=3)
    cluster.answer()
    cluster.lose_node("b")
    cluster.become_ready()
    assert [copy.node for copy in cluster.plans[-1].restore] == ["a", "c"]


def test_when_the_newest_copies_fail_the_next_are_taken_by_all() -> None:
    """No member may take an older copy than another: so there is a new plan."""
    cluster = orphaned(a=3, b=4, c=4)
    cluster.answer()
    cluster.become_ready()
    assert cluster.tell(SourceFailed("", snapshot("b", 4), True)) == []
    (publish,) = cluster.tell(SourceFailed("", snapshot("c", 4), True))
    assert isinstance(publish, Publish)
    assert publish.plan.abort
    assert [copy.node for copy in publish.plan.restore] == ["a"]
    assert len(publish.plan.members) == 3


def test_a_corrupt_copy_is_never_taken_again() -> None:
    cluster = orphaned(a=3, b=4, c=4)
    cluster.answer()
    cluster.become_ready()
    cluster.tell(SourceFailed("", snapshot("b", 4), True))
    cluster.lose(*cluster.members())
    cluster.answer()
    cluster.become_ready()
    assert [copy.node for copy in cluster.plans[-1].restore] == ["c", "a"]
    cluster.build()
    cluster.pull()
    cluster.heal()
    cluster.lose(*cluster.members())
    cluster.answer()
    cluster.become_ready()
    assert [copy.node for copy in cluster.plans[-1].restore] == ["c", "a"]


def test_when_every_copy_fails_the_job_is_lost() -> None:
    cluster = orphaned(a=3)
    cluster.answer()
    cluster.become_ready()
    del cluster.kept["a"]
    cluster.tell(SourceFailed("", snapshot("a", 3), False))
    assert not cluster.finish
    cluster.now_s += 1.01 * LIMITS.healing_s
    cluster.tell(Tick())
    assert cluster.finish
    assert cluster.finish.reason.startswith("every replica was lost")


def test_a_restored_member_holds_the_state_and_no_copies_are_planned_any_more() -> None:
    cluster = orphaned(a=3)
    cluster.answer()
    cluster.become_ready()
    cluster.build()
    cluster.pull("a.1")
    cluster.holders.add("a.1")
    cluster.tell(Healed("a.1"))
    cluster.lose("b.1")
    assert not cluster.plans[-1].restore
    assert cluster.members() == ["a.1", "c.1"]


def test_replacements_that_never_come_end_the_job() -> None:
    cluster = orphaned(a=3)
    cluster.answer()
    cluster.now_s += cluster.config.startup_s + 1
    cluster.tell(Tick())
    assert cluster.finish
    assert "no worker took over a sealed copy" in cluster.finish.reason


@pytest.mark.parametrize("healed", [False, True])
def test_a_joiner_holds_state_only_once_it_is_healed(healed: bool) -> None:
    cluster = running(nodes=2, spares=1)
    cluster.lose("b.0")
    cluster.build()
    if healed:
        cluster.advance()
    cluster.kept = {}
    cluster.lose("a.0")
    cluster.answer()
    cluster.now_s += 1.01 * LIMITS.healing_s
    cluster.tell(Tick())
    assert bool(cluster.finish) is not healed


def test_a_joiner_that_is_about_to_have_the_state_is_waited_for() -> None:
    cluster = running(nodes=2, spares=1)
    cluster.lose("b.0")
    cluster.build()
    assert not any(isinstance(action, Publish) for action in cluster.lose("a.0"))
    cluster.answer()
    cluster.now_s += 0.99 * LIMITS.healing_s
    assert not any(isinstance(action, (Publish, FinishJob)) for action in cluster.tell(Tick()))
    cluster.holders.add("a.1")
    assert isinstance(cluster.tell(Healed("a.1"))[0], Publish)


def test_workers_that_never_become_ready_are_started_ever_more_slowly_and_spend_no_budget() -> None:
    cluster = running(nodes=2, spares=0, max_failures=1)
    cluster.lose("b.0")
    cluster.build()
    for failure in range(1, 12):
        (name,) = set(cluster.live(cluster.processes)) - {"a.0"}
        starts = [action for action in cluster.lose(name) if isinstance(action, OrderStart)]
        if failure > 1:
            assert not starts
            cluster.now_s += 0.9 * min(PAUSE_MAX_S, PAUSE_S * 2.0 ** (failure - 2))
            assert not cluster.tell(Tick())
            cluster.now_s += 0.2 * PAUSE_MAX_S
            starts = [action for action in cluster.tell(Tick()) if isinstance(action, OrderStart)]
        assert len(starts) == 1
    cluster.become_ready()
    assert len(cluster.plans[-1].members) == 2


def test_when_nobody_can_train_and_nothing_starts_the_job_ends() -> None:
    """Below the smallest world there is nothing to outlive the failures for."""
    cluster = running(nodes=2, spares=0, min_world=2, max_failures=100)
    cluster.lose("b.0")
    for failure in range(1, STARTS_MAX + 1):
        assert cluster.finish is None
        cluster.now_s += PAUSE_MAX_S
        cluster.tell(Tick())
        (name,) = set(cluster.live(cluster.processes)) - {"a.0"}
        actions = cluster.lose(name)
        assert (failure == STARTS_MAX) == any(isinstance(action, FinishJob) for action in actions)
    assert cluster.finish is not None
    assert (
        "8 workers in a row ended before they were ready: 1 rank is left, min_world=2"
        in cluster.finish.reason
    )


def test_a_replacement_that_never_becomes_ready_is_overdue() -> None:
    cluster = running(nodes=2, spares=0, startup_s=30.0)
    cluster.lose("b.0")
    begun_s = cluster.now_s
    assert cluster.machine.overdue(begun_s + 29.9) == ()
    assert cluster.machine.overdue(begun_s + 30.1) == ("b.1",)
    cluster.become_ready()
    assert cluster.machine.overdue(begun_s + 99.0) == ()


def test_a_bad_node_is_given_no_more_workers() -> None:
    cluster = running(nodes=2, spares=0, strikes_max=2)
    cluster.lose("b.0")
    cluster.become_ready()
    actions = cluster.lose("b.1")
    assert SetAside("b") in actions
    assert [action.node for action in actions if isinstance(action, OrderStart)] == ["a"]


@pytest.mark.parametrize(
    ("incarnation", "stays_aside"),
    [
        pytest.param(f"{MACHINE}/8", True, id="another agent"),
        pytest.param("boot1/pid:[2]/net:[1]/1", True, id="a container that was started again"),
        pytest.param("boot1/pid:[2]/net:[2]/1", False, id="another pod"),
        pytest.param("boot2/pid:[1]/net:[1]/7", False, id="another boot"),
    ],
)
def test_a_bad_node_is_avoided_as_long_as_its_machine_is_the_same(
    incarnation: str, stays_aside: bool
) -> None:
    """A machine that replaces it has its name, and has lost no worker.

    An agent that is started again is no repair.
    """
    cluster = running(nodes=2, spares=0, strikes_max=2)
    cluster.lose("b.0")
    cluster.become_ready()
    assert SetAside("b") in cluster.lose("b.1")
    cluster.become_ready()
    cluster.lose_node("b")
    cluster.join("b", incarnation=incarnation)
    actions = cluster.lose("a.0")
    assert [action.node for action in actions if isinstance(action, OrderStart)] == [
        "a" if stays_aside else "b"
    ]


def test_a_node_that_is_not_fit_is_given_no_workers_until_another_agent_comes() -> None:
    """Its workers are given up like those of a lost node, but spend no part of the failure budget."""
    cluster = running(nodes=3, spares=0, max_failures=1)
    actions = cluster.find_unfit("b")
    assert [action for action in actions if isinstance(action, OrderStop)] == [
        OrderStop("b.0", "unfit")
    ]
    assert [action.node for action in actions if isinstance(action, OrderStart)] == ["a"]
    assert not cluster.finish
    assert cluster.members() == ["a.0", "c.0"]
    cluster.advance()
    assert cluster.find_unfit("b") == [], "it is known"
    assert sorted({worker[0] for worker in cluster.members()}) == ["a", "c"]
    cluster.lose_node("b")
    cluster.join("b")
    actions = cluster.lose_node("c")
    assert [action.node for action in actions if isinstance(action, OrderStart)] == ["b"]


def test_nodes_that_the_run_was_told_to_do_without_are_given_no_workers_whoever_comes() -> None:
    cluster = Cluster(config_of(nodes=2, spares=1, quarantined=("b",)))
    cluster.join("a", "b")
    assert sorted(cluster.processes) == ["a.0", "a.1", "a.2"]
    cluster.advance()
    handle(cluster.machine, Fit("b"), 0.0)
    cluster.lose_node("b")
    cluster.unfit.add("b")
    cluster.join("b")
    cluster.lose("a.0")
    assert {process.node for process in cluster.processes.values()} == {"a"}


def test_the_first_start_waits_for_a_node_on_probation_to_prove_itself() -> None:
    cluster = Cluster(config_of(nodes=2, spares=0, on_probation=("b",)))
    cluster.join("a", "b")
    assert not cluster.processes
    cluster.unfit.discard("b")
    assert cluster.tell(Fit("b")) == [OrderStart("a", "a.0"), OrderStart("b", "b.0")]


def test_a_node_on_probation_that_fails_is_done_without() -> None:
    cluster = Cluster(config_of(nodes=2, spares=0, on_probation=("b",)))
    cluster.join("a", "b")
    assert [
        action.node for action in cluster.find_unfit("b") if isinstance(action, OrderStart)
    ] == ["a", "a"]
    assert cluster.machine.on_probation == frozenset()
    assert cluster.tell(Tick()) == []


def test_a_node_on_probation_that_says_nothing_is_not_waited_for_long() -> None:
    cluster = Cluster(config_of(nodes=2, spares=0, on_probation=("b",)))
    cluster.join("a", "b")
    cluster.now_s += PROOF_S - 0.1
    assert cluster.tell(Tick()) == []
    cluster.now_s += 0.1
    assert cluster.tell(Tick()) == [OrderStart("a", "a.0"), OrderStart("a", "a.1")]
    cluster.advance()
    cluster.unfit.discard("b")
    cluster.tell(Fit("b"))
    assert [order.node for order in cluster.lose("a.1") if isinstance(order, OrderStart)] == [
        "b"
    ], "it came late"


def test_when_no_node_is_fit_the_start_ends_in_time_and_says_why() -> None:
    cluster = Cluster(config_of(nodes=1, spares=0))
    cluster.join("a")
    cluster.find_unfit("a")
    cluster.now_s = cluster.config.startup_s
    cluster.tell(Tick())
    assert cluster.finish is not None
    assert cluster.finish.reason.endswith("not fit to train: a")


def test_a_generation_that_a_node_has_seen_never_comes_again() -> None:
    """The record of the decisions may be lost; what was published is not taken back."""
    machine = Membership(config_of(1, 0))
    handle(machine, GenerationSeen(41), 0.0)
    handle(machine, NodeJoined("a", "", 3), 0.0)
    assert handle(machine, Tick(), 0.0) == [OrderStart("a", "a.3")], (
        "others may have joined in the same moment"
    )
    handle(machine, Sealed("a", (snapshot("a", 7, 41),)), 0.0)
    (publish,) = handle(machine, WorkerReady("a.3", "a", endpoint("a.3")), 0.0)
    assert isinstance(publish, Publish)
    assert publish.plan.generation == 42
    assert publish.plan.restore == (snapshot("a", 7, 41),)


def test_workers_that_were_not_ready_cost_no_budget_when_their_node_is_lost() -> None:
    """Once the job trains: a node that comes and goes may have any number of them."""
    cluster = running(nodes=2, spares=0, max_failures=1)
    cluster.join("c")
    cluster.lose_node("b")  # a rank, which is replaced on another node
    assert cluster.processes["c.0"].node == "c"
    cluster.lose_node("c")
    assert cluster.finish is None


def test_a_failure_outside_the_world_is_outlived_once_the_job_trains() -> None:
    cluster = Cluster(config_of(2, 1))
    cluster.join("a", "b")
    assert not cluster.machine.trains_on_without("a.0")
    cluster.become_ready()
    cluster.build()
    assert cluster.machine.trains_on_without("a.1")
    assert not cluster.machine.trains_on_without("a.0")


# -- end -------------------------------------------------------------------------------------------


def finished_steps(nodes: int, spares: int) -> Cluster:
    cluster = running(nodes, spares)
    for _ in range(LAST_STEP):
        cluster.advance()
    return cluster


def test_the_job_ends_when_all_members_are_done() -> None:
    cluster = finished_steps(nodes=2, spares=1)
    cluster.report_done("b.0")
    assert not cluster.finish
    cluster.report_done("a.0")
    assert cluster.finish == FinishJob(True, "every rank committed the last step")
    assert (
        cluster.tell(NodeLost("a"))
        == cluster.tell(NodeJoined("z"))
        == cluster.tell(RunFailed("late"))
        == []
    )


def test_a_member_lost_after_it_was_done_is_replaced_while_others_are_not_done() -> None:
    cluster = finished_steps(nodes=2, spares=1)
    cluster.report_done("b.0")
    cluster.lose("b.0")
    assert cluster.members() == ["a.0", "a.1"]


def test_the_world_grows_again_when_the_only_member_that_was_done_is_lost() -> None:
    cluster = finished_steps(nodes=3, spares=0)
    cluster.report_done("b.0")
    cluster.lose("b.0")
    cluster.build()
    cluster.become_ready()
    assert cluster.members() == ["a.0", "c.0", "b.1"]


def test_losing_the_last_member_that_is_not_done_ends_the_job() -> None:
    cluster = finished_steps(nodes=2, spares=1)
    cluster.report_done("b.0")
    cluster.lose("a.0")
    assert cluster.finish == FinishJob(True, "every rank committed the last step")


def test_a_joiner_that_never_had_a_rank_does_not_hold_up_the_end() -> None:
    cluster = finished_steps(nodes=2, spares=0)
    cluster.lose("b.0")
    cluster.build()
    cluster.become_ready("b.1")
    assert not cluster.plans[-1].abort
    cluster.report_done("a.0")
    assert cluster.finish == FinishJob(True, "every rank committed the last step")


def test_the_world_does_not_grow_any_more_when_a_member_is_done() -> None:
    cluster = finished_steps(nodes=3, spares=0)
    cluster.lose("c.0")
    cluster.build()
    cluster.report_done("a.0")
    cluster.become_ready()
    assert len(cluster.plans) == 2


def test_a_fatal_error_of_the_user_ends_the_job() -> None:
    assert running().tell(RunFailed("user")) == [FinishJob(False, "user")]


def test_repeated_and_unknown_events_are_ignored() -> None:
    cluster = running()
    cluster.lose("b.0")
    stale: list[MembershipEvent] = [
        WorkerLost("b.0"),
        WorkerLost("x.0"),
        NodeLost("x"),
        NodeJoined("a"),
        WorkerReady("b.0", "b", endpoint("b.0")),
        WorkerReady("b.1", "x", endpoint("b.1")),
        Settled(1),
        Settled(3),
        Healed("b.0"),
        WorkerDone("b.0", LAST_STEP),
        WorkerDone("b.1", LAST_STEP),
    ]
    for event in stale:
        assert cluster.tell(event) == []
    assert cluster.machine.spares == ()


# -- random histories ------------------------------------------------------------------------------


@settings(max_examples=examples(500), deadline=None, database=None)
@given(st.data())
def test_losses_end_in_the_same_place_whatever_their_order(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(2, 5))
    spares, shards = data.draw(st.integers(0, 4)), data.draw(st.integers(nodes, 12))
    workers = sorted(running(nodes, spares, shards=shards).processes)
    lost = data.draw(st.lists(st.sampled_from(workers), unique=True))
    places = []
    for order in (lost, data.draw(st.permutations(lost))):
        cluster = running(nodes, spares, shards=shards)
        cluster.lose(*order)
        if not cluster.live(cluster.holders):
            return
        places.append(cluster.ranks())
    assert places[0] == places[1]
    if {worker[0] for worker in lost} == {"a"} and not cluster.live(
        [w for w in workers if w[0] == "a"]
    ):
        cluster = running(nodes, spares, shards=shards)
        cluster.lose_node("a")
        assert cluster.ranks() == places[0]
        assert len(cluster.plans) == 2


# -- uneven work -----------------------------------------------------------------------------------

UNEVEN = {"a.0": 5, "b.0": 2, "c.0": 4, "d.0": 5}


def loads(cluster: Cluster) -> dict[str, int]:
    return {worker: len(shards) for worker, (_, shards) in cluster.ranks().items()}


def test_shares_are_taken_up_between_two_steps_by_the_same_members() -> None:
    cluster = running(shards=16)
    before = cluster.ranks()
    cluster.tell(Rebalanced(UNEVEN))
    assert loads(cluster) == UNEVEN
    assert not cluster.plans[-1].abort
    assert {worker: rank for worker, (rank, _) in cluster.ranks().items()} == {
        worker: rank for worker, (rank, _) in before.items()
    }
    assert cluster.tell(Rebalanced(UNEVEN)) == [], "not while a membership is taken up"
    cluster.build()
    cluster.heal()
    assert cluster.tell(Rebalanced(UNEVEN)) == [], "it is so already"
    cluster.tell(Rebalanced(dict.fromkeys(UNEVEN, 4)))
    assert set(loads(cluster).values()) == {4}


def test_the_shares_of_the_living_hold_after_a_loss() -> None:
    cluster = running(shards=16, spares=1)
    cluster.tell(Rebalanced(UNEVEN))
    cluster.build()
    cluster.heal()
    cluster.lose("d.0")
    assert loads(cluster) == {"a.0": 6, "b.0": 2, "c.0": 4, "a.1": 4}
    cluster.build()
    cluster.heal()
    cluster.lose("b.0")
    assert loads(cluster) == {"a.0": 6, "c.0": 5, "a.1": 5}, "a.1 has the mean of the two others"


def test_nothing_is_moved_while_a_replacement_is_awaited_or_the_end_is_near() -> None:
    cluster = running(nodes=3, spares=0, shards=12)
    cluster.lose("c.0")
    cluster.build()
    cluster.heal()
    assert cluster.tell(Rebalanced({"a.0": 9, "b.0": 3})) == [], "it grows soon"
    cluster.become_ready()
    cluster.build()
    cluster.heal()
    plans = len(cluster.plans)
    cluster.advance()
    for _ in range(LAST_STEP):
        cluster.advance()
    cluster.report_done("a.0")
    cluster.tell(Rebalanced({worker: 10 if worker == "a.0" else 1 for worker in cluster.members()}))
    assert len(cluster.plans) == plans


def test_a_slow_rank_goes_to_another_node_and_its_own_gets_none_any_more() -> None:
    cluster = running(nodes=3, spares=3)
    assert sorted(cluster.machine.spares) == ["a.1", "b.1", "c.1"]
    assert cluster.machine.has_substitute("b.0")
    cluster.processes["b.0"].reported = True
    started = cluster.tell(WorkerLost("b.0", cause="slow"))
    assert cluster.members() == ["a.0", "a.1", "c.0"], (
        "not b.1, though it is on the node that lost a rank"
    )
    assert [action.node for action in started if isinstance(action, OrderStart)] != ["b"]


def test_without_a_spare_elsewhere_there_is_no_substitute() -> None:
    cluster = running(nodes=2, spares=1)
    assert cluster.machine.spares == ("a.1",)
    assert cluster.machine.has_substitute("b.0")
    assert not cluster.machine.has_substitute("a.0")


Pick = st.integers(0, 59)


class Histories(RuleBasedStateMachine):
    """Faults, delays and progress in any order; in the end the faults stop and the cluster must settle."""

    cluster: Cluster

    @initialize(data=st.data(), warm=st.booleans())
    def start(self, data: st.DataObject, warm: bool) -> None:
        nodes = data.draw(st.integers(1, 4))
        config = config_of(
            nodes,
            spares=data.draw(st.integers(0, 2)),
            min_world=data.draw(st.integers(1, nodes)),
            shards=data.draw(st.integers(nodes, 9)),
            max_failures=data.draw(st.sampled_from([3, 99])),
        )
        self.cluster = Cluster(config)
        if warm:
            self.cluster.join(*"abcd"[:nodes])
            self.cluster.advance()

    def pick(self, number: int, workers: list[str]) -> list[str]:
        """Return a worker of ``workers``, or None if there is none."""
        return [workers[number % len(workers)]] if workers else []

    @rule(number=Pick)
    def join(self, number: int) -> None:
        self.cluster.join("abcde"[number % 5])

    @rule(number=Pick)
    def become_ready(self, number: int) -> None:
        cluster = self.cluster
        waiting = [
            worker
            for worker in cluster.live(cluster.processes)
            if not cluster.processes[worker].ready
        ]
        if waiting:
            cluster.become_ready(*self.pick(number, waiting))

    @rule(number=Pick)
    def kill(self, number: int) -> None:
        for worker in self.pick(number, self.cluster.live(self.cluster.processes)):
            self.cluster.processes[worker].alive = False

    @rule()
    def bury(self) -> None:
        self.cluster.bury()

    @rule(number=Pick, dead=st.booleans())
    def lose(self, number: int, dead: bool) -> None:
        """A report of a loss.

        Wrong reports leave a worker that goes on as if nothing had happened.
        """
        for worker in self.pick(number, self.cluster.live(self.cluster.processes)):
            self.cluster.processes[worker].alive &= not dead
            self.cluster.lose(worker)

    @precondition(lambda self: self.cluster.nodes)
    @rule(number=Pick)
    def lose_node(self, number: int) -> None:
        self.cluster.lose_node(self.cluster.nodes[number % len(self.cluster.nodes)])

    @precondition(lambda self: self.cluster.nodes)
    @rule(number=Pick)
    def find_unfit(self, number: int) -> None:
        self.cluster.find_unfit(self.cluster.nodes[number % len(self.cluster.nodes)])

    @rule(number=Pick)
    def build(self, number: int) -> None:
        for worker in self.pick(number, self.cluster.members()):
            self.cluster.build(worker)

    @rule()
    def build_all(self) -> None:
        self.cluster.build()

    @rule(number=Pick)
    def pull(self, number: int) -> None:
        for worker in self.pick(number, self.cluster.members()):
            self.cluster.pull(worker)

    @rule()
    def commit(self) -> None:
        self.cluster.commit()

    @rule()
    def answer(self) -> None:
        self.cluster.answer()

    @rule(number=Pick, corrupt=st.booleans())
    def spoil(self, number: int, corrupt: bool) -> None:
        """A member cannot read one of the copies that it was told of."""
        cluster = self.cluster
        restore = cluster.plans[-1].restore if cluster.plans else ()
        if restore and not cluster.live(cluster.holders):
            failed = restore[number % len(restore)]
            cluster.kept.pop(failed.node, None)
            cluster.tell(SourceFailed("", failed, corrupt))

    @rule(number=Pick)
    def heal(self, number: int) -> None:
        for worker in self.pick(number, self.cluster.live(self.cluster.members())):
            self.cluster.heal(worker)

    @rule()
    def advance(self) -> None:
        self.cluster.advance()

    @rule(number=Pick)
    def report_done(self, number: int) -> None:
        for worker in self.pick(number, self.cluster.live(self.cluster.members())):
            self.cluster.report_done(worker)

    @rule(late=st.booleans())
    def stall(self, late: bool) -> None:
        self.cluster.tell(Stalled(len(self.cluster.plans) - late))

    @rule(seconds=st.sampled_from([1.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.now_s += seconds
        self.cluster.tell(Tick())

    @rule(data=st.data())
    def rebalance(self, data: st.DataObject) -> None:
        """Slow a rank. Shares are taken up between two steps, or not at all."""
        cluster, members = self.cluster, self.cluster.members()
        if not members or len(members) > cluster.config.shard_count:
            return
        more = [
            data.draw(st.integers(0, len(members) - 1))
            for _ in range(cluster.config.shard_count - len(members))
        ]
        shares = {member: 1 + more.count(rank) for rank, member in enumerate(members)}
        may, plans = may_rebalance(cluster.machine), len(cluster.plans)
        cluster.tell(Rebalanced(shares))
        if not may:
            assert len(cluster.plans) == plans, "moved shards while another membership was to come"
        for plan in cluster.plans[plans:]:
            assert not plan.abort
            assert [member.worker for member in plan.members] == members
        if may and len(set(shares.values())) > 1:
            assert {name: len(shards) for name, (_, shards) in cluster.ranks().items()} == shares

    @rule()
    def repeat(self) -> None:
        cluster = self.cluster
        gone = [worker for worker in cluster.processes if cluster.processes[worker].reported]
        stale: list[MembershipEvent] = [NodeJoined(node) for node in cluster.nodes]
        stale += [Settled(generation) for generation in cluster.settled]
        for worker in gone:
            stale += [WorkerLost(worker), WorkerReady(worker, worker[0], endpoint(worker))]
            stale += [Healed(worker), WorkerDone(worker, LAST_STEP)]
        for event in stale:
            assert cluster.tell(event) == []

    def teardown(self) -> None:
        """Faults stop: the full world comes back, or the job has ended."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.bury()
        for node in [node for node in cluster.nodes if node in cluster.unfit]:
            cluster.lose_node(node)  # it is repaired, and another agent comes
        cluster.join(*"abcd"[: cluster.config.nodes])
        for _ in range(4):
            cluster.answer()
            cluster.become_ready()
            cluster.build()
            cluster.pull()
            cluster.heal()
            cluster.now_s += PAUSE_MAX_S
            cluster.tell(Tick())
        if not cluster.finish and not cluster.live(cluster.done):
            assert len(cluster.machine.members) == cluster.config.nodes
            assert len(cluster.machine.spares) == cluster.config.spares
            assert len(cluster.plans) == cluster.settled[-1]
        for _ in range(LAST_STEP + 1):
            cluster.advance()
            cluster.report_done()
        assert cluster.finish
        assert all(older.generation < newer.generation for older, newer in pairwise(cluster.plans))


Histories.TestCase.settings = settings(
    max_examples=examples(800), stateful_step_count=40, deadline=None, database=None
)
test_random_histories = Histories.TestCase
