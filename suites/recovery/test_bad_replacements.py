"""Tests of replacements that cannot start, nodes that kill all workers, and nodes that return."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit import Chaos
from chaoskit.faults import CrashLoop, FailLoad, FreezeNode, Kill
from chaoskit.suites.goals import happened
from chaoskit.suites.recovery.expect import AT, FROZEN_S, survives, victim


@pytest.mark.promise("their agent reports that they ended with this exception", times=2)
@pytest.mark.parametrize("times", [1, 2])
def test_a_spare_that_is_bad_too(chaos: Chaos, times: int) -> None:
    """Some replacements cannot load the job; a later one can, and the world is full again."""
    faults = [FailLoad(rank=1, at_step=3, times=times), Kill(rank=1, at_step=AT)]
    outcome = survives(chaos, *faults, nodes=2, spares=0, until={"world": 2})
    assert len({record.source for record in outcome.records("failed")}) == times
    assert outcome.steps[-1].world == 2


@pytest.mark.promise("the killed workers are gone", world=3)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_node_that_kills_every_process(chaos: Chaos, world: int) -> None:
    """A worker that starts there dies as soon as it is ready, until the node is well again."""
    goal = happened(chaos, "worker_exited", 3, "node1")
    survives(chaos, CrashLoop(rank=1, at_step=AT, times=3), nodes=world, spares=1, goal=goal)


@pytest.mark.promise("A node that loses worker after worker is given no more of them.")
def test_a_node_that_kills_every_process_is_set_aside(chaos: Chaos) -> None:
    """The node gets no worker after three strikes; the others take over its share."""
    plan: dict[str, Any] = {
        "nodes": 3,
        "spares": 0,
        "strikes_max": 3,
        "goal": happened(chaos, "set_aside"),
    }
    outcome = survives(chaos, CrashLoop(rank=1, at_step=AT, times=3), **plan)
    assert [record["node"] for record in outcome.records("set_aside")] == ["node1"]
    started = [record for record in outcome.records("worker_started") if record.source == "node1"]
    assert len(started) == 3


@pytest.mark.slow
@pytest.mark.promise(
    "When it wakes up its agent attaches again, is told to end its workers, and counts as fresh capacity.",
    phase="reduce",
)
@pytest.mark.parametrize("phase", ["forward", "reduce", "optimizer"])
def test_a_node_that_returns_as_a_zombie(chaos: Chaos, phase: str) -> None:
    """The node was frozen for longer than its lease. Its actions afterwards have no effect."""
    fault = FreezeNode(rank=1, at_step=AT, phase=phase, thaw_after_s=FROZEN_S)
    outcome = survives(chaos, fault, nodes=3, goal=happened(chaos, "lifted"))
    commits = [
        record for record in outcome.records("commit") if record.source == victim(outcome, 0)
    ]
    assert {record["generation"] for record in commits} == {1}
