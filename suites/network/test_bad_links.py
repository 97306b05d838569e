"""Tests of links that work badly: the numbers do not depend on them."""

from __future__ import annotations

import pytest

from chaoskit import Chaos
from chaoskit.faults import Bandwidth, Delay, Fault, Kill, Loss
from chaoskit.suites.goals import all_took_effect
from chaoskit.suites.recovery.expect import AT, survives

pytestmark = pytest.mark.chaos(substrate="netns")

FAULTS: list[Fault] = [
    Delay(rank=1, at_step=AT, delay_ms=5),
    Delay(rank=1, at_step=AT, delay_ms=10, jitter_ms=5, apart_from=(2,)),
    Loss(rank=1, at_step=AT, share=0.01),
]
NARROW = [  # need a job that sends more
    Bandwidth(rank=1, at_step=AT, bits_per_s=5e6, heal_after_s=0.5),
    Bandwidth(rank=1, at_step=AT, bits_per_s=2e6, per_peer=True, heal_after_s=0.5),
]


@pytest.mark.promise("echoes between the nodes take longer by the delay", fault=FAULTS[0])
@pytest.mark.promise("some packets between two sides are lost", fault=FAULTS[2])
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_bad_link(chaos: Chaos, fault: Fault) -> None:
    survives(chaos, fault, nodes=3, goal=all_took_effect(chaos, 1))


@pytest.mark.promise("the kernel counts how often it held packets back", fault=NARROW[0])
@pytest.mark.parametrize("fault", NARROW, ids=str)
def test_a_narrow_link(chaos: Chaos, fault: Fault) -> None:
    survives(chaos, fault, job="gpt", nodes=4, options={"size": "tiny"})


@pytest.mark.parametrize("fault", FAULTS[:3], ids=str)
def test_a_rank_is_lost_beside_a_bad_link(chaos: Chaos, fault: Fault) -> None:
    survives(chaos, fault, Kill(rank=2, at_step=AT + 8), nodes=3, goal=all_took_effect(chaos, 2))
