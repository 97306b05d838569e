"""Tests of the end of a hand, and of requests that it refuses."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping

import pytest
from support.hand.client import HandClient, directory, hand, public_python
from support.hand.targets import Target, target
from support.waiting import stays, wait_until

LONG_S = 600.0


@contextlib.contextmanager
def deaf_client(role: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a hand whose answers are not read."""
    command = [public_python(), "-m", "hand", f"--{role}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=directory())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def send(process: subprocess.Popen[bytes], request: Mapping[str, object]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()


def stop(client: HandClient, process: Target) -> None:
    assert client.do("stop", **client.identity(process.pid), lasts_s=LONG_S)["held"] is True


def test_the_end_of_the_input_ends_all_effects_and_the_hand() -> None:
    with hand("processes") as client, target() as process, target(threads=3) as other:
        stop(client, process)
        stop(client, other)
        client.close_input()
        assert client.wait() == 0
        assert [line["why"] for line in client.lines[-3:]] == ["end of input"] * 3
        process.wait_for_tick()
        other.wait_for_tick()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_effects_and_the_hand(signum: signal.Signals) -> None:
    with hand("processes") as client, target() as process:
        stop(client, process)
        client.process.send_signal(signum)
        assert client.wait() == 0
        assert client.event("ended")["why"] == signum.name
        process.wait_for_tick()


def test_silence_of_the_client_ends_all_effects_and_the_hand() -> None:
    with hand("processes", "--silent-s", "0.7") as client, target() as process:
        stop(client, process)
        silent_s = time.monotonic()
        assert client.wait() == 0
        assert 0.6 < time.monotonic() - silent_s < 5
        assert client.event("ended")["why"] == "silence"
        process.wait_for_tick()


def test_a_hand_that_does_nothing_for_ten_seconds_exits() -> None:
    """The signal has the same effect as a call that does not return."""
    with hand("processes") as client, target() as process:
        stop(client, process)
        client.process.send_signal(signal.SIGSTOP)
        count = len(process.times_s())
        stays(lambda: len(process.times_s()) == count, "no tick", for_s=10.5, poll_s=0.1)
        client.process.send_signal(signal.SIGCONT)
        assert client.wait() == 70
        process.wait_for_tick()


@pytest.mark.parametrize("line", [b'{"number": 1, "do": "ping"}\n', b"no request\n"])
def test_any_line_of_the_client_keeps_the_hand_alive(line: bytes) -> None:
    with hand("processes", "--silent-s", "0.8") as client, target() as process:
        stop(client, process)
        for _ in range(8):
            stays(lambda: client.process.poll() is None, "the hand lives", for_s=0.2)
            client.send(line)
        assert client.do("counters", effect=2)["held"] is True


def test_a_client_that_reads_no_answers_ends_the_hand() -> None:
    """The client goes on to send requests, so it is not silent."""
    with target() as process, hand("processes") as observer:
        identity = observer.identity(process.pid)
        with deaf_client("processes") as client:
            send(client, {"number": 1, "do": "stop", **identity, "lasts_s": LONG_S})
            wait_until(lambda: observer.do("look", **identity)["states"] == {"t": 1}, "the stop")
            while client.poll() is None:
                send(client, {"number": 2, "do": "list"})
            assert client.returncode == 0
            process.wait_for_tick()


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (b"no JSON", "line"),
        (b"[1]", "line"),
        (b"\xff\xfe", "line"),
        (b"[" * 60_000, "line"),
        (b'{"do": "ping"}', "number"),
        (b'{"number": true, "do": "ping"}', "number"),
        (b'{"number": -1, "do": "ping"}', "number"),
        (b'{"number": 7}', "do"),
        (b'{"number": 7, "do": "explode"}', "do"),
        (b'{"number": 7, "do": "cut"}', "do"),
        (b'{"number": 7, "do": "ping", "extra": 1}', "extra"),
        (b'{"number": 7, "do": "stop", "pid": PID, "ticks": TICKS}', "lasts_s"),
        (b'{"number": 7, "do": "stop", "pid": PID, "ticks": TICKS, "lasts_s": 0}', "lasts_s"),
        (b'{"number": 7, "do": "stop", "pid": PID, "ticks": TICKS, "lasts_s": NaN}', "line"),
        (b'{"number": 7, "do": "stop", "pid": PID, "ticks": TICKS, "lasts_s": 1e999}', "lasts_s"),
        (b'{"number": 7, "do": "stop", "pid": PID, "ticks": TICKS, "lasts_s": "3"}', "lasts_s"),
        (b'{"number": 7, "do": "stop", "pid": "PID", "ticks": TICKS, "lasts_s": 3}', "pid"),
        (b'{"number": 7, "do": "stop", "pid": 4194304, "ticks": 1, "lasts_s": 3}', "ticks"),
        (b'{"number": 7, "do": "kill", "pid": PID}', "ticks"),
        (b'{"number": 7, "do": "throttle", "pid": PID, "ticks": TICKS, "lasts_s": 3}', "share"),
        (b'{"number": 7, "do": "lift", "effect": 5}', "effect"),
        (b'{"number": 7, "do": "extend", "effect": 5, "lasts_s": 5}', "effect"),
    ],
)
def test_a_bad_request_is_answered_and_changes_nothing(line: bytes, field: str) -> None:
    with target() as process, hand("processes") as client:
        identity = client.identity(process.pid)
        line = line.replace(b"PID", b"%d" % identity["pid"])
        line = line.replace(b"TICKS", b"%d" % identity["ticks"])
        client.send(line + b"\n")
        answer = client.line(lambda answer: "error" in answer, "an error")
        assert answer["error"]["field"] == field
        assert answer["error"]["remedy"]
        assert answer["number"] == (7 if b'"number": 7' in line else None)
        before = client.do("look", **identity)["switches"]
        process.wait_for_tick()
        assert client.do("look", **identity)["switches"] > before


def test_a_failure_of_the_system_is_answered() -> None:
    """The hand may open no further file."""
    with hand("processes", prefix=("prlimit", "--nofile=5")) as client:
        assert "Too many open files" in client.ask("list")["unable"]["reason"]
        assert client.do("ping")


def test_a_number_of_a_lasting_effect_is_refused_for_another() -> None:
    with target() as process, target() as other, hand("processes") as client:
        stop(client, process)
        identity = client.identity(other.pid)
        request = {"number": 2, "do": "stop", **identity, "lasts_s": LONG_S}
        client.send(json.dumps(request).encode() + b"\n")
        error = client.line(lambda line: "error" in line, "an error")["error"]
        assert error["field"] == "number"
        other.wait_for_tick()


def test_a_line_that_is_too_long_is_refused_and_the_next_one_is_answered() -> None:
    with hand("processes") as client:
        client.send(b'{"number": 5, "do": "ping", "extra": "' + b"x" * 200_000)
        error = client.line(lambda line: "error" in line, "an error")["error"]
        assert "65536 bytes" in error["remedy"]
        client.send(b'"}\n{"number": 6, "do": "ping"}\n')
        client.line(lambda line: line.get("number") == 6, "the next answer")
        assert len(client.lines) == 2


def test_requests_of_one_packet_are_answered_in_order() -> None:
    with hand("processes") as client:
        client.send(b"".join(b'{"number": %d, "do": "ping"}\n' % number for number in range(500)))
        wait_until(lambda: len(client.lines) == 500, "all answers")
        assert [line["number"] for line in client.lines] == list(range(500))
