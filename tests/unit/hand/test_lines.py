"""Tests of the hand's protocol: any bytes give lines, answers or refusals, and never another error."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.hand.fields import HandOperation, RequestField, check_fields, decimal, whole, word
from chaoskit.hand.lines import LINE_SIZE_MAX_BYTES, RequestSplitter, read_request, write_line
from chaoskit.hand.refusals import RefusedRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)
FIELDS = {
    "count": RequestField(whole(1, 9)),
    "share": RequestField(decimal(0.0, 1.0), 0.5),
    "means": RequestField(word("any", "none"), "any"),
}


def split(data: bytes, cuts: list[int]) -> list[bytes | None]:
    splitter, lines = RequestSplitter(), list[bytes | None]()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        lines += splitter.split(data[begin:end])
    return lines


@given(st.lists(st.binary(min_size=1).filter(lambda b: b"\n" not in b and b.strip())), st.data())
def test_lines_do_not_depend_on_the_pieces_in_which_they_arrive(
    lines: list[bytes], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, 10_000)))
    assert split(b"".join(line + b"\n" for line in lines), cuts) == lines


@given(st.integers(LINE_SIZE_MAX_BYTES - 2, LINE_SIZE_MAX_BYTES + 3), st.lists(st.integers(0)))
def test_a_line_above_the_limit_is_dropped_once_and_the_next_one_is_kept(
    size_bytes: int, cuts: list[int]
) -> None:
    lines = split(b"x" * size_bytes + b"\nnext\n", cuts)
    is_too_long = size_bytes > LINE_SIZE_MAX_BYTES
    assert lines == [None if is_too_long else b"x" * size_bytes, b"next"]


def test_the_rest_of_a_long_line_is_not_kept() -> None:
    splitter = RequestSplitter()
    assert splitter.split(b"x" * (LINE_SIZE_MAX_BYTES + 1)) == [None]
    for _ in range(100):
        assert splitter.split(b"x" * LINE_SIZE_MAX_BYTES) == []
    assert splitter.split(b"\nnext\n") == [b"next"]


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_a_request_or_refused(line: bytes) -> None:
    try:
        request = read_request(line)
    except RefusedRequest as refusal:
        write_line({"error": [refusal.field, refusal.value, refusal.remedy]})
    else:
        assert request.number >= 0


@given(st.dictionaries(st.sampled_from([*FIELDS, "other"]), JSON))
def test_any_fields_are_checked_or_refused(values: dict[str, Any]) -> None:
    try:
        checked = check_fields(FIELDS, values)
    except RefusedRequest as refusal:
        write_line({"error": [refusal.field, refusal.value, refusal.remedy]})
    else:
        assert checked.keys() == FIELDS.keys()
        assert checked["count"] in range(1, 10)
        assert 0 < checked["share"] <= 1
        assert checked["means"] in ("any", "none")


@pytest.mark.parametrize("values", [{}, {"count": 1, "other": 2}, {"count": True}, {"count": 1.0}])
def test_missing_unknown_and_mistyped_fields_are_refused(values: dict[str, Any]) -> None:
    operation = HandOperation(FIELDS, lambda number, fields: {})
    with pytest.raises(RefusedRequest):
        check_fields(operation.fields, values)
