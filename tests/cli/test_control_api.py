"""Requests by HTTP reach the coordinator; the control API of a launcher is tested alone, without a
job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from support.waiting import LIMIT_S, wait_until

from chaoskit.config import RunConfig
from chaoskit.elastic.client import DOOR, Door, RequestReply, RunClient, Unanswered, open_door
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.requests import Requests
from chaoskit.job import JobSpec
from chaoskit.launcher import control_api
from chaoskit.wire.messages import (
    Answered,
    Heartbeat,
    LendNodes,
    Message,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
    Welcome,
)


class Launcher:
    """A control API, with a conductor behind it that records its messages and answers at once."""

    def __init__(self, directory: Path) -> None:
        self.requests, self.sent = Requests(), list[Message]()
        self.directory, self.answers, self.accepts = directory, True, True
        elastic = ElasticPolicy(min_replicas=1, max_replicas=4)
        self.requests.hear(
            Welcome(RunConfig(job=JobSpec("job.py"), nodes=2, elastic=elastic), 1, os.getpid())
        )
        self.requests.hear(Heartbeat("node1", ()))

    @contextlib.contextmanager
    def listening(self) -> Iterator[Door]:
        over = threading.Event()
        conductor = threading.Thread(target=self._conduct, args=(over,))
        conductor.start()
        try:
            with control_api.listening(self.requests, self.directory) as door:
                yield door
        finally:
            over.set()
            conductor.join()

    def _conduct(self, over: threading.Event) -> None:
        while not over.wait(0.002):
            for message in self.requests.take():
                self.sent.append(message)
                if self.answers and isinstance(message, ScaleTo | LendNodes):
                    self.requests.hear(
                        Answered(message.request, self.accepts, "as you like", ("node1",))
                    )

    def sent_messages(self) -> list[Message]:
        """Return the sent messages without their request numbers, which are random."""
        return [
            msgspec.structs.replace(message, request="") if hasattr(message, "request") else message
            for message in self.sent
        ]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_what_is_asked_is_what_the_coordinator_is_told(launcher: Launcher) -> None:
    """Each request over HTTP becomes the message that it asks for, and gets the answer of the
    coordinator.
    """
    with launcher.listening():
        run = RunClient(launcher.directory)
        assert run.scale(3, "a scheduler") == RequestReply(True, "as you like", ("node1",))
        assert run.lend(2, "urgent", 7.5).nodes == ("node1",)
        assert run.drain("node1", 5.5).accepted
        assert run.return_nodes("urgent").accepted
        wait_until(lambda: len(launcher.sent) == 4, "four messages")
    assert launcher.sent_messages() == [
        ScaleTo("", 3, "a scheduler"),
        LendNodes("", "urgent", 2, 7.5),
        SpotNotice("node1", 5.5),
        ReturnNodes("urgent"),
    ]
    assert not (launcher.directory / DOOR).exists()


def test_who_was_refused_nodes_has_none_to_give_back(launcher: Launcher) -> None:
    """A job that was refused nodes has none to return; a request without an answer may have been
    granted.
    """
    with launcher.listening():
        run, launcher.accepts = RunClient(launcher.directory), False
        assert not run.lend(2, "urgent", 7.5).accepted
        assert run.return_nodes("urgent") == RequestReply(
            False, "'urgent' has no nodes of this run"
        )
        launcher.answers = False
        assert (
            "may still carry out"
            in launcher.requests.lend("unheard", 2, 7.5, timeout_s=0.01).reason
        )
        assert run.return_nodes("unheard").accepted


def test_whoever_waits_for_the_file_finds_it_whole(tmp_path: Path) -> None:
    """A reader of the file with address and token never finds half of it."""
    over, damaged = threading.Event(), list[BadInput]()

    def look() -> None:
        while not over.is_set():
            if (tmp_path / DOOR).exists():
                try:
                    RunClient(tmp_path)
                except BadInput as error:
                    damaged.append(error)

    with ThreadPoolExecutor(1) as pool:
        looks = pool.submit(look)
        for number in range(300):
            open_door(tmp_path, Door("http://127.0.0.1:1", "t" * 32, number))
        over.set()
        looks.result(LIMIT_S)
    assert not damaged
    assert [path.name for path in tmp_path.iterdir()] == [DOOR]


def test_it_listens_to_this_machine_alone(launcher: Launcher) -> None:
    """The server binds 127.0.0.1 alone: a server on every address would accept another loopback
    address, too.
    """
    with launcher.listening() as door:
        port = urlsplit(door.url).port
        assert port is not None
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=LIMIT_S)


def test_a_body_of_a_negative_length_is_refused(launcher: Launcher) -> None:
    """The server does not wait for such a body."""
    with launcher.listening() as door:
        headers = {"Authorization": f"Bearer {door.token}", "Content-Length": "-1"}
        request = urllib.request.Request(f"{door.url}/scale", b"{}", headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=5.0)
    assert refused.value.code == 400


#: What may listen at the port of a launcher that is gone, by what it sends.
STRANGERS = {
    "a page": b"HTTP/1.0 200 OK\r\n\r\n<html>welcome</html>",
    "an empty answer": b"HTTP/1.0 200 OK\r\n\r\n",
    "JSON of another kind": b'HTTP/1.0 200 OK\r\n\r\n[{"accepted": true}]',
    "JSON without an end": b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000,
    "half of what was announced": b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "a page that says no": b"HTTP/1.0 404 Not Found\r\n\r\n<html>not here</html>",
    "another launcher": b'HTTP/1.0 401 Unauthorized\r\n\r\n{"error": "send the token"}',
    "bad input without its parts": b'HTTP/1.0 400 Bad Request\r\n\r\n{"error": "what?"}',
    "bad input that is no JSON": b"HTTP/1.0 400 Bad Request\r\n\r\n<html>what?</html>",
    "no HTTP": b"220 \x1b[31mmail.example.org ESMTP\r\n",
    "nothing": b"",
}


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Provide a server that sends ``answer`` to every request, and yield its URL."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            body_bytes = 0
            while (line := self.rfile.readline().strip()) != b"":
                name, _, text = line.partition(b":")
                body_bytes = int(text) if name.lower() == b"content-length" else body_bytes
            self.rfile.read(body_bytes)
            with contextlib.suppress(OSError):  # the client has read enough
                self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("answer", STRANGERS.values(), ids=STRANGERS)
def test_an_answer_of_a_stranger_is_none(tmp_path: Path, answer: bytes) -> None:
    """A strange server may listen at the address of a run that is over: the error names the run, in
    one line.
    """
    with answering(answer) as url:
        open_door(tmp_path, Door(url, "token", os.getpid()))
        run = RunClient(tmp_path)
        for ask in (run.state, lambda: run.scale(2), lambda: run.drain("node1", 1.0)):
            with pytest.raises(Unanswered) as refused:
                ask()
            assert str(tmp_path) in str(refused.value)
            assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "url",
    ["nowhere", "http://127.0.0.1:99999999", "http://[", "http://127.0.0.1:1", "ftp://127.0.0.1:1"],
)
def test_an_address_that_is_none_does_not_answer(tmp_path: Path, url: str) -> None:
    """A complete file with a meaningless address is reported like a launcher that is gone."""
    open_door(tmp_path, Door(url, "token", os.getpid()))
    with pytest.raises(Unanswered, match="it is over, or its launcher stands still"):
        RunClient(tmp_path).state()


DAMAGED = {
    "empty": b"",
    "torn": b'{"url": "http://127',
    "no text": b"\xff\x00",
    "another kind": b"[]",
    "fields missing": b'{"url": "http://127.0.0.1:1"}',
    "fields of other kinds": b'{"url": 1, "token": 2, "pid": "3"}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_address_is_bad_input(tmp_path: Path, content: bytes) -> None:
    """The error names the file and its damage."""
    (tmp_path / DOOR).write_bytes(content)
    with pytest.raises(
        BadInput, match=r"control\.json.*it is damaged .*name the directory of another run"
    ):
        RunClient(tmp_path)


def test_an_address_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    """The cases: no directory, a file in its place, no address in it, and a directory in place of
    the address.
    """
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "none", tmp_path / "file", tmp_path):
        with pytest.raises(BadInput, match="name the directory of a run that"):
            RunClient(directory)
    (tmp_path / DOOR).mkdir()
    with pytest.raises(BadInput, match="it cannot be read"):
        RunClient(tmp_path)


@pytest.mark.parametrize(
    "arguments", [("scale", "2"), ("node", "drain", "node1", "--grace-s", "5")]
)
def test_commands_end_in_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A damaged address is bad input; a strange server is an error of the run. Both print one
    line.
    """
    command = [sys.executable, "-m", "chaoskit", *arguments, "--run", str(tmp_path)]
    with answering(STRANGERS["a page"]) as url:
        open_door(tmp_path, Door(url, "token", os.getpid()))
        strange = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    (tmp_path / DOOR).write_text("")
    damaged = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (strange.returncode, damaged.returncode) == (11, 2)
    for ended in (strange, damaged):
        assert len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("world/of", None, 404),
        ("shrink", b"{}", 404),
        ("scale", b'{"size": 2, "siez": 3}', 400),
        ("scale", b"", 400),
        ("lend", b'{"job": "urgent", "nodes": 1}', 400),
        ("lend", b'{"job": "urgent", "nodes": 0, "grace_s": 1}', 400),
        ("lend", b'{"job": "", "nodes": 1, "grace_s": 1}', 400),
    ],
)
def test_what_makes_no_sense_is_refused_and_told_to_nobody(
    launcher: Launcher, path: str, data: bytes | None, status: int
) -> None:
    """A request with an unknown path or other fields is refused, and nothing is sent."""
    with launcher.listening() as door:
        headers = {"Authorization": f"Bearer {door.token}"}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(
                urllib.request.Request(f"{door.url}/{path}", data, headers), timeout=LIMIT_S
            )
    assert refused.value.code == status
    assert launcher.sent == []


def test_whoever_waits_is_told_that_the_run_is_over(launcher: Launcher) -> None:
    """A request that waits when the run ends, and one after it, are answered that the run is over."""
    launcher.answers = False
    with ThreadPoolExecutor(1) as pool:
        with launcher.listening():
            waits = pool.submit(RunClient(launcher.directory).scale, 3)
            wait_until(lambda: launcher.sent, "the request")
            launcher.requests.end()
            assert waits.result(LIMIT_S) == RequestReply(False, "the run is over")
        assert launcher.requests.scale(2) == RequestReply(False, "the run is over")
