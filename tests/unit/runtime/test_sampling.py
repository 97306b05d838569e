"""Samples and randomness as functions of seed, step and shard: dealt completely, and equal for
every reader.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from torch.utils.data import Dataset, Subset, TensorDataset

import chaoskit
from chaoskit.errors import BadInput
from chaoskit.fixtures.jobs.corpus import ByteDataset
from chaoskit.runtime.state.sampling import Sampler, derive_seed, fetch, seed_everything

CPU = torch.device("cpu")


@st.composite
def samplers(draw: st.DrawFn) -> Sampler:
    """Draw samplers over datasets of any size, dealt into batches that fit them."""
    shard_count = draw(st.integers(1, 8), label="shards")
    batch_size = shard_count * draw(st.integers(1, 5), label="a shard")
    size = draw(st.integers(batch_size, 3 * batch_size + 7), label="size")
    return Sampler(size, batch_size, shard_count, draw(st.integers(0, 2**63), label="seed"))


def batch(sampler: Sampler, step: int) -> list[int]:
    return [
        sample for shard in range(sampler.shard_count) for sample in sampler.samples(step, shard)
    ]


@settings(max_examples=examples(150), deadline=None, database=None)
@given(samplers(), st.integers(1, 4))
def test_every_sample_comes_once_an_epoch(sampler: Sampler, epochs: int) -> None:
    """No sample is left out or repeated in the steps of the epochs, whether batches divide them or
    not.
    """
    steps = -(-epochs * sampler.size // sampler.batch_size)
    dealt = [sample for step in range(steps) for sample in batch(sampler, step)]
    assert len(dealt) == steps * sampler.batch_size
    for epoch in range(epochs):
        assert sorted(dealt[epoch * sampler.size : (epoch + 1) * sampler.size]) == list(
            range(sampler.size)
        )
    rest = Counter(dealt[epochs * sampler.size :])
    assert all(count == 1 and sample < sampler.size for sample, count in rest.items())


@settings(max_examples=80, deadline=None, database=None)
@given(samplers(), st.data())
def test_a_shard_is_the_same_for_whoever_asks_in_whatever_order(
    sampler: Sampler, data: st.DataObject
) -> None:
    """A rank that jumps between steps and shards gets the same samples as a rank that goes through
    them in order.
    """
    steps = range(-(-2 * sampler.size // sampler.batch_size))
    expected = {
        (step, shard): sampler.samples(step, shard)
        for step in steps
        for shard in range(sampler.shard_count)
    }
    assert {len(samples) for samples in expected.values()} == {
        sampler.batch_size // sampler.shard_count
    }
    other = Sampler(sampler.size, sampler.batch_size, sampler.shard_count, sampler.seed)
    for step, shard in data.draw(st.permutations(sorted(expected)))[:20]:
        assert other.samples(step, shard) == expected[step, shard]


def test_epochs_and_seeds_shuffle_differently() -> None:
    """Each epoch has an order of its own, and so has each seed; none is the order of the
    dataset.
    """

    def order(seed: int, epoch: int) -> tuple[int, ...]:
        sampler = Sampler(64, 16, 4, seed)
        return tuple(
            sample for step in range(4 * epoch, 4 * epoch + 4) for sample in batch(sampler, step)
        )

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert tuple(range(64)) not in orders


def test_a_dataset_below_one_batch_is_refused() -> None:
    """The smallest dataset is one batch."""
    assert sorted(batch(Sampler(8, 8, 4, 0), 0)) == list(range(8))
    with pytest.raises(BadInput, match="at least one global batch, batch_size=8") as caught:
        Sampler(7, 8, 4, 0)
    assert (caught.value.field, caught.value.value) == ("dataset", 7)


@pytest.mark.parametrize("batch_size", [6, 1, 0, -4])
def test_a_batch_that_does_not_make_equal_shards_is_refused(batch_size: int) -> None:
    """The global batch is a positive multiple of the number of shards."""
    with pytest.raises(BadInput, match="multiple of the number of shards, 4") as caught:
        Sampler(100, batch_size, 4, 0)
    assert (caught.value.field, caught.value.value) == ("batch_size", batch_size)


# -- randomness ------------------------------------------------------------------------------------


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.random())  # noqa: NPY002  # what users use


def test_equal_keys_draw_the_same_numbers() -> None:
    """torch, random and NumPy start over at the same place for the same seed, step and shard."""
    seed_everything(1, 2, 3)
    first = drawn()
    drawn()
    seed_everything(1, 2, 3)
    assert drawn() == first


def test_each_part_of_the_key_changes_all_generators() -> None:
    """Another seed, step or shard gives other numbers in every one of the three libraries."""
    draws = []
    for key in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (3, 2, 1)]:
        seed_everything(*key)
        draws.append(drawn())
    for numbers in zip(*draws, strict=True):
        assert len(set(numbers)) == len(draws)


@settings(max_examples=examples(300), deadline=None, database=None)
@given(
    st.lists(
        st.lists(st.integers(0, 2**63), min_size=1, max_size=3).map(tuple),
        min_size=2,
        max_size=30,
        unique=True,
    )
)
def test_different_keys_have_different_seeds(keys: list[tuple[int, ...]]) -> None:
    """Neighbouring steps, swapped parts and numbers that only look alike when written together do
    not collide.
    """
    near = [(1, 23), (12, 3), (123,), (1, 2, 3), (3, 2, 1)]
    everything = {*keys, *near}
    seeds = {derive_seed(*key) for key in everything}
    assert len(seeds) == len(everything)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    """The derivation is part of the run's format: a resumed run must draw the same numbers."""
    assert derive_seed(0, 0, 0) == int.from_bytes(bytes.fromhex("3f3e1c8e57a282fe"), "big") >> 1


# -- batches ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


class Samples(Dataset[Any]):
    """Dataset of ten samples, each made by ``form``."""

    def __init__(self, form: Any) -> None:
        self._form = form

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return self._form(torch.tensor([index, index]), index)


def equal(first: Any, second: Any) -> bool:
    """Return whether two samples have the same structure, types and values."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            equal(first[key], second[key]) for key in first
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


X, Y = torch.tensor([[7, 7], [2, 2]]), torch.tensor([7, 2])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (lambda x, y: x, X),
        (lambda x, y: (x, y), [X, Y]),
        (lambda x, y: {"x": x, "y": y}, {"x": X, "y": Y}),
        (
            lambda x, y: {"x": [x, {"deep": y}], "name": str(y)},
            {"x": [X, {"deep": Y}], "name": ["7", "2"]},
        ),
        (Pair, Pair(X, Y)),
        (lambda x, y: y, Y),
    ],
    ids=["tensor", "tuple", "dict", "nested", "named tuple", "number"],
)
def test_samples_are_collated_as_by_a_data_loader(form: Any, expected: Any) -> None:
    """Samples of every usual form become one batch, in the order asked for, of the same form."""
    dataset = Samples(form)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=[[7, 2]])
    fetched = fetch(dataset, [7, 2], CPU)
    assert equal(fetched, expected)
    assert equal(fetched, next(iter(loader)))


def test_a_dataset_that_gives_whole_batches_is_asked_once(tmp_path: Path) -> None:
    """``__getitems__`` that returns a batch is used as it is."""
    path = tmp_path / "corpus"
    path.write_bytes(bytes(range(200)))
    dataset = ByteDataset(path, 9)
    assert equal(fetch(dataset, [3, 0], CPU), torch.stack([dataset[3], dataset[0]]))

    class Whole(Samples):
        def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, list[int]]:
            assert type(indices) is list
            return torch.tensor(indices), indices

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("not to be asked for single samples")

    assert equal(fetch(Whole(None), (5, 6), CPU), (torch.tensor([5, 6]), [5, 6]))


def test_a_dataset_that_gives_several_samples_is_collated() -> None:
    """``__getitems__`` that returns a list of samples, as ``Subset`` has it, gives the same batch
    as its parts.
    """
    whole = TensorDataset(torch.arange(20).view(10, 2), torch.arange(10))
    part = Subset(whole, [9, 8, 7, 6])
    assert equal(fetch(part, [0, 3], CPU), fetch(whole, [9, 6], CPU))
    assert equal(
        fetch(part, [0, 3], CPU), [torch.tensor([[18, 19], [12, 13]]), torch.tensor([9, 6])]
    )


def test_every_tensor_of_a_batch_is_moved() -> None:
    """Tensors at any depth go to the device; other values stay as they are."""
    meta = torch.device("meta")
    batch = fetch(Samples(lambda x, y: {"pair": Pair(x, [y]), "name": str(y)}), [1, 2], meta)
    assert batch["pair"].x.device == batch["pair"].y[0].device == meta
    assert batch["name"] == ["1", "2"]


def test_no_module_of_ours_draws_from_the_generators_of_the_process() -> None:
    """They belong to the training: a copy that is sent again must not change its numbers."""
    package = Path(chaoskit.__file__).parent
    draws = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "random"
        and node.func.attr not in ("Random", "SystemRandom", "seed", "getstate", "setstate")
    ]
    assert not draws
