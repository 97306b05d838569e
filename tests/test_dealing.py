"""Plain PyTorch does not trust a run's sampler: an epoch has each sample once, whatever order the run has named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from chaoskit.data.positions import Positions
from chaoskit.experiment.reference import Reference, check_dealt
from chaoskit.plain import PlainTrainer
from chaoskit.vocabulary import Verdict


def trained(samples: list[list[list[int]]], *sizes: int) -> PlainTrainer:
    """A trainer that has used these samples, of datasets of these sizes in turn."""
    trainer = PlainTrainer(0, samples, Path())
    model: Any = nn.Linear(1, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < len(samples):
        with trainer.transaction() as step:
            for shard in step.shards(torch.zeros(sizes[trainer.step % len(sizes)], 1), batch_size=0):
                step.backward(model(shard.batch).sum())
    return trainer


@settings(deadline=None)  # a busy machine
@given(st.integers(4, 30), st.integers(1, 4), st.integers(1, 12))
def test_what_a_sampler_deals_is_dealt_once(size: int, batch: int, steps: int) -> None:
    """Over the end of an epoch, too."""
    dealt = [[Positions(size, batch).batch(step).tolist()] for step in range(steps)]
    assert trained(dealt, size).repeated == ""


def test_a_sample_that_is_used_twice_is_named() -> None:
    assert (
        trained([[[0, 1], [2, 3]], [[4, 5], [1, 6]]], 8).repeated
        == "step 1: sample 1 for the second time in an epoch of 8"
    )
    assert trained([[[0, 0]]], 8).repeated == "step 0: sample 0 for the second time in an epoch of 8"


def test_datasets_of_other_sizes_have_samples_of_their_own() -> None:
    """A job that takes turns between them deals each as if it had all steps."""
    turns = [Positions(size, 2).batch(step).tolist() for step, size in enumerate([8, 9] * 4)]
    assert trained([[one] for one in turns], 8, 9).repeated == ""


def test_the_check_fails() -> None:
    assert check_dealt(Reference(losses=[1.0])).verdict == Verdict.PASSED
    found = check_dealt(Reference(losses=[1.0], repeated="step 0: sample 3"))
    assert (found.verdict, found.detail) == (Verdict.FAILED, "step 0: sample 3")
