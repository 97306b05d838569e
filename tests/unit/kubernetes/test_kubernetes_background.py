"""Requests to the API server that no run waits for, against a server that hangs, refuses or comes
back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.nodes.api_server import ApiServer, api_server
from support.waiting import LIMIT_S, wait_until

from chaoskit.substrate.kubernetes.api.background import BackgroundRequests
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.pods import Pod, SessionPods
from chaoskit.substrate.supervisor.reception import Reception

PODS = "/api/v1/namespaces/chaos/pods"


class Held:
    """A server that answers a PATCH only when the test lets it."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "PATCH":
            self.may_answer.wait(LIMIT_S)
        return 200, {"metadata": {"name": path}}


@pytest.fixture
def background() -> Iterator[BackgroundRequests]:
    requests = BackgroundRequests(limit=3, pause_s=0.01)
    yield requests
    requests.close(LIMIT_S)


def paths_of(server: ApiServer, method: str) -> list[str]:
    """Return the paths of the received requests of a method."""
    return [path for made_by, path, _ in list(server.requests) if made_by == method]


@contextlib.contextmanager
def session_pods(server: ApiServer, background: BackgroundRequests) -> Iterator[SessionPods]:
    """Return the pods of a session: those of a node, and of a standby station.

    No supervisor has connected.
    """
    api, reception = KubernetesApi(kubeconfig=server.kubeconfig), Reception("127.0.0.1", "token")
    options = KubernetesOptions(image="a:1")
    reception_of_pods = (reception, "127.0.0.1", lambda station, place: {})
    pods = SessionPods(
        api, "chaoskit-1", options, *reception_of_pods, lambda line: None, background
    )
    for station in ("node0", "standby0"):
        pods.add(Pod(station, f"chaoskit-1-{station}", pods.is_over))
    try:
        yield pods
    finally:
        pods.close()
        reception.close()
        api.close()


def test_a_deletion_does_not_wait_for_labels(
    tmp_path: Path, background: BackgroundRequests
) -> None:
    held = Held()
    with api_server(tmp_path, held.answer) as server, session_pods(server, background) as pods:
        pods.label(
            "node0",
            {"chaoskit.dev/generation": "1"},
            {"chaoskit.dev/test": "tests/test_a.py::test_b[1]"},
        )
        pods.label("node0", {"chaoskit.dev/station": "node0"})
        wait_until(lambda: paths_of(server, "PATCH"), "the request for labels")
        pods.drop_standbys(beyond=())
        wait_until(
            lambda: paths_of(server, "DELETE") == [f"{PODS}/chaoskit-1-standby0"], "the deletion"
        )
        assert len(paths_of(server, "PATCH")) == 1, (
            "the second label waits for the first one, and the deletion for none"
        )
        held.may_answer.set()
    patched = next(body for method, _, body in server.requests if method == "PATCH")
    assert patched["metadata"]["annotations"] == {"chaoskit.dev/test": "tests/test_a.py::test_b[1]"}


def test_labels_of_the_last_generation_replace_those_that_wait(
    tmp_path: Path, background: BackgroundRequests
) -> None:
    held = Held()
    with api_server(tmp_path, held.answer) as server, session_pods(server, background) as pods:
        pods.label("node0", {"chaoskit.dev/generation": "1"})
        wait_until(lambda: paths_of(server, "PATCH"), "the first request")
        for generation in range(2, 9):
            pods.label("node0", {"chaoskit.dev/generation": str(generation)})
        pods.label("node0", {"chaoskit.dev/station": "node0"})
        held.may_answer.set()
        wait_until(lambda: len(paths_of(server, "PATCH")) == 3, "the last request")
    labels = [
        body["metadata"]["labels"] for method, _, body in server.requests if method == "PATCH"
    ]
    generation = "chaoskit.dev/generation"
    assert labels == [{generation: "1"}, {generation: "8"}, {"chaoskit.dev/station": "node0"}]


def held_up(background: BackgroundRequests) -> threading.Event:
    """Have the first request last until the returned event is set."""
    may_go_on, begun = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        may_go_on.wait(LIMIT_S)

    background.submit(first)
    assert begun.wait(LIMIT_S)
    return may_go_on


def test_what_waits_is_bounded_and_counted(background: BackgroundRequests) -> None:
    may_go_on, acts = held_up(background), list[int]()
    for number in range(5):
        background.submit(lambda number=number: acts.append(number))
    assert background.left_out == 2
    may_go_on.set()
    background.close(LIMIT_S)
    assert acts == [0, 1, 2]


def test_a_request_is_made_again_until_it_is_answered(background: BackgroundRequests) -> None:
    """A refusal is an answer, and an error of one request does not affect the next."""
    unanswered = [ApiError("no answer"), ApiError("overloaded", 503)]
    outcomes = [*unanswered, None, ApiError("forbidden", 403), KeyError("x"), None]
    refused, acts, done = list[ApiError](), list[str](), threading.Event()

    def act(name: str) -> None:
        acts.append(name)
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome
        if name == "d":
            done.set()

    for name in "ab":
        background.submit(lambda name=name: act(name), on_refused=refused.append)
    wait_until(lambda: len(acts) == 4, "both requests")
    for name in "cd":
        background.submit(lambda name=name: act(name))
    assert done.wait(LIMIT_S)
    assert acts == ["a", "a", "a", "b", "c", "d"]
    assert [error.status for error in refused] == [403]


def test_the_end_of_a_session_waits_for_no_server_that_is_away() -> None:
    background, requested = BackgroundRequests(pause_s=LIMIT_S), threading.Event()

    def act() -> None:
        requested.set()
        raise ApiError("no answer")

    background.submit(act)
    assert requested.wait(LIMIT_S)
    began_s = time.monotonic()
    background.close(LIMIT_S)
    assert time.monotonic() - began_s < LIMIT_S / 2
    background.submit(act)
    assert background.left_out == 0


def test_what_a_slow_server_leaves_when_a_session_ends_is_dropped(
    background: BackgroundRequests,
) -> None:
    may_go_on, acts = held_up(background), list[int]()
    for number in range(3):
        background.submit(lambda number=number: acts.append(number))
    background.close(0.01)
    may_go_on.set()
    background.close(LIMIT_S)
    assert acts == []
