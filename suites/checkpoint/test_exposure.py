"""How long a sharded job lacks copies after a fault: until they are back, another loss may be one too many."""

from __future__ import annotations

import pytest

from chaoskit.experiment.outcome import Exposure, Outcome
from chaoskit.pytest_plugin import Chaos
from chaoskit.suites.checkpoint.expect import AT, SHARDED, sharded
from faults import Fault, Kill, KillNode, LosePeerCopy

pytestmark = pytest.mark.costly

WIDE_S = 30.0  # a recovery, a step and a copy take far less on any machine
STEPS = 30  # there is a step after the recovery


def the_exposure(outcome: Outcome, fault: Fault) -> Exposure:
    """The only one, which the fault has caused, and which has ended."""
    (found,) = outcome.exposures
    assert found.fault == str(fault)
    assert found.seconds is not None
    return found


def test_none_without_a_fault(chaos: Chaos) -> None:
    assert sharded(chaos, spares=0).exposures == []


@pytest.mark.parametrize("job", SHARDED)
def test_after_the_loss_of_a_rank(chaos: Chaos, job: str) -> None:
    """It lasts as long as the recovery, and no longer than the first copies after it take."""
    fault = Kill(rank=2, at_step=AT)
    outcome = sharded(chaos, fault, job=job, steps=STEPS)
    found = the_exposure(outcome, fault)
    assert found.seconds is not None
    assert found.seconds < WIDE_S
    # if the new spare was ready in time
    restored = [span for span in outcome.recovery.spans if span.name == "redundancy restored"]
    assert all(span.end_s >= found.begun_s + found.seconds - 1e-6 for span in restored)


def test_after_the_loss_of_a_node(chaos: Chaos) -> None:
    """The node was a partner, too: the piece that it kept for another one is copied elsewhere."""
    fault = KillNode(rank=2, at_step=AT)
    found = the_exposure(sharded(chaos, fault, steps=STEPS), fault)
    assert found.seconds is not None
    assert found.seconds < WIDE_S


def test_after_the_loss_of_copies_alone(chaos: Chaos) -> None:
    """The owner sends again what it still has: that waits for no recovery, and for no step."""
    fault = LosePeerCopy(rank=2, at_step=AT)
    outcome = sharded(chaos, fault)
    found = the_exposure(outcome, fault)
    assert found.pieces == [2]
    assert outcome.recoveries == []
    assert found.seconds is not None
    assert found.seconds < WIDE_S / 3
