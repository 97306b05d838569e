"""Tests with a resize every few steps, and faults in between."""

from __future__ import annotations

import pytest

from chaoskit import Chaos
from chaoskit.faults import Scale
from chaoskit.suites.elasticity.expect import POLICY, no_rank_is_lost, resizes, sizes
from chaoskit.suites.elasticity.storms import TROUBLES, storm


@pytest.mark.slow
@pytest.mark.promise(
    "no bit of the training changes, because the global batch is cut into the same shards at every size",
    seed=[0, 3],
)
@pytest.mark.parametrize("seed", range(len(TROUBLES)))
def test_a_storm(chaos: Chaos, seed: int) -> None:
    """All numbers are those of the unbroken run, whatever is requested and lost."""
    outcome = resizes(chaos, *storm(seed, POLICY, resizes=5, start=4))
    assert len(sizes(outcome)) > 3


@pytest.mark.slow
@pytest.mark.promise(
    "Nodes and workers come and go between two steps: no step and no sample is lost"
)
def test_resizes_alone_lose_nobody(chaos: Chaos) -> None:
    """Every rank that leaves does so at a step boundary."""
    faults = [fault for fault in storm(7, POLICY, resizes=5, start=4) if isinstance(fault, Scale)]
    outcome = resizes(chaos, *faults)
    assert len(sizes(outcome)) > len(faults)
    no_rank_is_lost(outcome)
