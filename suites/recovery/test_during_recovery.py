"""Tests of faults that strike during the recovery from another one."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit import Chaos
from chaoskit.faults import Exit, Fault, Hang, Kill, KillAgent, KillCoordinator, KillNode, Raise
from chaoskit.suites.goals import happened
from chaoskit.suites.recovery.expect import AT, survives, victim

FIRST = Kill(rank=1, at_step=AT)
#: Spares for the lost ranks: in a smaller world some of the second ranks would be missing, or not
#: restore.
READY: dict[str, Any] = {"spares": 2, "until": {"spares": 2}}


@pytest.mark.slow(fault=Hang(rank=2, during="recommit", how="spin"))
@pytest.mark.promise(
    "A recovery that is interrupted in any phase and begun again does nothing twice.",
    fault=[
        Kill(rank=2, during="detection"),
        KillAgent(rank=0, during="regroup"),
        Hang(rank=2, during="regroup"),
        Raise(rank=1, during="restore"),
        Exit(rank=1, during="recommit"),
        Hang(rank=2, during="recommit", how="spin"),
    ],
)
@pytest.mark.parametrize(
    "fault",
    [
        Kill(rank=2, during="detection"),
        KillNode(rank=0, during="detection"),
        Kill(rank=2, during="regroup"),
        KillAgent(rank=0, during="regroup"),
        Hang(rank=2, during="regroup"),
        Kill(rank=1, during="restore"),
        Raise(rank=1, during="restore"),
        Hang(rank=1, during="restore"),
        Kill(rank=0, during="recommit"),
        Exit(rank=1, during="recommit"),
        Hang(rank=2, during="recommit", how="spin"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.during}-rank{fault.rank}",
)
def test_a_second_loss_during_the_recovery(chaos: Chaos, fault: Fault) -> None:
    """A half-made recovery is superseded, or begun again, and repeats no act."""
    outcome = survives(chaos, FIRST, fault, nodes=3, steps=60, **READY)
    assert victim(outcome, 0) != victim(outcome, 1)


@pytest.mark.promise(
    "A regroup that was half-way is planned again; a settled one goes on untouched.", world=2
)
@pytest.mark.parametrize("during", ["detection", "regroup", "restore", "recommit"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_coordinator_dies_during_the_recovery(chaos: Chaos, world: int, during: str) -> None:
    """The next coordinator finishes what the last one decided, and no generation comes twice."""
    rank = 1 if during == "restore" else 0
    faults, goal = [FIRST, KillCoordinator(rank=rank, during=during)], happened(chaos, "resumed")
    outcome = survives(chaos, *faults, nodes=world, goal=goal, until={"spares": 1})
    generations = [record["generation"] for record in outcome.records("plan")]
    assert generations == sorted(set(generations))
    assert outcome.records("resumed")


@pytest.mark.promise(
    "On CPU the whole state lives in one shared-memory arena with a sequence lock.", world=3
)
@pytest.mark.parametrize("world", [3, 4])
def test_the_healer_dies_while_it_heals(chaos: Chaos, world: int) -> None:
    """The rank from which a newcomer takes its state is lost: the newcomer asks another rank."""
    outcome = survives(
        chaos, FIRST, Kill(rank="healer", during="restore"), nodes=world, steps=60, **READY
    )
    assert len(outcome.recoveries) == 2
    assert victim(outcome, 1) not in {
        member["worker"] for member in outcome.records("plan")[-1]["members"]
    }


@pytest.mark.promise("Faults in the recoveries from other faults add up, and do not multiply.")
def test_one_loss_in_each_of_three_recoveries(chaos: Chaos) -> None:
    """Each fault waits for the recovery from the one before."""
    faults = [FIRST, Kill(rank=2, during="regroup"), Hang(rank=0, during="recommit", recovery=2)]
    outcome = survives(chaos, *faults, nodes=3, steps=60, **READY)
    assert len({victim(outcome, number) for number in range(3)}) == 3
