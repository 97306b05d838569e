"""Guard rails and the preview of faults for a job on a real cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.jobs import cluster, manifests
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.attach.fault_preview import preview_faults
from chaoskit.attach.guards.guard_rails import GuardRails, check_guard_rails
from chaoskit.attach.hands.hand_container import HandImage, HandMeans
from chaoskit.attach.jobs.find import FoundJob, find_job
from chaoskit.errors import BadInput
from chaoskit.faults import Cut, DeletePod, Kill, NaN
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
LABEL = "chaoskit.dev/protected"
RANKS = {0: "llama-0", 1: "llama-1", 2: "llama-2"}


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    kubeconfig = os.environ[pods.VARIABLE_OF_TESTS]
    with closing(KubernetesApi(namespace=pods.namespace(), kubeconfig=kubeconfig)) as client:
        yield client


def running(api: KubernetesApi) -> FoundJob:
    """Return the job as soon as all its pods run."""

    def attempt() -> FoundJob | None:
        try:
            return find_job(api, "statefulset/llama")
        except BadInput as refusal:
            if "wait for" not in refusal.remedy:
                raise
            return None

    return wait_until(attempt, "the pods of the job", poll_s=0.1)


def set_label(path: str, value: str | None) -> None:
    """Set the label that protects on an object, or remove it."""
    pods.ask("PATCH", path, {"metadata": {"labels": {LABEL: value}}})


def test_labels_that_protect_and_the_preview(api: KubernetesApi) -> None:
    space = f"/api/v1/namespaces/{pods.namespace()}"
    kills = [Kill(rank=1, at_step=5)]
    with cluster.created(manifests.stateful_set("llama")):
        job = running(api)
        guarded = check_guard_rails(api, job, kills, GuardRails(), ranks=RANKS, nodes=3)
        assert {node.machine for node in guarded.nodes} == {
            pod["spec"]["nodeName"] for pod in pods.pods().values()
        }
        for path, owner in (
            (f"{space}/pods/llama-1", "pod llama-1 has it"),
            (space, f"namespace {pods.namespace()} has it"),
            (cluster.path("StatefulSet", "llama"), "StatefulSet llama has it"),
        ):
            set_label(path, "yes")
            try:
                with pytest.raises(BadInput, match=f"protected='{LABEL}=yes': .*{owner}"):
                    check_guard_rails(api, running(api), kills, GuardRails(), ranks=RANKS)
            finally:
                set_label(path, None)
        faults = [*kills, Cut(rank=0, at_step=5), DeletePod(rank="any", at_step=9)]
        faults.append(NaN(rank=2, at_step=9, parameter="w"))
        rows = preview_faults(api, job, guarded, faults, HandMeans(HandImage(pods.IMAGE)))
        uids = {name: pod["metadata"]["uid"] for name, pod in pods.pods().items()}
        assert [(row.node, row.uid, row.ranks, row.hands, bool(row.refusal)) for row in rows] == [
            ("llama-1", uids["llama-1"], (1,), ("processes",), False),
            ("llama-0", uids["llama-0"], (0,), ("network",), False),
            ("", "", (), ("API",), False),
            ("llama-2", uids["llama-2"], (2,), (), True),
        ]
        pods.ask("PATCH", space, level("baseline"))
        try:
            rows = preview_faults(api, job, guarded, faults[:2], HandMeans(HandImage(pods.IMAGE)))
        finally:
            pods.ask("PATCH", space, level(None))
        # the pods of the tests mount a folder of their machine
        assert "processes on llama-1: " in rows[0].refusal
        assert "NET_ADMIN" not in rows[0].refusal
        assert "network on llama-0: " in rows[1].refusal
        assert "NET_ADMIN" in rows[1].refusal
        assert not any(pod["spec"].get("ephemeralContainers") for pod in pods.pods().values())


def level(name: str | None) -> dict[str, object]:
    """Return a change of the level of Pod Security that a namespace enforces."""
    return {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": name}}}
