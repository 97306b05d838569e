"""Tests of a broken network between pods.

The pods need a helper that may break it (``NETWORK_FAULTS=allow``).
"""

from __future__ import annotations

import os

import pytest

from chaoskit import Chaos
from chaoskit.faults import Cut, Delay, DeletePod, Kill, Loss, Reset
from chaoskit.suites.recovery.expect import AT, survives

VARIABLE = "CHAOSKIT_KUBERNETES_NETWORK_FAULTS"
NO_HELPER = "" if os.environ.get(VARIABLE) == "allow" else f"pods have no helper: {VARIABLE}=allow"
WHY_NOT = DeletePod.unavailable() or NO_HELPER
pytestmark = [
    pytest.mark.chaos(substrate="kubernetes"),
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"substrate kubernetes: {WHY_NOT}"),
]


@pytest.mark.parametrize("phase", ["forward", "reduce"])
def test_a_pod_that_is_cut_off_costs_nothing(chaos: Chaos, phase: str) -> None:
    """No message passes between it and the others: its lease ends."""
    survives(chaos, Cut(rank=1, at_step=AT, phase=phase), spares=0, nodes=3)


def test_connections_between_two_pods_are_reset(chaos: Chaos) -> None:
    survives(
        chaos, Reset(rank=1, at_step=AT, apart_from=(0,), heal_after_s=1.0), nodes=3, steps=100
    )


def test_packets_are_lost(chaos: Chaos) -> None:
    survives(chaos, Loss(rank=1, at_step=AT, heal_after_s=1.0), nodes=3, steps=100)


def test_a_rank_dies_while_packets_are_late(chaos: Chaos) -> None:
    survives(
        chaos,
        Delay(rank=1, at_step=AT, delay_ms=5.0),
        Kill(rank=2, at_step=AT + 20),
        nodes=3,
        steps=80,
    )
