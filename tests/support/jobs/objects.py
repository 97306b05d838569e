"""Objects of jobs and pods as an API server has them, for tests without a cluster."""

from __future__ import annotations

from typing import Any

from chaoskit.attach.jobs.kinds import COMPLETION_INDEX, JOB_NAME, POD_INDEX


def pod(
    name: str,
    uid: str = "",
    *,
    owner: tuple[str, str] | None = None,
    labels: dict[str, str] | None = None,
    phase: str = "Running",
    version: int = 1,
    created: int = 0,
    containers: tuple[str, ...] = ("trainer",),
    **more: Any,
) -> dict[str, Any]:
    """Return a pod.

    Args:
        owner: kind and name of its controller.
        created: seconds after a fixed moment at which it was created.
        more: further fields: ``ready``, ``terminating``, ``node``, ``statuses``.
    """
    metadata: dict[str, Any] = {
        "name": name,
        "uid": uid or f"uid-{name}",
        "resourceVersion": str(version),
        "creationTimestamp": f"2026-01-01T00:{created // 60:02}:{created % 60:02}Z",
        "labels": labels or {},
    }
    if owner is not None:
        metadata["ownerReferences"] = [
            {"kind": owner[0], "name": owner[1], "uid": "u", "controller": True}
        ]
    if more.get("terminating"):
        metadata["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    ready = "True" if more.get("ready", phase == "Running") else "False"
    return {
        "metadata": metadata,
        "spec": {
            "nodeName": more.get("node", "node0"),
            "containers": [{"name": container} for container in containers],
        },
        "status": {
            "phase": phase,
            "conditions": [
                {"type": "Ready", "status": ready},
                {"type": "ContainersReady", "status": more.get("containers_ready", ready)},
            ],
            "containerStatuses": more.get("statuses") or _running(containers, phase),
        },
    }


def _running(containers: tuple[str, ...], phase: str) -> list[dict[str, Any]]:
    """Return the statuses of containers of a running pod; none for another phase."""
    if phase != "Running":
        return []
    return [{**status("running"), "name": container} for container in containers]


def stateful_pod(index: int, uid: str = "", **fields: Any) -> dict[str, Any]:
    """Return a pod of the StatefulSet ``llama``."""
    labels = {"app": "llama", POD_INDEX: str(index)}
    owner = ("StatefulSet", "llama")
    return pod(f"llama-{index}", uid, owner=owner, labels=labels, **fields)


def job_pod(index: int, suffix: str, **fields: Any) -> dict[str, Any]:
    """Return a pod of the indexed Job ``train``."""
    labels = {JOB_NAME: "train", COMPLETION_INDEX: str(index)}
    return pod(f"train-{index}-{suffix}", owner=("Job", "train"), labels=labels, **fields)


def status(state: str, restarts: int = 0, **details: Any) -> dict[str, Any]:
    """Return the status of the container ``trainer``.

    Args:
        state: ``waiting``, ``running`` or ``terminated``.
        details: fields of the state, and ``last``, the fields of the end before.
    """
    last = details.pop("last", None)
    life = details.pop("life", restarts)
    return {
        "name": "trainer",
        "restartCount": restarts,
        "containerID": f"containerd://{life}",
        "state": {state: details},
        "lastState": {"terminated": last} if last else {},
    }


def stateful_set(replicas: int = 3) -> dict[str, Any]:
    """Return the StatefulSet ``llama``."""
    return {
        "metadata": {"name": "llama", "uid": "set", "resourceVersion": "1"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "llama"}}},
        "status": {},
    }


def indexed_job(parallelism: int = 3, **status: Any) -> dict[str, Any]:
    """Return the indexed Job ``train``."""
    return {
        "metadata": {"name": "train", "uid": "job", "resourceVersion": "1"},
        "spec": {
            "parallelism": parallelism,
            "completions": parallelism,
            "completionMode": "Indexed",
        },
        "status": status,
    }
