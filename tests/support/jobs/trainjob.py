"""A stand-in for the controller of TrainJobs: a JobSet of the same name, and the TrainJob's status.

There is no recording of it. It makes what the source of Trainer v2 and its CRDs say: the template
of the runtime, with the nodes, the command and the variables of the TrainJob.

-> ``controller.py`` runs it. ``jobset.py``: the controller of the JobSet.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from support.jobs import cluster
from support.jobs.jobset import defaulted, owner_reference
from support.nodes import pods

_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_NODE = "node"
_PORT = 29500
_TAKEN = ("image", "command", "args")
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def reconcile(trainjob: Mapping[str, Any], jobsets: Sequence[Mapping[str, Any]]) -> None:
    """Make the JobSet of a TrainJob unless it exists, and write the TrainJob's status.

    Args:
        trainjob: the TrainJob.
        jobsets: the JobSets of the namespace.
    """
    if trainjob["metadata"].get("deletionTimestamp"):
        return
    uid = trainjob["metadata"]["uid"]
    for jobset in jobsets:
        if any(owner["uid"] == uid for owner in jobset["metadata"].get("ownerReferences") or ()):
            _write_status(trainjob, jobset)
            return
    at = cluster.path("TrainingRuntime", trainjob["spec"]["runtimeRef"]["name"])
    cluster.create({"kind": "JobSet", **jobset_manifest(trainjob, pods.ask("GET", at))})


def jobset_manifest(trainjob: Mapping[str, Any], runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JobSet of a TrainJob.

    Args:
        trainjob: the TrainJob.
        runtime: its TrainingRuntime.
    """
    name, trainer = trainjob["metadata"]["name"], trainjob["spec"].get("trainer") or {}
    policy = runtime["spec"].get("mlPolicy") or {}
    nodes = trainer.get("numNodes") or policy.get("numNodes") or 1
    template = copy.deepcopy(runtime["spec"]["template"])
    for entry in template["spec"]["replicatedJobs"]:
        metadata = entry["template"].get("metadata") or {}
        if (metadata.get("labels") or {}).get(_ANCESTOR) != "trainer":
            continue
        entry["replicas"] = 1
        entry["template"]["spec"] |= {"parallelism": nodes, "completions": nodes}
        for container in entry["template"]["spec"]["template"]["spec"]["containers"]:
            if container["name"] == _NODE:
                container.update({key: trainer[key] for key in _TAKEN if key in trainer})
                own = [*container.get("env", ()), *trainer.get("env", ())]
                container["env"] = [*own, *_torch_variables(name, nodes, policy)]
    metadata = {"name": name, "ownerReferences": [owner_reference(trainjob)]}
    return defaulted({"metadata": metadata, "spec": template["spec"]})


def _torch_variables(name: str, nodes: int, policy: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the variables that torchrun reads, for a runtime of torch."""
    if "torch" not in policy:
        return []
    processes = (policy["torch"] or {}).get("numProcPerNode") or "auto"
    return [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(processes)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-{_NODE}-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]


def _write_status(trainjob: Mapping[str, Any], jobset: Mapping[str, Any]) -> None:
    """Copy the counts and the end of a JobSet into the status of its TrainJob."""
    status = jobset.get("status") or {}
    words = {"Completed": "Complete", "Failed": "Failed"}
    result: dict[str, Any] = {
        "jobsStatus": status.get("replicatedJobsStatus") or [],
        "conditions": [
            {**condition, "type": words[condition["type"]]}
            for condition in status.get("conditions") or ()
            if condition["type"] in words
        ],
    }
    before = trainjob.get("status") or {}
    if any(before.get(key, []) != value for key, value in result.items()):
        at = cluster.path("TrainJob", trainjob["metadata"]["name"], "status")
        pods.ask("PATCH", at, {"status": result})
