"""Pods of a job that already runs are deleted, evicted and crashed by UID, and their machines are
drained and lose their power.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.attach.watched_pods import WatchedPods, watched_pods
from support.jobs import cluster, manifests
from support.jobs.users import user_with
from support.nodes import pods
from support.waiting import stays, wait_until

from chaoskit.attach.jobs.find import FoundJob, find_job
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.pods.checks import require_action_rights, require_machines
from chaoskit.attach.pods.machine_pods import (
    AttachedMachinePods,
    job_uids,
    machine_backend,
    new_run_name,
)
from chaoskit.attach.pods.pod_backend import AttachedPodBackend
from chaoskit.attach.pods.pod_requests import PodRequests
from chaoskit.attach.pods.preemption import Preemptions
from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.machine_faults import MachineFaults
from chaoskit.substrate.kubernetes.machines.machines import BROKEN
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import (
    ContainerCrash,
    MachineDrain,
    MachineLoss,
    MachineTaint,
    PodDeletion,
    PodEviction,
    PodPreemption,
)
from chaoskit.substrate.kubernetes.pods.state import has_ended
from chaoskit.substrate.undo import UndoLog

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}")
]
needs_tool = pytest.mark.skipif(bool(pods.no_tool()), reason=f"machines: {pods.no_tool()}")
LIMIT_S = 60.0
NODE = "llama-1"


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    client = KubernetesApi(
        namespace=pods.namespace(), kubeconfig=os.environ[pods.VARIABLE_OF_TESTS]
    )
    yield client
    client.close()


def two_pods(**spec: Any) -> dict[str, Any]:
    """Return a StatefulSet of two pods."""
    manifest = manifests.stateful_set("llama")
    manifest["spec"]["replicas"] = 2
    manifest["spec"]["template"]["spec"] |= spec
    return manifest


def found(api: KubernetesApi) -> FoundJob:
    """Return the job as soon as all its pods run."""

    def attempt() -> FoundJob | None:
        try:
            return find_job(api, "statefulset/llama")
        except BadInput as refusal:
            if "wait for" not in refusal.remedy:
                raise
            return None

    return wait_until(attempt, "the job", poll_s=0.1)


@pytest.fixture
def watched(api: KubernetesApi) -> Iterator[WatchedPods]:
    """Provide the watched pods of a StatefulSet of two pods."""
    with cluster.created(two_pods()), watched_pods(api, found(api)) as watched:
        yield watched


def backend(api: KubernetesApi, watched: WatchedPods) -> AttachedPodBackend:
    requests = PodRequests(api, watched)
    preemptions = Preemptions(api, watched, requests, UndoLog())
    return AttachedPodBackend(watched, requests, preemptions, watched.containers)


def successor(watched: WatchedPods, before: PodState) -> PodState:
    """Return the ready pod that has replaced one."""
    pod = watched.watch.wait_for_successor(watched.key(NODE), before.uid, LIMIT_S)
    assert pod is not None
    assert pod.name == before.name
    assert pod.uid != before.uid
    return pod


def present_uid(name: str) -> str:
    """Return the UID of a pod that is not being deleted."""
    metadata = pods.pods()[name]["metadata"]
    assert "deletionTimestamp" not in metadata
    return str(metadata["uid"])


def runs(before: PodState) -> bool:
    """Return whether the API server says that a pod of this UID has not ended."""
    pod = pods.pods().get(before.name)
    return pod is not None and pod["metadata"]["uid"] == before.uid and not has_ended(pod)


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """Allow no disruption of the pods of the job until the context ends."""
    path = f"/apis/policy/v1/namespaces/{pods.namespace()}/poddisruptionbudgets"
    spec = {"minAvailable": "100%", "selector": {"matchLabels": {"app": "llama"}}}
    pods.ask("POST", path, {"metadata": {"name": "llama"}, "spec": spec})
    try:
        wait_until(
            lambda: pods.ask("GET", f"{path}/llama").get("status", {}).get("expectedPods") == 2,
            "the budget in force",
        )
        yield
    finally:
        pods.ask("DELETE", f"{path}/llama")


def test_a_pod_is_deleted_by_its_uid_and_its_successor_is_left_alone(
    api: KubernetesApi, watched: WatchedPods
) -> None:
    before, other = watched.pod(NODE), watched.pod("llama-0")
    removal = backend(api, watched).apply(NODE, PodDeletion(1))
    wait_until(removal.shown, "the end of the pod")
    assert not runs(before)
    after = successor(watched, before)
    requests = PodRequests(api, watched)
    for request in (requests.delete, requests.evict):
        with pytest.raises(ProcessLookupError, match=f"with UID {before.uid} is gone"):
            request(before, 0)
    stays(lambda: present_uid(after.name) == after.uid, "the successor", for_s=1.0, poll_s=0.1)
    assert present_uid(other.name) == other.uid
    assert removal.shown() == 1


def test_a_pod_is_evicted_unless_a_budget_forbids_it(
    api: KubernetesApi, watched: WatchedPods
) -> None:
    before = watched.pod(NODE)
    with budget():
        refused = backend(api, watched).apply(NODE, PodEviction(0))
        stays(
            lambda: present_uid(before.name) == before.uid and refused.shown() == 0,
            "the pod",
            for_s=1.0,
            poll_s=0.1,
        )
    removal = backend(api, watched).apply(NODE, PodEviction(1))
    wait_until(removal.shown, "the end of the pod")
    successor(watched, before)
    assert refused.shown() == 0


def test_a_pod_is_preempted_for_another_one(api: KubernetesApi, watched: WatchedPods) -> None:
    before, other = watched.pod(NODE), watched.pod("llama-0")
    with pods.priority_class(1000) as priority_class:
        preemption = backend(api, watched).apply(NODE, PodPreemption(priority_class))
        try:
            wait_until(preemption.shown, "the preemption")
        finally:
            assert preemption.lift()
    successor(watched, before)
    assert present_uid(other.name) == other.uid
    names = {"llama-0", "llama-1"}
    wait_until(lambda: pods.pods().keys() == names, "the end of the other pod")


def test_a_container_is_crashed_and_its_pod_lives_on(
    api: KubernetesApi, watched: WatchedPods
) -> None:
    for restarts in (1, 2):
        before = watched.pod(NODE)
        crash = backend(api, watched).apply(NODE, ContainerCrash())
        wait_until(crash.shown, "the end of the container")
        wait_until(lambda: watched.pod(NODE).is_ready, "the next container")
        pod = pods.pods()[before.name]
        assert pod["metadata"]["uid"] == before.uid
        assert pods.restarts(pod) == restarts
        (status,) = pod["status"]["containerStatuses"]
        ended = status["lastState"]["terminated"]
        assert ended["containerID"] == before.containers[0].container_id != status["containerID"]
        wait_until(
            lambda ended=ended: (
                watched.pod(NODE).containers[0].container_id != ended["containerID"]
                and watched.pod(NODE).containers[0].state == "running"
            ),
            "the watch to see the next container",
        )


def test_the_rights_are_those_that_the_actions_need(watched: WatchedPods, tmp_path: Path) -> None:
    """A user with the rights of a table can do it, and one without them is refused before."""
    actions = {PodDeletion, PodEviction, ContainerCrash}
    granted = (*rights.ATTACH_RIGHTS, *rights.DELETE_RIGHTS, *rights.CRASH_RIGHTS)
    refused = pytest.raises(BadInput, match=r"granted in namespace .*: create pods/eviction")
    with user_with(tmp_path, granted) as api, refused:
        require_action_rights(api, actions)
    with user_with(tmp_path, (*granted, *rights.EVICT_RIGHTS)) as api:
        require_action_rights(api, actions)
        with pytest.raises(BadInput, match="granted in the whole cluster: get nodes"):
            require_action_rights(api, {MachineTaint} | actions)
        for action in (PodDeletion(0), PodEviction(0)):
            before = watched.pod(NODE)
            removal = backend(api, watched).apply(NODE, action)
            wait_until(removal.shown, "the end of the pod")
            after = successor(watched, before)
            with pytest.raises(ProcessLookupError):
                PodRequests(api, watched).delete(before, 0)
            assert present_uid(after.name) == after.uid
        crash = backend(api, watched).apply(NODE, ContainerCrash())
        wait_until(crash.shown, "the end of the container")


# -- machines --------------------------------------------------------------------------------------


def faults_of_machines(
    api: KubernetesApi, watched: WatchedPods, job: FoundJob, options: KubernetesOptions
) -> MachineFaults:
    requests = PodRequests(api, watched)
    attached = AttachedMachinePods(api, watched, requests, watched.containers)
    own_uids = job_uids(api, job.membership)
    return machine_backend(api, attached, options, new_run_name(), own_uids, UndoLog())


def emptiest_machine() -> str:
    """Return the machine with the fewest pods: other tests may use the cluster at the same time."""
    machines = [pod["spec"].get("nodeName") for pod in pods.ask("GET", "/api/v1/pods")["items"]]
    return min(pods.machines(), key=machines.count)


def annotations_of(machine: str) -> dict[str, str]:
    metadata = pods.ask("GET", f"/api/v1/nodes/{machine}")["metadata"]
    annotations: dict[str, str] = metadata.get("annotations") or {}
    return annotations


def test_a_machine_is_drained_of_the_pods_of_the_job(api: KubernetesApi, tmp_path: Path) -> None:
    with cluster.created(two_pods()):
        job = found(api)
        with watched_pods(api, job) as watched:
            before = watched.pod(NODE)
            uids = job_uids(api, job.membership)
            assert uids() == {watched.pod(node).uid for node in ("llama-0", NODE)}
            options = KubernetesOptions(machines=before.node, strangers="allow")
            require_machines(api, options, {MachineDrain}, [before.node], new_run_name(), uids)
            faults = faults_of_machines(api, watched, job, options)
            drain = faults.apply(NODE, MachineDrain(1))
            try:
                wait_until(drain.shown, "the drained machine")
                assert BROKEN in annotations_of(before.node)
                assert successor(watched, before).node != before.node
            finally:
                faults.close()
            assert BROKEN not in annotations_of(before.node)
            assert "unschedulable" not in pods.ask("GET", f"/api/v1/nodes/{before.node}")["spec"]


@needs_tool
@pytest.mark.costly
@pytest.mark.slow
def test_a_machine_below_the_job_loses_its_power(api: KubernetesApi, tmp_path: Path) -> None:
    machine = emptiest_machine()
    with cluster.created(two_pods(nodeSelector={"kubernetes.io/hostname": machine})):
        job = found(api)
        with watched_pods(api, job) as watched:
            options = KubernetesOptions(
                machines=machine, levers=pods.levers(tmp_path), strangers="allow"
            )
            require_machines(
                api, options, {MachineLoss}, [machine], "attached-1", job_uids(api, job.membership)
            )
            faults = faults_of_machines(api, watched, job, options)
            nothing = faults.apply(NODE, MachineLoss("nothing"))
            wait_until(lambda: nothing.shown() == 1, "the command that does nothing")
            stays(lambda: nothing.shown() == 1, "no proof of a loss", for_s=3.0, poll_s=0.1)
            nothing.lift()
            wait_until(lambda: BROKEN not in annotations_of(machine), "the end of the first fault")
            loss = faults.apply(NODE, MachineLoss("power-cut"))
            try:
                wait_until(lambda: loss.shown() == 2, "the silence of the machine", limit_s=30.0)
                assert BROKEN in annotations_of(machine)
            finally:
                faults.close()
            assert pods.is_ready(machine)
            assert BROKEN not in annotations_of(machine)
            wait_until(lambda: watched.pod(NODE).is_ready, "the pod", limit_s=120.0)
