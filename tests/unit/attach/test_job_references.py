"""References to jobs are parsed or refused, and a pod gets the place that its labels mean."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobs.objects import job_pod, pod, stateful_pod, stateful_set

from chaoskit.attach.jobs.containers import training_container
from chaoskit.attach.jobs.job_state import read_job
from chaoskit.attach.jobs.kinds import JOBSET, KINDS, PODS, PYTORCHJOB, TRAINJOB
from chaoskit.attach.jobs.membership import (
    JobMembership,
    PlaceKey,
    job_of,
    membership,
    selector_text,
)
from chaoskit.attach.jobs.reference import JobReference, parse_reference
from chaoskit.errors import BadInput


@pytest.mark.parametrize(
    ("text", "kind", "name", "selector"),
    [
        ("statefulset/llama", "statefulset", "llama", ""),
        ("StatefulSet/llama", "statefulset", "llama", ""),
        ("job/x", "job", "x", ""),
        ("jobset/x.y", "jobset", "x.y", ""),
        ("trainjob/x", "trainjob", "x", ""),
        ("pytorchjob/x", "pytorchjob", "x", ""),
        ("hyperpodpytorchjob/x", "hyperpodpytorchjob", "x", ""),
        ("pods/app=llama", "pods", "", "app=llama"),
        ("pods/example.com/app=llama,tier=", "pods", "", "example.com/app=llama,tier="),
    ],
)
def test_a_reference_is_parsed(text: str, kind: str, name: str, selector: str) -> None:
    assert parse_reference(text) == JobReference(KINDS[kind], name, selector)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("llama", "statefulset/NAME"),
        ("statefulset/", "statefulset/NAME"),
        ("statefullset/x", "write statefulset"),
        ("jobsets/x", "write jobset"),
        ("deployment/x", "use one of statefulset"),
        ("job/Llama", "as in job/llama"),
        ("job/a/b", "as in job/llama"),
        ("pods/llama", "pods/LABEL=VALUE"),
        ("pods/app=llama&watch=true", "pods/LABEL=VALUE"),
    ],
)
def test_a_malformed_reference_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(BadInput, match=remedy) as caught:
        parse_reference(text)
    assert (caught.value.field, caught.value.value) == ("job", text)


def test_kinds_that_were_never_tried_say_so() -> None:
    noted = {word for word, kind in KINDS.items() if kind.note}
    assert noted == {"pytorchjob", "hyperpodpytorchjob"}


def jobset(*replicated_jobs: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": "x", "uid": "set", "resourceVersion": "1"},
        "spec": {"replicatedJobs": list(replicated_jobs)},
        "status": {"restarts": 2},
    }


def replicated_job(name: str, step: str, replicas: int, parallelism: int) -> dict[str, Any]:
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": step}
    template = {"metadata": {"labels": labels}, "spec": {"parallelism": parallelism}}
    return {"name": name, "replicas": replicas, "template": template}


def jobset_pod(replicated_job: str, job: int, index: int) -> dict[str, Any]:
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "x",
        "jobset.sigs.k8s.io/replicatedjob-name": replicated_job,
        "jobset.sigs.k8s.io/job-global-index": str(job),
        "batch.kubernetes.io/job-name": f"x-{replicated_job}-{job}",
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    name = f"x-{replicated_job}-{job}-{index}-abcde"
    return pod(name, owner=("Job", f"x-{replicated_job}-{job}"), labels=labels)


def test_a_pod_of_a_statefulset_has_the_place_of_its_ordinal() -> None:
    members = membership(parse_reference("statefulset/llama"), stateful_set())
    assert members.selector == "app=llama"
    assert members.place_of(stateful_pod(2)) == (PlaceKey("llama", 2), 0)
    unlabelled = pod("llama-12", owner=("StatefulSet", "llama"), labels={"app": "llama"})
    assert members.place_of(unlabelled) == (PlaceKey("llama", 12), 0)


def test_a_pod_of_another_controller_with_the_same_labels_is_no_member() -> None:
    members = membership(parse_reference("statefulset/llama"), stateful_set())
    other = pod("other-0", owner=("StatefulSet", "other"), labels={"app": "llama"})
    assert members.place_of(other) is None
    assert members.place_of(pod("debug", labels={"app": "llama"})) is None


def test_a_place_of_a_jobset_outlives_its_job() -> None:
    members = membership(parse_reference("jobset/x"), jobset())
    assert members.place_of(jobset_pod("workers", 1, 2)) == (PlaceKey("x-workers-1", 2), 1)


def test_only_trainers_of_a_trainjob_have_places() -> None:
    made = jobset(
        replicated_job("dataset-initializer", "dataset-initializer", 1, 1),
        replicated_job("node", "trainer", 1, 4),
    )
    members = membership(parse_reference("trainjob/x"), made)
    assert members.selector == "jobset.sigs.k8s.io/jobset-name=x"
    assert members.place_of(jobset_pod("node", 1, 3)) == (PlaceKey("x-node-1", 3), 1)
    assert members.place_of(jobset_pod("dataset-initializer", 0, 0)) is None
    assert read_job(TRAINJOB, made).pods_wanted == 4
    assert read_job(JOBSET, made).pods_wanted == 5
    assert read_job(JOBSET, made).restarts == 2


def test_the_master_of_a_pytorchjob_comes_before_its_workers() -> None:
    members = membership(parse_reference("pytorchjob/x"), None)

    def replica(kind: str, index: int) -> dict[str, Any]:
        labels = {
            "training.kubeflow.org/job-name": "x",
            "training.kubeflow.org/replica-type": kind,
            "training.kubeflow.org/replica-index": str(index),
        }
        return pod(f"x-{kind}-{index}", owner=("PyTorchJob", "x"), labels=labels)

    assert members.place_of(replica("master", 0)) == (PlaceKey("master", 0), 0)
    assert members.place_of(replica("worker", 1)) == (PlaceKey("worker", 1), 1)
    spec = {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 3}}}
    assert read_job(PYTORCHJOB, {"metadata": {"uid": "u"}, "spec": spec}).pods_wanted == 4


def test_a_pod_of_a_hyperpod_job_is_recognized_by_its_name() -> None:
    members = membership(parse_reference("hyperpodpytorchjob/x"), None)
    assert members.place_of(pod("x-pod-3")) == (PlaceKey("x-pod", 3), 0)
    assert members.place_of(pod("x-pod-workers-3")) == (PlaceKey("x-pod-workers", 3), 0)
    assert members.place_of(pod("xy-pod-3")) is None


def test_a_pod_without_an_index_is_a_place_of_its_own() -> None:
    members = JobMembership(JobReference(PODS, selector="app=x"), "app=x")
    bare = pod("trainer", labels={"app": "x"})
    assert members.place_of(bare) == (PlaceKey("trainer", 0), 0)
    assert members.place_of(job_pod(1, "abcde")) == (PlaceKey("train", 1), 0)
    assert members.place_of(stateful_pod(1)) == (PlaceKey("llama", 1), 0)


def test_pods_of_one_job_have_the_same_owner() -> None:
    assert job_of(jobset_pod("workers", 0, 0)) == job_of(jobset_pod("leader", 1, 0)) == "jobset/x"
    labels = {"pod-template-hash": "5d4"}
    assert job_of(pod("a", owner=("ReplicaSet", "web-5d4"), labels=labels)) == "deployment/web"
    assert job_of(pod("a")) == ""


def test_a_selector_is_written_as_requests_have_it() -> None:
    expressions = [
        {"key": "a", "operator": "In", "values": ["b", "c"]},
        {"key": "d", "operator": "NotIn", "values": ["e"]},
        {"key": "f", "operator": "Exists"},
        {"key": "g", "operator": "DoesNotExist"},
    ]
    selector = {"matchLabels": {"app": "x"}, "matchExpressions": expressions}
    assert selector_text(selector) == "app=x,a in (b,c),d notin (e),f,!g"


def test_the_container_that_trains() -> None:
    assert training_container("p", ["main"], KINDS["job"]) == "main"
    assert training_container("p", ["proxy", "main"], KINDS["job"], "main") == "main"
    assert training_container("p", ["proxy", "pytorch"], KINDS["pytorchjob"]) == "pytorch"
    assert training_container("p", ["proxy", "node"], KINDS["trainjob"]) == "node"
    with pytest.raises(BadInput, match="name the container that trains: pod p has proxy, main"):
        training_container("p", ["proxy", "main"], KINDS["job"])
    with pytest.raises(BadInput, match="container='mian': write main"):
        training_container("p", ["main"], KINDS["job"], "mian")
