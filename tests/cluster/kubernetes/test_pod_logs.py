"""Tests of followed logs on a real cluster: containers are killed, streams cut, pods deleted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.nodes import pods
from support.waiting import wait_until

from benchmarks.pods.api_proxy import ApiProxy
from benchmarks.pods.log_cases import (
    LineCounts,
    LoggingPod,
    away,
    cutting,
    deleted,
    deleted_while_away,
    killed,
    restarted_while_away,
    silenced,
)
from chaoskit.attach.logs.files import LogFiles, read_holes
from chaoskit.attach.logs.follower import LogFollower
from chaoskit.attach.logs.records import HoleReason
from chaoskit.attach.required_rights import require_rights
from chaoskit.journal import Journal, read_journals
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import LOG_RIGHTS

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)

Start = Callable[..., LoggingPod]


@pytest.fixture(scope="module")
def api() -> Iterator[KubernetesApi]:
    client = KubernetesApi(
        kubeconfig=os.environ[pods.VARIABLE_OF_TESTS], namespace=pods.namespace()
    )
    yield client
    client.close()


@pytest.fixture
def start(api: KubernetesApi, tmp_path: Path) -> Iterator[Start]:
    """Start a pod that prints lines and is followed through a proxy."""
    proxy = ApiProxy(os.environ[pods.VARIABLE_OF_TESTS], tmp_path)
    started: list[LoggingPod] = []

    def start_pod(**writer: Any) -> LoggingPod:
        started.append(LoggingPod(api, proxy, **writer))
        return started[-1]

    yield start_pod
    for pod in started:
        pod.close()
    proxy.close()


def assert_whole(counts: LineCounts) -> None:
    """Check that all lines were delivered, each once, and that no hole is told."""
    assert counts.written > 100
    assert (counts.lost, counts.doubled, counts.holes) == (0, 0, 0), counts


def assert_told(pod: LoggingPod, counts: LineCounts, *reasons: HoleReason) -> None:
    """Check that lines are lost, that each lies in a hole, and the reasons of the holes."""
    assert counts.lost > 0
    assert (counts.in_holes, counts.doubled) == (counts.lost, 0), counts
    assert {hole.reason for hole in pod.holes()} <= set(reasons), pod.holes()


def test_a_killed_container_is_followed_into_its_next_lives(start: Start) -> None:
    assert_whole(killed(start(rate=200, seconds=1.0, lives=2), times=1))


def test_a_stream_that_is_cut_again_and_again_loses_nothing(start: Start) -> None:
    pod = start(rate=200, seconds=4)
    with cutting(pod.proxy, every_s=0.7):
        counts = pod.await_end()
    assert_whole(counts)
    assert counts.openings >= 3


@pytest.mark.parametrize("grace_s", [0, 2])
def test_a_deleted_pod_is_read_to_its_end(start: Start, grace_s: int) -> None:
    pod = start(rate=200, seconds=60, grace_s=2)
    counts = deleted(pod, grace_s)
    assert (counts.lost, counts.doubled) == (0, 0), counts
    assert counts.holes <= 1, counts  # on a busy machine a stream may break before the pod is gone


def test_a_pod_that_is_deleted_while_its_stream_is_cut_has_a_hole(start: Start) -> None:
    pod = start(rate=200, seconds=60)
    assert_told(pod, deleted_while_away(pod), HoleReason.POD_GONE)


def test_two_restarts_while_the_stream_is_cut_are_a_hole(start: Start) -> None:
    pod = start(rate=200, seconds=4, lives=3)
    assert_told(pod, restarted_while_away(pod, times=2), HoleReason.LIVES_UNREAD)


def test_a_silent_stream_is_opened_anew(start: Start) -> None:
    pod = start(rate=200, seconds=5, silence_s=1.0)
    counts = silenced(pod)
    assert_whole(counts)
    assert counts.openings >= 2


def test_the_files_of_a_run_have_the_lines_and_the_journal_the_holes(
    start: Start, api: KubernetesApi, tmp_path: Path
) -> None:
    pod = start(rate=200, seconds=60)
    journal = Journal(tmp_path / "journal", "harness", role="harness")
    files = LogFiles(tmp_path, journal)
    follower = LogFollower(api, files.receive)
    (place,) = follower.follow(api.get("Pod", pod.name))
    assert follower.follow(api.get("Pod", pod.name)) == []
    path = tmp_path / "log" / f"{place.name}.log"
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") > 100, "lines in the file")
    deleted_while_away(pod)
    files.receive(pod.holes())  # those of the follower behind the proxy
    wait_until(lambda: follower.is_over(place), "the end of the log")
    follower.close()
    files.close()
    journal.close()
    numbers = [line.split()[2] for line in path.read_bytes().splitlines() if line[:1] == b"0"]
    assert numbers == [b"%d" % number for number in range(len(numbers))]
    (hole,) = read_holes(read_journals(tmp_path / "journal"))
    assert (hole.file, hole.pod, hole.reason) == (place.name, pod.name, "pod_gone")
    assert hole.line <= path.read_bytes().count(b"\n")


def test_closing_ends_a_thread_that_waits_for_lines(start: Start) -> None:
    pod = start(rate=1, seconds=60)
    wait_until(pod.delivered, "the first line")
    pod.follower.close(limit_s=2.0)
    assert pod.follower.is_over(pod.place)
    assert not pod.holes()


def test_the_rights_are_checked_before_a_log_is_followed(api: KubernetesApi) -> None:
    require_rights(api, LOG_RIGHTS)


@pytest.mark.slow
def test_short_lives_are_read_one_by_one(start: Start) -> None:
    assert_whole(start(rate=200, seconds=0.3, lives=20).await_end(limit_s=150))


@pytest.mark.slow
def test_kills_and_cuts_together_lose_nothing(start: Start) -> None:
    pod = start(rate=200, seconds=3, lives=6)
    with cutting(pod.proxy, every_s=0.7):
        counts = killed(pod, times=5)
    assert_whole(counts)


@pytest.mark.slow
def test_rotations_lose_no_line_silently(start: Start) -> None:
    """A busy node may skip a whole file of a stream; a hole tells that."""
    counts = start(rate=10000, seconds=40, size_bytes=200, streams=1).await_end(limit_s=120)
    assert (counts.in_holes, counts.doubled) == (counts.lost, 0), counts


@pytest.mark.slow
def test_a_log_that_is_rotated_while_its_stream_is_cut_has_a_hole(start: Start) -> None:
    pod = start(rate=20000, seconds=30, size_bytes=150, streams=1)
    assert_told(pod, away(pod, 20.0), HoleReason.ROTATED)
