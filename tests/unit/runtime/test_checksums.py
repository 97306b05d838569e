"""Checksums that detect every changed bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.coordinator.results import Results
from chaoskit.runtime.reduction.checksums import checksum, join, slice_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]


def tensors(sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, 2, (size,), generator=generator).to(DTYPES[kind % len(DTYPES)])
        for size, kind in sizes
    ]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=5), st.data()
)
def test_one_flipped_bit_changes_exactly_one_slice(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Every byte is therefore in exactly one slice."""
    drawn = tensors(sizes)
    parts = data.draw(st.integers(1, 9))
    before, whole = [slice_checksum(drawn, part, parts) for part in range(parts)], checksum(drawn)
    filled = [tensor for tensor in drawn if tensor.numel()]
    if not filled:
        return
    flat = data.draw(st.sampled_from(filled)).view(torch.uint8)
    flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = [slice_checksum(drawn, part, parts) for part in range(parts)]
    assert sum(digest != changed for digest, changed in zip(before, after, strict=True)) == 1
    assert checksum(drawn) != whole


def test_exchanged_tensors_are_noticed_and_none_is_passed_over() -> None:
    first, second = torch.rand(8), torch.rand(8)
    assert checksum([first, None, second]) == checksum([first, second]) != checksum([second, first])


def test_a_view_at_an_odd_place_reads_as_its_copy() -> None:
    whole = torch.rand(9)
    assert checksum([whole[1:]]) == checksum([whole[1:].clone()])
    matrix = torch.rand(6, 4)
    assert checksum([matrix.t()]) == checksum([matrix.t().contiguous()])


def test_nothing_at_all_has_a_checksum_that_is_not_zero() -> None:
    """0 means that there is no checksum."""
    assert checksum([]) == slice_checksum([], 0, 4) == checksum([torch.zeros(4)]) != 0
    assert join(1, 2) != join(2, 1)


def test_results_differ_as_soon_as_one_digest_does() -> None:
    results = Results()
    assert results.note("node0.0", "aa") == results.note("node1.0", "aa") == ""
    assert (
        "ranks ended with different weights (node0.0 aa, node1.0 aa, node2.0 bb)"
        in results.note("node2.0", "bb")
    )


def test_results_of_who_took_another_batch_and_left_do_not_count() -> None:
    results = Results()
    assert results.note("node0.0", "aa", counted_workers=("node1.0", "node2.0")) == ""
    assert results.note("node1.0", "bb", counted_workers=("node1.0", "node2.0")) == ""
    assert "(node1.0 bb, node2.0 aa)" in results.note(
        "node2.0", "aa", counted_workers=("node1.0", "node2.0")
    )
