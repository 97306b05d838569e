"""Hands by exec in the container of their target, without an image, on a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.hand.in_pods import pod, status
from support.nodes import pods
from support.waiting import stays, wait_until

from chaoskit.attach.hands.hand_container import PROCESSES, ContainerExec
from chaoskit.attach.hands.hand_kernel import HandKernel
from chaoskit.attach.hands.start import HandPod, start_hand, why_no_hand
from chaoskit.errors import HarnessError
from chaoskit.hand import PROGRAM_NAME
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
RANKED = """
import os, subprocess, sys
environment = {**os.environ, "RANK": "3"}
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
"""
#: A process that writes the time of this machine's clock every 10 ms.
TICKING = "import time\nwhile True: print('%.3f' % time.monotonic()); time.sleep(0.01)"
#: A program that stops pid 1 of a pod by exec, and waits to be killed.
STOPS = """
import sys
from chaoskit.attach.hands.hand_container import PROCESSES, ContainerExec
from chaoskit.attach.hands.start import HandPod, start_hand
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
namespace, kubeconfig, *pod = sys.argv[1:]
api = KubernetesApi(namespace=namespace, kubeconfig=kubeconfig)
hand = start_hand(api, HandPod(*pod), "main", PROCESSES, ContainerExec())
ticks = hand.ask("find", pid=1)["ticks"]
assert hand.ask("stop", pid=1, ticks=ticks, lasts_s=600)["held"]
print("stopped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    kubeconfig = os.environ[pods.VARIABLE_OF_TESTS]
    with closing(KubernetesApi(namespace=pods.namespace(), kubeconfig=kubeconfig)) as client:
        yield client


def target(name: str) -> HandPod:
    return HandPod(name, pods.pods()[name]["metadata"]["uid"])


def last_tick_s(name: str) -> float:
    """Return the time that a pod has written last; 0 before the first."""
    lines = pods.log(name).splitlines()
    return float(lines[-1]) if lines else 0.0


def wait_for_tick(name: str) -> None:
    now_s = time.monotonic()
    wait_until(lambda: last_tick_s(name) > now_s, "a tick")


def test_ranks_are_read_and_processes_stopped_and_killed(api: KubernetesApi) -> None:
    """The hand is no process of the tree of pid 1, and the pod has no further container."""
    with pod("exec-kernel", RANKED, restarts=False) as name:
        began_s = time.monotonic()
        with closing(start_hand(api, target(name), "main", PROCESSES, ContainerExec())) as hand:
            print(f"started in {1000 * (time.monotonic() - began_s):.0f} ms")
            kernel = HandKernel(lambda: hand, lambda: status(name)["phase"] == "Failed")
            root = kernel.find(1)
            ((rank, launched),) = wait_until(
                lambda: kernel.launched_ranks(root).items(), "the rank"
            )
            assert launched == LaunchedRank(3, "RANK")
            assert kernel.tree(root) == [root, rank]
            listed = {process["pid"]: process for process in hand.ask("list")["processes"]}
            own = listed[hand.ask("hello")["pid"]]
            assert (own["name"], own["parent"]) == (PROGRAM_NAME, 0)
            for process in (root, rank):
                process.signal(signal.SIGSTOP)
                assert process.is_stopped()
                process.signal(signal.SIGCONT)
                assert not process.is_stopped()
            root.signal(signal.SIGKILL)
            wait_until(lambda: status(name)["phase"] == "Failed", "the end of the pod")
            wait_until(lambda: not hand.is_open, "the end of the hand")
        (container,) = status(name)["containerStatuses"]
        assert container["state"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
        assert not pods.pods()[name]["spec"].get("ephemeralContainers")


def test_a_stop_ends_when_the_client_is_killed(api: KubernetesApi) -> None:
    with pod("exec-killed", TICKING) as name:
        wait_for_tick(name)
        arguments = [pods.namespace(), os.environ[pods.VARIABLE_OF_TESTS], *target(name)]
        pipe = subprocess.PIPE
        client = subprocess.Popen(
            [sys.executable, "-c", STOPS, *arguments], stdin=pipe, stdout=pipe
        )
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"stopped\n"
            stopped_s = time.monotonic()
            stays(lambda: last_tick_s(name) <= stopped_s, "no tick", for_s=0.5)
            client.kill()
            killed_s = time.monotonic()
            wait_for_tick(name)
        finally:
            client.kill()
            client.wait()
        ticks_s = [float(line) for line in pods.log(name).splitlines()]
        after_s = min(tick_s for tick_s in ticks_s if tick_s > killed_s) - killed_s
        print(f"goes on {1000 * after_s:.0f} ms after the end of the client")
        assert after_s < 5.0
        with closing(start_hand(api, target(name), "main", PROCESSES, ContainerExec())) as hand:
            wait_until(lambda: len(hands(hand.ask("list"))) == 1, "the end of the first hand")


def hands(listed: dict[str, list[dict[str, object]]]) -> list[object]:
    """Return the pids of hands in the answer to a request for all processes."""
    return [entry["pid"] for entry in listed["processes"] if entry["name"] == PROGRAM_NAME]


def test_a_container_without_python_is_refused(api: KubernetesApi) -> None:
    with pod("exec-python", TICKING) as name:
        no_python = ContainerExec("python-that-is-not-there")
        reason = why_no_hand(api, target(name), "main", PROCESSES, no_python)
        print(reason)
        assert "let its image have python3" in reason
        assert "\n" not in reason
        assert why_no_hand(api, target(name), "main", PROCESSES, ContainerExec()) == ""
        former = HandPod(name, "the UID of an earlier pod")
        with pytest.raises(HarnessError, match="another one has its name"):
            start_hand(api, former, "main", PROCESSES, ContainerExec())
