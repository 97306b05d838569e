"""Tests of the lines of a log stream, and of the status that tells which logs can be read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.attach.logs.container_status import ContainerStatus
from chaoskit.attach.logs.records import ContainerLife
from chaoskit.attach.logs.timed_lines import TimedLine, TimedLineSplitter, to_since

DATA = (
    b"2026-11-29T12:31:22.000000001Z first\n"
    b"2026-11-29T12:31:22.5Z \n"
    b"2026-11-29T13:31:22+01:00 step 3\rstep 4\n"
    b"rpc error: code = NotFound\n"
    b"2026-11-29T12:31:23.000000002Z caf\xc3\xa9 2026-11-29T12:31:23Z\n"
)


@given(st.sets(st.integers(0, len(DATA))))
def test_lines_do_not_depend_on_the_parts_in_which_they_arrive(cuts: set[int]) -> None:
    splitter = TimedLineSplitter()
    places = [0, *sorted(cuts), len(DATA)]
    lines = [
        line
        for first, last in itertools.pairwise(places)
        for line in splitter.feed(DATA[first:last])
    ]
    assert lines == TimedLineSplitter().feed(DATA)
    assert splitter.rest() == []


def test_times_are_nanoseconds_since_the_epoch() -> None:
    lines = TimedLineSplitter().feed(DATA)
    second_ns = 1795955482 * 10**9
    assert [line.node_ns for line in lines] == [
        second_ns + 1,
        second_ns + 5 * 10**8,
        second_ns,
        0,
        second_ns + 10**9 + 2,
    ]
    assert lines[2].content == b"step 3\rstep 4"
    assert lines[3] == TimedLine("", 0, b"rpc error: code = NotFound")


def test_an_incomplete_line_waits_for_its_rest() -> None:
    splitter = TimedLineSplitter()
    assert splitter.feed(b"2026-11-29T12:31:22Z hal") == []
    assert splitter.feed(b"f a line") == []
    assert [line.content for line in splitter.rest()] == [b"half a line"]


def test_since_is_rounded_down_to_a_second() -> None:
    assert to_since(1795955482 * 10**9 + 999_999_999) == "2026-11-29T12:31:22Z"


def pod(state: dict[str, Any], last: str = "", restarts: int = 0, **fields: Any) -> dict[str, Any]:
    last_state = {"terminated": {"containerID": last}} if last else {}
    entry = {"name": "c", "state": state, "lastState": last_state, "restartCount": restarts}
    if "running" in state:
        entry["containerID"] = "new"
    status = {"phase": fields.pop("phase", "Running"), "containerStatuses": [entry]}
    return {"metadata": fields.pop("metadata", {}), "spec": fields, "status": status}


@pytest.mark.parametrize(
    ("pod_object", "expected"),
    [
        (pod({"waiting": {}}), ContainerStatus()),
        (
            pod({"running": {}}, "old", 2),
            ContainerStatus(ContainerLife(2, "new"), ContainerLife(1, "old"), is_running=True),
        ),
        (
            pod({"terminated": {"containerID": "new"}}, "old", 2),
            ContainerStatus(ContainerLife(2, "new"), ContainerLife(1, "old")),
        ),
        (
            pod({"waiting": {}}, "old", 2),
            ContainerStatus(None, ContainerLife(2, "old")),
        ),
        (
            pod({"terminated": {"containerID": "new", "exitCode": 1}}, restartPolicy="Never"),
            ContainerStatus(ContainerLife(0, "new"), may_restart=False),
        ),
        (
            pod({"terminated": {"containerID": "new", "exitCode": 1}}, restartPolicy="OnFailure"),
            ContainerStatus(ContainerLife(0, "new")),
        ),
        (
            pod({"running": {}}, metadata={"deletionTimestamp": "2026-11-29T12:31:22Z"}),
            ContainerStatus(ContainerLife(0, "new"), is_running=True, may_restart=False),
        ),
        (
            pod({"terminated": {"containerID": "new"}}, phase="Failed"),
            ContainerStatus(ContainerLife(0, "new"), is_final=True, may_restart=False),
        ),
        ({"status": {}}, ContainerStatus()),
    ],
)
def test_the_status_names_the_lives_that_can_be_read(
    pod_object: dict[str, Any], expected: ContainerStatus
) -> None:
    assert ContainerStatus.of(pod_object, "c") == expected


def test_a_start_is_in_seconds_since_the_epoch() -> None:
    status = ContainerStatus.of(pod({"running": {"startedAt": "2026-11-29T12:31:22Z"}}), "c")
    assert status.current is not None
    assert status.current.started_s == 1795955482
