"""``chaoskit cluster doctor --attach`` on a real cluster: hands that work, refusals, and no leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.hand.client import UID, directory
from support.hand.in_pods import PYTHON, mounts
from support.jobs import cluster, manifests
from support.jobs.training import PodSecurity, training
from support.nodes import pods
from support.waiting import wait_until

from chaoskit.attach.doctor.trial_pod import COMPONENT, COMPONENT_LABEL
from chaoskit.cli.app import run

pytestmark = pytest.mark.skipif(
    bool(pods.unavailable()), reason=f"Kubernetes: {pods.unavailable()}"
)
REFERENCE = "statefulset/hands-doctor"
Findings = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", os.environ[pods.VARIABLE_OF_TESTS])
    monkeypatch.setenv("CHAOSKIT_KUBERNETES_NAMESPACE", pods.namespace())


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The file of an image of hands that mounts this machine's Python."""
    file = tmp_path / "hand.json"
    settings = {
        "name": pods.IMAGE,
        "command": (PYTHON, "-S", "-m", "hand"),
        "working_directory": str(directory()),
        "mounts": mounts(),
    }
    file.write_bytes(msgspec.json.encode(settings))
    return file


@pytest.fixture
def job() -> Iterator[None]:
    """A StatefulSet of a pod whose processes are not root. None of its containers mounts the hand."""
    manifest = manifests.stateful_set("hands-doctor")
    manifest["spec"]["replicas"] = 1
    spec = manifest["spec"]["template"]["spec"]
    spec["volumes"].append({"name": "hand", "hostPath": {"path": str(directory())}})
    spec["containers"][0]["securityContext"] = {"runAsUser": UID, "runAsGroup": UID}
    with cluster.created(manifest):
        wait_until(lambda: all(is_running(pod) for pod in job_pods()), "the pod of the job")
        yield


def job_pods() -> list[dict[str, Any]]:
    return list(pods.pods("app=hands-doctor").values()) or [{}]


def is_running(pod: dict[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") == "Running"


def throwaway_pods() -> dict[str, Any]:
    return dict(pods.pods(f"{COMPONENT_LABEL}={COMPONENT}"))


def findings(
    capsys: pytest.CaptureFixture[str], image: Path | str, reference: str, status: int
) -> Findings:
    """Run the doctor, and return its finding about each hand."""
    arguments = ["cluster", "doctor", "--attach", reference, "--hand-image", str(image)]
    assert run([*arguments, "--json"]) == status
    records = json.loads(capsys.readouterr().out)["hands"]
    wait_until(lambda: not throwaway_pods(), "the end of the throw-away pod")
    return {finding["hand"]: finding for finding in records}


@pytest.mark.usefixtures("job")
def test_hands_that_work(capsys: pytest.CaptureFixture[str], image: Path) -> None:
    by_hand = findings(capsys, image, REFERENCE, 0)
    assert by_hand["processes"]["works"], by_hand
    assert "pid 1 stood still, and went on" in by_hand["processes"]["text"]
    assert by_hand["network"]["works"], by_hand
    assert "a rule dropped" in by_hand["network"]["text"]
    assert [pod["spec"].get("ephemeralContainers") for pod in job_pods()] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["restricted", "baseline"])
def test_pod_security_refuses_a_hand_on_the_network(
    capsys: pytest.CaptureFixture[str], image: Path, level: PodSecurity
) -> None:
    with training("statefulset", pod_security=level, nodes=1) as job:
        by_hand = findings(capsys, image, job.reference, 1)
    assert by_hand["processes"]["works"], by_hand
    assert not by_hand["network"]["works"]
    assert "violates PodSecurity" in by_hand["network"]["text"]
    assert "enforce=privileged" in by_hand["network"]["remedy"]


@pytest.mark.usefixtures("job")
def test_a_throwaway_pod_that_is_refused(capsys: pytest.CaptureFixture[str], image: Path) -> None:
    """The namespace got its level after the job: no new pod like its own is admitted."""
    path = f"/api/v1/namespaces/{pods.namespace()}"
    label = "pod-security.kubernetes.io/enforce"
    pods.ask("PATCH", path, {"metadata": {"labels": {label: "baseline"}}})
    try:
        by_hand = findings(capsys, image, REFERENCE, 1)
    finally:
        pods.ask("PATCH", path, {"metadata": {"labels": {label: None}}})
    for finding in by_hand.values():
        assert "the throw-away pod is refused" in finding["text"]
        assert "violates PodSecurity" in finding["text"]
        assert "level of the namespace" in finding["remedy"]


@pytest.mark.usefixtures("job")
def test_an_image_that_cannot_be_pulled(capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = findings(capsys, "local.test/no-such-hand:1", REFERENCE, 1)
    for finding in by_hand.values():
        assert "its image cannot be pulled" in finding["text"]
        assert "--hand-image" in finding["remedy"]


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda signum: signum.name
)
def test_a_doctor_that_is_ended_leaves_no_pod(signum: signal.Signals) -> None:
    """The signal comes while it waits for an image that cannot be pulled."""
    command = [sys.executable, "-m", "chaoskit", "cluster", "doctor", "--attach", REFERENCE]
    command += ["--hand-image", "local.test/no-such-hand:1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as doctor:
        wait_until(
            lambda: any(
                pod["spec"].get("ephemeralContainers") for pod in throwaway_pods().values()
            ),
            "the hand in the throw-away pod",
        )
        doctor.send_signal(signum)
    assert doctor.returncode != 0
    wait_until(lambda: not throwaway_pods(), "the end of the throw-away pod")


def test_a_missing_right_is_named_before_a_pod_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role of chaoskit's own users has no right to watch jobs, and none to start hands."""
    file = tmp_path / "kubeconfig"
    with pods.person() as kubeconfig:
        file.write_text(kubeconfig)
        monkeypatch.setenv("KUBECONFIG", str(file))
        arguments = ["cluster", "doctor", "--attach", REFERENCE, "--hand-image", "registry/hand:1"]
        assert run(arguments) == 2
        output = capsys.readouterr()
    assert "watch pods (" in output.err
    assert output.err.count("\n") == 1
    assert not throwaway_pods()
