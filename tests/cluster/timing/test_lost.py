"""Processes and nodes that are gone, stopped, silent or cut off: found in time, and not taken for what they are not."""

from __future__ import annotations

from typing import Any

import pytest
from support.stopwatch import Stopwatch

from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.experiment.outcome import Outcome
from chaoskit.journal import Record
from chaoskit.pytest_plugin import Chaos
from chaoskit.substrate.cgroup import unavailable
from chaoskit.suites.recovery.expect import STEADY
from faults import Cut, Delay, Fault, FreezeNode, Hang, Kill, Scale

AT = 8
LEASE_BEATS = 10  # 490 ms: a freeze within it can be told from one beyond it on any machine


def run(chaos: Chaos, *faults: Fault, nodes: int = 3, spares: int = 1, steps: int = 24, **plan: Any) -> Outcome:
    for fault in faults:
        if reason := fault.unavailable():
            pytest.skip(reason)
    settings = {"deadline_s": 60.0, "twin": False} | plan
    assert not chaos.limits, "the limits of production"
    return chaos.run(STEADY, faults=faults, nodes=nodes, spares=spares, steps=steps, **settings)


def struck(outcome: Outcome) -> Record:
    (record,) = outcome.records("injected")
    return record


def lost(outcome: Outcome) -> Record:
    """The only loss, of the rank that was struck."""
    (record,) = outcome.records("detected")
    assert record["rank"] == struck(outcome)["rank"]
    return record


def assert_left_alone(outcome: Outcome) -> None:
    assert outcome.records("detected", "node_lost", "left_out") == []
    assert len(outcome.records("plan")) == 1


# -- exit ---------------------------------------------------------------------------------------------------------


def test_a_process_that_ends_is_missed(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """The kernel wakes what waits for its end: no limit has to pass."""
    outcome = run(chaos, Kill(rank=1, at_step=AT))
    assert lost(outcome)["cause"] == "exited"
    stopwatch.within(0.1, struck(outcome), lost(outcome))


def test_a_process_that_leaves_as_planned_is_not_missed(chaos: Chaos) -> None:
    """It ends before the job does, as one that dies; the world has let it go."""
    policy = ElasticPolicy(min_replicas=2, max_replicas=3, scaling_timeout_s=0)
    plan = {"elastic": policy, "shards": 6, "options": {"step_s": 0.05}}
    outcome = run(chaos, Scale(to=2, at_step=AT), spares=0, steps=40, **plan)
    (ended,) = outcome.records("job_ended")
    gone = [record for record in outcome.records("worker_exited") if record.t_ns < ended.t_ns]
    assert [record["status"] for record in gone] == ["status 0"]
    assert outcome.records("detected", "evicted", "node_lost") == []
    assert outcome.steps[-1].world == 2


# -- stop ---------------------------------------------------------------------------------------------------------


def test_a_process_that_is_stopped_is_found_at_once(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """By its parent, which the kernel tells: long before the limit of its phase."""
    outcome = run(chaos, Hang(rank=1, at_step=AT, how="stop"))
    assert lost(outcome)["cause"] == "stopped"
    stopwatch.within(0.1, struck(outcome), lost(outcome))


def test_a_node_that_is_suspended_and_resumed_is_kept(chaos: Chaos) -> None:
    """All its processes are stopped, and go on together within the lease: none is given up as stopped."""
    outcome = run(chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=0.15), lease_beats=LEASE_BEATS)
    assert_left_alone(outcome)


# -- lease --------------------------------------------------------------------------------------------------------


FREEZER = "signal" if unavailable("freezer") else "cgroup"


def test_a_silent_node_is_lost_when_its_lease_ends(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """Within as many beats as a lease has: 150 ms."""
    outcome = run(chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=1.0, how=FREEZER))
    assert lost(outcome)["cause"] == "node lost"
    (node,) = outcome.records("node_lost")
    assert node["detail"] == "silent for 3 beats"
    stopwatch.within(0.2, struck(outcome), lost(outcome))


def test_a_longer_lease_ends_later(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """With ten beats a node may be silent for 490 ms: the lease is what decides, and not the silence."""
    outcome = run(chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=2.0, how=FREEZER), lease_beats=LEASE_BEATS)
    assert lost(outcome)["cause"] == "node lost"
    stopwatch.within(0.6, struck(outcome), lost(outcome))
    assert lost(outcome).t_ns - struck(outcome).t_ns > 0.4e9


def test_a_node_that_is_silent_within_its_lease_is_kept(chaos: Chaos) -> None:
    """The freeze is a third of the lease: the node goes on, and no membership changes."""
    outcome = run(chaos, FreezeNode(rank=1, at_step=AT, thaw_after_s=0.15, how=FREEZER), lease_beats=LEASE_BEATS)
    assert_left_alone(outcome)


# -- link ---------------------------------------------------------------------------------------------------------


@pytest.mark.chaos(substrate="netns")
def test_a_link_that_is_cut_has_a_node_left_out(chaos: Chaos, stopwatch: Stopwatch) -> None:
    """Both nodes reach the coordinator, so neither is silent: only what they say of their link tells."""
    outcome = run(chaos, Cut(rank=1, at_step=AT, apart_from=(2,)), spares=0)
    (left_out,) = outcome.records("left_out")
    assert left_out["nodes"] in (["node1"], ["node2"])
    assert left_out["detail"] == "no connection node1-node2"
    assert {record["cause"] for record in outcome.records("detected")} == {"unreachable"}
    stopwatch.within(1.5, struck(outcome), left_out)


@pytest.mark.chaos(substrate="netns")
def test_a_slow_link_has_no_node_left_out(chaos: Chaos) -> None:
    """Each reduction takes several round trips of 40 ms, and none of them as long as a suspicion."""
    outcome = run(chaos, Delay(rank=1, at_step=AT, delay_ms=20, apart_from=(2,)), spares=0)
    assert_left_alone(outcome)
    assert max(point.seconds for point in outcome.steps[AT:]) > 0.04
