"""Data files are complete or not there, and what they hold comes back; positions are computed, never replayed."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from torch.utils.data import DataLoader

from chaoskit.checkpoint import Damaged
from chaoskit.data import Permutation, Positions, RecordFile, TokenFile, write_records, write_tokens
from chaoskit.data.header import DTYPES, HEADER_BYTES, read_header
from chaoskit.errors import BadInput

pytestmark = pytest.mark.costly

# -- positions ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None, database=None)
@given(size=st.integers(1, 3000), key=st.lists(st.integers(0, 2**63), max_size=3))
def test_a_permutation_has_everything_once(size: int, key: list[int]) -> None:
    """Also where the range is just above or below a power of two."""
    assert sorted(Permutation(size, *key)(np.arange(size))) == list(range(size))


@settings(max_examples=50, deadline=None, database=None)
@given(size=st.integers(2**33, 2**62), key=st.integers(0, 2**63))
def test_places_of_a_huge_one_are_computed_alone(size: int, key: int) -> None:
    """Nobody can look at all of it: these places have values of their own, within the range, whoever asks."""
    order, places = Permutation(size, key), np.unique(np.linspace(0, size - 1, 1000).astype(np.int64) % size)
    values = order(places)
    assert len(np.unique(values)) == len(places)
    assert values.min() >= 0
    assert values.max() < size
    assert np.array_equal(order(places[::7]), values[::7])


def too_far(counts: list[int], expected: float, freedom: int) -> bool:
    """Whether chi-square is more than six deviations above its mean."""
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    return chi_square > freedom + 6 * math.sqrt(2 * freedom)


def test_every_order_is_as_likely() -> None:
    """Of five, where each of the 120 orders can be counted."""
    found = Counter(tuple(Permutation(5, seed)(np.arange(5))) for seed in range(6000))
    assert not too_far([found[order] for order in itertools.permutations(range(5))], 50, 119)


@pytest.mark.parametrize("size", [33, 64, 100])
def test_every_sample_is_as_likely_at_every_place(size: int) -> None:
    """And so is the distance of two that follow each other."""
    places, rounds = np.arange(size), 2000
    at, apart = np.zeros((size, size), int), np.zeros(size, int)
    for epoch in range(rounds):
        order = Permutation(size, 7, epoch)(places)
        at[places, order] += 1
        np.add.at(apart, np.diff(order) % size, 1)
    assert not too_far(at.ravel().tolist(), rounds / size, (size - 1) ** 2)
    assert not too_far(apart[1:].tolist(), rounds, size - 2)


def test_the_order_is_part_of_what_a_run_is() -> None:
    """A run that is continued by a later version, on another machine, goes on in the same order."""
    assert Permutation(1000, 1, 2)(np.arange(5)).tolist() == GOLDEN


GOLDEN = [576, 116, 897, 677, 229]


@pytest.mark.slow
@pytest.mark.promise("Which samples belong to a step is computed")
@settings(max_examples=examples(100), deadline=None, database=None)
@given(part=st.integers(1, 4), world=st.integers(1, 4), more=st.integers(0, 50), seed=st.integers(0, 2**63))
def test_a_batch_does_not_depend_on_the_world(part: int, world: int, more: int, seed: int) -> None:
    """Ranks take equal parts; three epochs deal every sample three times, whoever asks for which step first."""
    batch_size = part * world
    size = batch_size + more
    alone, together = Positions(size, batch_size, seed), Positions(size, batch_size, seed)
    steps = -(-3 * size // batch_size)
    batches = [alone.batch(step) for step in range(steps)]
    for step in reversed(range(steps)):
        parts = [together.batch(step, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), batches[step])
    dealt = np.concatenate(batches)
    for epoch in range(3):
        assert sorted(dealt[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_positions_refuse_what_they_cannot_deal() -> None:
    with pytest.raises(BadInput, match="at least one global batch"):
        Positions(7, 8)
    with pytest.raises(BadInput, match="1 or more"):
        Positions(7, 0)
    with pytest.raises(BadInput, match="multiple of the number of ranks, 3"):
        Positions(80, 8).batch(0, 0, 3)
    with pytest.raises(BadInput, match="use 0 to 1"):
        Positions(80, 8).batch(0, 2, 2)


# -- files --------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None, database=None)
@given(dtype=st.sampled_from(DTYPES), lengths=st.lists(st.integers(0, 50), min_size=1, max_size=8), seed=st.integers(0))
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, lengths: list[int], seed: int
) -> None:
    """Of every type, however it was cut: as one stream, and as records."""
    chance = np.random.default_rng(seed)
    parts = [chance.integers(0, 100, length).astype(dtype) for length in lengths]
    folder = tmp_path_factory.mktemp("data")
    write_records(folder / "records", parts, dtype)
    records = RecordFile(folder / "records")
    records.verify()
    assert [records[index].tolist() for index in range(len(records))] == [part.tolist() for part in parts]
    backwards = [*range(len(parts))][::-1]
    batch = records.__getitems__(backwards)
    for place, index in enumerate(backwards):
        assert batch.values[batch.offsets[place] : batch.offsets[place + 1]].tolist() == parts[index].tolist()
    stream = np.concatenate(parts)
    if len(stream) >= 4:
        write_tokens(folder / "tokens", (part.tolist() for part in parts), dtype)
        tokens = TokenFile(folder / "tokens", 3, as_dtype=None)
        tokens.verify()
        assert len(tokens) == (len(stream) - 1) // 3
        for index in range(len(tokens)):
            assert np.array_equal(tokens[index].numpy(), stream[3 * index : 3 * index + 4])
        assert torch.equal(tokens.__getitems__([0, -1]), torch.stack([tokens[0], tokens[-1]]))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "tokens", [np.arange(1001)])
    return tmp_path / "tokens"


def test_samples_share_memory_with_the_file(tokens: Path) -> None:
    """And a process that writes to them changes neither the file nor what another mapping shows."""
    first, second = TokenFile(tokens, 10, as_dtype=None), TokenFile(tokens, 10)
    assert first[2].data_ptr() == first[2].data_ptr() == first[0].data_ptr() + 2 * 10 * 2
    before = tokens.read_bytes()
    first[2][0] = 7
    assert first[2].tolist()[:2] == [7, 21]
    assert second[2].tolist()[:2] == [20, 21]
    assert second[2].dtype == torch.int64
    assert tokens.read_bytes() == before


def test_loaders_take_them(tokens: Path) -> None:
    """What is sent to a spawned process is the name of the file."""
    dataset = TokenFile(tokens, 10)
    assert len(pickle.dumps(dataset)) < 1000
    positions = Positions(len(dataset), 8)
    steps = (positions.batch(step, 1, 2) for step in range(3))
    loader: Any = DataLoader(dataset, batch_sampler=steps, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
    for step, batch in enumerate(loader):
        assert torch.equal(batch, dataset.__getitems__(positions.batch(step, 1, 2)))
    assert torch.equal(copy.copy(dataset)[3], dataset[3])


def test_files_without_a_header_are_tokens_if_somebody_says_so(tmp_path: Path) -> None:
    np.arange(50, dtype=np.int32).tofile(tmp_path / "raw")
    dataset = TokenFile(tmp_path / "raw", 7, dtype="int32")
    assert dataset[6].tolist() == [*range(42, 50)]
    with pytest.raises(BadInput, match="say what the tokens"):
        TokenFile(tmp_path / "raw", 7)
    with pytest.raises(BadInput, match="without a header nothing can tell"):
        dataset.verify()
    with pytest.raises(BadInput, match="has no header"):
        RecordFile(tmp_path / "raw")
    (tmp_path / "raw").write_bytes(bytes(7))
    with pytest.raises(BadInput, match="whole int32"):
        TokenFile(tmp_path / "raw", 1, dtype="int32")


@pytest.mark.parametrize("kept", [20, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, -1])
def test_a_truncated_file_is_refused(tokens: Path, kept: int) -> None:
    tokens.write_bytes(tokens.read_bytes()[:kept])
    with pytest.raises(BadInput, match="write it again"):
        TokenFile(tokens, 10)


def test_damage_is_told(tokens: Path) -> None:
    """In the header at once, in the data when one looks for it."""
    data = bytearray(tokens.read_bytes())
    data[HEADER_BYTES + 99] ^= 1
    tokens.write_bytes(data)
    with pytest.raises(Damaged, match="digest"):
        TokenFile(tokens, 10).verify()
    data[30] ^= 1
    tokens.write_bytes(data)
    with pytest.raises(BadInput, match="header is damaged"):
        TokenFile(tokens, 10)


def test_files_of_another_kind_are_refused(tokens: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "records", [b"abc", b"de"])
    with pytest.raises(BadInput, match="file of tokens, not of records"):
        RecordFile(tokens)
    with pytest.raises(BadInput, match="file of records, not of tokens"):
        TokenFile(tmp_path / "records", 1)
    with pytest.raises(BadInput, match="the file holds uint16"):
        TokenFile(tokens, 10, dtype="uint8")
    with pytest.raises(BadInput, match="at least 2001 tokens"):
        TokenFile(tokens, 2000)
    tokens.write_bytes(tokens.read_bytes().replace(b"data 1\n", b"data 2\n"))
    with pytest.raises(BadInput, match="another version"):
        TokenFile(tokens, 10)
    with pytest.raises(BadInput, match="can be read"):
        TokenFile(tmp_path / "nothing", 10)


@pytest.mark.parametrize(
    ("chunk", "dtype", "remedy"),
    [
        ([70000], "uint16", "wider"),
        ([-1], "uint32", "wider"),
        ([0.5], "int64", "floating"),
        ([1], "bool", "use one of"),
    ],
)
def test_values_that_do_not_fit_leave_the_file_as_it_was(tokens: Path, chunk: Any, dtype: str, remedy: str) -> None:
    before = tokens.read_bytes()
    with pytest.raises(BadInput, match=remedy):
        write_tokens(tokens, [[1, 2], chunk], dtype)
    assert tokens.read_bytes() == before
    assert [*tokens.parent.iterdir()] == [tokens]


_ENDLESS = """
import itertools, sys
from chaoskit.data import write_tokens
def chunks():
    for number in itertools.count():
        yield [number % 100] * 5000
        if number == 20:
            print("writing", flush=True)
write_tokens(sys.argv[1], chunks())
"""


def test_a_killed_writer_leaves_the_file_as_it_was(tokens: Path) -> None:
    """Nobody else may write meanwhile; afterwards the next one takes its place."""
    before = tokens.read_bytes()
    with subprocess.Popen([sys.executable, "-c", _ENDLESS, str(tokens)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        with pytest.raises(BadInput, match="wait until the other process"):
            write_tokens(tokens, [[1, 2, 3]])
        os.kill(writer.pid, signal.SIGKILL)
    assert tokens.read_bytes() == before
    header = write_tokens(tokens, [[1, 2, 3]])
    assert read_header(tokens) == header
    assert TokenFile(tokens, 2)[0].tolist() == [1, 2, 3]
    assert [*tokens.parent.iterdir()] == [tokens]
