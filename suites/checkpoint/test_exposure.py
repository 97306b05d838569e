"""Tests of exposure: the time for which a sharded job lacks copies after a fault.

Another loss during that time may be fatal.
"""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit import Chaos, Outcome
from chaoskit.faults import Fault, Kill, KillNode, LosePeerCopy
from chaoskit.suites.checkpoint.expect import AT, SHARDED, copied_again, sharded

pytestmark = pytest.mark.costly


def the_exposure(outcome: Outcome, fault: Fault) -> Any:
    """Return the only exposure, which the fault has caused, and which has ended."""
    (exposure,) = outcome.exposures
    assert exposure.fault == str(fault)
    assert exposure.seconds is not None
    return exposure


def test_none_without_a_fault(chaos: Chaos) -> None:
    """A job without a fault is never exposed."""
    assert sharded(chaos, spares=0).exposures == []


@pytest.mark.slow
@pytest.mark.promise(
    "`outcome.exposures` says for how long pieces lacked copies after a fault", job="hsdp"
)
@pytest.mark.parametrize("job", SHARDED)
def test_after_the_loss_of_a_rank(chaos: Chaos, job: str) -> None:
    """The exposure ends before the redundancy of the job is restored, or with it."""
    fault = Kill(rank=2, at_step=AT)
    outcome = sharded(chaos, fault, job=job, goal=copied_again(chaos))
    exposure = the_exposure(outcome, fault)
    assert exposure.seconds is not None
    assert exposure.seconds > 0
    # the span exists only if the new spare was ready in time
    restored = [span for span in outcome.recovery.spans if span.name == "redundancy restored"]
    assert all(span.end_s >= exposure.begun_s + exposure.seconds - 1e-6 for span in restored)


@pytest.mark.slow
@pytest.mark.promise("`outcome.exposures` says for how long pieces lacked copies after a fault")
def test_after_the_loss_of_a_node(chaos: Chaos) -> None:
    """The node was a partner, too: the piece that it kept for another is copied elsewhere."""
    fault = KillNode(rank=2, at_step=AT)
    the_exposure(sharded(chaos, fault, goal=copied_again(chaos)), fault)


@pytest.mark.slow
@pytest.mark.promise("the owner is told at once (`on_lost`), and sends what it has again")
def test_after_the_loss_of_copies_alone(chaos: Chaos) -> None:
    """The owner sends its copy again, without a recovery and without a step."""
    fault = LosePeerCopy(rank=2, at_step=AT)
    outcome = sharded(chaos, fault, goal=copied_again(chaos))
    exposure = the_exposure(outcome, fault)
    assert exposure.pieces == [2]
    assert outcome.recoveries == []
