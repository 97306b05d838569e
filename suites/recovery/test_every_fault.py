"""Tests of every fault of the catalogue, in every phase of a step, in worlds of 2 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from chaoskit import Chaos
from chaoskit.faults import (
    CATALOGUE,
    BadBatch,
    BitFlip,
    ClockJump,
    CrashLoop,
    DataStall,
    Deadlock,
    Exit,
    FailLoad,
    Fault,
    FreezeNode,
    Hang,
    Kill,
    KillAgent,
    KillCoordinator,
    KillNode,
    LimitCpu,
    LimitIo,
    LimitMemory,
    LimitPids,
    NaN,
    OutOfMemory,
    Preempt,
    Rack,
    Raise,
    ReplaceNode,
    Straggle,
)
from chaoskit.suites.goals import all_took_effect
from chaoskit.suites.recovery.expect import (
    AT,
    FROZEN_S,
    PHASES,
    STEADY,
    WORLDS,
    is_left_alone,
    survives,
)

GPT = "gpt"


@dataclass(frozen=True)
class Recipe:
    """Fault, with the phases in which it can strike.

    Attributes:
        make: returns the fault for a rank and a phase.
        phases: phases in which it can strike.
        job: job of the run. A node that leaves in order, and a coordinator that comes back, need
            more time than ``gpt`` takes.
    """

    make: Callable[[int, str], Fault]
    phases: tuple[str, ...] = PHASES
    job: str = STEADY


#: Faults that cost a rank.
LOSSES = {
    "Kill": Recipe(lambda rank, phase: Kill(rank=rank, at_step=AT, phase=phase), job=GPT),
    "Exit": Recipe(lambda rank, phase: Exit(rank=rank, at_step=AT, phase=phase), job=GPT),
    "Raise": Recipe(lambda rank, phase: Raise(rank=rank, at_step=AT, phase=phase), job=GPT),
    "MemoryError": Recipe(
        lambda rank, phase: OutOfMemory(rank=rank, at_step=AT, phase=phase, how="error"), job=GPT
    ),
    "OutOfMemory": Recipe(lambda rank, phase: OutOfMemory(rank=rank, at_step=AT, phase=phase)),
    "Hang stop": Recipe(lambda rank, phase: Hang(rank=rank, at_step=AT, phase=phase), job=GPT),
    "Hang gil": Recipe(lambda rank, phase: Hang(rank=rank, at_step=AT, phase=phase, how="gil")),
    "Hang spin": Recipe(lambda rank, phase: Hang(rank=rank, at_step=AT, phase=phase, how="spin")),
    "Deadlock lock": Recipe(lambda rank, phase: Deadlock(rank=rank, at_step=AT, phase=phase)),
    "NaN weight": Recipe(
        lambda rank, phase: NaN(
            rank=rank, at_step=AT, phase=phase, parameter="head.weight", where="weight"
        ),
        ("forward",),  # a later one would reach no gradient any more
        GPT,
    ),
    "NaN gradient": Recipe(
        lambda rank, phase: NaN(rank=rank, at_step=AT, phase=phase, parameter="head.weight"),
        ("forward", "backward"),
        GPT,
    ),
    "NaN activation": Recipe(
        lambda rank, phase: NaN(
            rank=rank, at_step=AT, phase=phase, parameter="head.weight", where="activation"
        ),
        ("forward",),
        GPT,
    ),
    "KillAgent": Recipe(lambda rank, phase: KillAgent(rank=rank, at_step=AT, phase=phase)),
    "KillNode": Recipe(lambda rank, phase: KillNode(rank=rank, at_step=AT, phase=phase)),
    "Preempt": Recipe(lambda rank, phase: Preempt(rank=rank, at_step=AT, phase=phase, grace_s=0.2)),
    "FreezeNode": Recipe(
        lambda rank, phase: FreezeNode(rank=rank, at_step=AT, phase=phase, thaw_after_s=FROZEN_S)
    ),
}

#: Faults for which no rank may be given up.
NUISANCES = {
    "KillCoordinator": Recipe(
        lambda rank, phase: KillCoordinator(rank=rank, at_step=AT, phase=phase)
    ),
    "ClockJump": Recipe(
        lambda rank, phase: ClockJump(
            rank=rank, at_step=AT, phase=phase, seconds=3600.0 * (1 - 2 * (rank % 2))
        )
    ),
    "Straggle": Recipe(
        lambda rank, phase: Straggle(rank=rank, at_step=AT, phase=phase, delay_ms=10, steps=4)
    ),
    "DataStall": Recipe(
        lambda rank, phase: DataStall(rank=rank, at_step=AT, stall_ms=60), ("forward",)
    ),
}

#: Faults with other moments or settings -> the tests that have them.
ELSEWHERE: dict[type[Fault], str] = {
    BitFlip: "test_corruption.py",
    BadBatch: "test_corruption.py",
    CrashLoop: "test_bad_replacements.py",
    FailLoad: "test_bad_replacements.py",
    **dict.fromkeys(
        (ReplaceNode, Rack, LimitCpu, LimitMemory, LimitPids, LimitIo), "chaoskit.suites.node"
    ),
    **{kind: "tests/cluster/faults/test_disks.py" for kind in CATALOGUE if kind.family == "disk"},
    **{kind: "chaoskit.suites.checkpoint" for kind in CATALOGUE if kind.family == "checkpoint"},
    **{kind: "chaoskit.suites.elasticity" for kind in CATALOGUE if kind.family == "elastic"},
}


def covering(recipes: dict[str, Recipe]) -> list[tuple[str, str, int, int]]:
    """Return name, phase, world and rank of tests with all pairs of (fault, phase, world).

    The n-th fault meets each of its phases once, in the world that is n places further; a fault
    with fewer phases than there are worlds comes again. Random draws would need three times as many
    runs for the same pairs.
    """
    cases = []
    for place, (name, recipe) in enumerate(recipes.items()):
        for turn in range(max(len(recipe.phases), len(WORLDS))):
            world = WORLDS[(place + turn) % len(WORLDS)]
            cases.append(
                (name, recipe.phases[turn % len(recipe.phases)], world, (place + 2 * turn) % world)
            )
    return cases


def _id(value: object) -> str:
    return str(value).replace(" ", "-")


@pytest.mark.promise("its parent saw it end by this signal", name="Kill", phase="reduce")
@pytest.mark.promise(
    "its parent saw it exit with this status, and its rank was lost", name="Exit", phase="optimizer"
)
@pytest.mark.promise("the process ended with this exception", name="Raise", phase="backward")
@pytest.mark.promise("or the process ended with MemoryError", name="MemoryError", phase="forward")
@pytest.mark.promise(
    "the control group's count of kills and SIGKILL as seen by its parent",
    name="OutOfMemory",
    phase="backward",
)
@pytest.mark.promise("the kernel reports it stopped", name="Hang stop", phase="reduce")
@pytest.mark.promise(
    "its training thread sleeps while its listening thread wants the interpreter lock in vain",
    name="Hang gil",
    phase="forward",
)
@pytest.mark.promise("it burns CPU without progress", name="Hang spin", phase="optimizer")
@pytest.mark.promise(
    "`lock`: the rank is given up as hung.", name="Deadlock lock", phase="backward"
)
@pytest.mark.promise(
    "non-finite values counted in the same tensor before and after", name="NaN weight", world=3
)
@pytest.mark.promise(
    "the owner of the segment finds the contribution not finite before the step commits",
    name="NaN gradient",
    phase="backward",
)
@pytest.mark.promise(
    "a plain all-reduce would spread it in one step", name="NaN activation", world=4
)
@pytest.mark.promise(
    "the agent and every process that it had started are gone", name="KillAgent", phase="forward"
)
@pytest.mark.promise(
    "the node's connection ends, and its workers are given up", name="KillNode", phase="reduce"
)
@pytest.mark.promise(
    "one node is told to end, and after a grace period made to", name="Preempt", phase="optimizer"
)
@pytest.mark.promise(
    "the kernel reports every process of the node stopped, all at the same time",
    name="FreezeNode",
    phase="backward",
)
@pytest.mark.parametrize(("name", "phase", "world", "rank"), covering(LOSSES), ids=_id)
def test_a_loss_costs_nothing(chaos: Chaos, name: str, phase: str, world: int, rank: int) -> None:
    """The step of a lost rank is repeated, whatever it was doing, and all numbers stay the same."""
    recipe = LOSSES[name]
    fault = recipe.make(rank, phase)
    if reason := fault.unavailable():
        pytest.skip(reason)
    plan: dict[str, Any] = (
        {"steps": 20, "options": {"size": "tiny", "batch": 12}} if recipe.job == GPT else {}
    )
    outcome = survives(chaos, fault, job=recipe.job, nodes=world, **plan)
    assert len(outcome.recoveries) == 1


@pytest.mark.promise(
    "training goes on, and the coordinator comes back from its record",
    name="KillCoordinator",
    phase="reduce",
)
@pytest.mark.promise("nothing may be decided by the wall clock", name="ClockJump", phase="backward")
@pytest.mark.promise(
    "steps take longer, and a rank that is blamed for it is a false alarm",
    name="Straggle",
    phase="optimizer",
)
@pytest.mark.promise(
    "one step takes longer, and a rank that is blamed for it is a false alarm",
    name="DataStall",
    world=2,
)
@pytest.mark.parametrize(("name", "phase", "world", "rank"), covering(NUISANCES), ids=_id)
def test_a_nuisance_is_borne(chaos: Chaos, name: str, phase: str, world: int, rank: int) -> None:
    """A dead coordinator, a wrong clock, a slow rank or a late batch costs no rank."""
    is_left_alone(
        chaos, NUISANCES[name].make(rank, phase), nodes=world, goal=all_took_effect(chaos, 1)
    )


@pytest.mark.slow
@pytest.mark.promise("the same ranks begin the reduction anew", world=3, phase="reduce")
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_skips_a_collective_is_waited_for_by_all(
    chaos: Chaos, world: int, phase: str
) -> None:
    """All ranks wait for each other, and none is to blame: they begin the reduction anew."""
    outcome = survives(
        chaos, Deadlock(rank=world - 1, at_step=AT, phase=phase, how="skip"), nodes=world
    )
    assert outcome.recoveries == []


def test_the_catalogue_is_covered() -> None:
    """A new fault must have a test; here, if it needs no network that can be broken."""
    tested = {type(recipe.make(1, recipe.phases[0])) for recipe in (LOSSES | NUISANCES).values()}
    assert tested | set(ELSEWHERE) == {kind for kind in CATALOGUE if "local" in kind.substrates}


@pytest.mark.parametrize("recipes", [LOSSES, NUISANCES], ids=["losses", "nuisances"])
def test_the_selection_covers_every_pair(recipes: dict[str, Recipe]) -> None:
    """Each fault comes in each of its phases and in each world, and each phase in each world."""
    cases = covering(recipes)
    assert {(name, phase) for name, phase, _, _ in cases} == {
        (name, phase) for name, recipe in recipes.items() for phase in recipe.phases
    }
    assert {(name, world) for name, _, world, _ in cases} == {
        (name, world) for name in recipes for world in WORLDS
    }
    assert {(phase, world) for _, phase, world, _ in cases} == {
        (phase, world) for phase in PHASES for world in WORLDS
    }
    assert all(0 <= rank < world for _, _, world, rank in cases)
