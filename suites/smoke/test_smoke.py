"""Smoke tests of a minute, in which a rank is lost, frozen, poisoned or fails.

chaoskit test smoke
"""

from __future__ import annotations

import pytest

from chaoskit import Chaos, Outcome
from chaoskit.faults import Fault, Hang, Kill, NaN, Raise

pytestmark = pytest.mark.chaos(nodes=4, options={"size": "tiny"})

STEPS = 40


@pytest.mark.promise(
    "A rank that imports, compiles or is in a declared `trainer.long_phase()` is never called hung."
)
def test_an_unbroken_run_raises_no_alarm(chaos: Chaos) -> None:
    """A run without a fault has no detection.

    The tests of hangs show that the same limits find one.
    """
    outcome = chaos.run("gpt", steps=STEPS)
    assert outcome.false_alarms == 0
    assert outcome.recoveries == []


@pytest.mark.promise(
    "every loss has the same bits as in an unbroken run, at any world size",
    phase="optimizer",
)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "optimizer"])
def test_a_killed_rank_costs_nothing(chaos: Chaos, phase: str) -> None:
    """A killed rank costs no step and changes no loss, whatever it was doing."""
    _costs_nothing(chaos, Kill(rank=2, at_step=12, phase=phase))


@pytest.mark.promise("after a fault no healthy process restarts, no step is lost")
def test_losing_rank_zero_costs_nothing(chaos: Chaos) -> None:
    """No rank is special."""
    _costs_nothing(chaos, Kill(rank=0, at_step=12))


@pytest.mark.promise("one rank stops making progress; nothing tells the others", how="gil")
@pytest.mark.parametrize("how", ["stop", "gil", "spin"])
def test_a_hang_is_found_and_costs_nothing(chaos: Chaos, how: str) -> None:
    """A live rank that does not move is found and replaced, for each cause of its hang."""
    outcome = _costs_nothing(chaos, Hang(rank=1, at_step=12, how=how))
    assert ("stopped" if how == "stop" else "hung") in outcome.recovery.cause


@pytest.mark.promise("a hang that nothing announces (it holds the GIL)")
def test_a_hang_on_the_threshold_of_the_reduction_is_found_at_once(chaos: Chaos) -> None:
    """A rank that stops before its first transfer does not pass for one that waits."""
    outcome = _costs_nothing(chaos, Hang(rank=1, at_step=12, phase="reduce", how="spin"))
    assert "hung (forward for" in outcome.recovery.cause


@pytest.mark.promise("No step is committed with a gradient that is not finite", where="gradient")
@pytest.mark.parametrize("where", ["gradient", "weight", "activation"])
def test_a_nan_is_never_committed(chaos: Chaos, where: str) -> None:
    """Non-finite numbers are traced to the rank that made them, before they reach any weight."""
    outcome = _costs_nothing(chaos, NaN(rank=3, at_step=12, parameter="head.weight", where=where))
    assert "rank 3" in outcome.recovery.cause


def test_an_exception_in_one_rank_costs_nothing(chaos: Chaos) -> None:
    """A rank with an exception in user code is replaced like a dead process."""
    _costs_nothing(chaos, Raise(rank=1, at_step=12))


@pytest.mark.promise("Each strikes once, however often its step is repeated.")
def test_two_faults_in_one_run_cost_nothing(chaos: Chaos) -> None:
    """The second fault meets a run that is as strong as before the first one."""
    outcome = chaos.run(
        "gpt",
        steps=STEPS,
        faults=[Kill(rank=1, at_step=8), NaN(rank=2, at_step=20, parameter="head.weight")],
    )
    assert len(outcome.recoveries) == 2
    outcome.assert_same_losses_as_twin()


@pytest.mark.promise("every loss has the same bits as in an unbroken run, at any world size")
@pytest.mark.promise("it grows again at a step boundary when a replacement is warm")
def test_without_a_spare_the_world_shrinks_and_grows_again(chaos: Chaos) -> None:
    """Training goes on at once with three ranks, and with four when a replacement is warm.

    The bits are those of the unbroken run.
    """
    options = {"size": "tiny", "schedule_steps": 100}
    outcome = chaos.run(
        "gpt",
        steps=20,
        until={"world": 4},
        spares=0,
        options=options,
        faults=[Kill(rank=2, at_step=12)],
    )
    assert outcome.recovery.world == 3
    assert outcome.steps[-1].world == 4
    outcome.assert_same_losses_as_twin()


def _costs_nothing(chaos: Chaos, fault: Fault) -> Outcome:
    outcome = chaos.run("gpt", steps=STEPS, faults=[fault])
    assert len(outcome.recoveries) == 1
    assert outcome.lost_steps == 0
    assert outcome.ledger is not None
    assert outcome.ledger.missing == outcome.ledger.repeated == []
    outcome.assert_same_losses_as_twin()
    first, *_, last = [
        {member["worker"] for member in plan["members"]} for plan in outcome.records("plan")
    ]
    assert len(first - last) == 1, "healthy processes were restarted"
    return outcome
