"""Tests of the follower of logs with a small API server on the loopback."""

from __future__ import annotations

import contextlib
import copy
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.nodes.api_server import api_server, refusal
from support.waiting import wait_until

from chaoskit.attach.logs.follower import LogFollower
from chaoskit.attach.logs.records import ContainerLine, HoleReason, LogHole, LogPlace
from chaoskit.attach.required_rights import require_rights
from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import LOG_RIGHTS

POD: dict[str, Any] = {
    "metadata": {"name": "train-0", "uid": "0f1e2d3c-4b5a"},
    "spec": {"containers": [{"name": "main"}], "initContainers": [{"name": "once"}]},
    "status": {
        "phase": "Running",
        "containerStatuses": [
            {
                "name": "main",
                "containerID": "containerd://0",
                "restartCount": 0,
                "state": {"running": {"startedAt": "2026-11-29T12:31:22Z"}},
            }
        ],
    },
}


def test_closing_tells_a_hole_while_the_server_does_not_answer(tmp_path: Path) -> None:
    """The thread waits for an answer, and delivers nothing more when it comes."""
    asked, released = threading.Event(), threading.Event()

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/log"):
            asked.set()
            return refusal(500, "no kubelet")
        if asked.is_set():
            released.wait()
        return 200, POD

    records: list[ContainerLine | LogHole] = []
    with api_server(tmp_path, answer) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        follower = LogFollower(api, records.extend)
        (place,) = follower.follow(POD)
        wait_until(lambda: follower.troubles() and len(server.requests) >= 3, "the second status")
        assert "no kubelet" in follower.troubles()[place]
        follower.close(limit_s=0.1)
        (hole,) = records
        assert isinstance(hole, LogHole)
        assert hole.reason is HoleReason.STOPPED
        released.set()
        wait_until(lambda: follower.is_over(place), "the end of the thread")
        assert records == [hole]
        api.close()


def test_a_pod_that_is_gone_ends_its_thread(tmp_path: Path) -> None:
    records: list[ContainerLine | LogHole] = []
    with api_server(tmp_path, lambda *request: refusal(404, "not found")) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        follower = LogFollower(api, records.extend)
        (place,) = follower.follow(POD)
        wait_until(lambda: follower.is_over(place), "the end of the thread")
        follower.close()
        (hole,) = records
        assert isinstance(hole, LogHole)
        assert hole.reason is HoleReason.POD_GONE
        api.close()


def stamp(number: int) -> str:
    return f"2026-11-29T12:31:23.{number:09}Z"


def lines(*numbers: int) -> bytes:
    """Return a chunk with numbered lines."""
    data = b"".join(f"{stamp(number)} line {number}\n".encode() for number in numbers)
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def texts(records: Sequence[ContainerLine | LogHole]) -> list[str]:
    return [
        record.text if isinstance(record, ContainerLine) else record.reason.name
        for record in records
    ]


@contextlib.contextmanager
def following(
    directory: Path,
    write: Callable[[socket.socket], None],
    receive: Callable[[Sequence[ContainerLine | LogHole]], None],
    pod: Callable[[int], dict[str, Any]] = lambda number: POD,
) -> Iterator[tuple[LogFollower, LogPlace]]:
    """Yield a follower of the stream that ``write`` makes, and its place.

    Args:
        pod: returns the answer to the status request of this number, which counts from 1.
    """
    statuses: list[str] = []

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/log"):
            return 200, write
        statuses.append(path)
        return 200, pod(len(statuses))

    with api_server(directory, answer) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        follower = LogFollower(api, receive)
        (place,) = follower.follow(POD)
        try:
            yield follower, place
        finally:
            with contextlib.suppress(OSError, KeyError):  # the error of the test's receiver
                follower.close()
            api.close()


def await_interrupt(connection: socket.socket) -> None:
    """Return when the client has ended its side of the connection."""
    assert connection.recv(1) == b""


def test_an_error_of_the_receiver_ends_its_log_with_a_hole(tmp_path: Path) -> None:
    records: list[ContainerLine | LogHole] = []
    is_full, first_arrived = threading.Event(), threading.Event()
    is_full.set()

    def write(connection: socket.socket) -> None:
        connection.sendall(lines(1))
        first_arrived.wait(30)
        connection.sendall(lines(2))
        await_interrupt(connection)

    def receive(batch: Sequence[ContainerLine | LogHole]) -> None:
        if first_arrived.is_set() and is_full.is_set():
            raise OSError("the disk is full")
        records.extend(batch)
        first_arrived.set()

    with following(tmp_path, write, receive) as (follower, place):
        wait_until(follower.troubles, "the trouble")
        assert follower.troubles() == {place: "OSError: the disk is full"}
        assert str(follower.error) == "the disk is full"
        wait_until(lambda: not _log_threads(), "the end of the thread")
        assert not follower.is_over(place)
        is_full.clear()
        with pytest.raises(OSError, match="the disk is full"):
            follower.close()
        assert not follower.is_over(place)
        assert texts(records) == ["line 1", "FAILED"]
        hole = records[1]
        assert isinstance(hole, LogHole)
        assert (hole.place, hole.lives, hole.after) == (place, range(1), stamp(1))
        assert hole.detail == "OSError: the disk is full"


def test_an_unexpected_error_of_a_thread_ends_its_log_with_a_hole(tmp_path: Path) -> None:
    def pod(number: int) -> dict[str, Any]:
        if number < 3:
            return POD
        line_arrived.wait(30)
        return {"kind": "Pod"}  # a proxy has cut the rest

    def write(connection: socket.socket) -> None:
        connection.sendall(lines(1) + b"0\r\n\r\n")
        line_arrived.set()

    line_arrived = threading.Event()
    records: list[ContainerLine | LogHole] = []
    with following(tmp_path, write, records.extend, pod) as (follower, place):
        wait_until(follower.troubles, "the trouble")
        assert follower.troubles() == {place: "KeyError: 'metadata'"}
        wait_until(lambda: not _log_threads(), "the end of the thread")
        assert not follower.is_over(place)
        with pytest.raises(KeyError, match="metadata"):
            follower.close()
        assert isinstance(follower.error, KeyError)
        hole = records[-1]
        assert isinstance(hole, LogHole)
        assert (hole.place, hole.reason) == (place, HoleReason.FAILED)
        assert hole.detail == "KeyError: 'metadata'"


def _log_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("log ")]


def test_closing_goes_on_after_an_error_of_the_receiver(tmp_path: Path) -> None:
    """The hole of the first log, which was not received, is delivered again."""
    pod = copy.deepcopy(POD)
    pod["spec"]["containers"].append({"name": "side"})
    pod["status"]["containerStatuses"].append(
        pod["status"]["containerStatuses"][0] | {"name": "side"}
    )
    asked, released = threading.Event(), threading.Event()
    refused: list[str] = []
    waiting: list[str] = []

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/log"):
            refused.append(path)
            if len(refused) == 2:
                asked.set()
            return refusal(500, "no kubelet")
        if asked.is_set():
            waiting.append(path)
            released.wait(30)
        return 200, pod

    batches: list[Sequence[ContainerLine | LogHole]] = []

    def receive(batch: Sequence[ContainerLine | LogHole]) -> None:
        batches.append(batch)
        if len(batches) == 1:
            raise OSError("the disk is full")

    with api_server(tmp_path, answer) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        follower = LogFollower(api, receive)
        places = follower.follow(pod)
        wait_until(lambda: len(waiting) == 2, "both threads")
        with pytest.raises(OSError, match="the disk is full"):
            follower.close(limit_s=0.1)
        records = [record for batch in batches[1:] for record in batch]
        assert texts(records) == ["FAILED", "STOPPED"]
        assert [record.place for record in records] == places
        released.set()
        api.close()


@pytest.mark.parametrize("backlog", [range(2, 4), range(2, 1000)], ids=["some", "much"])
def test_data_that_has_arrived_is_delivered_by_closing(tmp_path: Path, backlog: range) -> None:
    """The server may have more than it could send, after much data."""
    received, sent, interrupted = threading.Event(), threading.Event(), threading.Event()
    records: list[ContainerLine | LogHole] = []

    def write(connection: socket.socket) -> None:
        connection.sendall(lines(1))
        received.wait(30)
        for number in backlog:
            connection.sendall(lines(number))
        sent.set()
        await_interrupt(connection)
        interrupted.set()

    def receive(batch: Sequence[ContainerLine | LogHole]) -> None:
        records.extend(batch)
        received.set()
        interrupted.wait(30)

    with following(tmp_path, write, receive) as (follower, _):
        wait_until(sent.is_set, "the data")
        follower.close(limit_s=30.0)
        expected = [f"line {number}" for number in (1, *backlog)]
        if len(backlog) > 500:
            assert texts(records)[-1] == "STOPPED"
            arrived = texts(records)[:-1]
            assert len(arrived) > 100
            assert arrived == expected[: len(arrived)]
        else:
            assert texts(records) == expected


@pytest.mark.parametrize("in_chunk", [False, True])
def test_a_part_of_a_line_at_the_close_is_a_hole(tmp_path: Path, in_chunk: bool) -> None:
    received, sent = threading.Event(), threading.Event()
    records: list[ContainerLine | LogHole] = []

    def write(connection: socket.socket) -> None:
        connection.sendall(lines(1))
        received.wait(30)
        part = f"{stamp(2)} line".encode()
        size = len(part) + 6 * in_chunk
        connection.sendall(f"{size:x}\r\n".encode() + part + b"\r\n" * (not in_chunk))
        sent.set()
        await_interrupt(connection)

    def receive(batch: Sequence[ContainerLine | LogHole]) -> None:
        records.extend(batch)
        received.set()

    with following(tmp_path, write, receive) as (follower, _):
        wait_until(sent.is_set, "the data")
        follower.close(limit_s=30.0)
        assert texts(records) == ["line 1", "STOPPED"]


@pytest.mark.parametrize("unanswered", [2, 3], ids=["the life", "the proof"])
def test_data_that_was_not_read_before_the_close_is_a_hole(tmp_path: Path, unanswered: int) -> None:
    """The thread waits for the status of the pod, and does not read the stream meanwhile."""
    asked, released = threading.Event(), threading.Event()
    records: list[ContainerLine | LogHole] = []

    def write(connection: socket.socket) -> None:
        connection.sendall(lines(1))
        await_interrupt(connection)

    def pod(number: int) -> dict[str, Any]:
        if number >= unanswered:
            asked.set()
            released.wait(30)
        return POD

    with following(tmp_path, write, records.extend, pod) as (follower, _):
        wait_until(asked.is_set, "the request for the status")
        follower.close(limit_s=0.1)
        assert texts(records) == ["STOPPED"]
        released.set()


def test_a_missing_right_is_bad_input(tmp_path: Path) -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        attributes = body["spec"]["resourceAttributes"]
        return 201, {"status": {"allowed": attributes["subresource"] != "log"}}

    with api_server(tmp_path, answer) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        with pytest.raises(BadInput, match=r"have these rights granted .*: get pods/log"):
            require_rights(api, LOG_RIGHTS)
        api.close()
