"""A watch loses no event, whatever happens to its stream, and says when nothing is heard."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs.objects import stateful_pod, stateful_set
from support.jobs.watch_server import Event, WatchServer, watch_server
from support.waiting import wait_until

from chaoskit.attach.jobs.changes import JobChange, ReadinessChanged
from chaoskit.attach.jobs.find import FoundJob, JobListing
from chaoskit.attach.jobs.membership import PlaceKey, membership
from chaoskit.attach.jobs.object_watch import ObjectWatch
from chaoskit.attach.jobs.places import JobPlaces
from chaoskit.attach.jobs.reference import parse_reference
from chaoskit.attach.jobs.watch import JobWatch
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

GONE, OVERLOADED = 410, 500


def pod(version: int) -> dict[str, Any]:
    return stateful_pod(0, version=version)


class Script:
    """Answers of the server to the watches, one after the other; the last one is repeated.

    An answer is a list of events, after which the stream ends, or a status. ``silence`` after the
    events keeps the stream open.
    """

    def __init__(self, *answers: list[Event | str] | int) -> None:
        self._answers = list(answers)
        self.over = threading.Event()

    def __call__(self, version: str) -> Iterable[Event] | int:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return answer if isinstance(answer, int) else self._events(answer)

    def _events(self, answer: list[Event | str]) -> Iterator[Event]:
        for event in answer:
            if isinstance(event, str):
                self.over.wait(30)
            else:
                yield event


@contextlib.contextmanager
def watched(
    directory: Path, script: Script, *, silence_s: float = 20.0
) -> Iterator[tuple[WatchServer, ObjectWatch, list[Any]]]:
    """Yield server, watch, and what the watch has passed on, of which a list is its version."""
    received: list[Any] = []
    with watch_server(directory, script) as server:
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        watch = ObjectWatch(
            api,
            "Pod",
            lambda pods, version: received.append(version),
            lambda event, entry: received.append((event, entry["metadata"]["resourceVersion"])),
            silence_s=silence_s,
        )
        watch.start()
        try:
            yield server, watch, received
        finally:
            script.over.set()
            watch.close()
            api.close()


def bookmark(version: int) -> Event:
    return "BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}


def test_a_watch_goes_on_after_the_last_event(tmp_path: Path) -> None:
    script = Script([("ADDED", pod(5)), bookmark(8)], [("MODIFIED", pod(9)), "silence"])
    with watched(tmp_path, script) as (server, watch, received):
        wait_until(lambda: len(received) == 3, "all events")
        assert received == [1, ("ADDED", "5"), ("MODIFIED", "9")]
        assert server.requests == ["list", "watch 1", "watch 8"]
        assert not watch.trouble


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_watch_lists_again_if_its_version_is_forgotten(tmp_path: Path, in_stream: bool) -> None:
    error: Event = ("ERROR", {"kind": "Status", "code": GONE, "message": "too old"})
    script = Script([error] if in_stream else GONE, [("ADDED", pod(50)), "silence"])
    with watched(tmp_path, script) as (server, watch, received):
        wait_until(lambda: len(received) == 3, "the second list and the event")
        assert received == [1, 1, ("ADDED", "50")]
        assert server.requests == ["list", "watch 1", "list", "watch 1"]
        assert not watch.trouble


def test_a_silent_watch_is_opened_anew(tmp_path: Path) -> None:
    script = Script([("ADDED", pod(5)), "silence"], [("MODIFIED", pod(6)), "silence"])
    with watched(tmp_path, script, silence_s=0.3) as (server, watch, received):
        wait_until(lambda: ("MODIFIED", "6") in received, "the event of the second stream")
        assert server.requests[:3] == ["list", "watch 1", "watch 5"]
        assert not watch.trouble


def test_a_refused_watch_is_reported_and_tried_again(tmp_path: Path) -> None:
    script = Script(403, 403, [("ADDED", pod(5)), "silence"])
    with watched(tmp_path, script) as (_, watch, received):
        wait_until(lambda: watch.trouble, "the trouble")
        wait_until(lambda: ("ADDED", "5") in received, "the event")
        assert not watch.trouble


def test_a_server_that_is_gone_is_reported(tmp_path: Path) -> None:
    script = Script(["silence"])
    with watched(tmp_path, script) as (server, watch, received):
        wait_until(lambda: server.requests[1:], "the watch")
        heard_s = watch.heard_s
        server.close()
        script.over.set()
        wait_until(lambda: watch.trouble, "the trouble")
        assert "does not answer" in watch.trouble
        assert heard_s <= watch.heard_s < time.monotonic()
        assert received == [1]


def test_an_unexpected_error_is_reported_and_ends_with_a_new_list(tmp_path: Path) -> None:
    """The trouble lasts until a list was taken. The error stays, as changes may be lost for good."""
    grown = threading.Event()

    def watch_events(version: str) -> Iterator[Event]:
        grown.wait(30)
        if version == "10":
            yield "ADDED", {"metadata": {}}
        else:
            yield "ADDED", stateful_pod(2, version=21)
            script_over.wait(30)

    def take(changes: list[JobChange]) -> None:
        troubles.append(watch.trouble)
        if len(troubles) == 1:
            raise OSError("the disk is full")

    members = membership(parse_reference("statefulset/llama"), stateful_set())
    listing = JobListing(None, (stateful_pod(0, version=1),), 3, time.monotonic())
    reference = parse_reference("pods/app=llama")
    job = FoundJob(reference, "chaos", members, JobPlaces(()), {}, listing)
    troubles: list[str] = []
    script_over = threading.Event()
    with watch_server(tmp_path, watch_events) as server:
        server.objects, server.version = [stateful_pod(0, version=1)], "10"
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        with JobWatch(api, job, take) as watch:
            wait_until(lambda: watch.heard_s, "the first list")
            assert watch.error is None
            server.objects = [stateful_pod(0, version=1), stateful_pod(1, version=15)]
            server.version = "20"
            grown.set()
            wait_until(lambda: len(troubles) == 2, "the list, and the event after the next one")
            assert "unexpected error: KeyError('resourceVersion')" in troubles[0]
            assert troubles[1] == ""
            assert isinstance(watch.error, KeyError)
            assert len(watch.places().places) == 3
            script_over.set()
        assert server.requests[:5] == ["list", "watch 10", "list", "list", "watch 20"]
        api.close()


def test_a_watch_is_closed_while_its_stream_is_silent(tmp_path: Path) -> None:
    script = Script([("ADDED", pod(5)), "silence"])
    with watched(tmp_path, script) as (_, watch, received):
        wait_until(lambda: len(received) == 2, "the event")
        began_s = time.monotonic()
        watch.close()
        assert time.monotonic() - began_s < 2.0
        assert not any(thread.name == "watch-Pod" for thread in threading.enumerate())


def test_a_wait_for_a_successor_ends_with_it_or_with_its_limit(tmp_path: Path) -> None:
    go, ready = threading.Event(), threading.Event()

    def watch_events(version: str) -> Iterator[Event]:
        go.wait(30)
        yield "DELETED", stateful_pod(0, "old", version=11)
        yield "ADDED", stateful_pod(0, "new", version=12, created=9, ready=False)
        ready.wait(30)
        yield "MODIFIED", stateful_pod(0, "new", version=13, created=9)

    members = membership(parse_reference("statefulset/llama"), stateful_set())
    # the list of the server is newer than that of the search: the pod is not ready any more
    listing = JobListing(None, (stateful_pod(0, "old", version=1),), 3, time.monotonic())
    reference = parse_reference("pods/app=llama")
    job = FoundJob(reference, "chaos", members, JobPlaces(()), {}, listing)
    changes: list[JobChange] = []
    with watch_server(tmp_path, watch_events) as server:
        server.objects, server.version = [stateful_pod(0, "old", version=5, ready=False)], "10"
        api = KubernetesApi(kubeconfig=server.kubeconfig)
        key = PlaceKey("llama", 0)
        with JobWatch(api, job, changes.extend) as watch:
            assert [str(place.key) for place in watch.places().places] == ["llama[0]"]
            assert watch.wait_for(lambda places: not places.places[0].is_ready, 20.0)
            assert [type(change) for change in changes] == [ReadinessChanged]
            assert watch.wait_for_successor(key, "old", 0.05) is None
            go.set()
            assert watch.wait_for(lambda places: places.successor(key, "old"), 20.0)
            assert watch.wait_for_successor(key, "old", 0.05) is None  # it is not ready yet
            ready.set()
            successor = watch.wait_for_successor(key, "old", 20.0)
            assert successor is not None
            assert (successor.uid, successor.is_ready) == ("new", True)
        api.close()
