"""Jobs that run on a real cluster are found, and followed through deleted pods, killed containers and
restarts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import cluster, manifests, recordings
from support.jobs.controller import controllers
from support.jobs.processes import kill_container
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.attach.jobs.changes import (
    ContainerEnded,
    ContainerRestarted,
    JobChange,
    JobEnded,
    JobRestarted,
    PlaceEmptied,
    PlaceTaken,
)
from chaoskit.attach.jobs.find import FoundJob, find_job
from chaoskit.attach.jobs.membership import PlaceKey
from chaoskit.attach.jobs.places import JobPlaces
from chaoskit.attach.jobs.pod_state import PodState
from chaoskit.attach.jobs.watch import JobWatch
from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi

pytestmark = [
    pytest.mark.skipif(bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}")
]
needs_crds = pytest.mark.skipif(
    bool(recordings.missing()), reason=f"Kubernetes: {recordings.missing()}"
)
LIMIT_S = 60.0


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    client = KubernetesApi(
        namespace=pods.namespace(), kubeconfig=os.environ[pods.VARIABLE_OF_TESTS]
    )
    yield client
    client.close()


def found(api: KubernetesApi, text: str, container: str = "") -> FoundJob:
    """Return a job as soon as all its pods run."""

    def attempt() -> FoundJob | None:
        try:
            return find_job(api, text, container=container)
        except BadInput as refusal:
            if "wait for" not in refusal.remedy:
                raise
            return None

    return wait_until(attempt, text, poll_s=0.1)


def present(places: JobPlaces, key: PlaceKey) -> PodState:
    place = places.place(key)
    assert place is not None
    assert place.pod is not None
    return place.pod


def check_against_api(job: FoundJob, owner: str, containers: set[str]) -> None:
    """Compare the places of a job with the pods of the namespace."""
    assert [place.key for place in job.places.places] == [
        PlaceKey(owner, index) for index in range(3)
    ]
    by_name = pods.pods()
    for place in job.places.places:
        pod = by_name[present(job.places, place.key).name]
        assert place.pod is not None
        assert place.pod.uid == pod["metadata"]["uid"]
        assert place.pod.node == pod["spec"]["nodeName"]
        assert place.pod.phase == "Running"
    assert {*job.containers.values()} == containers
    assert job.namespace == pods.namespace()
    assert job.sees_nodes


def of_type(changes: list[JobChange], kind: type[Any]) -> list[Any]:
    return [change for change in changes if isinstance(change, kind)]


def test_a_statefulset(api: KubernetesApi) -> None:
    with cluster.created(manifests.stateful_set("llama")):
        job = found(api, "statefulset/llama")
        check_against_api(job, "llama", {"trainer"})
        by_label = found(api, "pods/app=llama")
        assert [place.pod for place in by_label.places.places] == [
            place.pod for place in job.places.places
        ]
        with pytest.raises(BadInput, match="write statefulset/llama"):
            find_job(api, "statefulset/lama")
        with pytest.raises(BadInput, match="container='main': use one of trainer"):
            find_job(api, "statefulset/llama", container="main")
        changes: list[JobChange] = []
        with JobWatch(api, job, changes.extend) as watch:
            deleted_pod_is_replaced(watch, changes, PlaceKey("llama", 1))
            killed_container_is_restarted(watch, changes, PlaceKey("llama", 2))
            assert not watch.trouble
            assert present(watch.places(), PlaceKey("llama", 0)).containers[0].restart_count == 0
        scaled = {"spec": {"replicas": 0}}
        pods.ask("PATCH", cluster.path("StatefulSet", "llama"), scaled)
        wait_until(lambda: not pods.pods(), "the end of all pods")
        with pytest.raises(BadInput, match="has none with app=llama"):
            find_job(api, "statefulset/llama")


def deleted_pod_is_replaced(watch: JobWatch, changes: list[JobChange], key: PlaceKey) -> None:
    """Delete a pod by force, and check what the watch says."""
    before = present(watch.places(), key)
    deleted_s = time.monotonic()
    pods.delete(before.name)
    after = watch.wait_for_successor(key, before.uid, LIMIT_S)
    ready_s = time.monotonic()
    assert after is not None
    assert after.uid == pods.pods()[after.name]["metadata"]["uid"] != before.uid
    assert after.name == before.name
    place = watch.places().place(key)
    assert place is not None
    assert deleted_s < place.since_s < ready_s
    assert [(pod.uid, pod.is_deleted) for pod in place.former_pods] == [(before.uid, True)]
    (emptied,) = of_type(changes, PlaceEmptied)
    taken = of_type(changes, PlaceTaken)[-1]
    assert (emptied.place, emptied.uid, taken.place) == (key, before.uid, key)
    assert (taken.uid, taken.previous_uid) == (after.uid, before.uid)
    assert deleted_s < emptied.at_s <= taken.at_s == place.since_s


def killed_container_is_restarted(watch: JobWatch, changes: list[JobChange], key: PlaceKey) -> None:
    """Kill the container of a pod, and check what the watch says."""
    before = present(watch.places(), key)
    killed_s = time.monotonic()
    kill_container(before.name)
    watch.wait_for(
        lambda places: (
            present(places, key).containers[0].restart_count == 1 and present(places, key).is_ready
        ),
        LIMIT_S,
    )
    after = present(watch.places(), key)
    assert after.uid == before.uid
    assert after.containers[0].container_id != before.containers[0].container_id
    (restarted,) = of_type(changes, ContainerRestarted)
    assert (restarted.place, restarted.uid, restarted.container) == (key, before.uid, "trainer")
    assert (restarted.restart_count, restarted.restarts_unseen) == (1, 0)
    assert (restarted.exit_code, restarted.reason) == (137, "Error")
    assert killed_s < restarted.at_s
    place = watch.places().place(key)
    assert place is not None
    assert place.since_s < killed_s  # the pod has held its place all the time


@pytest.mark.slow  # the controller of Jobs waits 10 s before it replaces a failed pod
def test_an_indexed_job(api: KubernetesApi) -> None:
    with cluster.created(manifests.indexed_job("train")):
        job = found(api, "job/train")
        check_against_api(job, "train", {"trainer"})
        changes: list[JobChange] = []
        key = PlaceKey("train", 1)
        with JobWatch(api, job, changes.extend) as watch:
            before = present(watch.places(), key)
            kill_container(before.name)
            after = watch.wait_for_successor(key, before.uid, LIMIT_S)
            assert after is not None
            assert after.name != before.name
            place = watch.places().place(key)
            assert place is not None
            (former,) = place.former_pods
            # the failed pod stays beside its successor
            assert (former.uid, former.phase, former.is_deleted) == (before.uid, "Failed", False)
            assert before.name in pods.pods()
            (ended,) = of_type(changes, ContainerEnded)
            (emptied,) = of_type(changes, PlaceEmptied)
            assert (ended.place, ended.exit_code) == (key, 137)
            assert (emptied.place, emptied.cause) == (key, "Failed")
            assert emptied.at_s < place.since_s
        again = found(api, "job/train")
        assert present(again.places, key).uid == after.uid
        with pytest.raises(BadInput, match="write job/train"):
            find_job(api, "job/trian")


@needs_crds
def test_a_jobset(api: KubernetesApi) -> None:
    with controllers(), cluster.created(manifests.jobset("train", restarts=1)):
        job = found(api, "jobset/train")
        check_against_api(job, "train-workers-0", {"trainer"})
        changes: list[JobChange] = []
        with JobWatch(api, job, changes.extend) as watch:
            first = watch.places()
            killed_s = time.monotonic()
            kill_container(present(first, PlaceKey("train-workers-0", 1)).name)
            for place in first.places:
                assert place.pod is not None
                after = watch.wait_for_successor(place.key, place.pod.uid, LIMIT_S)
                assert after is not None
                assert (place.pod.restart_attempt, after.restart_attempt) == (0, 1)
                assert after.uid == pods.pods()[after.name]["metadata"]["uid"]
            second = watch.places()
            assert second.restart_attempt == 1
            assert all(place.since_s > killed_s for place in second.places)
            (restarted,) = of_type(changes, JobRestarted)
            assert restarted.attempt == 1
            last_taken = of_type(changes, PlaceTaken)[-3:]
            assert {change.uid for change in last_taken} == {
                place.pod.uid for place in second.places if place.pod
            }
            assert all(change.at_s > restarted.at_s > killed_s for change in last_taken)
            kill_container(present(second, PlaceKey("train-workers-0", 2)).name)
            watch.wait_for(lambda places: places.job and places.job.outcome, LIMIT_S)
            (ended,) = of_type(changes, JobEnded)
            assert (ended.outcome, ended.reason) == ("failed", "ReachedMaxRestarts")
        with pytest.raises(BadInput, match="this one is failed"):
            find_job(api, "jobset/train")


@needs_crds
def test_a_trainjob(api: KubernetesApi) -> None:
    with controllers(), cluster.created(*manifests.trainjob("tune")):
        job = found(api, "trainjob/tune")
        check_against_api(job, "tune-node-0", {"node"})
        assert len(pods.pods()) == 4  # the initializer has no place
        with pytest.raises(BadInput, match=r"name the container that trains: .* has node, proxy"):
            found(api, "jobset/tune")
        with JobWatch(api, job) as watch:
            key = PlaceKey("tune-node-0", 0)
            before = present(watch.places(), key)
            pods.delete(before.name)
            after = watch.wait_for_successor(key, before.uid, LIMIT_S)
            assert after is not None
            assert after.restart_attempt == watch.places().restart_attempt == 1
            assert len(watch.places().places) == 3


def test_a_crash_loop(api: KubernetesApi) -> None:
    def refusal() -> str:
        try:
            find_job(api, "statefulset/broken")  # accepted at a moment at which it runs
        except BadInput as error:
            return error.remedy if "crash loop" in error.remedy else ""
        return ""

    with cluster.created(manifests.crashing_set("broken")):
        remedy = wait_until(refusal, "the crash loop", poll_s=0.1)
        assert "container trainer of pod broken-0 is in a crash loop" in remedy
        assert "the last time with exit code 3" in remedy


def test_a_kind_whose_crd_is_not_installed(api: KubernetesApi) -> None:
    with pytest.raises(BadInput, match="its CRD is not installed"):
        find_job(api, "pytorchjob/x")


def test_a_missing_right_is_named(tmp_path: Path) -> None:
    with pods.person() as kubeconfig:
        file = tmp_path / "kubeconfig"
        file.write_text(kubeconfig)
        api = KubernetesApi(namespace=pods.namespace(), kubeconfig=str(file))
        with pytest.raises(BadInput, match=r"watch pods .*list statefulsets\.apps"):
            find_job(api, "statefulset/llama")
        api.close()


def test_a_namespace_that_does_not_allow_faults() -> None:
    api = KubernetesApi(namespace="default", kubeconfig=os.environ[pods.VARIABLE_OF_TESTS])
    with pytest.raises(BadInput, match=r"kubectl label namespace default chaoskit\.dev/chaos"):
        find_job(api, "statefulset/llama")
    api.close()
