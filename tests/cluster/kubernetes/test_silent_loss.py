"""The end of a pod as its peer sees it: a loss in silence is not heard, and a deletion is.

-> ``tests/process/hand/test_silent_loss.py``: what is left if a pod cannot be deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import pytest
from support.hand.client import directory
from support.hand.in_pods import PYTHON, mounts, pod, status
from support.nodes import pods
from support.waiting import stays, wait_until

from chaoskit.attach.hands.hand import Hand
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandImage
from chaoskit.attach.hands.start import HandPod, start_hand
from chaoskit.attach.jobs.pod_state import PodState, read_pod
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.attach.pods.silent_loss import SilentLosses
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
IMAGE = HandImage(pods.IMAGE, (PYTHON, "-S", "-m", "hand"), str(directory()), tuple(mounts()))
#: Seconds after the loss. The kubelet has ended the pod and its network by then.
SILENT_S = 8.0
#: The peer sends each 50 ms. It prints how its connection ends.
PEER = """
import socket, time
listener = socket.socket()
listener.bind(("0.0.0.0", 7001))
listener.listen()
connection, _ = listener.accept()
print("accepted", flush=True)
connection.setblocking(False)
try:
    while True:
        connection.send(b"x")
        try:
            if not connection.recv(65536):
                raise OSError("end of the stream")
        except BlockingIOError:
            pass
        time.sleep(0.05)
except OSError as error:
    print("heard:", error, flush=True)
time.sleep(600)
"""
TARGET = """
import socket
connection = socket.create_connection(("PEER", 7001))
while True:
    connection.send(connection.recv(65536))
"""


@dataclass
class LostPods:
    """Pods without a controller, whose names are their nodes.

    Attributes:
        hands: the process hand in each.
    """

    api: KubernetesApi
    hands: dict[str, Hand] = field(default_factory=dict)

    def pod(self, node: str) -> PodState:
        return read_pod(self.api.get("Pod", node))

    def is_pod_over(self, uid: str) -> bool:
        return all(entry["metadata"]["uid"] != uid for entry in pods.pods().values())

    def is_life_over(self, uid: str, container_id: str) -> bool:
        return self.is_pod_over(uid)

    def crash(self, node: str) -> None:
        init = self.hands[node].ask("find", pid=1)
        self.hands[node].kill(1, init["ticks"])

    def nodes_on(self, machine: str) -> tuple[str, ...]:
        return ()


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    kubeconfig = os.environ[pods.VARIABLE_OF_TESTS]
    with closing(KubernetesApi(namespace=pods.namespace(), kubeconfig=kubeconfig)) as client:
        yield client


@pytest.mark.parametrize("is_silent", [True, False], ids=["lost", "deleted"])
def test_a_peer_hears_of_a_deletion_but_not_of_a_loss(api: KubernetesApi, is_silent: bool) -> None:
    with ExitStack() as ended:
        peer = ended.enter_context(pod("loss-peer", PEER))
        target = TARGET.replace("PEER", status(peer)["podIP"])
        lost = ended.enter_context(pod("loss-target", target))
        wait_until(lambda: "accepted" in pods.log(peer), "the connection")
        lost_pods = LostPods(api)
        requests = PodRequests(api, lost_pods)
        state = lost_pods.pod(lost)
        if not is_silent:
            requests.delete(state, 0)
            wait_until(lambda: "heard:" in pods.log(peer), "the end of the connection")
            return
        made = HandPod(lost, state.uid)
        network = ended.enter_context(closing(start_hand(api, made, "main", NETWORK, IMAGE)))
        lost_pods.hands[lost] = ended.enter_context(
            closing(start_hand(api, made, "main", PROCESSES, IMAGE))
        )
        losses = SilentLosses(lost_pods, requests, lambda node: network)
        losses.lose(lost)
        assert lost_pods.is_pod_over(state.uid)
        assert losses.dropped(lost) >= 1
        stays(lambda: "heard:" not in pods.log(peer), "silence", for_s=SILENT_S, poll_s=0.5)
