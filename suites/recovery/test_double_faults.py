"""Tests of two faults: in the same step, in the next one, and on the same rank again."""

from __future__ import annotations

import pytest

from chaoskit import Chaos
from chaoskit.faults import Exit, Fault, Hang, Kill, KillNode, NaN, Raise, at_rate
from chaoskit.suites.recovery.expect import AT, survives, victim


@pytest.mark.promise("A loss during a regroup supersedes it.")
@pytest.mark.parametrize(
    "faults",
    [
        (Kill(rank=0, at_step=AT), Kill(rank=3, at_step=AT)),
        (Kill(rank=1, at_step=AT, phase="optimizer"), Exit(rank=2, at_step=AT, phase="optimizer")),
        (
            Hang(rank=1, at_step=AT, phase="backward", how="spin"),
            Kill(rank=2, at_step=AT, phase="reduce"),
        ),
        (
            NaN(rank=1, at_step=AT, parameter="head.weight"),
            Raise(rank=3, at_step=AT, phase="reduce"),
        ),
        (KillNode(rank=2, at_step=AT, phase="reduce"), Hang(rank=0, at_step=AT)),
    ],
    ids=lambda faults: "+".join(fault.kind for fault in faults),
)
def test_two_ranks_in_the_same_step(chaos: Chaos, faults: tuple[Fault, ...]) -> None:
    """The second loss comes before the first one is answered."""
    outcome = survives(chaos, *faults, nodes=4, spares=2)
    assert len(outcome.recoveries) == 2


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("spares", [0, 2])
def test_two_ranks_in_consecutive_steps(chaos: Chaos, world: int, spares: int) -> None:
    """The second loss comes while the first replacement is under way, or has just arrived."""
    faults = [
        Kill(rank=1, at_step=AT, phase="reduce"),
        Kill(rank=0, at_step=AT + 1, phase="backward"),
    ]
    survives(chaos, *faults, nodes=world, spares=spares)


@pytest.mark.promise("A rank is a number, in whatever process holds it by then")
def test_the_same_rank_twice(chaos: Chaos) -> None:
    """The replacement of a rank is lost as well, one step later."""
    faults = [Kill(rank=1, at_step=AT), Exit(rank=1, at_step=AT + 1)]
    outcome = survives(chaos, *faults, nodes=2, spares=2, until={"spares": 2})
    assert victim(outcome, 0) != victim(outcome, 1)


@pytest.mark.slow(role="all_but_one")
@pytest.mark.promise(
    "so many ranks, drawn from the run's seed when it is planned: one fault each",
    role=["majority", "all_but_one"],
)
@pytest.mark.parametrize("role", ["minority", "majority", "all_but_one"])
def test_many_at_once(chaos: Chaos, role: str) -> None:
    """The remaining ranks have all that is needed."""
    outcome = survives(
        chaos, Kill(rank=role, at_step=AT, phase="reduce"), nodes=4, spares=2, steps=60
    )
    assert (
        len({fault.rank for fault in outcome.faults})
        == len(outcome.faults)
        == (1 if role == "minority" else 3)
    )


@pytest.mark.promise(
    "`at_rate` repeats one as machines fail, at exponentially distributed distances, the same ones for the same seed",
    world=3,
)
@pytest.mark.parametrize(("world", "drawn"), [(2, 5), (3, 3)])
def test_losses_at_a_rate(chaos: Chaos, world: int, drawn: int) -> None:
    """A rank is lost every ten steps or so, at random; a spare for each is ready before."""
    kill = Kill(rank="any")
    faults, again, others = (
        at_rate(kill, mtbf_steps=10, steps=40, seed=seed) for seed in (drawn, drawn, 9)
    )
    assert len({fault.at_step for fault in faults}) > 1
    assert faults == again != others
    until = {"world": world, "spares": len(faults)}
    survives(chaos, *faults, nodes=world, spares=len(faults), steps=60, until=until)
