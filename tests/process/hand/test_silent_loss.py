"""The loss of a node in silence: what its peers hear, and what is left if its pod cannot be deleted.

A socket of this process stands for a connection of the training. It is closed instead of a kill.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.hand.network import WHY_NOT
from support.hand.traffic import JobNodes, job_nodes
from support.nodes.api_server import ApiServer, api_server, refusal
from support.waiting import wait_until

from chaoskit.attach.hands.hand import Hand
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.attach.pods.silent_loss import SilentLosses
from chaoskit.errors import HarnessError
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"packets: {WHY_NOT}")
SILENT_S = 0.5


@dataclass
class Pods:
    """A job of one pod, ``a``, which is over once the server has taken its deletion.

    Attributes:
        end: the connection that ends with its processes; None if they are gone already.
        hand: a hand that ends with the processes, too.
    """

    server: ApiServer
    end: socket.socket | None
    hand: Hand | None = None

    def pod(self, node: str) -> PodState:
        return PodState("u1", node)

    def is_pod_over(self, uid: str) -> bool:
        return bool(self.deletions())

    def is_life_over(self, uid: str, container_id: str) -> bool:
        return self.is_pod_over(uid)

    def crash(self, node: str) -> None:
        if self.end is None:
            raise ProcessLookupError(node)
        self.end.close()
        if self.hand is not None:
            self.hand.close()

    def nodes_on(self, machine: str) -> tuple[str, ...]:
        return ()

    def deletions(self) -> list[Any]:
        """Return the bodies of the requests to delete the pod."""
        return [body for method, _, body in self.server.requests if method == "DELETE"]


@pytest.fixture
def nodes() -> Iterator[JobNodes]:
    with job_nodes("a", "b") as made:
        yield made


@pytest.fixture
def answers() -> dict[str, tuple[int, Any]]:
    """The answers of the API server, by method."""
    return {"DELETE": (200, {}), "GET": refusal(404, "no such pod")}


@pytest.fixture
def server(tmp_path: Path, answers: dict[str, tuple[int, Any]]) -> Iterator[ApiServer]:
    with api_server(tmp_path, lambda method, path, body: answers[method]) as made:
        yield made


@pytest.fixture
def api(server: ApiServer) -> Iterator[KubernetesApi]:
    with closing(KubernetesApi(kubeconfig=server.kubeconfig)) as client:
        yield client


def losses(api: KubernetesApi, pods: Pods, nodes: JobNodes) -> SilentLosses:
    return SilentLosses(pods, PodRequests(api, pods), nodes.hand)


def hears(end: socket.socket) -> bool:
    """Return whether anything arrives at the end of a connection, such as its end."""
    end.settimeout(SILENT_S)
    try:
        end.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def test_peers_of_a_lost_node_hear_nothing(
    api: KubernetesApi, server: ApiServer, nodes: JobNodes
) -> None:
    near, far = nodes.connection("a", "b")
    pods = Pods(server, near)
    lost = losses(api, pods, nodes)
    lost.lose("a")
    ((body),) = pods.deletions()
    assert (body["gracePeriodSeconds"], body["preconditions"]) == (0, {"uid": "u1"})
    assert lost.dropped("a") >= 1
    assert not hears(far)
    nodes.process("a").process.terminate()  # as the kubelet does
    nodes.process("a").process.wait()
    assert not hears(far)
    assert not nodes.passes("a", "b")


def test_a_hand_that_ends_with_the_processes_does_not_save_the_pod(
    api: KubernetesApi, server: ApiServer, nodes: JobNodes
) -> None:
    near, far = nodes.connection("a", "b")
    pods = Pods(server, near, nodes.hand("a"))
    lost = losses(api, pods, nodes)
    lost.lose("a")
    assert len(pods.deletions()) == 1
    assert lost.dropped("a") == 0
    assert not hears(far)


def test_packets_pass_again_if_the_pod_is_not_deleted(
    api: KubernetesApi,
    server: ApiServer,
    nodes: JobNodes,
    answers: dict[str, tuple[int, Any]],
) -> None:
    near, far = nodes.connection("a", "b")
    answers["DELETE"] = refusal(403, "no right")
    with pytest.raises(ApiError, match="no right"):
        losses(api, Pods(server, near), nodes).lose("a")
    assert nodes.passes("a", "b")  # at once, not after the time in the kernel
    wait_until(lambda: hears(far), "the end of the connection")


def test_a_node_without_processes_is_not_lost(
    api: KubernetesApi, server: ApiServer, nodes: JobNodes
) -> None:
    pods = Pods(server, None)
    with pytest.raises(ProcessLookupError):
        losses(api, pods, nodes).lose("a")
    assert pods.deletions() == []
    assert nodes.passes("a", "b")


def test_a_hand_that_cannot_silence_the_pod_leaves_it_alone(
    api: KubernetesApi, server: ApiServer, nodes: JobNodes
) -> None:
    near, far = nodes.connection("a", "b")
    pods = Pods(server, near)
    nodes.hand("a").close()
    with pytest.raises(HarnessError):
        losses(api, pods, nodes).lose("a")
    assert pods.deletions() == []
    near.sendall(b"x")
    assert hears(far)
