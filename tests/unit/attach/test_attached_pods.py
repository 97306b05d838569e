"""Actions on the pods of an attached job, and on their machines, against an API server on the
loopback: by UID, refused, or with nothing to act on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.injecting import injecting, target_of
from support.nodes.api_server import ApiServer, api_server, refusal
from support.waiting import stays, wait_until

from chaoskit.attach.jobs.pod_state import PodState, read_pod
from chaoskit.attach.pods.checks import require_action_rights, require_machines
from chaoskit.attach.pods.machine_pods import AttachedMachinePods, new_run_name
from chaoskit.attach.pods.machine_silence import MachineSilence, is_silence_of_kubelet
from chaoskit.attach.pods.pod_backend import AttachedPodBackend
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.attach.pods.preemption import Preemptions, why_not_alone
from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate.core.actions import Action, Freeze
from chaoskit.substrate.core.external_commands import LocalCommands
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.machine_faults import MachineFaults
from chaoskit.substrate.kubernetes.machines.machines import (
    BROKEN,
    PROTECTED,
    put_back_left,
    why_not_breakable,
)
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import (
    ApiServerStop,
    ContainerCrash,
    MachineDrain,
    MachineLoss,
    MachineTaint,
    PodDeletion,
    PodEviction,
    PodPreemption,
)
from chaoskit.substrate.undo import UndoLog
from faults import LoseMachine

PODS = "/api/v1/namespaces/chaos/pods"
NODE = "/api/v1/nodes/m1"
BUDGET = {
    "kind": "Status",
    "code": 429,
    "message": "Cannot evict pod as it would violate the pod's disruption budget.",
    "details": {"causes": [{"reason": "DisruptionBudget"}]},
}
RUNNING = {"running": {"startedAt": "2026-11-29T12:00:00Z"}}


def pod_object(uid: str, container_id: str = "c1", **state: Any) -> dict[str, Any]:
    """Return the object of the pod llama-1 on the machine m1."""
    status = {"name": "trainer", "containerID": container_id, "state": state or RUNNING}
    return {
        "metadata": {"name": "llama-1", "uid": uid, "namespace": "chaos"},
        "spec": {"nodeName": "m1", "containers": [{"name": "trainer"}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


@dataclass
class Job:
    """A job of one pod, as its watch sees it.

    Attributes:
        states: the pods that hold places, by node.
        over: identifiers of pods and of lives of containers that are over.
        crashes: nodes whose container was killed.
    """

    states: dict[str, PodState] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    crashes: list[str] = field(default_factory=list)

    def pod(self, node: str) -> PodState:
        if node not in self.states:
            raise ProcessLookupError(node)
        return self.states[node]

    def is_pod_over(self, uid: str) -> bool:
        return uid in self.over

    def is_life_over(self, uid: str, container_id: str) -> bool:
        return bool(self.over & {uid, container_id})

    def crash(self, node: str) -> None:
        self.crashes.append(node)

    def nodes_on(self, machine: str) -> tuple[str, ...]:
        return tuple(node for node, pod in self.states.items() if pod.node == machine)


@dataclass
class Cluster:
    """The API server, and the job whose pods it has.

    Attributes:
        pod: object of the pod of that name at the server; None if there is none.
        answers: answers by method and path, instead of the usual ones; None for no answer.
    """

    pod: dict[str, Any] | None = field(default_factory=lambda: pod_object("u1"))
    answers: dict[tuple[str, str], tuple[int, Any] | None] = field(default_factory=dict)
    job: Job = field(default_factory=lambda: Job({"llama-1": read_pod(pod_object("u1"))}))
    server: ApiServer = field(init=False)
    api: KubernetesApi = field(init=False)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        answer = self.answers.get((method, path), (0, None))
        if answer is None:
            raise ConnectionAbortedError
        if answer[0]:
            return answer
        if (method, path) == ("GET", f"{PODS}/llama-1"):
            return (200, self.pod) if self.pod else refusal(404, "no such pod")
        return 200, body or {}

    def requests(self, end_s: float = 30.0) -> PodRequests:
        return PodRequests(self.api, self.job, end_s=end_s)

    def backend(self, requests: PodRequests | None = None) -> AttachedPodBackend:
        requests = requests or self.requests()
        preemptions = Preemptions(self.api, self.job, requests, UndoLog())
        containers = {"llama-1": "trainer", "llama-2": "trainer"}
        return AttachedPodBackend(self.job, requests, preemptions, containers)

    def machine_pods(self, requests: PodRequests) -> AttachedMachinePods:
        return AttachedMachinePods(self.api, self.job, requests, {"llama-1": "trainer"})

    def made(self, method: str) -> list[tuple[str, Any]]:
        """Return path and body of each request of a method."""
        return [(path, body) for verb, path, body in self.server.requests if verb == method]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster()
    with api_server(tmp_path, made.answer) as made.server:
        made.api = KubernetesApi(kubeconfig=made.server.kubeconfig)
        yield made
        made.api.close()


# -- requests about pods ---------------------------------------------------------------------------


def test_a_deletion_names_the_pod_by_its_uid(cluster: Cluster) -> None:
    removal = cluster.backend().apply("llama-1", PodDeletion(3))
    ((path, body),) = cluster.made("DELETE")
    assert path == f"{PODS}/llama-1"
    assert body["preconditions"] == {"uid": "u1"}
    assert body["gracePeriodSeconds"] == 3
    assert removal.shown() == 0
    cluster.job.over.add("u1")
    assert removal.shown() == 1
    assert removal.lift()


def test_an_eviction_names_the_pod_by_its_uid(cluster: Cluster) -> None:
    removal = cluster.backend().apply("llama-1", PodEviction(4))
    ((path, body),) = cluster.made("POST")
    assert path == f"{PODS}/llama-1/eviction"
    assert body["deleteOptions"] == {"gracePeriodSeconds": 4, "preconditions": {"uid": "u1"}}
    cluster.job.over.add("u1")
    assert removal.shown() == 1


def test_an_eviction_that_a_budget_refuses_never_shows(cluster: Cluster) -> None:
    cluster.answers["POST", f"{PODS}/llama-1/eviction"] = (429, BUDGET)
    removal = cluster.backend().apply("llama-1", PodEviction(0))
    cluster.job.over.add("u1")
    assert removal.shown() == 0
    assert removal.lift()


@pytest.mark.parametrize(
    ("method", "path", "action"),
    [
        ("DELETE", f"{PODS}/llama-1", PodDeletion(0)),
        ("POST", f"{PODS}/llama-1/eviction", PodEviction(0)),
    ],
    ids=["deletion", "eviction"],
)
@pytest.mark.parametrize(
    ("answer", "pod", "error"),
    [
        (refusal(409, "another UID"), pod_object("u2"), ProcessLookupError),
        (refusal(409, "another UID"), None, ProcessLookupError),
        (refusal(409, "it was changed"), pod_object("u1"), ApiError),
        (refusal(404, "no such pod"), None, ProcessLookupError),
        (refusal(403, "forbidden"), pod_object("u1"), ApiError),
        (None, pod_object("u1"), ApiError),
    ],
    ids=["successor", "gone", "conflict", "not found", "forbidden", "silent"],
)
def test_a_request_that_fails_says_if_the_pod_is_gone(
    cluster: Cluster,
    method: str,
    path: str,
    action: Action,
    answer: tuple[int, Any] | None,
    pod: dict[str, Any] | None,
    error: type[Exception],
) -> None:
    cluster.answers[method, path] = answer
    cluster.pod = pod
    with pytest.raises(error) as raised:
        cluster.backend().apply("llama-1", action)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "change", [{"is_terminating": True}, {"phase": "Failed"}, {"is_deleted": True}], ids=str
)
@pytest.mark.parametrize("action", [PodDeletion(0), PodEviction(0), ContainerCrash()], ids=str)
def test_a_pod_that_ends_by_itself_is_left_alone(
    cluster: Cluster, change: dict[str, Any], action: Action
) -> None:
    cluster.job.states["llama-1"] = replace(cluster.job.states["llama-1"], **change)
    with pytest.raises(ProcessLookupError, match="llama-1 has ended, or is ending"):
        cluster.backend().apply("llama-1", action)
    assert cluster.server.requests == []
    assert cluster.job.crashes == []


def test_an_empty_place_has_nothing_to_act_on(cluster: Cluster) -> None:
    with pytest.raises(ProcessLookupError):
        cluster.backend().apply("llama-2", PodDeletion(0))
    with pytest.raises(HarnessError, match="Freeze is not an action on pods"):
        cluster.backend().apply("llama-1", Freeze())


# -- preemption ------------------------------------------------------------------------------------


def labelled(uid: str, machine: str = "m1", **labels: str) -> dict[str, Any]:
    """Return the object of a pod with labels."""
    pod = pod_object(uid)
    pod["metadata"]["labels"] = labels
    pod["spec"]["nodeName"] = machine
    return pod


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (labelled("u2", app="llama", index="0"), ""),
        (labelled("u2", app="llama", index="1", more="x"), "on the same machine has the same"),
        (labelled("u2", "m2", app="llama", index="1"), ""),
        (labelled("u2", app="llama", index="1") | {"status": {"phase": "Failed"}}, ""),
    ],
    ids=["another index", "all labels", "another machine", "ended"],
)
def test_a_preemption_needs_labels_that_select_one_pod(other: dict[str, Any], reason: str) -> None:
    victim = labelled("u1", app="llama", index="1")
    text = why_not_alone(victim, [victim, other])
    assert reason in text
    assert bool(text) is bool(reason)
    assert "no labels" in why_not_alone(labelled("u1"), [])


def test_a_preemption_is_shown_by_the_event_of_the_scheduler(cluster: Cluster) -> None:
    victim = cluster.pod = labelled("u1", app="llama", index="1")
    made = {"metadata": {"uid": "p1"}, "spec": {"priority": 1000, "priorityClassName": "high"}}
    cluster.answers["GET", PODS] = (200, {"items": [victim]})
    cluster.answers["POST", PODS] = (201, made)
    preemption = cluster.backend().apply("llama-1", PodPreemption("high"))
    (_, dry), (_, manifest) = cluster.made("POST")
    assert dry == manifest
    (term,) = manifest["spec"]["affinity"]["podAntiAffinity"].popitem()[1]
    assert term["labelSelector"] == {"matchLabels": {"app": "llama", "index": "1"}}
    assert not manifest["metadata"]["labels"].items() & victim["metadata"]["labels"].items()
    event = {"message": "Preempted by pod p1 on node m1"}
    cluster.answers["GET", "/api/v1/namespaces/chaos/events"] = (200, {"items": [event]})
    assert preemption.shown() == 0
    event["message"] = "Preempted by pod p2 on node m1"
    cluster.job.over.add("u1")
    stays(lambda: preemption.shown() == 0, "another pod's event", for_s=0.3)
    event["message"] = "Preempted by pod p1 on node m1"
    wait_until(preemption.shown, "the event")
    assert preemption.lift()
    ((path, _),) = cluster.made("DELETE")
    assert path == f"{PODS}/{manifest['metadata']['name']}"


def test_a_preemption_that_might_strike_another_pod_is_refused(cluster: Cluster) -> None:
    victim = cluster.pod = labelled("u1", app="llama")
    cluster.answers["GET", PODS] = (200, {"items": [victim, labelled("u2", app="llama")]})
    with pytest.raises(HarnessError, match="llama-1 on the same machine has the same labels"):
        cluster.backend().apply("llama-1", PodPreemption("high"))
    cluster.answers["GET", PODS] = (200, {"items": [victim]})
    cluster.answers["POST", PODS] = (201, {"spec": {"priority": 0}})
    with pytest.raises(HarnessError, match="its priority would be 0"):
        cluster.backend().apply("llama-1", PodPreemption("high"))
    assert cluster.made("DELETE") == []


# -- containers ------------------------------------------------------------------------------------


def test_a_crash_is_shown_when_that_life_is_over(cluster: Cluster) -> None:
    """The watch still has the life before: its end is no effect of the crash."""
    cluster.pod = pod_object("u1", "c2")
    crash = cluster.backend().apply("llama-1", ContainerCrash())
    assert cluster.job.crashes == ["llama-1"]
    cluster.job.over.add("c1")
    assert crash.shown() == 0
    cluster.job.over.add("c2")
    assert crash.shown() == 1


@pytest.mark.parametrize(
    "pod",
    [
        pod_object("u1", "c1", waiting={"reason": "CrashLoopBackOff"}),
        pod_object("u1", "c1", terminated={"exitCode": 1}),
        pod_object("u2"),
        None,
    ],
    ids=["waiting", "terminated", "successor", "gone"],
)
def test_a_container_that_does_not_run_is_not_crashed(
    cluster: Cluster, pod: dict[str, Any] | None
) -> None:
    cluster.pod = pod
    with pytest.raises(ProcessLookupError):
        cluster.backend().apply("llama-1", ContainerCrash())
    assert cluster.job.crashes == []


# -- lost nodes ------------------------------------------------------------------------------------


def test_the_end_of_a_deleted_pod_is_awaited_by_its_uid(cluster: Cluster) -> None:
    pod = cluster.job.states["llama-1"]
    with pytest.raises(HarnessError, match=r"llama-1 was deleted, but .* after 0.05 s"):
        cluster.requests(end_s=0.05).await_over(pod)
    cluster.job.over.add("u2")
    with pytest.raises(HarnessError, match="has not shown its end"):
        cluster.requests(end_s=0.05).await_over(pod)
    cluster.job.over.add("u1")
    cluster.requests().await_over(pod)


# -- the silence of a machine ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_silence"),
    [
        (ApiError("the API server does not answer: timed out"), True),
        (ApiError('Get "https://10.0.0.1:10250/containerLogs/x": dial tcp: timeout', 500), True),
        (ApiError('Get "https://10.0.0.1:10250/containerLogs/x": no route to host', 502), True),
        (ApiError("failed to create fsnotify watcher", 500), False),
        (ApiError("container is waiting to start", 400), False),
        (ApiError("pods not found", 404), False),
    ],
)
def test_only_an_unanswered_request_is_silence(error: ApiError, is_silence: bool) -> None:
    assert is_silence_of_kubelet(error) is is_silence


LOG = f"{PODS}/llama-1/log"


def watched(cluster: Cluster) -> MachineSilence:
    return MachineSilence(cluster.api, [("llama-0", "trainer"), ("llama-1", "trainer")])


def test_a_machine_whose_kubelet_does_not_answer_is_silent(cluster: Cluster) -> None:
    cluster.answers["GET", f"{PODS}/llama-0/log"] = refusal(404, "no such pod")
    silence = watched(cluster)
    silence.start()
    try:
        wait_until(lambda: len(cluster.made("GET")) > 6, "questions")
        stays(lambda: not silence.is_silent, "an answer", for_s=2.5)
        cluster.answers["GET", LOG] = None
        wait_until(lambda: silence.is_silent, "the silence")
    finally:
        silence.close()


@pytest.mark.parametrize(
    "answers",
    [
        {LOG: refusal(404, "no such pod"), f"{PODS}/llama-0/log": refusal(400, "it waits")},
        {LOG: None, f"{PODS}/llama-0/log": None, "/version": None},
    ],
    ids=["no log", "no API server"],
)
def test_a_machine_is_not_silent_because_nothing_can_be_asked(
    cluster: Cluster, answers: dict[str, tuple[int, Any] | None]
) -> None:
    cluster.answers = {("GET", path): answer for path, answer in answers.items()}
    silence = watched(cluster)
    silence.start()
    try:
        wait_until(lambda: len(cluster.made("GET")) > 6, "questions")
        stays(lambda: not silence.is_silent, "no proof", for_s=2.5)
    finally:
        silence.close()


# -- machines --------------------------------------------------------------------------------------


def machine_faults(
    cluster: Cluster,
    commands: list[tuple[str, str]],
    requests: PodRequests,
    may_end: threading.Event | None = None,
) -> MachineFaults:
    """Return the backend with commands that are only noted.

    Args:
        may_end: set when the commands may end; None for at once.
    """

    def carry_out(name: str, machine: str) -> Any:
        if may_end is not None:
            may_end.wait()
        commands.append((name, machine))
        return lambda: commands.append((f"undo {name}", machine))

    return MachineFaults(
        cluster.api, cluster.machine_pods(requests), LocalCommands(carry_out), "harness"
    )


def test_a_drain_evicts_the_pods_of_the_job_after_the_cordon(cluster: Cluster) -> None:
    commands: list[tuple[str, str]] = []
    may_end = threading.Event()
    faults = machine_faults(cluster, commands, cluster.requests(), may_end)
    drain = faults.apply("llama-1", MachineDrain(5))
    stays(lambda: drain.shown() == 0 and not cluster.made("POST"), "no eviction", for_s=0.3)
    may_end.set()
    wait_until(lambda: drain.shown() == 0 and cluster.made("POST"), "the eviction")
    assert commands == [("cordon", "m1")]
    ((path, body),) = cluster.made("POST")
    assert path == f"{PODS}/llama-1/eviction"
    assert body["deleteOptions"] == {"gracePeriodSeconds": 5, "preconditions": {"uid": "u1"}}
    cluster.job.over.add("u1")
    assert drain.shown() == 1
    faults.close()
    assert commands == [("cordon", "m1"), ("undo cordon", "m1")]


def test_a_taint_is_shown_when_the_pods_are_over(cluster: Cluster) -> None:
    commands: list[tuple[str, str]] = []
    requests = cluster.requests()
    faults = machine_faults(cluster, commands, requests)
    taint = faults.apply("llama-1", MachineTaint())
    assert taint.shown() == 0
    cluster.job.over.add("u1")
    wait_until(lambda: taint.shown() == 1, "the taint")
    faults.close()
    assert commands == [("taint", "m1"), ("undo taint", "m1")]


def test_a_lost_machine_is_shown_by_its_silence(cluster: Cluster) -> None:
    commands: list[tuple[str, str]] = []
    requests = cluster.requests()
    faults = machine_faults(cluster, commands, requests)
    cluster.answers["GET", LOG] = None
    loss = faults.apply("llama-1", MachineLoss("power-cut"))
    wait_until(lambda: loss.shown() == 1, "the command")
    wait_until(lambda: loss.shown() == 2, "the silence")
    faults.close()
    assert commands == [("power-cut", "m1"), ("undo power-cut", "m1")]


def test_the_evidence_of_a_lost_machine_is_right_without_supervisors(
    cluster: Cluster, undo: UndoLog
) -> None:
    """An attached job has none: the silence is that of the kubelet."""
    faults = machine_faults(cluster, [], cluster.requests())
    cluster.answers["GET", LOG] = None
    nodes = SimpleNamespace(together=lambda node: (node,), apply=faults.apply)
    target = target_of(undo, nodes, node="llama-1")
    with injecting(LoseMachine(rank=1, after_s=1.0), target) as injection:
        assert injection.is_seen()
    (evidence,) = injection.evidence
    faults.close()
    assert str(evidence).startswith("the machine of llama-1 does not answer")
    assert "supervisor" not in str(evidence)
    assert "kubelet" in evidence.source


def test_the_machine_of_a_pod_that_ends_is_left_alone(cluster: Cluster) -> None:
    commands: list[tuple[str, str]] = []
    faults = machine_faults(cluster, commands, cluster.requests())
    state = cluster.job.states["llama-1"]
    cluster.job.states["llama-1"] = replace(state, is_terminating=True)
    with pytest.raises(ProcessLookupError):
        faults.apply("llama-1", MachineLoss("power-cut"))
    cluster.job.states["llama-1"] = replace(state, node="harness")
    with pytest.raises(HarnessError, match="the harness of this run is on it"):
        faults.apply("llama-1", MachineLoss("power-cut"))
    assert commands == []


def machine(**metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "m1", **metadata}, "spec": {}}


def test_pods_of_the_job_are_no_pods_of_others() -> None:
    pods = [pod_object("u1"), pod_object("u2")]
    pods[1]["metadata"]["name"] = "web-1"
    assert (
        why_not_breakable(machine(), "power-cut", pods, "chaos", "attached-1", {"u1", "u2"}) == ""
    )
    reason = why_not_breakable(machine(), "power-cut", pods, "chaos", "attached-1", {"u1"})
    assert "others' pods run there (chaos/web-1)" in reason


def test_a_machine_that_an_attached_run_has_broken_is_left_to_it(cluster: Cluster) -> None:
    """No object shows whether such a run is over."""
    run_name = new_run_name()
    note = f'{{"session": "chaos/{run_name}", "how": "cordon"}}'
    cluster.answers["GET", NODE] = (200, machine(annotations={BROKEN: note}))
    no_job = refusal(404, "no such job")
    cluster.answers["GET", f"/apis/batch/v1/namespaces/chaos/jobs/{run_name}"] = no_job
    assert [*put_back_left(cluster.api, KubernetesOptions(machines="m1"))] == []
    assert cluster.made("PATCH") == []


# -- checks before anything happens ----------------------------------------------------------------

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ALL_ACTIONS: tuple[type[Action], ...] = (
    PodDeletion,
    PodEviction,
    PodPreemption,
    ContainerCrash,
    MachineLoss,
    MachineDrain,
    MachineTaint,
    ApiServerStop,
)


@pytest.mark.parametrize(
    ("action", "missing"),
    [
        (PodDeletion, "delete pods (the faults DeletePod and LoseNode)"),
        (PodEviction, "create pods/eviction (the faults EvictPod and DrainMachine)"),
        (PodPreemption, "list events (the proof that the scheduler preempted a pod)"),
        (ContainerCrash, "get pods (the container that the fault KillContainer kills)"),
        (MachineLoss, "get pods/log"),
        (MachineDrain, "create pods/eviction"),
        (MachineTaint, "in the whole cluster: get nodes"),
    ],
)
def test_a_missing_right_is_named_with_its_reason(
    cluster: Cluster, action: type[Action], missing: str
) -> None:
    cluster.answers["POST", REVIEWS] = (201, {"status": {"allowed": False}})
    with pytest.raises(BadInput) as raised:
        require_action_rights(cluster.api, {action})
    assert missing in str(raised.value)
    cluster.answers["POST", REVIEWS] = (201, {"status": {"allowed": True}})
    require_action_rights(cluster.api, ALL_ACTIONS)


@pytest.fixture
def levers(tmp_path: Path) -> str:
    path = tmp_path / "levers.json"
    path.write_text('{"power-cut": {"do": ["cut", "{machine}"], "undo": ["on", "{machine}"]}}')
    return str(path)


@pytest.mark.parametrize(
    ("more", "node", "reason"),
    [
        ({}, machine(), ""),
        ({"machines": "m0"}, machine(), "machines='m0': name the machines of the job .*=m1"),
        ({"levers": ""}, machine(), "levers='': name a file with the commands"),
        ({"own_machine": "m1"}, machine(), "m1 must not be broken: this process runs on it"),
        ({}, machine(labels={PROTECTED: ""}), "it has the label chaoskit.dev/protect"),
        ({}, None, "m1 cannot be read: no such node"),
    ],
)
def test_a_machine_that_may_not_be_broken_is_refused_before(
    cluster: Cluster, levers: str, more: dict[str, str], node: dict[str, Any] | None, reason: str
) -> None:
    cluster.answers["GET", NODE] = (
        (200, node) if node is not None else refusal(HTTPStatus.NOT_FOUND, "no such node")
    )
    cluster.answers["GET", "/api/v1/pods"] = (200, {"items": [pod_object("u1")]})
    options = KubernetesOptions(**{"machines": "m0,m1", "levers": levers} | more)  # type: ignore[arg-type]
    check = lambda: require_machines(  # noqa: E731
        cluster.api, options, {MachineLoss}, ["m1"], "attached-1", lambda: {"u1"}
    )
    if reason:
        with pytest.raises(BadInput, match=reason):
            check()
    else:
        check()


def test_a_machine_with_pods_of_others_is_refused_before(cluster: Cluster, levers: str) -> None:
    cluster.answers["GET", NODE] = (200, machine())
    cluster.answers["GET", "/api/v1/pods"] = (200, {"items": [pod_object("u1")]})
    refused = KubernetesOptions(machines="m1", levers=levers)
    with pytest.raises(BadInput, match=r"others' pods run there \(chaos/llama-1\)"):
        require_machines(cluster.api, refused, {MachineTaint}, ["m1"], "attached-1", set)
    allowed = KubernetesOptions(machines="m1", levers=levers, strangers="allow")
    require_machines(cluster.api, allowed, {MachineTaint}, ["m1"], "attached-1", set)


def test_actions_on_pods_need_no_machines(cluster: Cluster) -> None:
    require_machines(
        cluster.api, KubernetesOptions(), {PodDeletion, ContainerCrash}, ["m1"], "a", set
    )
    assert cluster.server.requests == []
