"""The state with which a run ends: what ranks write of it shows what no loss and no digest of weights would show."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.experiment.ending import EQUAL, FINITE, check_equal, check_finite, ending
from chaoskit.experiment.outcome import Outcome
from chaoskit.journal import Record
from chaoskit.pytest_plugin import Chaos
from chaoskit.runtime.final_state import Part, describe
from chaoskit.vocabulary import Event, Verdict
from faults import Kill

JOB = str(Path(__file__).parent / "jobs" / "wrong_everywhere.py")


def told(*parts: Part, step: int = 5) -> Record:
    return Record(t_ns=0, event=Event.FINAL_STATE, source="w", fields={"step": step, "tensors": describe(parts)})


def whole(tensor: torch.Tensor, path: str = "model/w") -> Part:
    return Part(path, tensor, tuple(tensor.shape), (0,) * tensor.dim())


@given(st.data())
def test_the_numbers_of_boxes_add_up_to_those_of_the_tensor(data: st.DataObject) -> None:
    """Whatever the world is that holds it."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    cuts = [data.draw(st.integers(0, size)) for size in shape]
    boxes = []
    for corner in product(*([(0, cut), (cut, size)] for cut, size in zip(cuts, shape, strict=True))):
        memory = tensor[tuple(slice(begin, end) for begin, end in corner)]
        if memory.numel():
            boxes.append(Part("model/w", memory, shape, tuple(begin for begin, _ in corner)))
    apart = ending([told(box) for box in [*boxes, boxes[0]]])["model/w"]  # of two ranks with one box it counts once
    assert apart == pytest.approx(ending([told(whole(tensor))])["model/w"], abs=1e-4)


def test_another_value_anywhere_is_another_state() -> None:
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    before = ending([told(whole(tensor))])
    for change in (lambda one: one * 0.5, lambda one: -one, lambda one: one.roll(1, 0)):
        check = check_equal(ending([told(whole(change(tensor)))]), before)
        assert check.verdict == Verdict.FAILED
        assert "model/w: norm" in check.detail
    assert check_equal(before, before).verdict == Verdict.PASSED
    assert "missing" in check_equal({}, before).detail
    assert "not in the twin's" in check_equal(before, {}).detail


def test_ranks_that_hold_another_thing_at_one_place_are_no_state() -> None:
    tensor = torch.ones(4)
    found = ending([told(whole(tensor)), told(whole(tensor * 2))])
    assert all(map(math.isnan, found["model/w"]))
    assert check_equal(found, ending([told(whole(tensor))])).verdict == Verdict.FAILED
    assert check_finite(found).verdict == Verdict.FAILED


def test_only_the_last_step_counts() -> None:
    """A rank that finished, and was needed once more, has written twice."""
    found = ending([told(whole(torch.zeros(4)), step=4), told(whole(torch.ones(4)), step=5)])
    assert found["model/w"][1] == 4.0


def test_what_is_not_finite_counts_unless_it_is_a_buffer() -> None:
    """A mask of infinities is what the model wants."""
    odd = torch.tensor([1.0, math.inf, math.nan])
    found = ending([told(whole(odd), Part("model/mask", odd, (3,), (0,), is_buffer=True))])
    assert found["model/w"][:2] == [2.0, 1.0]
    assert found["model/mask"][:2] == [0.0, 1.0]
    assert check_finite(found).detail == "model/w: 2 values are not finite"
    assert check_finite({"model/mask": found["model/mask"]}).verdict == Verdict.PASSED


def check_of(outcome: Outcome, name: str) -> Verdict:
    return next(check.verdict for check in outcome.checks if check.name == name)


def test_a_number_that_is_lost_in_the_last_step_is_found(chaos: Chaos) -> None:
    """No loss is computed from it, and there is no twin to compare with."""
    outcome = chaos.run(JOB, steps=6, nodes=2, shards=2, twin=False, check=False, options={"how": "ends_with_nan"})
    assert check_of(outcome, FINITE) == Verdict.FAILED
    assert outcome.verdict == Verdict.FAILED


def test_a_part_of_the_optimizer_that_is_lost_is_found(chaos: Chaos) -> None:
    kill = Kill(rank=1, at_step=4)
    options = {"how": "forgets_momentum"}
    outcome = chaos.run(JOB, steps=6, nodes=2, shards=2, faults=[kill], check=False, options=options)
    assert check_of(outcome, "final weights equal the twin's") == Verdict.PASSED
    assert check_of(outcome, EQUAL) == Verdict.FAILED
    assert [check.name for check in outcome.checks if check.verdict == Verdict.FAILED] == [EQUAL]


def test_with_a_sum_in_another_order_it_is_not_compared(chaos: Chaos) -> None:
    outcome = chaos.run(JOB, steps=4, nodes=2, shards=2, reduction="fast")
    assert outcome.not_applied[EQUAL] == "sums may be formed in another order"
