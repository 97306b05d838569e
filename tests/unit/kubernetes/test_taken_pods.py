"""Pods of a session that end without its request, with supervisors on sockets and a small API
server.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.nodes.api_server import ApiServer, api_server, refusal
from support.waiting import wait_until

from chaoskit.errors import HarnessError
from chaoskit.journal import read_events
from chaoskit.journal.writer import own_version
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.kubernetes.api.background import BackgroundRequests
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.options import DrivenSession, KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests
from chaoskit.substrate.kubernetes.pods.manifests import STATION
from chaoskit.substrate.kubernetes.pods.pods import Pod, SessionPods
from chaoskit.substrate.kubernetes.preflight import FirstRefusal
from chaoskit.substrate.kubernetes.substrate import KubernetesSubstrate
from chaoskit.substrate.supervisor.messages import SupervisorHello, SupervisorReady
from chaoskit.substrate.supervisor.reception import Reception
from chaoskit.vocabulary import Event
from chaoskit.wire import frames

TOKEN = "of this test"
PODS, NODE = "/api/v1/namespaces/chaos/pods", "/api/v1/nodes/m1"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/m1"
EVENTS = "/api/v1/namespaces/chaos/events"
DELETED = {"deletionTimestamp": "2026-08-01T12:00:30Z"}


def node(ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"name": "m1"},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


class Cluster:
    """A session on a cluster of a single machine, ``m1``.

    Attributes:
        objects: answers of the server by path, beside those about pods: a status and a body.
        there: objects of pods by name.
        endings: answers to deletions and evictions of pods, by verb.
        silent: path of requests that the server does not answer.
        made_with: fields of the status of new pods, by station; their supervisors do not connect.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, Any]] = {
            NODE: (200, node()),
            LEASE: (404, {}),
            EVENTS: (200, {"items": []}),
        }
        self.there: dict[str, dict[str, Any]] = {}
        self.endings = {"DELETE": (200, dict[str, Any]()), "POST": (201, dict[str, Any]())}
        self.made_with = dict[str, dict[str, Any]]()
        self.silent = ""
        self.server: ApiServer
        self.session: SessionPods
        self._supervisors: list[Any] = []

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == self.silent:
            raise ConnectionAbortedError
        if method == "GET" and path in self.objects:
            return self.objects[path]
        if path.startswith(f"{PODS}/") and method in self.endings:
            return self.endings[method]
        if method == "POST":
            self._make(body)
        return 200, body or {"items": list(self.there.values())}

    def _make(self, pod: Any) -> None:
        name, station = pod["metadata"]["name"], pod["metadata"]["labels"][STATION]
        status = self.made_with.get(station)
        self.there[name] = pod | {"status": {"phase": "Running"} | (status or {})}
        if status is None:
            (container,) = pod["spec"]["containers"]
            runner = container["command"][container["command"].index("--dial") + 1]
            threading.Thread(
                target=self._dial, args=[name, *runner.split(":")], daemon=True
            ).start()

    def _dial(self, place: str, host: str, port: str) -> None:
        connection = frames.connect((host, int(port)), TOKEN)
        self._supervisors.append(connection)
        frames.send(connection, SupervisorHello(place, "10.0.0.1", "m1"))
        frames.send(connection, SupervisorReady(own_version()))

    def pod(self, station: str = "node1") -> Pod:
        """Return a pod that runs."""
        self.session.ensure_pods([station])
        pod = self.session.get(station)
        assert pod is not None
        return pod

    def end_supervisors(self) -> None:
        for connection in self._supervisors:
            connection.close()

    def request_count(self, method: str, path: str) -> int:
        """Return how often the server received this request."""
        return sum((request[0], request[1]) == (method, path) for request in self.server.requests)

    def taken(self) -> list[Pod]:
        self.session.examine_machines()
        return self.session.pop_disrupted()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with session_on(tmp_path, startup_s=60.0) as cluster_of_session:
        yield cluster_of_session


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster with a session that waits only a moment for pods that do not run."""
    with session_on(tmp_path, startup_s=0.6) as cluster_of_session:
        yield cluster_of_session


@contextlib.contextmanager
def session_on(directory: Path, startup_s: float) -> Iterator[Cluster]:
    options = KubernetesOptions(
        image="registry/train:1", namespace="chaos", harness="pod", startup_s=startup_s
    )
    with contextlib.ExitStack() as stack:
        reception = stack.enter_context(contextlib.closing(Reception("127.0.0.1", TOKEN)))
        cluster, runner = Cluster(), f"127.0.0.1:{reception.address[1]}"

        def manifest(station: str, place: str) -> manifests.Manifest:
            return manifests.pod("s", station, place, runner, options, {}, None)

        cluster.server = stack.enter_context(api_server(directory, cluster.answer))
        api = stack.enter_context(
            contextlib.closing(KubernetesApi(kubeconfig=cluster.server.kubeconfig))
        )
        reception_of_pods, background = (reception, "127.0.0.1", manifest), BackgroundRequests()
        stack.callback(background.close, 0.0)
        cluster.session = SessionPods(
            api, "s", options, *reception_of_pods, lambda line: None, background
        )
        stack.callback(cluster.end_supervisors)
        stack.enter_context(contextlib.closing(cluster.session))
        yield cluster


def fall_silent(cluster: Cluster) -> Pod:
    """Have a pod lost because its supervisor does not answer, and wait until it is deleted."""
    pod = cluster.pod()
    cluster.session.note_silent(pod, 5)
    wait_until(lambda: pod.end_requested, "the deletion of the pod")
    return pod


# -- machines that go without a word ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "proof"),
    [
        ((200, node("Unknown")), "Ready is Unknown"),
        ((404, {}), "the API server has no node m1 any more"),
    ],
)
def test_a_machine_that_is_lost_takes_its_silent_pods(
    cluster: Cluster, lost: tuple[int, Any], proof: str
) -> None:
    """The API server learns of the loss long after the pod was deleted.

    The first sign is the first question.
    """
    pod = fall_silent(cluster)
    assert cluster.taken() == []
    cluster.objects[NODE] = lost
    taken = list[Pod]()
    wait_until(lambda: taken.extend(cluster.taken()) or taken, "the proof", poll_s=0.05)
    assert taken == [pod]
    assert (pod.first_sign_ns, cluster.session.has_unproven()) == (5, False)
    assert pod.disruption is not None
    assert pod.disruption.cause == "lost with its machine"
    assert proof in pod.disruption.detail


def test_a_silent_pod_that_is_being_deleted_is_taken_before_its_machine_is_lost(
    cluster: Cluster,
) -> None:
    pod = cluster.pod()
    cluster.there[pod.place]["metadata"] |= DELETED
    cluster.session.note_silent(pod)
    wait_until(lambda: pod.end_requested, "the deletion of the pod")
    assert cluster.taken() == [pod]
    assert not cluster.session.has_unproven()
    assert cluster.request_count("GET", NODE) == 0


def test_a_machine_that_is_heard_again_is_not_lost(cluster: Cluster) -> None:
    """The pod itself has failed, which is no proof of an outside cause.

    No end of a run waits for it.
    """
    cluster.objects[LEASE] = 200, {"spec": {"renewTime": "12:00:00"}}
    fall_silent(cluster)
    assert cluster.taken() == []
    assert cluster.session.has_unproven()
    cluster.objects[LEASE] = 200, {"spec": {"renewTime": "12:00:10"}}
    wait_until(
        lambda: cluster.taken() or not cluster.session.has_unproven(),
        "the second look",
        poll_s=0.05,
    )
    cluster.objects[NODE] = 200, node("Unknown")
    assert cluster.taken() == []


def test_without_the_right_to_read_nodes_nothing_is_proven(cluster: Cluster) -> None:
    """The right is asked for once, and no run waits for it."""
    cluster.objects[NODE] = refusal(403, "nodes is forbidden")
    fall_silent(cluster)
    assert cluster.taken() == []
    assert not cluster.session.has_unproven()
    assert cluster.request_count("GET", NODE) == 1


def test_a_server_that_does_not_answer_is_asked_again(cluster: Cluster) -> None:
    cluster.objects[NODE] = 501, {}
    fall_silent(cluster)
    assert cluster.taken() == []
    assert cluster.session.has_unproven()


@pytest.mark.parametrize("when", ["a fault", "another run"])
def test_what_a_run_has_broken_itself_or_lost_before_is_not_asked_for(
    cluster: Cluster, when: str
) -> None:
    pod = cluster.pod()
    pod.ends_by_plan = when == "a fault"
    cluster.session.note_silent(pod)
    wait_until(lambda: pod.end_requested, "the deletion of the pod")
    cluster.session.forget_disrupted()
    cluster.objects[NODE] = 404, {}
    assert cluster.taken() == []
    assert cluster.request_count("GET", NODE) == 0
    assert cluster.request_count("GET", EVENTS) == (when != "a fault")


def test_a_machine_that_this_run_breaks_is_not_asked_for_any_more(cluster: Cluster) -> None:
    """The server is not asked about a machine that this run breaks, although its pod had missed an
    answer before.
    """
    cluster.objects[NODE] = 501, {}
    fall_silent(cluster)
    cluster.taken()
    assert cluster.session.has_unproven()
    cluster.session.plan_loss(NODE.rpartition("/")[2])
    assert not cluster.session.has_unproven()


def test_a_server_that_is_silent_is_asked_about_one_pod(cluster: Cluster) -> None:
    """The server is asked once if all pods fall silent: each question would wait for its whole
    limit.
    """
    stations = ("node0", "node1", "node2")
    for station in stations:
        end_stream(cluster, cluster.pod(station))
    cluster.silent = PODS
    cluster.session.examine_all(stations)
    assert (cluster.request_count("GET", PODS), cluster.request_count("GET", NODE)) == (1, 0)
    cluster.silent = NODE
    cluster.session.examine_all(stations)
    assert (cluster.request_count("GET", PODS), cluster.request_count("GET", NODE)) == (4, 1)
    assert cluster.session.has_unproven()


def test_a_pod_whose_stream_ended_with_its_machine_is_taken(cluster: Cluster) -> None:
    """The end of the pod was observed, and the pod is replaced before the cluster knows of the
    machine.
    """
    pod = cluster.pod()
    end_stream(cluster, pod)
    cluster.session.delete(pod, 0)
    cluster.objects[NODE] = 404, {}
    assert cluster.taken() == [pod]


def end_stream(cluster: Cluster, pod: Pod) -> None:
    """Have the supervisor of a pod end."""
    cluster.end_supervisors()
    assert pod.link is not None
    pod.link.await_sign(pod.link.ask_alive(), 30.0)
    pod.note_end()
    assert pod.first_sign_ns


# -- ends that this session has asked for, or may have ---------------------------------------------

BUDGET = {"message": "no", "details": {"causes": [{"reason": "DisruptionBudget"}]}}


@pytest.mark.parametrize(
    ("verb", "answer", "is_ours"),
    [
        ("DELETE", (200, {}), True),
        ("DELETE", (404, {}), True),
        (
            "DELETE",
            (501, {}),
            True,
        ),  # the deletion may have been done, and its answer lost on the way
        ("POST", (501, {}), True),
        ("DELETE", (403, {}), False),
        ("POST", (403, {}), False),
        ("POST", (429, BUDGET), False),
    ],
)
def test_a_pod_is_taken_by_others_only_if_its_end_was_refused_here(
    cluster: Cluster, verb: str, answer: tuple[int, Any], is_ours: bool
) -> None:
    pod = cluster.pod()
    cluster.endings[verb] = answer
    with contextlib.suppress(ApiError):
        (cluster.session.delete if verb == "DELETE" else cluster.session.evict)(pod, 0)
    cluster.there[pod.place]["metadata"] |= DELETED
    end_stream(cluster, pod)
    cluster.session.examine(pod)
    assert cluster.taken() == ([] if is_ours else [pod])


def test_a_pod_is_examined_at_once_before_it_is_deleted(cluster: Cluster) -> None:
    """The pod is examined again although the API server did not know a moment ago: afterwards it
    has no record.
    """
    pod = cluster.pod()
    end_stream(cluster, pod)
    cluster.session.examine(pod)
    assert cluster.taken() == []
    cluster.there[pod.place]["metadata"] |= DELETED
    cluster.session.delete(pod, 0)
    assert cluster.taken() == [pod]


# -- pods that do not run --------------------------------------------------------------------------

ROOM = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
}
EVICTED = {"phase": "Failed", "reason": "Evicted"}
CRASHED = {"phase": "Failed", "reason": "Error"}


@pytest.mark.parametrize(
    ("nodes", "is_tried_again", "reason"),
    [
        ({"node1": ROOM}, False, "node1: Unschedulable"),
        ({"node1": CRASHED}, False, "node1: Error"),
        ({"node1": EVICTED}, True, "node1: ended by its machine"),
        ({"node1": CRASHED, "node2": EVICTED}, True, "node2: ended by its machine"),
        ({"node1": {}}, True, "no supervisor has connected"),
    ],
)
def test_only_a_reason_that_another_attempt_would_meet_is_remembered(
    impatient: Cluster, nodes: dict[str, Any], is_tried_again: bool, reason: str
) -> None:
    impatient.made_with = nodes
    assert attempts(impatient, list(nodes), reason) == (2 if is_tried_again else 1)


def test_pods_of_which_the_server_tells_nothing_are_tried_again(impatient: Cluster) -> None:
    impatient.made_with = {"node1": {}}
    impatient.objects[PODS] = 501, {}
    assert attempts(impatient, ["node1"], "ApiServer") == 2


def attempts(cluster: Cluster, stations: list[str], reason: str) -> int:
    """Have pods made twice that do not run, and return how often that was tried."""
    refused, orders = FirstRefusal(), []

    def attempt() -> None:
        with refused.remembered():
            orders.append(stations)
            cluster.session.ensure_pods(stations)

    for _ in range(2):
        with pytest.raises(HarnessError, match=reason):
            attempt()
    return len(orders)


# -- what a run writes down ------------------------------------------------------------------------


def test_a_run_is_judged_when_it_is_known_whether_a_machine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has the time of the first sign, and the machine is reported as lost while the run
    waits for that.
    """
    for name, content in (("token", TOKEN), ("owner", "1")):
        (tmp_path / name).write_text(content)
    driven = msgspec.json.encode(DrivenSession("s", str(tmp_path))).decode()
    options = KubernetesOptions(
        image="registry/train:1", namespace="chaos", harness="here", session=driven
    )
    cluster, lines = Cluster(), list[str]()

    def tell(line: str) -> None:
        lines.append(line)
        cluster.objects[NODE] = 200, node("Unknown")

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(api_server(tmp_path, cluster.answer))
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        substrate = stack.enter_context(contextlib.closing(KubernetesSubstrate(options)))
        stack.callback(cluster.end_supervisors)
        substrate.warm_up()
        substrate.tell = tell
        substrate.run_pods.note_silent(COORDINATOR, 5)
        substrate.run_pods.settle_ends([COORDINATOR], tmp_path)
        substrate.run_pods.await_machines(tmp_path)
    (record,) = read_events(tmp_path / "journal", Event.POD_TAKEN)
    assert (record.t_ns, record["role"], record["cause"]) == (
        5,
        "coordinator",
        "lost with its machine",
    )
    assert len(lines) == 1
    assert "whether its machine was lost" in lines[0]
