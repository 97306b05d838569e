"""The final state of a run: the ranks' descriptions show errors that no loss and no digest of
weights shows.
"""

from __future__ import annotations

import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaoskit import judge_directory
from chaoskit.experiment.reference.ending import (
    EQUAL,
    FINITE,
    check_equal,
    check_finite,
    check_near,
    ending,
)
from chaoskit.experiment.reference.floor import ORDERS, Floor
from chaoskit.experiment.reference.plain_process import ask
from chaoskit.job import JobSpec
from chaoskit.journal import Record
from chaoskit.plain import PlainAnswer, Request
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.sketch import TensorBox, sketch
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event, Verdict
from faults import Kill

JOB = str(Path(__file__).parents[2] / "jobs" / "wrong" / "wrong_everywhere.py")
OFF_COURSE = str(Path(__file__).parents[2] / "jobs" / "wrong" / "off_course.py")


def state_record(*parts: TensorBox, step: int = 5) -> Record:
    return Record(
        t_ns=0,
        event=Event.STATE,
        source="w",
        fields={"step": step, "generation": 1, "tensors": sketch(parts)},
    )


def whole(tensor: torch.Tensor, path: str = "model/w") -> TensorBox:
    return TensorBox(path, tensor, tuple(tensor.shape), (0,) * tensor.dim())


@given(st.data())
def test_the_numbers_of_boxes_add_up_to_those_of_the_tensor(data: st.DataObject) -> None:
    """The description of a tensor does not depend on the world that holds it."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    tensor = torch.randn(
        shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    cuts = [data.draw(st.integers(0, size)) for size in shape]
    boxes = []
    for corner in product(
        *([(0, cut), (cut, size)] for cut, size in zip(cuts, shape, strict=True))
    ):
        memory = tensor[tuple(slice(begin, end) for begin, end in corner)]
        if memory.numel():
            boxes.append(TensorBox("model/w", memory, shape, tuple(begin for begin, _ in corner)))
    apart = ending([state_record(box) for box in [*boxes, boxes[0]]])[
        "model/w"
    ]  # a box that two ranks hold counts once
    assert apart == pytest.approx(ending([state_record(whole(tensor))])["model/w"], abs=1e-4)


def test_another_value_anywhere_is_another_state() -> None:
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    before = ending([state_record(whole(tensor))])
    for change in (
        lambda values: values * 0.5,
        lambda values: -values,
        lambda values: values.roll(1, 0),
    ):
        check = check_equal(ending([state_record(whole(change(tensor)))]), before)
        assert check.verdict == Verdict.FAILED
        assert "model/w: norm" in check.detail
    assert check_equal(before, before).verdict == Verdict.PASSED
    assert "missing" in check_equal({}, before).detail
    assert "in this run only" in check_equal(before, {}).detail


def test_ranks_that_hold_another_thing_at_one_place_are_no_state() -> None:
    tensor = torch.ones(4)
    state = ending([state_record(whole(tensor)), state_record(whole(tensor * 2))])
    assert all(map(math.isnan, state["model/w"]))
    assert check_equal(state, ending([state_record(whole(tensor))])).verdict == Verdict.FAILED
    finite = check_finite(state)
    assert (finite.verdict, finite.detail) == (
        Verdict.FAILED,
        "model/w: ranks hold different values of it",
    )
    assert check_equal(state, ending([state_record(whole(tensor))])).detail == finite.detail


def test_only_the_last_step_counts() -> None:
    """A rank that finished and was needed again has described its state twice."""
    state = ending(
        [state_record(whole(torch.zeros(4)), step=4), state_record(whole(torch.ones(4)), step=5)]
    )
    assert state["model/w"][1] == 4.0


def test_what_is_not_finite_counts_unless_it_is_a_buffer() -> None:
    """A buffer may hold infinities, as a mask does, and no NaN."""
    odd = torch.tensor([1.0, math.inf, math.nan])
    mask, mean = (
        TensorBox(f"model/{name}", odd[[0, place]], (2,), (0,), is_buffer=True)
        for name, place in (("mask", 1), ("mean", 2))
    )
    state = ending([state_record(whole(odd), mask, mean)])
    assert state["model/w"][:2] == [2.0, 1.0]
    assert state["model/mask"][:2] == [0.0, 1.0]
    assert state["model/mean"][:2] == [1.0, 1.0]
    assert (
        check_finite(state).detail
        == "model/mean: 1 values are not finite; model/w: 2 values are not finite"
    )
    assert check_finite({"model/mask": state["model/mask"]}).verdict == Verdict.PASSED


def check_of(outcome: Outcome, name: str) -> Verdict:
    return next(check.verdict for check in outcome.checks if check.name == name)


def detail_of(outcome: Outcome, name: str) -> str:
    return next(check.detail for check in outcome.checks if check.name == name)


def test_a_number_that_is_lost_in_the_last_step_is_found(chaos: Chaos) -> None:
    """A NaN of the last step is found, although no loss is computed from it and there is no twin."""
    outcome = chaos.run(
        JOB, steps=6, nodes=2, shards=2, twin=False, check=False, options={"how": "ends_with_nan"}
    )
    assert check_of(outcome, FINITE) == Verdict.FAILED
    assert outcome.verdict == Verdict.FAILED


def test_a_part_of_the_optimizer_that_is_lost_is_found(chaos: Chaos) -> None:
    kill = Kill(rank=1, at_step=4)
    options = {"how": "forgets_momentum"}
    outcome = chaos.run(
        JOB, steps=6, nodes=2, shards=2, faults=[kill], check=False, options=options
    )
    assert check_of(outcome, "final weights equal the twin's") == Verdict.PASSED
    assert check_of(outcome, EQUAL) == Verdict.FAILED
    assert [check.name for check in outcome.checks if check.verdict == Verdict.FAILED] == [EQUAL]


# -- within a floor --------------------------------------------------------------------------------

#: Three shards, because a sum of two has a single order.
FAST: dict[str, Any] = {"nodes": 3, "spares": 0, "shards": 3, "reduction": "fast"}
SHRINKS = Kill(rank=1, at_step=4)


def described(tensor: torch.Tensor) -> dict[str, list[float]]:
    return ending([state_record(whole(tensor))])


def floors(detail: str) -> float:
    """Return the distance, in floors, of the first tensor that a check names."""
    return float(detail.partition(" floors")[0].rpartition(" ")[2])


def test_the_distance_is_counted_in_floors() -> None:
    generator = torch.Generator().manual_seed(4)
    tensor, noise = (
        torch.randn(64, 64, generator=generator),
        torch.randn(64, 64, generator=generator),
    )
    floor = Floor({"model/w": 1e-3 * float(noise.norm())}, orders=ORDERS)
    for scale in (1.0, 30.0):
        check = check_near(described(tensor + scale * 1e-3 * noise), described(tensor), floor)
        assert check.verdict == (Verdict.PASSED if scale == 1.0 else Verdict.FAILED)
    assert floors(check.detail) == pytest.approx(30.0, rel=0.5)
    fewer = Floor(floor.spread, orders=1)
    assert (
        check_near(described(tensor + 0.03 * noise), described(tensor), fewer).verdict
        == Verdict.PASSED
    )
    assert fewer.of("model/w", 0.0) == 10 * floor.of("model/w", 0.0)


def test_a_tensor_without_spread_has_the_rounding_of_its_description() -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(3))
    floor = Floor({"model/w": 0.0}, orders=ORDERS)
    assert (
        check_near(described(tensor * (1 + 2**-23)), described(tensor), floor).verdict
        == Verdict.PASSED
    )
    assert (
        check_near(described(tensor * (1 + 2**-16)), described(tensor), floor).verdict
        == Verdict.FAILED
    )
    zero = described(torch.zeros(4))
    assert check_near(zero, zero, floor).verdict == Verdict.PASSED
    assert "inf floors" in check_near(described(torch.full((4,), 1e-9)), zero, floor).detail


def test_what_is_no_number_or_no_tensor_is_in_no_floor() -> None:
    good, floor = described(torch.ones(4)), Floor({"model/w": 100.0}, orders=ORDERS)
    assert (
        check_near(described(torch.tensor([1.0, 1.0, 1.0, math.nan])), good, floor).verdict
        == Verdict.FAILED
    )
    assert check_near({"model/w": [math.nan] * 10}, good, floor).verdict == Verdict.FAILED
    assert "missing" in check_near({}, good, floor).detail
    assert check_near(good, good, floor).verdict == Verdict.PASSED
    assert check_near(good, good, floor, scalars_differ=True).verdict == Verdict.FAILED
    assert "in this run only" in check_near(good | {"model/v": good["model/w"]}, good, floor).detail


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_a_world_that_became_smaller_ends_within_the_floor(chaos: Chaos, optimizer: str) -> None:
    outcome = chaos.run(
        OFF_COURSE, steps=10, faults=[SHRINKS], options={"optimizer": optimizer}, **FAST
    )
    assert {point.world for point in outcome.steps} == {2, 3}
    assert check_of(outcome, EQUAL) == Verdict.PASSED


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        ("sgd", "doubles_the_rate"),
        ("momentum", "doubles_the_rate"),
        ("adamw", "doubles_the_rate"),
        ("momentum", "halves_the_weights"),
        ("momentum", "forgets_momentum"),
        ("adamw", "forgets_momentum"),
    ],
)
def test_what_goes_wrong_after_a_recovery_is_many_floors_away(
    chaos: Chaos, optimizer: str, how: str
) -> None:
    options = {"optimizer": optimizer, "how": how}
    outcome = chaos.run(
        OFF_COURSE, steps=10, faults=[SHRINKS], check=False, options=options, **FAST
    )
    assert [check.name for check in outcome.checks if check.verdict == Verdict.FAILED] == [EQUAL]
    assert floors(detail_of(outcome, EQUAL)) >= 10


@pytest.mark.parametrize("how", ["none", "doubles_the_rate", "forgets_momentum"])
def test_a_sharded_world_of_another_size_ends_within_the_floor_or_far_from_it(
    chaos: Chaos, how: str
) -> None:
    plan = {
        "nodes": 3,
        "spares": 0,
        "shards": 3,
        "replacement_s": 0,
        "max_lost_steps": 2,
        "check": how == "none",
    }
    job, options = f"{OFF_COURSE}:train_sharded", {"how": how}
    outcome = chaos.run(job, steps=10, faults=[SHRINKS], options=options, **plan)
    assert len({point.world for point in outcome.steps}) > 1
    assert [check.name for check in outcome.checks if check.verdict == Verdict.FAILED] == (
        [EQUAL] * (how != "none")
    )
    assert how == "none" or floors(detail_of(outcome, EQUAL)) >= 10


def test_the_floor_is_kept_with_the_run(chaos: Chaos, tmp_path: Path) -> None:
    outcome = chaos.run(
        OFF_COURSE, steps=10, faults=[SHRINKS], options={"optimizer": "sgd"}, **FAST
    )
    copy = Path(shutil.copytree(outcome.directory, tmp_path / "copy"))
    assert detail_of(judge_directory(copy), EQUAL) == detail_of(outcome, EQUAL)
    (copy / "floor.json").unlink()
    again = judge_directory(copy)
    assert EQUAL not in [check.name for check in again.checks]
    assert (
        again.not_applied[EQUAL]
        == "sums may be formed in another order; no floor: none was measured"
    )


def test_a_job_that_plain_pytorch_cannot_train_has_no_floor(chaos: Chaos) -> None:
    outcome = chaos.run(f"{JOB}:imports_the_runtime", steps=4, nodes=2, spares=0, reduction="fast")
    assert "no floor: the job imports chaoskit.runtime" in outcome.not_applied[EQUAL]


def measured(directory: Path, undo: UndoLog, **options: Any) -> PlainAnswer:
    """Return a floor that was measured without any time for it."""
    samples = [[[shard, shard + 3] for shard in range(3)]] * 4
    job = JobSpec(OFF_COURSE, options={"steps": 4, **options})
    return ask(Request(job, 1, samples, orders=[1, 2, 3], budget_s=0.0), directory, "floor", undo)


def test_a_floor_takes_no_longer_than_its_budget(tmp_path: Path, undo: UndoLog) -> None:
    """A floor without a budget tries one further order, and no more."""
    answer = measured(tmp_path, undo)
    assert answer.orders == 1
    assert answer.floor["model/head.weight"] > 0
    assert set(answer.floor) > {"model/head.weight", "optimizer/0/momentum_buffer"}


def test_a_floor_is_no_lower_than_the_last_place_of_its_type(tmp_path: Path, undo: UndoLog) -> None:
    """The floor of bfloat16 is its last place: few orders show any rounding, and the next one may."""
    answer = measured(tmp_path, undo, dtype="bfloat16")
    assert answer.floor["model/norm.weight"] == pytest.approx(
        2**-7, rel=0.1
    )  # the values are about 1
