"""Tests of parts of the world that cannot reach each other, or the coordinator."""

from __future__ import annotations

import pytest

from chaoskit import Chaos, Verdict
from chaoskit.faults import Cut, Flap, Kill, KillCoordinator, LinkDown, Reset
from chaoskit.suites.goals import all_took_effect, happened
from chaoskit.suites.recovery.expect import AT, PHASES, STEADY, given_up, heals, victim

pytestmark = pytest.mark.chaos(substrate="netns")

HEAL_S = 3.0  # three relaxed leases: the node is given up by then, however busy the coordinator is


@pytest.mark.slow(fault=Reset)
@pytest.mark.promise(
    "the kernel counts packets that it dropped by the rule", fault=Cut, phase="reduce"
)
@pytest.mark.promise(
    "the kernel counts segments that it answered with a reset", fault=Reset, phase="forward"
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", [Cut, Reset])
def test_a_node_is_cut_off_from_everybody(
    chaos: Chaos, fault: type[Cut | Reset], phase: str
) -> None:
    cut = fault(rank=2, at_step=AT, phase=phase, heal_after_s=HEAL_S)
    outcome = heals(chaos, cut, goal=happened(chaos, "lifted"))
    (cause,) = given_up(outcome)
    assert cause in ("node lost", "unreachable")  # the first report decides


@pytest.mark.promise(
    "leases end without a word, and the workers of the silent nodes are given up", nodes=3
)
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_without_a_spare_the_world_is_smaller_until_the_network_heals(
    chaos: Chaos, nodes: int
) -> None:
    cut = Cut(rank=nodes - 1, at_step=AT, heal_after_s=HEAL_S)
    outcome = heals(chaos, cut, nodes=nodes, spares=0, steps=20, options={}, until={"world": nodes})
    assert min(len(record["members"]) for record in outcome.records("plan")) == nodes - 1


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("apart_from", ["all", "coordinator"])
def test_one_way(chaos: Chaos, apart_from: str, direction: str) -> None:
    cut = Cut(rank=3, at_step=AT, apart_from=apart_from, direction=direction, heal_after_s=HEAL_S)
    heals(chaos, cut, goal=happened(chaos, "lifted"))


def test_a_node_that_only_the_coordinator_cannot_reach(chaos: Chaos) -> None:
    """Its rank could train on with the others; but no report of it would arrive."""
    cut = Cut(rank=1, at_step=AT, apart_from="coordinator", heal_after_s=HEAL_S)
    heals(chaos, cut, goal=happened(chaos, "lifted"))


@pytest.mark.slow
@pytest.mark.promise(
    "The rendezvous store listens on a port of its own, so that it can be cut alone.", fault=Cut
)
@pytest.mark.parametrize("fault", [Cut, Reset])
def test_the_store_is_out_of_reach_when_it_is_needed(
    chaos: Chaos, fault: type[Cut | Reset]
) -> None:
    """The cut shows only when a rank is lost.

    The neighbour of the store's cut cannot come to the new membership before it heals.
    """
    cut = fault(rank=1, at_step=AT - 2, apart_from="store", heal_after_s=2.0)
    outcome = heals(chaos, cut, Kill(rank=2, at_step=AT), goal=happened(chaos, "lifted"))
    struck = {victim(outcome, number).partition(".")[0] for number in range(2)}
    assert {record["worker"].partition(".")[0] for record in outcome.records("detected")} <= struck


@pytest.mark.slow
@pytest.mark.promise(
    "A fault that leaves no evidence on its target makes the run `unknown`, never passed"
)
def test_nobody_misses_the_store_while_nobody_is_lost(chaos: Chaos) -> None:
    """Agents and coordinator stay in contact; and as nothing met the cut, nothing is proved."""
    cut = Cut(rank=1, at_step=AT, apart_from="store", heal_after_s=0.3)
    goal = happened(chaos, "lifted")
    outcome = chaos.run(
        STEADY, nodes=3, steps=40, until=goal.until, watch=goal, faults=[cut], check=False
    )
    assert outcome.verdict == Verdict.UNKNOWN
    assert given_up(outcome) == set()
    (lifted,) = outcome.records("lifted")
    assert lifted["what"] == str(cut)


@pytest.mark.promise("Workers on a node that was left out are lost as `unreachable`", fault=Cut)
@pytest.mark.parametrize("fault", [Cut, Reset])
def test_two_nodes_that_cannot_reach_each_other(chaos: Chaos, fault: type[Cut | Reset]) -> None:
    """The coordinator reaches both: a node must report the cut."""
    outcome = heals(chaos, fault(rank=1, at_step=AT, apart_from=(2,), heal_after_s=2.0))
    assert given_up(outcome) == {"unreachable"}
    (left_out,) = outcome.records("left_out")
    assert left_out["nodes"] in [
        [member["node"]] for member in outcome.records("plan")[0]["members"][1:3]
    ]


@pytest.mark.slow
@pytest.mark.promise("the one that is cut off from most is left out, again and again")
def test_two_halves_that_both_reach_the_coordinator(chaos: Chaos) -> None:
    outcome = heals(chaos, Cut(rank=0, side=(1,), at_step=AT, apart_from="ranks", heal_after_s=2.0))
    assert given_up(outcome) == {"unreachable"}
    assert len(outcome.records("detected")) == 2


def test_a_bridge(chaos: Chaos) -> None:
    """Rank 2 reaches every rank, the others do not reach each other."""
    heals(chaos, Cut(rank=0, side=(1,), at_step=AT, apart_from=(3,), heal_after_s=2.0))


@pytest.mark.slow
@pytest.mark.promise(
    "When it wakes up its agent attaches again, is told to end its workers, and counts as fresh capacity.",
    side=(2,),
)
@pytest.mark.parametrize("side", [(), (2,), (2, 3)])
def test_the_side_without_the_coordinator_waits_and_comes_back(
    chaos: Chaos, side: tuple[int, ...]
) -> None:
    outcome = heals(chaos, Cut(rank=1, side=side, at_step=AT, heal_after_s=HEAL_S))
    assert len(outcome.records("detected")) == 1 + len(side)


@pytest.mark.slow
@pytest.mark.promise(
    "When none is, it may be the coordinator that is cut off: they are kept until their own leases are over, too.",
    fault=Cut,
)
@pytest.mark.parametrize("fault", [Cut, Reset])
def test_a_coordinator_that_nobody_reaches_gives_nobody_up(
    chaos: Chaos, fault: type[Cut | Reset]
) -> None:
    """The coordinator cannot know whether the ranks train on. They do."""
    cut = fault(rank=0, side=(1, 2, 3), at_step=AT, apart_from="coordinator", heal_after_s=HEAL_S)
    outcome = heals(chaos, cut, goal=happened(chaos, "lifted"))
    assert given_up(outcome) == set()
    assert len(outcome.records("plan")) == 1


def test_the_coordinator_is_killed_while_a_node_is_cut_off(chaos: Chaos) -> None:
    faults = [Cut(rank=2, at_step=AT, heal_after_s=HEAL_S), KillCoordinator(rank=0, at_step=AT + 4)]
    heals(chaos, *faults, goal=happened(chaos, "lifted"))


def test_one_cut_after_another(chaos: Chaos) -> None:
    faults = [Cut(rank=rank, at_step=AT + 40 * (rank - 1), heal_after_s=HEAL_S) for rank in (1, 2)]
    heals(chaos, *faults, goal=happened(chaos, "lifted", 2))


@pytest.mark.slow
@pytest.mark.promise("echoes to the node are lost")
def test_a_link_that_goes_down(chaos: Chaos) -> None:
    heals(chaos, LinkDown(rank=1, at_step=AT, heal_after_s=HEAL_S), goal=happened(chaos, "lifted"))


@pytest.mark.slow
@pytest.mark.promise("echoes to the node are lost while the link is down")
def test_a_link_that_comes_and_goes(chaos: Chaos) -> None:
    heals(chaos, Flap(rank=1, at_step=AT), goal=all_took_effect(chaos, 1))
