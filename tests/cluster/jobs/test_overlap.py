"""Buckets that are reduced during the backward pass give the same bits, and survive the same
faults.
"""

from __future__ import annotations

import pytest

from chaoskit.pytest_plugin import Chaos
from faults import Kill, NaN

pytestmark = pytest.mark.chaos(nodes=3, shards=4, buckets=3, options={"size": "tiny"})


def test_buckets_change_no_bit(chaos: Chaos) -> None:
    """The twin is shared with runs that reduce everything at once: equal losses mean equal bits."""
    bucketed = chaos.run("gpt", steps=20)
    whole = chaos.run("gpt", steps=20, buckets=1)
    assert bucketed.losses == whole.losses
    assert bucketed.weights_digest == whole.weights_digest


@pytest.mark.chaos(nodes=2, spares=0, shards=2, options={"at_steps": [3, 4, 5]})
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_buckets_travel_while_the_backward_pass_runs(chaos: Chaos, reduction: str) -> None:
    """A backward pass goes on only after the kernel has sent a part of the last layer's gradient."""
    outcome = chaos.run(
        "../../jobs/training/overlapping.py", steps=10, buckets=2, reduction=reduction, twin=False
    )
    assert len(outcome.steps) == 10


@pytest.mark.chaos(nodes=2, spares=1, shards=2, options={"at_steps": [3, 10]})
def test_buckets_travel_so_after_a_recovery_too(chaos: Chaos) -> None:
    """The first bucket of a new world waits for its group; buckets of later steps do not."""
    outcome = chaos.run(
        "../../jobs/training/overlapping.py",
        steps=20,
        buckets=2,
        faults=[Kill(rank=1, at_step=6)],
        twin=False,
    )
    assert len(outcome.recoveries) == 1


@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "optimizer"])
def test_a_kill_amid_overlapped_transfers_costs_nothing(chaos: Chaos, phase: str) -> None:
    """Ranks that had sent some buckets begin the reduction again, with the gradients that they
    kept.
    """
    outcome = chaos.run("gpt", steps=20, faults=[Kill(rank=1, at_step=9, phase=phase)])
    assert outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


def test_a_nan_in_an_overlapped_bucket_is_traced(chaos: Chaos) -> None:
    """A NaN that is sent before the end of the backward pass is traced."""
    outcome = chaos.run("gpt", steps=20, faults=[NaN(rank=2, at_step=9, parameter="head.weight")])
    assert "rank 2" in outcome.recovery.cause
    outcome.assert_same_losses_as_twin()


def test_fast_reduction_recovers_too(chaos: Chaos) -> None:
    """Plain all-reduce promises no bits, but loses no step and no sample either."""
    outcome = chaos.run("gpt", steps=20, reduction="fast", faults=[Kill(rank=0, at_step=9)])
    assert outcome.lost_steps == 0
    assert outcome.ledger is not None
    assert outcome.ledger.missing == outcome.ledger.repeated == []
