"""The client of a hand, with a hand that runs on this machine."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.hand.client import AS_USER, directory, no_namespaces, public_python
from support.hand.pipe_stream import stream_of
from support.hand.pipes import hand_on_processes
from support.waiting import wait_until

from chaoskit.attach.hands.hand import PING_S, QUERY_S, Hand, HandUnable
from chaoskit.errors import HarnessError, NodeUnreachable
from chaoskit.process.linux import is_ending, start_ticks


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def identity(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return {"pid": process.pid, "ticks": start_ticks(process.pid)}


def test_effects_are_begun_and_lifted_by_the_number_of_their_request(
    sleeper: subprocess.Popen[bytes],
) -> None:
    events: list[Mapping[str, Any]] = []
    with hand_on_processes(events=events) as (client, _):
        stop = client.ask("stop", **identity(sleeper), lasts_s=60)
        assert stop["held"] is True
        client.ask("lift", effect=stop["number"])
        wait_until(lambda: events, "the event")
        assert (events[0]["event"], events[0]["effect"]) == ("ended", stop["number"])


def test_a_refusal_of_the_kernel_names_its_remedy(sleeper: subprocess.Popen[bytes]) -> None:
    if reason := no_namespaces():
        pytest.skip(reason)
    with hand_on_processes(prefix=AS_USER) as (client, _):
        with pytest.raises(HandUnable, match="runAsUser: 0") as refused:
            client.ask("stop", **identity(sleeper), lasts_s=1)
        assert "runs as uid 0" in refused.value.reason


def test_bad_input_is_an_error_that_names_the_field(sleeper: subprocess.Popen[bytes]) -> None:
    with hand_on_processes() as (client, _):
        with pytest.raises(HarnessError, match="ticks=1"):
            client.kill(sleeper.pid, 1)
        assert not is_ending(sleeper.pid)
        assert client.ask("hello")["role"] == "processes"


def test_a_process_is_killed_with_evidence(sleeper: subprocess.Popen[bytes]) -> None:
    with hand_on_processes() as (client, _):
        assert client.kill(**identity(sleeper))["by"] == "signal"
        assert sleeper.wait() == -signal.SIGKILL


def test_a_kill_of_the_init_of_the_hand_itself_is_known_by_its_event() -> None:
    """The hand is in the pid namespace of its target, and dies with it before it can answer."""
    if reason := no_namespaces():
        pytest.skip(reason)
    script = f"cd {directory()}; {public_python()} -S -m hand --processes; sleep 600"
    unshared = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    process = subprocess.Popen(unshared, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    client = Hand("the hand", stream_of(process))
    try:
        init = next(record for record in client.ask("hello")["processes"] if record["pid"] == 1)
        assert client.kill(1, init["ticks"])["by"] == "tracer"
        wait_until(lambda: not client.is_open, "the end of the hand")
    finally:
        client.close()
        process.kill()
        process.wait()


def test_a_hand_that_ends_is_known_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    with hand_on_processes() as (client, process):
        client.ask("hello")
        process.kill()
        wait_until(lambda: not client.is_open, "the end of the hand")
        with pytest.raises(NodeUnreachable):
            client.ask("hello")


def test_a_hand_without_an_answer_is_gone_after_the_limit() -> None:
    with hand_on_processes() as (client, process):
        client.ask("hello")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(NodeUnreachable, match=r"did not answer hello within 0\.2 s"):
            client.ask("hello", limit_s=0.2)
        process.send_signal(signal.SIGCONT)


@pytest.mark.costly
def test_a_hand_that_is_not_asked_is_kept_by_pings(sleeper: subprocess.Popen[bytes]) -> None:
    """A hand ends after some seconds without a line, and with it its effects."""
    silent_s = 1.5 * PING_S
    with hand_on_processes("--silent-s", str(silent_s)) as (client, _):
        stop = client.ask("stop", **identity(sleeper), lasts_s=60)
        left_s = 60 - 2 * silent_s
        wait_until(
            lambda: client.ask("counters", effect=stop["number"])["left_s"] < left_s,
            "more time than a silent hand has",
            limit_s=60.0,
            poll_s=1.9 * silent_s,
        )
        assert client.is_open


def test_questions_to_a_silent_hand_fail_at_once_after_the_first_one() -> None:
    with hand_on_processes() as (client, process):
        client.query("list")
        process.send_signal(signal.SIGSTOP)
        for limit_s in (2 * QUERY_S, QUERY_S / 2):
            asked_s = time.monotonic()
            with pytest.raises(NodeUnreachable):
                client.query("list")
            assert time.monotonic() < asked_s + limit_s
        assert client.is_open
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: is_answering(client), "an answer")


def is_answering(client: Hand) -> bool:
    """Return whether a hand answers a question."""
    try:
        client.query("list")
    except NodeUnreachable:
        return False
    return True
