"""The hand whose modules come on its standard input, as by exec in a container without an image."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from support.hand.client import public_python
from support.hand.pipe_stream import stream_of
from support.waiting import wait_until

from chaoskit.attach.hands.exec_hand import bootstrap, hand_program
from chaoskit.attach.hands.hand import Hand
from chaoskit.hand import PROGRAM_NAME

_ENDS_S = 20.0


@contextlib.contextmanager
def program(announced: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the first lines of a hand, in a directory without any module of it."""
    command = [public_python(), "-I", "-S", "-c", bootstrap(), str(announced), "--processes"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd="/", stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def hand(process: subprocess.Popen[bytes]) -> Iterator[Hand]:
    """Send the modules, and make requests to the hand."""
    stream = stream_of(process)
    modules = hand_program()
    for begin in range(0, len(modules), 4096):
        stream.send(modules[begin : begin + 4096])
    client = Hand("the hand", stream)
    try:
        yield client
    finally:
        client.close()


def test_it_answers_and_ends_with_its_input() -> None:
    with program(len(hand_program())) as process:
        with hand(process) as client:
            hello = client.ask("hello")
            assert hello["pid"] == process.pid
            assert client.ask("find", pid=process.pid)["name"] == PROGRAM_NAME
        assert process.wait(_ENDS_S) == 0


def test_a_process_that_it_stops_goes_on_when_it_is_killed() -> None:
    counting = "n = 0\nwhile True: n += 1"
    target = subprocess.Popen([public_python(), "-S", "-c", counting])
    try:
        with program(len(hand_program())) as process, hand(process) as client:
            ticks = client.ask("find", pid=target.pid)["ticks"]
            assert client.ask("stop", pid=target.pid, ticks=ticks, lasts_s=600)["held"] is True
            process.send_signal(signal.SIGKILL)
            wait_until(lambda: state(target.pid) == "R", "the target runs")
    finally:
        target.kill()
        target.wait()


@pytest.mark.parametrize("is_cut_off", [True, False], ids=["end of input", "silence"])
def test_it_ends_if_its_modules_do_not_arrive(*, is_cut_off: bool) -> None:
    began_s = time.monotonic()
    with program(len(hand_program())) as process:
        assert process.stdin is not None
        process.stdin.write(hand_program()[:100])
        if is_cut_off:
            process.stdin.close()
        status = process.wait(_ENDS_S)
    if is_cut_off:
        assert status == 1
        assert time.monotonic() - began_s < 5.0
    else:
        assert status == -signal.SIGALRM


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0]
