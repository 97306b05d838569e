"""What a launcher takes by HTTP, file and signal is what its coordinator is told: the door alone, without a job."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from rich.console import Console

from chaoskit.config import JobSpec, RunConfig
from chaoskit.elastic.client import DOOR, Door, Reply, Run, open_door
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput
from chaoskit.experiment.requests import Requests
from chaoskit.faces import door
from chaoskit.messages import (
    Answered,
    Heartbeat,
    LendNodes,
    Message,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
    Welcome,
    WorldSize,
)

LIMIT_S = 20.0


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


class Launcher:
    """A door, and whoever stands behind it: keeps what it is to send, and answers at once."""

    def __init__(self, directory: Path) -> None:
        self.requests, self.shown, self.sent = Requests(), io.StringIO(), list[Message]()
        self.directory, self.answers, self.accepts = directory, True, True
        elastic = ElasticPolicy(min_replicas=1, max_replicas=4)
        self.requests.hear(Welcome(RunConfig(job=JobSpec("job.py"), nodes=2, elastic=elastic), (), 1, os.getpid()))
        self.requests.hear(Heartbeat("node1", ()))

    @contextlib.contextmanager
    def listening(self) -> Iterator[Door]:
        over = threading.Event()
        conductor = threading.Thread(target=self._conduct, args=(over,))
        conductor.start()
        try:
            with door.listening(self.requests, self.directory, Console(file=self.shown, width=200)) as found:
                yield found
        finally:
            over.set()
            conductor.join()

    def _conduct(self, over: threading.Event) -> None:
        while not over.wait(0.002):
            for message in self.requests.take():
                self.sent.append(message)
                if self.answers and isinstance(message, ScaleTo | LendNodes):
                    self.requests.hear(Answered(message.request, self.accepts, "as you like", ("node1",)))

    def asked(self) -> list[Message]:
        """Without the numbers of requests, which are drawn."""
        return [msgspec.structs.replace(one, request="") if hasattr(one, "request") else one for one in self.sent]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_what_is_asked_is_what_the_coordinator_is_told(launcher: Launcher) -> None:
    with launcher.listening():
        run = Run(launcher.directory)
        assert run.scale(3, "somebody") == Reply(True, "as you like", ("node1",))
        assert run.lend(2, "urgent", 7.5).nodes == ("node1",)
        assert run.notice("node1", 5.5).accepted
        assert run.give_back("urgent").accepted
        until(lambda: len(launcher.sent) == 4)
    assert launcher.asked() == [
        ScaleTo("", 3, "somebody"),
        LendNodes("", "urgent", 2, 7.5),
        SpotNotice("node1", 5.5),
        ReturnNodes("urgent"),
    ]
    assert not (launcher.directory / DOOR).exists()


def test_who_was_refused_nodes_has_none_to_give_back(launcher: Launcher) -> None:
    """But what nobody has answered may have been done."""
    with launcher.listening():
        run, launcher.accepts = Run(launcher.directory), False
        assert not run.lend(2, "urgent", 7.5).accepted
        assert run.give_back("urgent") == Reply(False, "'urgent' has no nodes of this run")
        launcher.answers = False
        assert "may still do" in launcher.requests.lend("unheard", 2, 7.5, timeout_s=0.01).reason
        assert run.give_back("unheard").accepted


def test_whoever_waits_for_the_file_finds_it_whole(tmp_path: Path) -> None:
    over, damaged = threading.Event(), list[BadInput]()

    def look() -> None:
        while not over.is_set():
            if (tmp_path / DOOR).exists():
                try:
                    Run(tmp_path)
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
    """Whoever listens on every address takes a connection to another one of loopback's, too."""
    with launcher.listening() as found:
        port = urlsplit(found.url).port
        assert port is not None
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("world/of", None, 404),
        ("shrink", b"{}", 404),
        ("scale", b'{"size": 2, "siez": 3}', 400),
        ("scale", b"", 400),
        ("lend", b'{"job": "urgent", "nodes": 1}', 400),
    ],
)
def test_what_makes_no_sense_is_refused_and_told_to_nobody(
    launcher: Launcher, path: str, data: bytes | None, status: int
) -> None:
    with launcher.listening() as found:
        headers = {"Authorization": f"Bearer {found.token}"}
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{found.url}/{path}", data, headers), timeout=LIMIT_S)
    assert refused.value.code == status
    assert launcher.sent == []


def test_a_file_is_obeyed_once_each_time_that_it_is_written(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said before the launch is of another run; what is no number is told to whoever looks."""
    looks, genuine = 0, door._stamp

    def stamp(path: Path) -> tuple[int, int] | None:
        nonlocal looks
        looks += 1
        return genuine(path)

    def look_twice() -> None:
        seen = looks
        until(lambda: looks > seen + 2)

    monkeypatch.setattr(door, "_stamp", stamp)
    monkeypatch.setattr(door, "_LOOK_S", 0.002)
    file = launcher.directory / door.SCALE_FILE
    file.write_text("4")
    with launcher.listening():
        look_twice()
        assert launcher.sent == []
        for text in ("3\n", "two", " 2 "):
            fresh = launcher.directory / "fresh"
            fresh.write_text(text)
            fresh.replace(file)
            look_twice()
        until(lambda: "as you like" in launcher.shown.getvalue().splitlines()[-1])
    assert launcher.asked() == [ScaleTo("", size, "the file scale") for size in (3, 2)]
    assert "refused: write a number of nodes" in launcher.shown.getvalue()


def test_a_signal_asks_for_one_more_or_less_than_was_wanted_last(launcher: Launcher) -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    with launcher.listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: len(launcher.sent) == 1)
        launcher.requests.hear(WorldSize(2, 4, ("node0", "node1"), "there are no more nodes"))
        os.kill(os.getpid(), signal.SIGUSR2)
        until(lambda: len(launcher.sent) == 2)
    assert launcher.asked() == [ScaleTo("", 3, "a signal"), ScaleTo("", 3, "a signal")]
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == before


@pytest.mark.parametrize(("wanted", "larger", "smaller"), [(2, 4, 1), (4, 5, 2), (1, 2, 0)])
def test_a_signal_asks_for_a_size_that_the_policy_allows(wanted: int, larger: int, smaller: int) -> None:
    """At the end of the sizes for one that it does not: the answer says which there are."""
    elastic = ElasticPolicy(min_replicas=1, max_replicas=4, replica_discrete_values=(1, 2, 4))
    requests = Requests()
    requests.hear(Welcome(RunConfig(job=JobSpec("job.py"), nodes=wanted, elastic=elastic), (), 1, os.getpid()))
    requests.step_size(1)
    requests.step_size(-1)
    assert [one.size for one in requests.take() if isinstance(one, ScaleTo)] == [larger, smaller]


def test_whoever_waits_is_told_that_the_run_is_over(launcher: Launcher) -> None:
    launcher.answers = False
    with ThreadPoolExecutor(1) as pool:
        with launcher.listening():
            waits = pool.submit(Run(launcher.directory).scale, 3)
            until(lambda: bool(launcher.sent))
            launcher.requests.end()
            assert waits.result(LIMIT_S) == Reply(False, "the run is over")
        assert launcher.requests.scale(2) == Reply(False, "the run is over")
