"""What the objects of a session look like. Nothing here speaks to a cluster."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any

from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.options import KubernetesOptions

Manifest = dict[str, Any]

#: Of a namespace in which runs may take place.
ALLOWED = "chaoskit.dev/chaos"
ALLOWED_VALUE = "allowed"
#: Labels of every object: the session; of a pod the node that it is now, and a name that no other pod ever has.
SESSION, STATION, PLACE = "chaoskit.dev/session", "chaoskit.dev/station", "chaoskit.dev/place"
#: Where files of runs lie in a pod.
FILES = "/var/lib/chaoskit"
_TOKEN = "/var/lib/chaoskit-token"
_ADDRESS = "CHAOSKIT_ADDRESS"
_USER = 1000
_SHM = "1Gi"
_GRACE_S = 30
#: A Job that has ended stays for so many seconds, so that its state can be read.
TTL_S = 30


def labels(session: str, component: str) -> dict[str, str]:
    """Labels of an object of a session."""
    return {
        "app.kubernetes.io/name": "chaoskit",
        "app.kubernetes.io/managed-by": "chaoskit",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": session,
        SESSION: session,
    }


def selector(session: str) -> str:
    """The label selector of all objects of a session."""
    return f"{SESSION}={session}"


def job(session: str, pod: Manifest, *, started_by: str, deadline_s: int) -> Manifest:
    """The owner of everything else, with the coordinator's pod in it: when that has ended, all goes."""
    kept = {name: pod["metadata"][name] for name in ("labels", "annotations") if name in pod["metadata"]}
    inside = {"metadata": kept, "spec": pod["spec"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": session,
            "labels": labels(session, "session"),
            "annotations": {"chaoskit.dev/started-by": started_by},
        },
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": deadline_s,
            "ttlSecondsAfterFinished": TTL_S,
            "template": inside,
        },
    }


def owner(job: Manifest) -> Manifest:
    """The reference by which the collector of garbage knows what belongs to a job."""
    metadata = job["metadata"]
    return {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}


def secret(session: str, token: str, owned_by: Manifest) -> Manifest:
    """The token with which supervisors authenticate."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": session, "labels": labels(session, "token"), "ownerReferences": [owned_by]},
        "data": {"token": base64.b64encode(token.encode()).decode()},
    }


def network_policy(session: str, runner: str, owned_by: Manifest) -> Manifest:
    """Pods of a session are reached by each other, and by the runner: its address."""
    selected = {"matchLabels": {SESSION: session}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": session, "labels": labels(session, "network"), "ownerReferences": [owned_by]},
        "spec": {
            "podSelector": selected,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": selected}, {"ipBlock": {"cidr": str(ip_network(runner))}}]}],
        },
    }


def _container(command: list[str], image: str) -> Manifest:
    """The container of a node, hardened."""
    container: Manifest = {
        "name": template.CONTAINER,
        "command": command,
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "chaoskit-files", "mountPath": FILES},
            {"name": "chaoskit-tmp", "mountPath": "/tmp"},
            {"name": "chaoskit-shm", "mountPath": "/dev/shm"},
            {"name": "chaoskit-token", "mountPath": _TOKEN, "readOnly": True},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return container | ({"image": image} if image else {})


def pod(
    session: str,
    station: str,
    name: str,
    runner: str,
    options: KubernetesOptions,
    given: Mapping[str, Any],
    owned_by: Manifest | None = None,
) -> Manifest:
    """A pod whose first process is a supervisor.

    Args:
        station: the node, or the coordinator. runner: ``host:port`` that the supervisor dials.
        given: a template, as :func:`chaoskit.substrate.kubernetes.template.read` gives it.
    """
    command = [options.python, "-m", "chaoskit.substrate.supervisor", "--dial", runner]
    command += ["--place", name, "--address", f"$({_ADDRESS})", "--token-file", f"{_TOKEN}/token"]
    container = _container(command, options.image)
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "chaoskit-files", "emptyDir": {}},
            {"name": "chaoskit-tmp", "emptyDir": {}},
            {"name": "chaoskit-shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHM}},
            {"name": "chaoskit-token", "secret": {"secretName": session, "defaultMode": 0o440}},
        ],
    }
    metadata: Manifest = {"name": name, "labels": {**labels(session, "node"), STATION: station, PLACE: name}}
    if owned_by is not None:
        metadata["ownerReferences"] = [owned_by]
    made = template.merge({"metadata": metadata, "spec": spec}, given)
    command += ["--grace-s", str(made["spec"]["terminationGracePeriodSeconds"])]
    return {"apiVersion": "v1", "kind": "Pod", **made}
