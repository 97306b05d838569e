"""Tests of a job of higher priority that takes nodes, and gives them back."""

from __future__ import annotations

import pytest

from chaoskit import Chaos
from chaoskit.faults import Demand, Kill, KillCoordinator
from chaoskit.suites.elasticity.expect import no_rank_is_lost, resizes, sizes


@pytest.mark.slow
@pytest.mark.promise("a world is formed without the nodes that the other job was promised", nodes=1)
@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_are_lent_and_come_back(chaos: Chaos, nodes: int) -> None:
    """Ranks leave in time, and the world is full again when the nodes come back."""
    outcome = resizes(
        chaos, Demand(nodes=nodes, grace_s=5.0, at_step=10), through=(4, 4 - nodes, 4)
    )
    assert sizes(outcome)[:2] == [4, 4 - nodes]
    assert sizes(outcome)[-1] == 4
    no_rank_is_lost(outcome)


@pytest.mark.slow
@pytest.mark.promise(
    "Idle nodes go first, then the members that cost least, never below the smallest size."
)
def test_the_smallest_world_is_not_lent(chaos: Chaos) -> None:
    """A job that asks for more gets only the nodes that can be spared, with the reason."""
    outcome = resizes(chaos, Demand(nodes=3, grace_s=5.0, at_step=10))
    assert min(sizes(outcome)) == 2
    (asked,) = outcome.records("asked")
    assert len(asked["nodes"]) == 2
    assert "only 2 of 3" in asked["reason"]


def test_two_jobs_ask_one_after_the_other(chaos: Chaos) -> None:
    """The second job asks when the node of the first one is back."""
    faults = [Demand(nodes=1, grace_s=5.0, at_step=step) for step in (10, 90)]
    outcome = resizes(chaos, *faults, through=(4, 3, 4, 3, 4))
    assert sizes(outcome) == [4, 3, 4, 3, 4]
    no_rank_is_lost(outcome)


@pytest.mark.slow
@pytest.mark.promise("Nothing of that is lost with a coordinator")
def test_a_rank_and_the_coordinator_are_lost_while_nodes_are_lent(chaos: Chaos) -> None:
    """The world is whole again when the node is given back and the lost rank is replaced."""
    demand = Demand(nodes=1, grace_s=5.0, return_after_s=2.0, at_step=10)
    outcome = resizes(
        chaos, demand, Kill(rank=1, at_step=20), KillCoordinator(rank=0, at_step=24), through=(3, 4)
    )
    assert sizes(outcome)[-1] == 4
