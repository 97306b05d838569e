"""Tests of slow ranks in a world that changes its size.

The others wait for a slow rank, and none is given up for being slow.
"""

from __future__ import annotations

import pytest

from chaoskit import Chaos
from chaoskit.faults import Scale, Straggle
from chaoskit.suites.elasticity.expect import no_rank_is_lost, resizes


@pytest.mark.parametrize("rank", [0, 3], ids=["stays", "leaves"])
def test_a_slow_rank_while_the_world_shrinks_and_grows(chaos: Chaos, rank: int) -> None:
    """A slow rank stays, or leaves while it is slow."""
    slow = Straggle(rank=rank, at_step=8, delay_ms=40, steps=30)
    outcome = resizes(
        chaos, slow, Scale(to=3, at_step=12), Scale(to=4, at_step=40), through=(4, 3, 4)
    )
    no_rank_is_lost(outcome)
