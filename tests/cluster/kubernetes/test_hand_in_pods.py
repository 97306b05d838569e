"""Tests of hands in ephemeral containers of pods, beside a process without any right."""

from __future__ import annotations

import signal
import time

import pytest
from support.hand.in_pods import NET_ADMIN, RESTRICTED, hand_in, hand_state, pod, status
from support.nodes import pods
from support.waiting import stays, wait_until

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
#: A process that writes the time of this machine's clock every 10 ms.
TICKING = "import time\nwhile True: print('%.3f' % time.monotonic()); time.sleep(0.01)"
#: A server that answers what it receives.
SERVER = """
import socket
server = socket.create_server(("", 7000))
while True:
    connection, _ = server.accept()
    while data := connection.recv(100):
        connection.sendall(data)
"""
CLIENT = """
import socket, time
connection = socket.create_connection(("{address}", 7000))
while True:
    connection.sendall(b"x")
    connection.recv(1)
    print('%.3f' % time.monotonic())
    time.sleep(0.01)
"""


def last_tick_s(name: str) -> float:
    """Return the time that a pod has written last; 0 before the first."""
    lines = pods.log(name).splitlines()
    return float(lines[-1]) if lines else 0.0


def wait_for_tick(name: str) -> None:
    now_s = time.monotonic()
    wait_until(lambda: last_tick_s(name) > now_s, "a tick")


def test_pid_one_is_stopped_and_goes_on_when_the_client_is_killed() -> None:
    with pod("hand-stop", TICKING) as name, hand_in(name, "processes", RESTRICTED) as client:
        wait_for_tick(name)
        stopped = client.do("stop", **client.identity(1), lasts_s=600)
        assert stopped["held"] is True
        stopped_s = time.monotonic()
        stays(lambda: last_tick_s(name) <= stopped_s, "no tick", for_s=0.5)
        client.process.send_signal(signal.SIGKILL)
        wait_for_tick(name)
        wait_until(lambda: "terminated" in hand_state(name), "the end of the hand")
        assert hand_state(name)["terminated"]["exitCode"] == 0


def test_pid_one_is_killed_and_a_second_hand_enters_the_new_container() -> None:
    with pod("hand-kill", TICKING) as name:
        wait_for_tick(name)
        with hand_in(name, "processes", RESTRICTED) as client:
            identity = client.identity(1)
            client.send(
                b'{"number": 99, "do": "kill", "pid": 1, "ticks": %d}\n' % identity["ticks"]
            )
            assert client.event("killing")["request"] == 99
            wait_until(lambda: pods.restarts({"status": status(name)}) == 1, "the new container")
            ended = status(name)["containerStatuses"][0]["lastState"]["terminated"]
            assert ended["exitCode"] == 128 + signal.SIGKILL
            wait_until(lambda: "terminated" in hand_state(name), "the end of the hand")
        wait_for_tick(name)
        with hand_in(name, "processes", RESTRICTED, container="second") as client:
            assert client.identity(1)["ticks"] > identity["ticks"]
            assert client.ask("kill", **identity)["error"]["field"] == "ticks"


def test_a_pod_is_cut_off_from_another_one() -> None:
    with pod("hand-server", SERVER) as server:
        address = status(server)["podIP"]
        with pod("hand-client", CLIENT.format(address=address)) as name:
            wait_for_tick(name)
            with hand_in(name, "network", NET_ADMIN) as client:
                assert client.do("hello")["unable"] == {}
                cut = client.do("cut", addresses=[address], lasts_s=1.5)
                cut_s = time.monotonic()
                assert cut["armed"] is True
                evidence = client.event("ended", cut["effect"])["evidence"]
                assert evidence["packets"]["out"]["dropped"] > 0
                wait_until(lambda: last_tick_s(name) > cut_s + 1.0, "the end of the cut")
                times_s = [float(line) for line in pods.log(name).splitlines()]
                assert not [tick_s for tick_s in times_s if cut_s < tick_s < cut_s + 1.3]
