"""Collectives of user code: the contributions of a call, its result, and refused calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor

from chaoskit.errors import BadInput, JobFailed
from chaoskit.runtime.group.collective_log import RESULTS_BYTES_MAX
from chaoskit.runtime.step import collectives
from chaoskit.runtime.step.collectives import Call, combine, explain_missing_group, pack

PARTS = torch.rand(64, generator=torch.Generator().manual_seed(0)) - 0.5


def result_of(calls: list[Call], world: int | None = None) -> Any:
    """Return the result of user code if the ranks make these calls, after every rank has read the
    same result.
    """
    world = len(calls) if world is None else world
    for rank, call in enumerate(calls):
        call.compute(rank, world)
    rows = [call.row(3, 0, rank, world) for rank, call in enumerate(calls)]
    (result,) = {call.conclude(rows) for call in calls}
    return calls[0].read(result)


def sum_of_shards(world: int, shards: int) -> Tensor:
    """Return the sum over shards in a world of ``world`` ranks."""
    total = result_of(
        [collectives.all_reduce(lambda shard: PARTS[shard], "sum", shards) for _ in range(world)]
    )
    assert isinstance(total, Tensor)
    return total


@given(st.integers(1, 64), st.integers(1, 9))
@settings(max_examples=examples(100), deadline=None)
def test_a_sum_over_shards_has_the_same_bits_in_every_world(shards: int, world: int) -> None:
    """Each shard is computed once, by any rank, and added in the canonical tree."""
    assert torch.equal(sum_of_shards(world, shards), combine(list(PARTS[:shards]), "sum"))


def test_the_order_of_the_sum_matters() -> None:
    """Another order gives other bits; otherwise the test above would hold for a sum in any order."""
    sums = [combine(list(parts), "sum") for parts in (PARTS, PARTS.roll(1))]
    assert not torch.equal(*sums)


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        ("sum", [1, 2, 4], 7),
        ("mean", [1, 2, 4], 7 / 3),
        ("max", [1.5, 2.5, -4.0], 2.5),
        ("min", [1.5, 2.5, -4.0], -4.0),
        ("sum", [True, False, True], 2),
    ],
)
def test_numbers_of_ranks(op: str, values: list[float], expected: float) -> None:
    """Python numbers come back as Python numbers."""
    result = result_of([collectives.all_reduce(value, op, None) for value in values])
    assert (result, type(result)) == (expected, type(expected))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The tensor of a rank comes back bit for bit, as a new tensor."""
    sent = torch.arange(math.prod(shape)).to(dtype).reshape(shape)
    received = result_of(
        [
            collectives.broadcast(sent, 1),
            collectives.broadcast(sent.t() if sent.dim() == 2 else sent, 1),
        ]
    )
    expected = sent.t() if sent.dim() == 2 else sent
    assert received.dtype == dtype
    assert torch.equal(received, expected)
    received += 1  # the tensor can be written to


def test_a_mean_of_integers_is_a_mean() -> None:
    mean = result_of(
        [collectives.all_reduce(torch.tensor([value, 4]), "mean", None) for value in (1, 2)]
    )
    assert torch.equal(mean, torch.tensor([1.5, 4.0], dtype=torch.float64))


def test_a_number_that_is_not_finite_is_a_result() -> None:
    assert math.isnan(
        result_of(
            [
                collectives.all_reduce(math.nan, "max", None),
                collectives.all_reduce(1.0, "max", None),
            ]
        )
    )


def test_only_the_source_calls_a_function() -> None:
    """The function may be expensive, or impossible on other ranks."""
    called: list[int] = []

    def value(rank: int) -> float:
        called.append(rank)
        return 0.5

    assert (
        result_of([collectives.broadcast(lambda rank=rank: value(rank), 1) for rank in range(3)])
        == 0.5
    )
    assert called == [1]


def test_a_barrier_has_no_result() -> None:
    assert result_of([collectives.barrier() for _ in range(3)]) is None


def test_shards_of_a_lost_rank_are_computed_by_those_that_are_left() -> None:
    """Each rank computes its remaining shards in the next world."""
    computed: list[list[int]] = [[], [], []]

    def call(rank: int) -> Call:
        def value(shard: int) -> int:
            computed[rank].append(shard)
            return 10**shard

        return collectives.all_reduce(value, "sum", 5)

    calls = [call(rank) for rank in range(3)]
    for rank, pending in enumerate(calls):
        pending.compute(rank, 3)
    assert computed == [[0, 3], [1, 4], [2]]
    assert result_of(calls[:2]) == 11111
    assert computed == [[0, 3, 2, 4], [1, 4, 3], [2]]


@pytest.mark.parametrize(("shards", "world"), [(5, 2), (4, 2), (1, 3)])
def test_ranks_of_a_sharded_model_call_a_function_equally_often(shards: int, world: int) -> None:
    """The forward pass of a sharded model needs all ranks; a superfluous result is dropped."""
    called = [0] * world
    for rank in range(world):

        def value(shard: int, rank: int = rank) -> float:
            called[rank] += 1
            return float(shard)

        collectives.all_reduce(value, "sum", shards).compute(rank, world, evenly=True)
    assert called == [-(-shards // world)] * world


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        {0: 1.0},
        2**70,
        1j,
        torch.zeros(2) > 0,
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
        lambda: 1.0,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_reduced_is_refused(value: Any) -> None:
    with pytest.raises(
        BadInput, match=r"a float, an int of 64 bits or a CPU tensor; .* with shards=N"
    ):
        collectives.all_reduce(value, "sum", None)


def test_values_are_small() -> None:
    pack("all_reduce", torch.zeros(RESULTS_BYTES_MAX // 4))
    with pytest.raises(BadInput, match="a metric, not data"):
        pack("all_reduce", torch.zeros(RESULTS_BYTES_MAX // 4 + 1))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: collectives.all_reduce(1.0, "product", None), "use one of sum, mean, max, min"),
        (lambda: collectives.all_reduce(1.0, "sum", 4), "pass a function of the shard"),
        (lambda: collectives.all_reduce(abs, "sum", 0), "use 1 or more"),
        (lambda: collectives.broadcast(1.0, -1), "the number of a rank"),
        (lambda: collectives.broadcast(1.0, 2).compute(0, 2), "use a rank below 2"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(call: Any, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        call()


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            collectives.barrier(),
            r"rank 0 made trainer.all_reduce\(op='sum'\).* rank 1 made trainer.barrier\(\) as call 0",
        ),
        (collectives.all_reduce(1.0, "max", None), "op='max'"),
        (collectives.all_reduce(1, "sum", None), "one type and shape"),
        (collectives.all_reduce(torch.zeros(()), "sum", None), "one type and shape"),
    ],
)
def test_ranks_that_call_different_things_are_all_refused(other: Call, match: str) -> None:
    """Every rank sees the mismatch, so no rank waits for a failed rank."""
    calls = [collectives.all_reduce(1.0, "sum", None), other]
    for rank, call in enumerate(calls):
        call.compute(rank, 2)
    rows = [call.row(3, 0, rank, 2) for rank, call in enumerate(calls)]
    for call in calls:
        with pytest.raises(BadInput, match=match):
            call.conclude(rows)


def test_ranks_that_have_made_other_calls_before_are_refused() -> None:
    """A rank has left a call out, so the same call has another number there."""
    calls = [collectives.barrier(), collectives.barrier()]
    with pytest.raises(BadInput, match="as call 1 since step 3"):
        calls[0].conclude([call.row(3, rank, rank, 2) for rank, call in enumerate(calls)])


def test_a_rank_that_is_given_the_result_of_another_call_is_refused() -> None:
    call = collectives.barrier()
    result = call.conclude([call.row(3, 0, 0, 1)])
    with pytest.raises(
        BadInput,
        match=r"calls trainer.broadcast\(source=0\) where others have called trainer.barrier",
    ):
        collectives.broadcast(1.0, 0).read(result)


def test_a_collective_without_a_group_says_what_to_call() -> None:
    """torch's own message would send the user to init_process_group."""
    with (
        pytest.raises(JobFailed, match=r"trainer\.all_reduce, trainer\.broadcast"),
        explain_missing_group(),
    ):
        torch.distributed.all_reduce(torch.zeros(1))
    with pytest.raises(ValueError, match="another"), explain_missing_group():
        raise ValueError("another trouble")
