"""Jobs on a real cluster that cannot be broken as they are: one line, status 2, and nothing is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import cluster, manifests
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.cli.app import run

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
ASK = ["cluster", "job"]
HAND = ["--hand-image", "local.test/no-such-hand:1"]
Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
    monkeypatch.setenv("CHAOSKIT_KUBERNETES_NAMESPACE", pods.namespace())
    monkeypatch.delenv("CHAOSKIT_HAND_IMAGE", raising=False)


def objects() -> list[str]:
    """Return the names of all objects of the namespace, and of the hands in its pods.

    The pods themselves are left out: controllers of the cluster make them meanwhile.
    """
    hands = [
        f"{name}/{hand['name']}"
        for name, pod in pods.pods().items()
        for hand in pod["spec"].get("ephemeralContainers") or ()
    ]
    others = [name for name in pods.everything() if not name.startswith("pods/")]
    return [*others, *hands]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the command until its line has the words, and return the line.

    A job that still comes up may be refused for other reasons before, or be accepted.
    """

    def attempt(words: str, arguments: list[str]) -> str:
        before = objects()
        status = run([*ASK, *arguments])
        output = capsys.readouterr()
        if words not in output.err:
            return ""
        assert status == 2
        assert output.out == ""
        assert output.err.startswith("chaoskit: ")
        assert output.err.count("\n") == 1
        assert output.err.endswith("\n")
        assert objects() == before
        return output.err

    def until(words: str, *arguments: str, limit_s: float = 60) -> str:
        return wait_until(
            lambda: attempt(words, [*arguments]),
            f"the refusal {words!r}",
            poll_s=0.2,
            limit_s=limit_s,
        )

    return until


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama"], "write statefulset/NAME, job/NAME"),
        (["statefulset/"], "write statefulset/NAME, job/NAME"),
        (["statefulst/llama"], "write statefulset before the slash"),
        (["deployment/llama"], "use one of statefulset, job"),
        (["statefulset/Llama!"], "write the name of an object, as in statefulset/llama"),
        (["pods/app"], "write pods/LABEL=VALUE"),
        (["pods/app=a,=b"], "write pods/LABEL=VALUE"),
        (["pods/app=no-such-app"], "has none with app=no-such-app"),
        (["statefulset/no-such-job"], "name an object of namespace"),
        (["job/no-such-job"], "name an object of namespace"),
        (["pytorchjob/llama"], "its CRD is not installed"),
        (["hyperpodpytorchjob/llama"], "its CRD is not installed"),
        (["statefulset/llama", "--ranks"], "name an image: --hand-image IMAGE"),
        (["statefulset/llama", "--container", ""], "give it a value, or leave it out"),
        ([], "KIND/NAME"),
    ],
)
def test_references(refused: Refused, arguments: list[str], words: str) -> None:
    refused(words, *arguments, limit_s=5)


@pytest.mark.parametrize(
    ("namespace", "words"),
    [
        ("default", "kubectl label namespace default chaoskit.dev/chaos=allowed"),
        ("kube-system", "use one of your own: this one belongs to the cluster"),
        ("no-such-namespace", "kubectl create namespace no-such-namespace"),
    ],
)
def test_namespaces(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, namespace: str, words: str
) -> None:
    monkeypatch.setenv("CHAOSKIT_KUBERNETES_NAMESPACE", namespace)
    refused(words, "statefulset/llama", *HAND, limit_s=5)


def test_a_context_that_does_not_exist(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOSKIT_KUBERNETES_CONTEXT", "no-such-context")
    refused("no-such-context", "statefulset/llama", limit_s=5)


def test_a_missing_right(refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The role of chaoskit's own users has no right to watch jobs, and none to start hands."""
    file = tmp_path / "kubeconfig"
    with pods.person() as kubeconfig:
        file.write_text(kubeconfig)
        monkeypatch.setenv("KUBECONFIG", str(file))
        line = refused("watch pods (", "statefulset/llama", limit_s=5)
        assert "list statefulsets.apps (" in line


def with_spec(manifest: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a job with other fields in the specification of its pods."""
    changed: dict[str, Any] = json.loads(json.dumps(manifest))
    changed["spec"]["template"]["spec"] |= fields
    return changed


def ending(manifest: dict[str, Any], code: int) -> dict[str, Any]:
    """Return a job whose containers end at once."""
    changed: dict[str, Any] = json.loads(json.dumps(manifest))
    for container in changed["spec"]["template"]["spec"]["containers"]:
        container["command"] = ["/bin/sh", "-c", f"exit {code}"]
    return changed


def without_image(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a job whose image cannot be pulled."""
    changed: dict[str, Any] = json.loads(json.dumps(manifest))
    for container in changed["spec"]["template"]["spec"]["containers"]:
        container["image"] = "registry.invalid/no-such-image:1"
    return changed


def job(**fields: Any) -> dict[str, Any]:
    """Return the indexed Job ``train`` with other fields."""
    manifest = manifests.indexed_job("train")
    manifest["spec"] |= fields
    return manifest


def empty_set() -> dict[str, Any]:
    """Return a StatefulSet that is scaled to zero."""
    manifest = manifests.stateful_set("llama")
    manifest["spec"]["replicas"] = 0
    return manifest


@pytest.mark.parametrize(
    ("manifest", "reference", "words"),
    [
        (manifests.crashing_set("llama"), "statefulset/llama", "is in a crash loop"),
        (
            without_image(manifests.stateful_set("llama")),
            "statefulset/llama",
            "wait for its pods: pod llama-",
        ),
        (empty_set(), "statefulset/llama", "has none with app=llama"),
        (
            with_spec(manifests.stateful_set("llama"), nodeSelector={"no-such": "label"}),
            "statefulset/llama",
            "wait for its pods: pod llama-",
        ),
        (
            with_spec(
                manifests.stateful_set("llama"),
                containers=manifests.pod_spec("trainer", "proxy")["containers"],
            ),
            "statefulset/llama",
            "name the container that trains",
        ),
        (job(suspend=True), "job/train", "resume it first: it is suspended"),
        (job(completionMode="NonIndexed"), "job/train", "its completionMode is not Indexed"),
        (ending(job(), 0), "job/train", "name a job that runs: this one is complete"),
        (ending(job(backoffLimit=0), 3), "job/train", "name a job that runs: this one is failed"),
        (
            ending(job(), 0),
            "pods/batch.kubernetes.io/job-name=train",
            "name a job that runs: all pods have ended",
        ),
    ],
    ids=[
        "crash loop",
        "image that cannot be pulled",
        "scaled to zero",
        "no machine",
        "two containers",
        "suspended",
        "not indexed",
        "complete",
        "failed",
        "ended pods",
    ],
)
def test_jobs(refused: Refused, manifest: dict[str, Any], reference: str, words: str) -> None:
    with cluster.created(manifest):
        refused(words, reference, *HAND)


def test_a_job_that_runs(refused: Refused) -> None:
    first, second = manifests.stateful_set("llama"), manifests.stateful_set("mistral")
    for manifest in (first, second):
        manifest["spec"]["replicas"] = 1
        for labels in (
            manifest["spec"]["selector"]["matchLabels"],
            manifest["spec"]["template"]["metadata"]["labels"],
        ):
            labels["team"] = "ml"
    with cluster.created(first, second):
        refused("use one of trainer", "statefulset/llama", "--container", "main", *HAND)
        refused("write statefulset/llama", "statefulset/lama", *HAND)
        line = refused("add labels until it matches the pods of one job", "pods/team=ml", *HAND)
        assert "statefulset/llama, statefulset/mistral" in line
