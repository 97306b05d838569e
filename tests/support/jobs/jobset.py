"""A stand-in for the controller of JobSets: Jobs, a service, restarts, and the status of a JobSet.

It makes what the recordings of JobSet v0.12 have; what they do not have is left out: startup
policies, failure rules, suspension, in-place restarts, Events. Some things differ:

* The label ``jobset.sigs.k8s.io/priority`` is in the templates of the Jobs, too. The real one is set
  on pods by a webhook.
* Defaults of the JobSet are set by :func:`defaulted` before its creation, not by a webhook.

-> ``controller.py`` runs it. ``cluster.py``: the requests.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from support.jobs import cluster
from support.nodes import pods

PREFIX = "jobset.sigs.k8s.io"
ATTEMPT = f"{PREFIX}/restart-attempt"
_COUNTS = ("active", "failed", "ready", "succeeded", "suspended")
_RESTARTING = "RestartingJobSet"


def defaulted(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JobSet with the defaults that a webhook gives to a new one."""
    result = copy.deepcopy(dict(jobset))
    spec = result["spec"]
    spec.setdefault("network", {})
    spec["network"].setdefault("enableDNSHostnames", True)
    spec["network"].setdefault("publishNotReadyAddresses", True)
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    spec.setdefault("successPolicy", {"operator": "All"})
    for replicated_job in spec["replicatedJobs"]:
        replicated_job["template"]["spec"].setdefault("completionMode", "Indexed")
    return result


def reconcile(jobset: Mapping[str, Any], all_jobs: Sequence[Mapping[str, Any]]) -> None:
    """Bring the objects of a JobSet nearer to what it asks for, and write its status.

    Args:
        jobset: the JobSet.
        all_jobs: the Jobs of the namespace.
    """
    if jobset["metadata"].get("deletionTimestamp"):
        return
    uid = jobset["metadata"]["uid"]
    jobs = [job for job in all_jobs if job["metadata"]["labels"].get(f"{PREFIX}/jobset-uid") == uid]
    before = jobset.get("status") or {}
    status = copy.deepcopy(before)
    restarts = status.setdefault("restarts", 0)
    present = [job for job in jobs if _attempt(job) >= restarts]
    if status.get("terminalState"):
        _delete([job for job in jobs if not _ended(job)])
        return
    _delete([job for job in jobs if _attempt(job) < restarts])
    status["replicatedJobsStatus"] = list(_counts(jobset, present))
    failed = [job for job in present if _ended(job) == "Failed"]
    if failed:
        _restart_or_fail(jobset, status, failed)
    elif _all(jobset, status, "succeeded"):
        _set_condition(
            status, "Completed", "True", "AllJobsCompleted", "jobset completed successfully"
        )
        status["terminalState"] = "Completed"
    else:
        _make_service(jobset)
        names = {job["metadata"]["name"] for job in jobs}
        for manifest in job_manifests(jobset, restarts):
            if manifest["metadata"]["name"] not in names:
                cluster.create(manifest)
        if _is_restarting(status) and _all(jobset, status, "ready"):
            _set_condition(status, _RESTARTING, "False", "JobsReady", "all jobs are ready")
    if status != before:
        at = cluster.path("JobSet", jobset["metadata"]["name"], "status")
        pods.ask("PATCH", at, {"status": status})


def job_manifests(jobset: Mapping[str, Any], restarts: int) -> Iterator[dict[str, Any]]:
    """Yield the Jobs that a JobSet asks for.

    Args:
        jobset: the JobSet.
        restarts: number of its restarts so far.
    """
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    groups = [entry.get("groupName", "default") for entry in _each_job(spec)]
    for global_index, entry in enumerate(_each_job(spec)):
        index = _index_within(spec, global_index)
        group = groups[global_index]
        job = f"{name}-{entry['name']}-{index}"
        key = hashlib.sha1(f"{pods.NAMESPACE}/{job}".encode()).hexdigest()
        values = {
            "global-replicas": len(groups),
            "group-name": group,
            "group-replicas": groups.count(group),
            "job-global-index": global_index,
            "job-group-index": groups[:global_index].count(group),
            "job-index": index,
            "job-key": key,
            "jobset-name": name,
            "jobset-uid": jobset["metadata"]["uid"],
            "replicatedjob-name": entry["name"],
            "replicatedjob-replicas": entry.get("replicas", 1),
            "restart-attempt": restarts,
        }
        marks = {f"{PREFIX}/{word}": str(value) for word, value in values.items()}
        yield _job(jobset, job, entry["template"], marks)


def _job(
    jobset: Mapping[str, Any], name: str, template: Mapping[str, Any], marks: dict[str, str]
) -> dict[str, Any]:
    """Return a Job of a JobSet. Its marks are labels and annotations of the Job and its pods."""
    spec = copy.deepcopy(template["spec"])
    own, pod = template.get("metadata") or {}, spec["template"].setdefault("metadata", {})
    pod["labels"] = {**(pod.get("labels") or {}), **marks, f"{PREFIX}/priority": "0"}
    pod["annotations"] = {**(pod.get("annotations") or {}), **marks}
    network = jobset["spec"].get("network") or {}
    if network.get("enableDNSHostnames"):
        spec["template"]["spec"]["subdomain"] = _subdomain(jobset)
    return {
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {**(own.get("labels") or {}), **marks},
            "annotations": {**(own.get("annotations") or {}), **marks},
            "ownerReferences": [owner_reference(jobset)],
        },
        "spec": {**spec, "suspend": False},
    }


def owner_reference(owner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reference of an object that it is controlled by another one."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _each_job(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entry of each Job among the replicated jobs, once for each replica."""
    return [entry for entry in spec["replicatedJobs"] for _ in range(entry.get("replicas", 1))]


def _index_within(spec: Mapping[str, Any], global_index: int) -> int:
    """Return the index of a Job among the replicas of its entry."""
    entries = _each_job(spec)
    return sum(entry is entries[global_index] for entry in entries[:global_index])


def _subdomain(jobset: Mapping[str, Any]) -> str:
    """Return the name of the headless service."""
    network = jobset["spec"].get("network") or {}
    return str(network.get("subdomain") or jobset["metadata"]["name"])


def _make_service(jobset: Mapping[str, Any]) -> None:
    """Create the headless service of a JobSet, unless it exists."""
    network = jobset["spec"].get("network") or {}
    name = jobset["metadata"]["name"]
    spec = {
        "clusterIP": "None",
        "selector": {f"{PREFIX}/jobset-name": name},
        "publishNotReadyAddresses": bool(network.get("publishNotReadyAddresses")),
    }
    metadata = {"name": _subdomain(jobset), "ownerReferences": [owner_reference(jobset)]}
    try:
        cluster.create({"kind": "Service", "metadata": metadata, "spec": spec})
    except OSError as error:
        if cluster.status_of(error) != cluster.CONFLICT:
            raise


def _counts(
    jobset: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the status of each replicated job."""
    for entry in jobset["spec"]["replicatedJobs"]:
        counts = dict.fromkeys(_COUNTS, 0)
        for job in jobs:
            if job["metadata"]["labels"][f"{PREFIX}/replicatedjob-name"] != entry["name"]:
                continue
            status, end = job.get("status") or {}, _ended(job)
            counts["failed"] += end == "Failed"
            counts["succeeded"] += end == "Complete"
            if not end:
                counts["active"] += (status.get("active") or 0) > 0
                running = (status.get("ready") or 0) + (status.get("succeeded") or 0)
                counts["ready"] += running >= job["spec"]["parallelism"]
        yield {"name": entry["name"], **counts}


def _restart_or_fail(
    jobset: Mapping[str, Any], status: dict[str, Any], failed: Sequence[Mapping[str, Any]]
) -> None:
    """Let a JobSet with a failed Job restart, or fail if it may not restart any more."""
    first = failed[0]["metadata"]["name"]
    policy = jobset["spec"].get("failurePolicy")
    counted = status.get("restartsCountTowardsMax", 0)
    if policy is None:
        reason, text = "FailedJobs", "jobset failed due to one or more job failures"
    elif counted >= policy.get("maxRestarts", 0):
        reason = "ReachedMaxRestarts"
        text = "jobset failed due to reaching max number of restarts"
    else:
        status["restarts"] += 1
        status["restartsCountTowardsMax"] = counted + 1
        message = f"applying RestartJobSet failure policy action (first failed job: {first})"
        _set_condition(status, _RESTARTING, "True", "DefaultFailurePolicy", message)
        return
    _set_condition(status, "Failed", "True", reason, f"{text} (first failed job: {first})")
    status["terminalState"] = "Failed"


def _set_condition(
    status: dict[str, Any], kind: str, value: str, reason: str, message: str
) -> None:
    """Set a condition of a status, and the time at which it has changed."""
    conditions = status.setdefault("conditions", [])
    condition = next((entry for entry in conditions if entry["type"] == kind), None)
    if condition is None:
        conditions.append(condition := {"type": kind, "status": ""})
    if condition["status"] != value:
        condition["lastTransitionTime"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    condition |= {"status": value, "reason": reason, "message": message}


def _is_restarting(status: Mapping[str, Any]) -> bool:
    """Return whether a restart is under way."""
    return any(
        condition["type"] == _RESTARTING and condition["status"] == "True"
        for condition in status.get("conditions") or ()
    )


def _all(jobset: Mapping[str, Any], status: Mapping[str, Any], count: str) -> bool:
    """Return whether all Jobs of a JobSet are in one state."""
    total = sum(entry[count] for entry in status["replicatedJobsStatus"])
    return total == len(_each_job(jobset["spec"]))


def _attempt(job: Mapping[str, Any]) -> int:
    """Return the number of restarts before a Job was made."""
    return int(job["metadata"]["labels"][ATTEMPT])


def _ended(job: Mapping[str, Any]) -> str:
    """Return ``Failed`` or ``Complete`` for a Job that has ended, and "" for another one."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition["type"] in ("Failed", "Complete") and condition["status"] == "True":
            return str(condition["type"])
    return ""


def _delete(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Delete Jobs, and their pods before them."""
    for job in jobs:
        if not job["metadata"].get("deletionTimestamp"):
            cluster.delete("Job", job["metadata"]["name"], "Foreground")
