"""The same promises on GPUs. Skipped, visibly, where there are none."""

from __future__ import annotations

import pytest
import torch

from chaoskit.pytest_plugin import Chaos
from faults import Hang, Kill, NaN

pytestmark = [pytest.mark.gpu, pytest.mark.chaos(device="cuda", options={"size": "tiny"})]


def test_training_on_one_gpu(chaos: Chaos) -> None:
    """A world of one commits every step, deterministically enough to equal its twin."""
    outcome = chaos.run("gpt", nodes=1, spares=0, steps=20)
    assert len(outcome.steps) == 20


@pytest.mark.parametrize("fault", [Kill(rank=1, at_step=10), Hang(rank=1, at_step=10)], ids=["kill", "stop"])
def test_losing_a_rank_costs_nothing(chaos: Chaos, fault: Kill | Hang) -> None:
    """NCCL's own abort frees the survivors; the replacement pulls its state."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    outcome = chaos.run("gpt", nodes=2, spares=2, steps=20, faults=[fault])
    assert outcome.lost_steps == 0
    outcome.assert_same_losses_as_twin()


def test_a_nan_is_never_committed(chaos: Chaos) -> None:
    """Non-finite gradients are traced on GPUs, too."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    chaos.run("gpt", nodes=2, spares=2, steps=20, faults=[NaN(rank=1, at_step=10, parameter="head.weight")])
