"""The watch on abort conditions against a real file and a real HTTP server."""

from __future__ import annotations

import contextlib
import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_until

from chaoskit.attach.guards.abort_conditions import parse_conditions
from chaoskit.attach.guards.abort_watch import AbortWatch
from chaoskit.errors import BadInput

INTERVAL_S, LIMIT_S = 0.05, 2.0


class Site:
    """An HTTP server on the loopback.

    Attributes:
        status: status of its answers; 0 to answer nothing.
        body: body of its answers.
        requests: number of requests so far.
    """

    def __init__(self) -> None:
        self.status, self.body, self.requests = 200, "", 0
        self.released = threading.Event()
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.requests += 1
                if not site.status:
                    site.released.wait(30)
                    return
                self.send_response(site.status)
                if site.status == 302:
                    self.send_header("Location", "/elsewhere")
                    site.status = 200
                self.end_headers()
                self.wfile.write(site.body.encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 32  # connections beyond it wait for a second

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        """End the server: connections are refused from then on."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site()
    with contextlib.closing(server):
        yield server


@contextlib.contextmanager
def watching(*texts: str) -> Iterator[list[str]]:
    """Watch conditions, and yield the list of reasons with which the watch aborts."""
    reasons = list[str]()
    with AbortWatch(
        parse_conditions(texts), reasons.append, interval_s=INTERVAL_S, limit_s=LIMIT_S
    ):
        yield reasons


def reason_of(reasons: list[str]) -> str:
    wait_until(lambda: reasons, "the abort")
    (reason,) = reasons
    return reason


def test_a_file_appears(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    with watching(f"file:{file}", f"file:{tmp_path}/a/b") as reasons:
        assert not reasons
        file.symlink_to("nowhere")
        assert reason_of(reasons) == f"file:{file}: {file} exists"


def test_a_url_is_not_well(site: Site) -> None:
    with watching(f"url:{site.url}") as reasons:
        site.status = 302  # a redirect is followed
        before = site.requests
        wait_until(lambda: site.requests > before + 3, "more checks")
        site.status = 204
        before = site.requests
        wait_until(lambda: site.requests > before + 2, "more checks")
        assert not reasons
        site.status = 503
        assert reason_of(reasons) == f"url:{site.url}: {site.url} answers with status 503"


def test_a_metric_crosses_its_limit(site: Site) -> None:
    site.body = 'errors{code="500"} 5\nerrors{code="404"} 9\n'
    text = f'metric:{site.url} errors{{code="500"}} > 5'
    with watching(text) as reasons:
        before = site.requests
        wait_until(lambda: site.requests > before + 2, "more checks")
        assert not reasons
        site.body = 'errors{code="500"} 5.5\n'
        assert reason_of(reasons) == f"{text}: errors is 5.5, > 5 ({site.url})"


def test_it_aborts_once_and_ends(site: Site) -> None:
    with watching(f"url:{site.url}") as reasons:
        site.status = 500
        reason_of(reasons)
        before = site.requests
        wait_until(
            lambda: "ck-abort" not in {thread.name for thread in threading.enumerate()},
            "the end of its thread",
        )
        assert (len(reasons), site.requests) == (1, before)


@pytest.mark.parametrize(
    "trouble", ["refused", "silent", "unreadable", "no such metric", "not a number", "status"]
)
def test_three_checks_without_an_answer(site: Site, trouble: str) -> None:
    site.body = "up 1\n"
    began_s = time.monotonic()
    with watching(f"metric:{site.url} up < 1") as reasons:
        if trouble == "refused":
            site.close()
        else:
            site.status = {"silent": 0, "status": 503}.get(trouble, 200)
            bodies = {"unreadable": "<html>", "not a number": "up NaN\n"}
            site.body = bodies.get(trouble, "other 1\n")
        assert "no answer 3 times in a row: " in reason_of(reasons)
        assert time.monotonic() - began_s < 30
    words = {
        "refused": "Connection refused",
        "silent": "it takes more than 2 s" if "takes" in reasons[0] else "timed out",
        "unreadable": "no sample of a metric",
        "no such metric": "has no value of up",
        "not a number": "has no value of up",
        "status": "answers with status 503",
    }
    assert words[trouble] in reasons[0]


def test_a_condition_that_holds_at_the_start_is_refused(tmp_path: Path, site: Site) -> None:
    site.body = "up 0\n"
    (tmp_path / "stop").touch()
    metric = f"metric:{site.url} up < 1"
    for text, words in (
        (f"file:{tmp_path}/stop", "exists"),
        (metric, "up is 0, < 1"),
        (f"metric:{site.url} down < 1", "has no value of down"),
        ("url:http://127.0.0.1:1/", "Connection refused"),
    ):
        with pytest.raises(BadInput) as caught, watching(text):
            pass
        assert (caught.value.field, caught.value.value) == ("abort", text)
        assert words in caught.value.remedy
    assert "ck-abort" not in {thread.name for thread in threading.enumerate()}


def test_silent_servers_do_not_delay_other_conditions(tmp_path: Path, site: Site) -> None:
    others = [f"url:{site.url}?{number}" for number in range(8)]
    with watching(*others, f"file:{tmp_path}/stop") as reasons:
        site.status = 0
        began_s = time.monotonic()
        (tmp_path / "stop").touch()
        assert reason_of(reasons).startswith("file:")
        assert time.monotonic() - began_s < 4 * LIMIT_S  # one after the other: 8 * LIMIT_S


def test_a_closed_watch_calls_no_more(tmp_path: Path) -> None:
    reasons = list[str]()
    watch = AbortWatch(
        parse_conditions([f"file:{tmp_path}/stop"]), reasons.append, interval_s=INTERVAL_S
    )
    watch.close()
    (tmp_path / "stop").touch()
    watch.close()
    assert not reasons
    assert "ck-abort" not in {thread.name for thread in threading.enumerate()}


def test_the_callback_may_close_the_watch(tmp_path: Path) -> None:
    closed = threading.Event()

    def abort(reason: str) -> None:
        watch.close()
        closed.set()

    watch = AbortWatch(parse_conditions([f"file:{tmp_path}/stop"]), abort, interval_s=INTERVAL_S)
    os.mkfifo(tmp_path / "stop")
    assert closed.wait(10)
