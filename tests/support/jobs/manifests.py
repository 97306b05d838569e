"""Manifests of small jobs whose pods only print and sleep, for the tests' cluster.

-> ``cluster.py`` creates them. ``processes.py`` kills their containers.
"""

from __future__ import annotations

from typing import Any

from support.jobs.jobset import defaulted
from support.nodes.pods import IMAGE

#: Ends with code 1 when it is asked to end, as a launcher of ranks does.
_SCRIPT = "trap 'exit 1' TERM; while true; do echo step; sleep 0.2; done"
COMMAND = ["/bin/sh", "-c", _SCRIPT]
_TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_INITIALIZER = {"trainer.kubeflow.org/trainjob-ancestor-step": "dataset-initializer"}


def pod_spec(*containers: str, restart_policy: str = "Never") -> dict[str, Any]:
    """Return the specification of a pod with containers of these names."""
    mounts = [{"name": "usr", "mountPath": "/usr", "readOnly": True}]
    return {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": 2,
        "containers": [
            {"name": name, "image": IMAGE, "command": COMMAND, "volumeMounts": mounts}
            for name in containers
        ],
        "volumes": [{"name": "usr", "hostPath": {"path": "/usr"}}],
    }


def crashing_set(name: str) -> dict[str, Any]:
    """Return a StatefulSet of a pod whose container ends with code 3."""
    manifest = stateful_set(name)
    manifest["spec"]["replicas"] = 1
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    container["command"] = ["/bin/sh", "-c", "exit 3"]
    return manifest


def stateful_set(name: str) -> dict[str, Any]:
    """Return a StatefulSet of three pods."""
    labels = {"app": name}
    return {
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "serviceName": name,
            "replicas": 3,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": pod_spec("trainer", restart_policy="Always"),
            },
        },
    }


def indexed_job(name: str) -> dict[str, Any]:
    """Return an indexed Job of three pods, which may fail some times."""
    return {"kind": "Job", "metadata": {"name": name}, "spec": _job_spec(6, "trainer")}


def jobset(name: str, restarts: int) -> dict[str, Any]:
    """Return a JobSet of three pods, which may restart some times."""
    template = {"spec": _job_spec(0, "trainer")}
    spec = {
        "failurePolicy": {"maxRestarts": restarts},
        "replicatedJobs": [{"name": "workers", "replicas": 1, "template": template}],
    }
    return defaulted({"kind": "JobSet", "metadata": {"name": name}, "spec": spec})


def trainjob(name: str) -> list[dict[str, Any]]:
    """Return a TrainJob of three trainers and an initializer, and its runtime before it."""
    trainer = {"metadata": {"labels": _TRAINER}, "spec": _job_spec(0, "node", "proxy")}
    initializer = {
        "metadata": {"labels": _INITIALIZER},
        "spec": {**_job_spec(0, "dataset-initializer"), "parallelism": 1, "completions": 1},
    }
    replicated_jobs = [
        {"name": "dataset-initializer", "template": initializer},
        {"name": "node", "template": trainer},
    ]
    runtime = {
        "kind": "TrainingRuntime",
        "metadata": {"name": f"{name}-runtime"},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": 1}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": 1},
                    "replicatedJobs": replicated_jobs,
                }
            },
        },
    }
    spec = {
        "runtimeRef": {"kind": "TrainingRuntime", "name": f"{name}-runtime"},
        "trainer": {"numNodes": 3, "command": COMMAND},
    }
    return [runtime, {"kind": "TrainJob", "metadata": {"name": name}, "spec": spec}]


def _job_spec(backoff_limit: int, *containers: str) -> dict[str, Any]:
    """Return the specification of an indexed Job of three pods."""
    return {
        "backoffLimit": backoff_limit,
        "completions": 3,
        "parallelism": 3,
        "completionMode": "Indexed",
        "template": {"spec": pod_spec(*containers)},
    }
