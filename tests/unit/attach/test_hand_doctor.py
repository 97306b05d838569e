"""The throw-away pod of the doctor of hands, and the remedies for hands that do not work."""

from __future__ import annotations

from typing import Any

import pytest

from chaoskit.attach.doctor.remedies import remedy_of
from chaoskit.attach.doctor.trial_pod import LABELS, LIFE_S, trial_pod
from chaoskit.attach.hands.hand import HandUnable
from chaoskit.attach.hands.hand_container import NETWORK, PROCESSES, HandRole
from chaoskit.errors import HarnessError

SECURITY = {"runAsUser": 1000, "capabilities": {"drop": ["ALL"]}}
TOLERATIONS = [{"key": "gpu", "operator": "Exists"}]


def job_pod() -> dict[str, Any]:
    """Return a pod of a job as the API server shows it."""
    trainer = {
        "name": "trainer",
        "image": "registry/train:1",
        "command": ["torchrun", "train.py"],
        "env": [{"name": "TOKEN", "value": "secret"}],
        "livenessProbe": {"exec": {"command": ["true"]}},
        "lifecycle": {"preStop": {"exec": {"command": ["save"]}}},
        "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "900Gi"}},
        "securityContext": SECURITY,
        "volumeMounts": [
            {"name": "data", "mountPath": "/data", "readOnly": True},
            {"name": "checkpoints", "mountPath": "/checkpoints"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "kube-api-access-x7k2p", "mountPath": "/var/run/secrets", "readOnly": True},
        ],
    }
    sidecar = {"name": "log", "image": "registry/log:1"}
    return {
        "metadata": {
            "name": "llama-0",
            "labels": {"app": "llama"},
            "ownerReferences": [{"kind": "StatefulSet", "name": "llama"}],
        },
        "spec": {
            "nodeName": "m1",
            "containers": [trainer, sidecar],
            "initContainers": [{"name": "copy", "image": "registry/copy:1"}],
            "priorityClassName": "training",
            "priority": 1000,
            "hostname": "llama-0",
            "subdomain": "llama",
            "resourceClaims": [{"name": "gpu"}],
            "serviceAccountName": "trainer",
            "tolerations": TOLERATIONS,
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "hand", "hostPath": {"path": "/opt/hand"}},
                {"name": "kube-api-access-x7k2p", "projected": {"sources": []}},
            ],
        },
    }


def test_a_trial_pod_has_what_decides_about_hands() -> None:
    spec = trial_pod("doctor-1", job_pod(), "trainer")["spec"]
    (container,) = spec["containers"]
    assert (container["name"], container["image"]) == ("trainer", "registry/train:1")
    assert container["securityContext"] == SECURITY
    assert (spec["serviceAccountName"], spec["tolerations"]) == ("trainer", TOLERATIONS)
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m1"]}]}
    ]


def test_a_trial_pod_does_nothing_and_takes_nothing() -> None:
    pod = job_pod()
    manifest = trial_pod("doctor-1", pod, "trainer")
    spec = manifest["spec"]
    (container,) = spec["containers"]
    assert container["command"][0] == "sh"
    assert f"sleep {LIFE_S}" in container["command"][2]
    assert spec["activeDeadlineSeconds"] == LIFE_S
    assert not {"env", "livenessProbe", "lifecycle"} & container.keys()
    left_out = {"initContainers", "priorityClassName", "priority", "hostname", "resourceClaims"}
    assert not left_out & spec.keys()
    assert spec["automountServiceAccountToken"] is False
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert manifest["metadata"] == {"name": "doctor-1", "labels": LABELS}
    assert not LABELS.items() & pod["metadata"]["labels"].items()
    assert pod == job_pod()


def test_a_trial_pod_has_only_volumes_that_it_cannot_change() -> None:
    """Hands may mount volumes that no container of the job mounts."""
    spec = trial_pod("doctor-1", job_pod(), "trainer")["spec"]
    assert [volume["name"] for volume in spec["volumes"]] == ["data", "tmp", "hand"]
    (container,) = spec["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == ["data", "tmp"]


@pytest.mark.parametrize("writer", ["initContainers", "containers"])
def test_a_volume_that_another_container_writes_is_left_out(writer: str) -> None:
    pod = job_pod()
    mount = {"name": "data", "mountPath": "/data"}
    pod["spec"][writer].append({"name": "writer", "volumeMounts": [mount]})
    volumes = trial_pod("doctor-1", pod, "trainer")["spec"]["volumes"]
    assert [volume["name"] for volume in volumes] == ["tmp", "hand"]


@pytest.mark.parametrize(
    ("error", "role", "remedy"),
    [
        (HandUnable("hand", "ptrace_scope is 1", "give it SYS_PTRACE"), PROCESSES, "SYS_PTRACE"),
        (
            HarnessError('pods "x" is forbidden: violates PodSecurity "restricted:latest"'),
            NETWORK,
            "pod-security.kubernetes.io/enforce=privileged",
        ),
        (
            HarnessError('pods "x" is forbidden: violates PodSecurity "restricted:latest"'),
            PROCESSES,
            "pod-security.kubernetes.io/enforce=baseline",
        ),
        (
            HarnessError('the throw-away pod is refused: violates PodSecurity "baseline:latest"'),
            None,
            "one that admits new pods like those of the job",
        ),
        (HarnessError("no hand in x: its image cannot be pulled: ErrImagePull"), NETWORK, "image"),
        (HarnessError("pods is forbidden: exceeded quota: team"), None, "raise the quota"),
        (HarnessError("a hook has refused it"), None, "look at the message"),
    ],
)
def test_a_refusal_has_a_remedy(error: HarnessError, role: HandRole | None, remedy: str) -> None:
    assert remedy in remedy_of(error, role)
