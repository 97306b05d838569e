"""Tests of the storage and the labels that a second job must not share with the job that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.jobs.found import found_job

from chaoskit.attach.jobs.find import FoundJob
from chaoskit.attach.jobs.membership import membership
from chaoskit.attach.jobs.reference import parse_reference
from chaoskit.attach.twin.manifests import TwinManifests
from chaoskit.attach.twin.sharing import check_sharing
from chaoskit.errors import BadInput

CLAIM = {"persistentVolumeClaim": {"claimName": "checkpoints"}}
HOST = {"hostPath": {"path": "/data/llama"}}
NFS = {"nfs": {"server": "files", "path": "/llama"}}
OTHER_NFS = {"nfs": {"server": "others", "path": "/llama"}}
VOLUME_IN_POD = {"emptyDir": {}}


def pod_spec(volume: dict[str, Any], **mount: Any) -> dict[str, Any]:
    """Return the specification of a pod that mounts a volume."""
    container = {"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/d", **mount}]}
    return {"containers": [container], "volumes": [{"name": "data", **volume}]}


def job_with(spec: dict[str, Any], reference: str = "statefulset/llama") -> FoundJob:
    """Return a job whose pods have a specification."""
    running = found_job()
    pods = tuple({**pod, "spec": spec} for pod in running.listing.pods)
    named = parse_reference(reference)
    return replace(
        running,
        reference=named,
        membership=membership(named, running.listing.job),
        listing=replace(running.listing, pods=pods),
    )


def twin_with(spec: dict[str, Any], kind: str = "StatefulSet", **labels: str) -> TwinManifests:
    """Return a second job whose pods have a specification and labels."""
    template = {"metadata": {"labels": labels or {"app": "llama-twin"}}, "spec": spec}
    nested = {"replicatedJobs": [{"template": {"spec": {"template": template}}}]}
    manifest = {
        "apiVersion": "any/v1",
        "kind": kind,
        "metadata": {"name": "llama-twin"},
        "spec": nested if kind == "JobSet" else {"template": template},
    }
    return TwinManifests("twin.yaml", (manifest,), parse_reference("statefulset/llama-twin"))


@pytest.mark.parametrize("kind", ["StatefulSet", "JobSet"])
@pytest.mark.parametrize(
    ("twin", "job", "storage"),
    [
        (pod_spec(CLAIM), pod_spec(CLAIM), "persistentVolumeClaim checkpoints /"),
        (pod_spec(HOST), pod_spec(HOST), "hostPath /data/llama"),
        (pod_spec({"hostPath": {"path": "/data/"}}), pod_spec(HOST), "hostPath /data/llama"),
        (pod_spec(NFS), pod_spec(NFS), "nfs files /llama"),
        (pod_spec(CLAIM, subPath="a"), pod_spec(CLAIM, subPath="a"), "checkpoints /a"),
        (pod_spec(HOST), pod_spec(HOST, readOnly=True), "hostPath /data/llama"),
    ],
)
def test_storage_of_the_job_that_the_second_job_writes_to(
    kind: str, twin: dict[str, Any], job: dict[str, Any], storage: str
) -> None:
    with pytest.raises(BadInput) as refused:
        check_sharing(twin_with(twin, kind), job_with(job))
    assert (refused.value.field, refused.value.value) == ("twin", "twin.yaml")
    assert f"give {kind} llama-twin storage of its own" in refused.value.remedy
    assert refused.value.remedy.endswith(f"{storage}, too")
    assert "llama-0 of the job that runs has" in refused.value.remedy


@pytest.mark.parametrize(
    ("twin", "job"),
    [
        (pod_spec(HOST, readOnly=True), pod_spec(HOST)),
        (pod_spec({"nfs": {**NFS["nfs"], "readOnly": True}}), pod_spec(NFS)),
        (pod_spec(CLAIM, subPath="twin"), pod_spec(CLAIM, subPath="llama")),
        (pod_spec(CLAIM, subPath="twin"), pod_spec(CLAIM)),
        (pod_spec(NFS), pod_spec(OTHER_NFS)),
        (pod_spec(VOLUME_IN_POD), pod_spec(VOLUME_IN_POD)),
        (pod_spec(HOST, name="claim-of-the-set"), pod_spec(HOST)),
        (pod_spec(HOST), pod_spec(HOST, name="claim-of-the-set")),
    ],
)
def test_storage_that_the_second_job_may_have(twin: dict[str, Any], job: dict[str, Any]) -> None:
    check_sharing(twin_with(twin), job_with(job))


def test_an_init_container_and_a_block_device_count() -> None:
    spec = pod_spec(CLAIM)
    (container,) = spec["containers"]
    device = {"name": "writer", "volumeDevices": [{"name": "data", "devicePath": "/dev/x"}]}
    for containers in ({"initContainers": [container]}, {"initContainers": [device]}):
        twin = {**spec, "containers": [{"name": "trainer"}], **containers}
        with pytest.raises(BadInput, match="storage of its own"):
            check_sharing(twin_with(twin), job_with(spec))


@pytest.mark.parametrize(
    ("reference", "labels", "is_refused"),
    [
        ("statefulset/llama", {"app": "llama", "role": "twin"}, True),
        ("statefulset/llama", {"app": "llama-twin"}, False),
        ("pods/app=llama,team==ml", {"app": "llama", "team": "ml"}, True),
        ("pods/app=llama,team==ml", {"app": "llama"}, False),
    ],
)
def test_labels_by_which_pods_of_the_job_are_found(
    reference: str, labels: dict[str, str], is_refused: bool
) -> None:
    twin, job = twin_with(pod_spec(VOLUME_IN_POD), **labels), job_with(pod_spec(HOST), reference)
    if not is_refused:
        check_sharing(twin, job)
        return
    with pytest.raises(BadInput, match="write other labels into the pods of StatefulSet") as error:
        check_sharing(twin, job)
    assert f"selects them as pods of {reference}" in error.value.remedy


@pytest.mark.parametrize(
    ("expression", "is_refused"),
    [
        ({"key": "app", "operator": "In", "values": ["llama", "x"]}, True),
        ({"key": "app", "operator": "In", "values": ["x"]}, False),
        ({"key": "role", "operator": "NotIn", "values": ["twin"]}, False),
        ({"key": "role", "operator": "NotIn", "values": ["x"]}, True),
        ({"key": "role", "operator": "Exists"}, True),
        ({"key": "role", "operator": "DoesNotExist"}, False),
    ],
)
def test_expressions_of_the_selector_of_a_stateful_set(
    expression: dict[str, Any], is_refused: bool
) -> None:
    job = job_with(pod_spec(HOST))
    set_object = {"spec": {"selector": {"matchExpressions": [expression]}}}
    job = replace(job, listing=replace(job.listing, job=set_object))
    twin = twin_with(pod_spec(VOLUME_IN_POD), app="llama", role="twin")
    if is_refused:
        with pytest.raises(BadInput, match="other labels"):
            check_sharing(twin, job)
    else:
        check_sharing(twin, job)
