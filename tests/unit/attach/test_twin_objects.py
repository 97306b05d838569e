"""The objects of a second job at an API server on the loopback: asked for, created, and deleted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.jobs.found import found_job
from support.nodes.api_server import ApiServer, api_server, refusal

from chaoskit import LogPatterns
from chaoskit.attach.jobs.reference import parse_reference
from chaoskit.attach.twin.cache import JobTwins
from chaoskit.attach.twin.manifests import TwinManifests
from chaoskit.attach.twin.objects import MARK, TwinObject, created, require_creatable
from chaoskit.attach.twin.run import SecondJob, TwinPlan
from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.undo import UndoLog

SETS = "/apis/apps/v1/namespaces/chaos/statefulsets"
SERVICES = "/api/v1/namespaces/chaos/services"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
OBJECTS = (TwinObject(SERVICES, "twin"), TwinObject(SETS, "twin"))
RESOURCES = {
    "/apis/apps/v1": [{"name": "statefulsets", "kind": "StatefulSet", "namespaced": True}],
    "/api/v1": [
        {"name": "services/status", "kind": "Service", "namespaced": True},
        {"name": "services", "kind": "Service", "namespaced": True},
        {"name": "nodes", "kind": "Node", "namespaced": False},
    ],
}


def manifest(kind: str, api_version: str) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": "twin"}, "spec": {}}


MANIFESTS = (manifest("Service", "v1"), manifest("StatefulSet", "apps/v1"))


def twin_of(*manifests: dict[str, Any]) -> TwinManifests:
    return TwinManifests("twin.yaml", manifests, parse_reference("statefulset/twin"))


@dataclass
class Cluster:
    """The API server.

    Attributes:
        objects: the objects that it has, by path.
        answers: answers by method and path, instead of the usual ones.
        denied: verb and resource of each right that the user lacks.
    """

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)
    denied: set[tuple[str, str]] = field(default_factory=set)
    server: ApiServer = field(init=False)
    api: KubernetesApi = field(init=False)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if (method, path) in self.answers:
            return self.answers[method, path]
        if path in RESOURCES:
            return 200, {"resources": RESOURCES[path]}
        if path == REVIEWS:
            asked = body["spec"]["resourceAttributes"]
            allowed = (asked["verb"], asked["resource"]) not in self.denied
            return 201, {"status": {"allowed": allowed}}
        if method == "POST":
            return self._create(f"{path}/{body['metadata']['name']}", body)
        if path not in self.objects:
            return refusal(404, "not found")
        if method == "GET":
            return 200, self.objects[path]
        if body["preconditions"]["uid"] != self.objects[path]["metadata"]["uid"]:
            return refusal(409, "another UID")
        return 200, self.objects.pop(path)

    def _create(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in self.objects:
            return refusal(409, f"{path} already exists")
        made = {**body, "metadata": {**body["metadata"], "uid": f"uid-{len(self.objects)}"}}
        if MARK in (made["metadata"].get("labels") or {}):  # a dry run has none
            self.objects[path] = made
        return 201, made

    def made(self, method: str) -> list[str]:
        """Return the path of each request of a method, in their order."""
        return [path for verb, path, _ in self.server.requests if verb == method]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster()
    with api_server(tmp_path, made.answer) as made.server:
        made.api = KubernetesApi(kubeconfig=made.server.kubeconfig)
        yield made
        made.api.close()


def test_all_objects_are_asked_for_and_none_is_made(cluster: Cluster) -> None:
    assert require_creatable(cluster.api, twin_of(*MANIFESTS)) == OBJECTS
    assert cluster.objects == {}
    asked = [path for path in cluster.made("POST") if path != REVIEWS]
    assert asked == [SERVICES, SETS]


def test_what_cannot_be_made_is_refused(cluster: Cluster) -> None:
    refusals = {
        "it belongs to the whole cluster": manifest("Node", "v1"),
        "has no apps/v1 Deployment": manifest("Deployment", "apps/v1"),
        "has no no.such/v1 Kind": manifest("Kind", "no.such/v1"),
    }
    for part, refused_manifest in refusals.items():
        with pytest.raises(BadInput, match=part) as refused:
            require_creatable(cluster.api, twin_of(refused_manifest))
        assert (refused.value.field, refused.value.value) == ("twin", "twin.yaml")


@pytest.mark.parametrize("verb", ["create", "delete", "get"])
def test_a_missing_right_is_named(cluster: Cluster, verb: str) -> None:
    cluster.denied.add((verb, "statefulsets"))
    with pytest.raises(BadInput, match=rf"granted in namespace chaos: {verb} statefulsets.apps"):
        require_creatable(cluster.api, twin_of(*MANIFESTS))


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (refusal(409, "twin already exists"), "delete StatefulSet twin, or write another name"),
        (refusal(403, "denied by a webhook"), "mend StatefulSet twin: denied by a webhook"),
        (refusal(422, "replicas: Invalid"), "mend StatefulSet twin: replicas: Invalid"),
    ],
)
def test_a_refusal_of_the_server_is_passed_on(
    cluster: Cluster, answer: tuple[int, Any], part: str
) -> None:
    cluster.answers["POST", SETS] = answer
    with pytest.raises(BadInput, match=part) as refused:
        require_creatable(cluster.api, twin_of(*MANIFESTS))
    assert refused.value.field == "twin"


def test_a_second_job_that_writes_to_storage_of_the_job_is_refused(cluster: Cluster) -> None:
    container = {"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    volumes = [{"name": "data", "hostPath": {"path": "/data/llama"}}]
    pod_spec = {"containers": [container], "volumes": volumes}
    running = found_job()
    pods = tuple({**pod, "spec": pod_spec} for pod in running.listing.pods)
    job = replace(running, listing=replace(running.listing, pods=pods))
    second = {**MANIFESTS[1], "spec": {"template": {"spec": pod_spec}}}
    plan = TwinPlan(twin_of(second), LogPatterns(step=r"step (\d+)"), "", 0, 60.0)
    with pytest.raises(BadInput, match="give StatefulSet twin storage of its own"):
        SecondJob(cluster.api, job, plan, JobTwins())


def test_the_objects_exist_inside_the_context_alone(cluster: Cluster, undo: UndoLog) -> None:
    with created(cluster.api, MANIFESTS, OBJECTS, undo):
        assert [*cluster.objects] == [f"{SERVICES}/twin", f"{SETS}/twin"]
    assert cluster.objects == {}
    assert cluster.made("DELETE") == [f"{SETS}/twin", f"{SERVICES}/twin"]
    options = [body for verb, _, body in cluster.server.requests if verb == "DELETE"]
    assert {body["propagationPolicy"] for body in options} == {"Foreground"}
    count = len(cluster.server.requests)
    undo.close()
    assert len(cluster.server.requests) == count  # nothing was left to undo


@pytest.mark.parametrize(
    ("answer", "is_undone"), [((201, lambda write: None), True), (refusal(422, "Invalid"), False)]
)
def test_an_object_that_appears_after_an_unanswered_creation_is_deleted(
    cluster: Cluster, undo: UndoLog, answer: tuple[int, Any], is_undone: bool
) -> None:
    """The answer is lost, and nothing is there to delete yet. A refused object never appears."""
    cluster.answers["POST", SETS] = answer
    with pytest.raises(ApiError), created(cluster.api, MANIFESTS, OBJECTS, undo):
        raise AssertionError
    assert cluster.objects == {}
    ((_, _, late),) = [request for request in cluster.server.requests if request[1] == SETS]
    late["metadata"]["uid"] = "late"
    cluster.objects[f"{SETS}/twin"] = late
    undo.close()
    assert bool(cluster.objects) is not is_undone


def test_an_object_that_another_one_has_made_meanwhile_is_left_alone(
    cluster: Cluster, undo: UndoLog
) -> None:
    """The first object is made, and deleted again."""
    foreign = {"metadata": {"name": "twin", "uid": "foreign"}}
    cluster.objects[f"{SETS}/twin"] = foreign
    with (
        pytest.raises(ApiError, match="already exists"),
        created(cluster.api, MANIFESTS, OBJECTS, undo),
    ):
        raise AssertionError
    assert cluster.objects == {f"{SETS}/twin": foreign}


def test_the_others_are_deleted_if_one_cannot_be(cluster: Cluster, undo: UndoLog) -> None:
    """The undo log tries again."""
    cluster.answers["DELETE", f"{SETS}/twin"] = refusal(403, "forbidden")
    with pytest.raises(ApiError, match="forbidden"), created(cluster.api, MANIFESTS, OBJECTS, undo):
        pass
    assert [*cluster.objects] == [f"{SETS}/twin"]
    del cluster.answers["DELETE", f"{SETS}/twin"]
    undo.close()
    assert cluster.objects == {}


@pytest.mark.parametrize(("mark", "left"), [("m1", []), ("m2", [f"{SETS}/twin"])])
def test_the_program_of_the_guard_deletes_its_own_objects_alone(
    cluster: Cluster, mark: str, left: list[str]
) -> None:
    metadata = {"name": "twin", "uid": "u", "labels": {MARK: "m1"}}
    cluster.objects[f"{SETS}/twin"] = {"metadata": metadata}
    arguments = {"objects": [OBJECTS[1]], "mark": mark, "server": cluster.api.server}
    words = [json.dumps(arguments | cluster.api.arguments)]
    command = [sys.executable, "-m", "chaoskit.attach.twin.objects", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [*cluster.objects] == left
