"""The state of a job's object: the pods that it asks for, its restarts, and its end.

-> ``membership.py``: the pods of the job. ``tracker.py`` reports changes of this state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chaoskit.attach.jobs.kinds import (
    ANCESTOR_STEP,
    HYPERPOD,
    JOB,
    JOBSET,
    PYTORCHJOB,
    STATEFULSET,
    TRAINER_STEP,
    TRAINJOB,
    JobKind,
)
from chaoskit.attach.jobs.pod_state import as_version, condition_statuses

COMPLETE, FAILED = "complete", "failed"
#: Types of conditions of an ended job. Kinds differ in the word for success.
_OUTCOMES = {"Complete": COMPLETE, "Completed": COMPLETE, "Succeeded": COMPLETE, "Failed": FAILED}


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job's object.

    Attributes:
        uid: identifier of the object, which differs from that of a former one of the same name.
        version: resource version of this state; 0 if it cannot be compared.
        pods_wanted: number of pods that it asks for at present; None if it does not say so.
        restarts: number of restarts of the whole job that its controller has counted.
        outcome: ``complete``, ``failed``, or "" while it runs.
        reason: reason of the outcome in a word; "" for none.
        message: explanation of the outcome; "" for none.
        is_suspended: True if its pods are withheld on purpose.
        is_indexed: False if its pods are interchangeable, so that a pod has no successor.
    """

    uid: str
    version: int = 0
    pods_wanted: int | None = None
    restarts: int = 0
    outcome: str = ""
    reason: str = ""
    message: str = ""
    is_suspended: bool = False
    is_indexed: bool = True


def read_job(kind: JobKind, job: Mapping[str, Any]) -> JobState:
    """Return the state of a job.

    Args:
        kind: kind of the job as the user named it.
        job: the object of the API server; for a TrainJob, its JobSet.
    """
    metadata, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    statuses = condition_statuses(status.get("conditions"))
    ended: Mapping[str, Any] = next(
        (
            condition
            for condition in status.get("conditions") or ()
            if condition.get("type") in _OUTCOMES and condition.get("status") == "True"
        ),
        {},
    )
    return JobState(
        uid=str(metadata["uid"]),
        version=as_version(metadata.get("resourceVersion")),
        pods_wanted=_pods_wanted(kind, spec, status),
        restarts=int(status.get("restarts") or 0),
        outcome=_OUTCOMES.get(str(ended.get("type")), ""),
        reason=str(ended.get("reason") or ""),
        message=" ".join(str(ended.get("message") or "").split()),
        is_suspended=bool(spec.get("suspend")) or statuses.get("Suspended") == "True",
        is_indexed=kind is not JOB or spec.get("completionMode") == "Indexed",
    )


def trainer_jobs(jobset: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the replicated jobs of a TrainJob's JobSet that train.

    Others initialize data and models. The label stands in the templates of the Jobs, not in those
    of the pods.
    """
    return frozenset(
        str(entry["name"])
        for entry in jobset["spec"].get("replicatedJobs") or ()
        if ((entry.get("template") or {}).get("metadata") or {})
        .get("labels", {})
        .get(ANCESTOR_STEP)
        == TRAINER_STEP
    )


def replicated_pods(jobset: Mapping[str, Any], names: Collection[str] | None) -> int:
    """Return the number of pods that run at once in replicated jobs of a JobSet.

    Args:
        jobset: the specification of the JobSet.
        names: names of the replicated jobs; None for all.
    """
    count = 0
    for entry in jobset.get("replicatedJobs") or ():
        if names is None or entry["name"] in names:
            job = entry["template"]["spec"]
            parallelism = job.get("parallelism")
            count += int(entry.get("replicas", 1)) * int(1 if parallelism is None else parallelism)
    return count


def _pods_wanted(kind: JobKind, spec: Mapping[str, Any], status: Mapping[str, Any]) -> int | None:
    """Return the number of pods that a job asks for, or None if its kind is not known to say so."""
    if kind is STATEFULSET:
        replicas = spec.get("replicas")
        return 1 if replicas is None else int(replicas)
    if kind is JOB:
        parallelism, completions = spec.get("parallelism"), spec.get("completions")
        count = 1 if parallelism is None else int(parallelism)
        if completions is not None:  # indexes that have succeeded need no pod any more
            count = min(count, int(completions) - int(status.get("succeeded") or 0))
        return max(count, 0)
    if kind is JOBSET:
        return replicated_pods(spec, None)
    if kind is TRAINJOB:
        return replicated_pods(spec, trainer_jobs({"spec": spec}))
    return sum(_replicas(kind, spec)) or None


def _replicas(kind: JobKind, spec: Mapping[str, Any]) -> Iterator[int]:
    """Yield the number of pods of each group of replicas."""
    groups: list[Mapping[str, Any]] = []
    if kind is PYTORCHJOB:
        groups = list((spec.get("pytorchReplicaSpecs") or {}).values())
    elif kind is HYPERPOD:
        groups = list(spec.get("replicaSpecs") or ())
    for group in groups:
        replicas = group.get("replicas")
        yield 1 if replicas is None else int(replicas)
