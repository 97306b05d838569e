"""A model that each rank builds from another seed is refused, and no hardware is accused."""

from __future__ import annotations

import pytest

from chaoskit import BadInput, Chaos
from chaoskit.vocabulary import Event

JOB = "../../jobs/training/writing.py"


@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("job", ["unseeded", "unseeded_head"])
def test_a_model_that_is_not_seeded_is_named_before_the_first_step(
    chaos: Chaos, job: str, nodes: int
) -> None:
    """The model is refused even if the first tensors, which are compared first, are equal."""
    with pytest.raises(BadInput, match=r"torch\.manual_seed\(trainer\.seed\)") as refused:
        chaos.run(f"{JOB}:{job}", nodes=nodes, spares=0, steps=10, twin=False)
    assert refused.value.field == "model"
    assert not chaos.outcomes or not chaos.outcomes[-1].records(Event.CORRUPT)


def test_replicas_of_a_sharded_model_are_compared_before_the_first_step(chaos: Chaos) -> None:
    with pytest.raises(BadInput, match=r"torch\.manual_seed\(trainer\.seed\)"):
        chaos.run(f"{JOB}:unseeded_replicas", nodes=2, spares=0, steps=10, twin=False)
