"""A step with a NaN loss over a finite gradient counts, for the runtime and for the judge."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from chaoskit.experiment.judge.comparison import drift
from chaoskit.experiment.properties.steps import unexplained_losses
from chaoskit.experiment.twin.twin import Twin
from chaoskit.pytest_plugin import Chaos
from faults import Kill

JOB = "../../jobs/training/ignored.py:replicated"
STEPS = 10


@pytest.mark.promise("the gradient decides, and the loss does not", ignored={"4": [1]})
@pytest.mark.parametrize(
    ("ignored", "settings"),
    [
        ({"4": [1]}, {}),
        ({"9": [0]}, {}),
        ({"9": [0, 1, 2, 3]}, {}),
        ({"4": [1], "9": [2]}, {"reduction": "fast"}),
        (
            {"5": [1], "6": [0, 3]},
            {"faults": [Kill(rank=1, at_step=6, phase="reduce")], "spares": 1},
        ),
    ],
)
def test_a_shard_whose_labels_are_all_ignored_costs_nothing(
    chaos: Chaos, ignored: dict[str, list[int]], settings: dict[str, Any]
) -> None:
    plan = {"nodes": 2, "shards": 4, "spares": 0, "steps": STEPS, **settings}
    outcome = chaos.run(JOB, options={"ignored": ignored}, **plan)
    losses = outcome.losses
    assert [step for step, loss in enumerate(losses) if loss is None or math.isnan(loss)] == list(
        map(int, ignored)
    )
    assert outcome.ledger is not None
    assert outcome.ledger.skipped == []


@pytest.mark.slow
def test_a_sharded_job_commits_it_too(chaos: Chaos) -> None:
    ignored = {"4": [1], "9": [2]}
    outcome = chaos.run(
        "../../jobs/training/ignored.py:sharded",
        nodes=2,
        shards=4,
        steps=STEPS,
        options={"ignored": ignored},
    )
    assert len(outcome.losses) == STEPS


def test_a_gradient_that_is_no_number_is_still_a_bad_batch(chaos: Chaos) -> None:
    """A step with a NaN gradient is skipped, also beside a shard with ignored labels, and no
    other step is.
    """
    options = {"ignored": {"3": [0], "5": [1]}, "spoiled": 5}
    outcome = chaos.run(JOB, nodes=2, shards=4, spares=0, steps=STEPS, options=options)
    assert outcome.ledger is not None
    assert [line.partition(":")[0] for line in outcome.ledger.skipped] == ["step 5"]


def test_a_twin_that_was_stored_tells_nan_from_a_batch_that_was_skipped() -> None:
    twin = Twin([1.0, math.nan, None], "", "", nan_steps=(1,))
    again = msgspec.json.decode(msgspec.json.encode(twin), type=Twin)
    assert repr(again.losses) == "[1.0, nan, None]"


@pytest.mark.parametrize(
    ("losses", "is_end_finite", "steps"),
    [
        ([1.0, 0.5], True, []),
        ([1.0, math.nan, 0.5], False, []),
        ([1.0, math.inf, None, 0.5], False, []),
        ([1.0, math.nan], True, []),
        ([1.0, math.nan], False, [1]),
        ([math.nan, 0.5, math.nan, math.nan], False, [2, 3]),
        ([math.nan, None], False, [0]),
    ],
)
def test_what_shows_that_the_gradient_was_finite(
    losses: list[float | None], is_end_finite: bool, steps: list[int]
) -> None:
    """A later finite loss, or a finite end, shows that the weights took no NaN, which they would
    keep.
    """
    assert unexplained_losses(losses, is_end_finite=is_end_finite) == steps


@pytest.mark.parametrize(
    ("mine", "other", "is_same"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.nan, 1.0, False),
        (math.inf, -math.inf, False),
    ],
)
def test_losses_that_are_no_numbers_are_compared_as_they_are(
    mine: float, other: float, is_same: bool
) -> None:
    assert (drift([mine], [other]) == []) is is_same
