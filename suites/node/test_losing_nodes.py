"""Nodes that vanish, freeze and come back, each with a network of its own that falls silent."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit import Chaos
from chaoskit.faults import FreezeNode, Kill, KillCoordinator, LoseNode, Rack, ReplaceNode
from chaoskit.suites.goals import all_took_effect, happened
from chaoskit.suites.recovery.expect import AT, PHASES, given_up, heals, survives, victim

pytestmark = pytest.mark.chaos(substrate="netns")
THAW_S = 3.0  # three relaxed leases: the node is given up by then, however busy the coordinator is


@pytest.mark.promise("and the kernel dropped the packets that would tell of it", phase="reduce")
@pytest.mark.parametrize("phase", PHASES)
def test_a_node_is_lost_without_a_word(chaos: Chaos, phase: str) -> None:
    """A spare on another node takes its place; the end of its lease reveals the loss."""
    outcome = survives(chaos, LoseNode(rank=2, at_step=AT, phase=phase), nodes=4)
    assert given_up(outcome) == {"node lost"}


@pytest.mark.promise(
    "one node is gone without a word: its network, its processes, and all that was in their memory",
    role="all_but_one",
)
@pytest.mark.parametrize("role", ["any", "all_but_one"])
def test_several_nodes_are_lost(chaos: Chaos, role: str) -> None:
    """The remaining nodes take over the ranks."""
    outcome = survives(chaos, LoseNode(rank=role, at_step=AT), nodes=3, spares=0)
    lost = 1 if role == "any" else 2
    assert len({member["node"] for member in outcome.records("plan")[-1]["members"]}) == 3 - lost


@pytest.mark.promise("in a recovery that another fault has caused", during="restore")
@pytest.mark.parametrize("during", ["regroup", "restore"])
def test_a_node_is_lost_in_a_recovery(chaos: Chaos, during: str) -> None:
    faults = [Kill(rank=1, at_step=AT), LoseNode(rank=1, during=during)]
    survives(chaos, *faults, nodes=4, spares=2, until={"spares": 2})  # one takes the rank


def test_a_node_and_the_coordinator_are_lost_in_one_step(chaos: Chaos) -> None:
    survives(chaos, LoseNode(rank=1, at_step=AT), KillCoordinator(rank=0, at_step=AT), nodes=4)


@pytest.mark.promise("the new one is fresh capacity, and the world is whole again", phase="forward")
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_a_node_comes_back_empty(chaos: Chaos, phase: str) -> None:
    plan: dict[str, Any] = {"nodes": 3, "spares": 0, "steps": 20, "goal": all_took_effect(chaos, 1)}
    heals(chaos, ReplaceNode(rank=1, at_step=AT, phase=phase, back_after_s=0.3), **plan)


def test_two_nodes_come_back_empty_one_after_the_other(chaos: Chaos) -> None:
    faults = [
        ReplaceNode(rank=1, at_step=AT, back_after_s=0.1),
        ReplaceNode(rank=2, at_step=AT + 12, back_after_s=0.1),
    ]
    heals(
        chaos,
        *faults,
        nodes=3,
        spares=1,
        steps=40,
        until={"spares": 1},
        goal=all_took_effect(chaos, 2),
    )


@pytest.mark.slow
@pytest.mark.promise("all at the same time; or its freezer says so", phase="reduce")
@pytest.mark.parametrize("phase", ["backward", "reduce"])
def test_a_node_stands_still_in_the_freezer_and_returns_as_a_zombie(
    chaos: Chaos, phase: str
) -> None:
    """The node's lease ends, and its actions after the thaw have no effect."""
    fault = FreezeNode(rank=2, at_step=AT, phase=phase, how="cgroup", thaw_after_s=THAW_S)
    if reason := fault.unavailable():
        pytest.skip(reason)
    outcome = heals(chaos, fault, nodes=3, steps=40, goal=happened(chaos, "lifted"))
    assert given_up(outcome) == {"node lost"}
    zombie = [record for record in outcome.records("commit") if record.source == victim(outcome, 0)]
    assert {record["generation"] for record in zombie} == {1}


@pytest.mark.promise("every process of every node of the rack is gone")
def test_a_rack_is_lost(chaos: Chaos) -> None:
    """Two of four nodes are lost at once."""
    outcome = survives(chaos, Rack(rank=3, at_step=AT), nodes=4, spares=0, rack_nodes=2)
    assert {record["node"] for record in outcome.records("node_lost")} == {"node2", "node3"}
    assert len(outcome.recoveries) == 1
