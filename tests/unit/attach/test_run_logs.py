"""Tests of the lines of a node that wait for the follower of its run."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.attach.logs.records import ContainerLife, ContainerLine, LogPlace
from chaoskit.attach.run.logs import UnreadLines
from chaoskit.rules.log_file import ArrivedPart

LINE = ContainerLine(
    LogPlace("train-0", "0f1e2d3c-4b5a", "main"),
    ContainerLife(0, "containerd://a"),
    "2026-11-29T12:31:22Z",
    0,
    0,
    b"",
)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=40))
def test_lines_come_once_in_their_order_with_their_times(lines: list[tuple[int, bool]]) -> None:
    """A reader that asks at any moment gets the times of arrival, made to rise."""
    unread, parts = UnreadLines(), list[ArrivedPart]()
    for number, (t_ns, is_read) in enumerate(lines):
        unread.add(msgspec.structs.replace(LINE, content=b"%d" % number, t_ns=t_ns))
        if is_read:
            parts += unread.read()
    parts += unread.read()
    assert [part.data for part in parts] == [b"%d\n" % number for number in range(len(lines))]
    times_ns = [t_ns for t_ns, _ in lines]
    assert [part.t_ns for part in parts] == [
        max(times_ns[: number + 1]) for number in range(len(lines))
    ]


def test_the_size_of_an_answer_is_limited() -> None:
    unread, size = UnreadLines(), 400_000
    for _ in range(5):
        unread.add(msgspec.structs.replace(LINE, content=b"x" * size))
    assert [len(unread.read()) for _ in range(3)] == [3, 2, 0]
