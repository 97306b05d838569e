"""Spot traces in each published format, made up small, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.elastic.traces import TraceEvent, parse_trace, read_trace
from chaoskit.errors import BadInput

SAMPLES = Path(__file__).parents[2] / "traces"


def test_named_nodes_come_and_go() -> None:
    trace = read_trace(SAMPLES / "nodes.csv")
    assert trace.events == (
        TraceEvent(0, "a", True),
        TraceEvent(0, "b", True),
        TraceEvent(0, "c", True),
        TraceEvent(60, "b", False),
        TraceEvent(90, "d", True),
        TraceEvent(90, "a", False),
    )
    assert trace.capacity() == [(0, 3), (60, 2), (90, 2)]


def test_counts_become_nodes() -> None:
    assert read_trace(SAMPLES / "counts.csv").capacity() == [(0, 3), (60, 2), (90, 2)]
    assert read_trace(SAMPLES / "counts.json").capacity() == [(0, 3), (60, 2), (120, 0), (150, 1)]


def test_who_leaves_is_drawn_by_the_seed() -> None:
    drawn = {read_trace(SAMPLES / "counts.json", seed=seed).events for seed in range(20)}
    assert len(drawn) > 1
    assert read_trace(SAMPLES / "counts.json", seed=3) == read_trace(
        SAMPLES / "counts.json", seed=3
    )


def test_a_unit_of_its_own() -> None:
    assert parse_trace("0.0,2\n1.5,1\n", unit_s=3600).duration_s == 5400


def test_time_is_compressed() -> None:
    trace = read_trace(SAMPLES / "nodes.csv")
    fast = trace.compressed(60)
    assert [event.time_s for event in fast.events] == [0, 0, 0, 1, 1.5, 1.5]
    assert [event[1:] for event in fast.events] == [event[1:] for event in trace.events]
    with pytest.raises(BadInput):
        trace.compressed(0)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(0, 5))
def test_counts_are_kept_and_nobody_leaves_twice(counts: list[int], seed: int) -> None:
    text = "\n".join(f"{number},{count}" for number, count in enumerate(counts))
    present: set[str] = set()
    by_time: dict[float, int] = {}
    came: list[str] = []
    for event in parse_trace(text, seed=seed).events:
        assert event.joins != (event.node in present)
        present ^= {event.node}
        by_time[event.time_s] = len(present)
        came += [event.node] * event.joins
    assert len(came) == len(set(came))  # a machine that comes is a new one
    last = 0
    for number, count in enumerate(counts):
        last = by_time.get(number, last)
        assert last == count


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "t"),
        ("0,add,a\n5,pause,b\n", "t:2.act"),
        ("0,add,a\n\n5,remove,b\n", "t:3.node"),
        ("0,add,a\n5,add,a\n", "t:2.node"),
        ("0,add,\n", "t:1.node"),
        ("9,add,a\n5,add,b\n", "t:2.time"),
        ("-1,add,a\n", "t:1.time"),
        ("nan,add,a\n", "t:1.time"),
        ("soon,add,a\n", "t:1.time"),
        ("0,add,a,b\n", "t:1"),
        ("0,2\n1,2,3\n", "t:2"),
        ("0,2\n1,-1\n", "t:2.nodes"),
        ("0,2.5\n", "t:1.nodes"),
        ("0,many\n", "t:1.nodes"),
        ('{"metadata": {}, "data": [1]}', "t:metadata.gap_seconds"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "t:metadata.gap_seconds"),
        ('{"metadata": {"gap_seconds": 5}, "data": 1}', "t:data"),
        ('{"metadata": {"gap_seconds": 5}, "data": [1, null]}', "t:data[1]"),
        ('{"metadata": ', "t"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_trace(text, "t")
    assert refused.value.field == field


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can be read"):
        read_trace(tmp_path / "none.csv")
