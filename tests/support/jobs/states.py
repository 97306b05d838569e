"""States of a JobSet, its Jobs and pods, without what differs from run to run.

Recordings of a real controller and observations of the stand-in are compared by them.

-> ``recordings.py``: the recordings. ``observer.py``: observations of the tests' cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from support.jobs.jobset import ATTEMPT, PREFIX

Observation = Mapping[str, Any]
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEY = re.compile(r"[0-9a-f]{40}")
_JOB_SPEC = (
    "parallelism",
    "completions",
    "backoffLimit",
    "completionMode",
    "suspend",
    "manualSelector",
    "podReplacementPolicy",
)
_POD_SPEC = ("hostname", "subdomain", "restartPolicy")


def jobset_states(observations: Iterable[Observation]) -> list[tuple[Any, ...]]:
    """Return the states of a JobSet in their order, without repetitions."""
    states: list[tuple[Any, ...]] = []
    for observation in _of_kind(observations, "JobSet"):
        status = observation["object"].get("status") or {}
        state = (
            status.get("restarts"),
            status.get("restartsCountTowardsMax"),
            status.get("terminalState"),
            *(tuple(sorted(counts.items())) for counts in status.get("replicatedJobsStatus") or ()),
            *_conditions(status, "type", "status", "reason", "message"),
        )
        if state not in states[-1:]:
            states.append(state)
    return states


def job_states(observations: Iterable[Observation]) -> set[tuple[Any, ...]]:
    """Return the states of the Jobs: attempt, deletion, conditions, active and failed pods."""
    states = set[tuple[Any, ...]]()
    for observation in _of_kind(observations, "Job"):
        job = observation["object"]
        status = job.get("status") or {}
        states.add(
            (
                job["metadata"]["labels"][ATTEMPT],
                observation["event"] == "DELETED",
                bool(job["metadata"].get("deletionTimestamp")),
                _conditions(status, "type", "status", "reason"),
                status.get("active"),
                status.get("failed"),
            )
        )
    return states


def pod_states(observations: Iterable[Observation]) -> set[tuple[Any, ...]]:
    """Return the states of the pods: attempt, deletion, phase, readiness, and their containers."""
    states = set[tuple[Any, ...]]()
    for observation in _of_kind(observations, "Pod"):
        pod = observation["object"]
        status = pod["status"]
        ready = {entry["type"]: entry["status"] for entry in status.get("conditions") or ()}
        states.add(
            (
                pod["metadata"]["labels"][ATTEMPT],
                observation["event"] == "DELETED",
                bool(pod["metadata"].get("deletionTimestamp")),
                bool(pod["metadata"].get("finalizers")),
                status["phase"],
                ready.get("Ready"),
                *(next(iter(entry["state"])) for entry in status.get("containerStatuses") or ()),
            )
        )
    return states


def described_jobs(observations: Iterable[Observation]) -> dict[str, Any]:
    """Return what the controller has written into each new Job, by its attempt."""
    return {
        job["metadata"]["labels"][ATTEMPT]: {
            "name": job["metadata"]["name"],
            **_marks(job["metadata"]),
            "owners": _owners(job["metadata"]),
            **{field: job["spec"].get(field) for field in _JOB_SPEC},
            "template": _marks(job["spec"]["template"]["metadata"]),
            "subdomain": job["spec"]["template"]["spec"].get("subdomain"),
        }
        for job in _new(observations, "Job")
    }


def described_pods(observations: Iterable[Observation]) -> dict[tuple[str, str], Any]:
    """Return what each new pod has from its controllers, by attempt and index."""
    described = {}
    for pod in _new(observations, "Pod"):
        labels = pod["metadata"]["labels"]
        key = labels[ATTEMPT], labels["batch.kubernetes.io/job-completion-index"]
        (container,) = pod["spec"]["containers"]
        described[key] = {
            "name": pod["metadata"]["generateName"],
            **_marks(pod["metadata"]),
            "owners": _owners(pod["metadata"]),
            "finalizers": pod["metadata"].get("finalizers"),
            **{field: pod["spec"].get(field) for field in _POD_SPEC},
            "env": container["env"],
        }
    return described


def described_services(observations: Iterable[Observation]) -> list[Any]:
    """Return what the controller has written into each service."""
    return [
        {
            "name": service["metadata"]["name"],
            **_marks(service["metadata"]),
            "owners": _owners(service["metadata"]),
            "spec": service["spec"],
        }
        for service in _new(observations, "Service")
    ]


def without_priority(jobs: dict[str, Any]) -> dict[str, Any]:
    """Return descriptions of Jobs without the label that only the stand-in gives to templates."""
    for job in jobs.values():
        job["template"]["labels"].pop(f"{PREFIX}/priority", None)
    return jobs


def _of_kind(observations: Iterable[Observation], kind: str) -> list[Observation]:
    return [
        observation
        for observation in observations
        if observation["what"] == "watch" and observation["kind"] == kind
    ]


def _new(observations: Iterable[Observation], kind: str) -> list[Any]:
    return [
        observation["object"]
        for observation in _of_kind(observations, kind)
        if observation["event"] == "ADDED"
    ]


def _conditions(status: Mapping[str, Any], *fields: str) -> tuple[tuple[str, ...], ...]:
    return tuple(
        sorted(
            tuple(str(condition.get(field)) for field in fields)
            for condition in status.get("conditions") or ()
        )
    )


def _marks(metadata: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return labels and annotations, with patterns in place of identifiers."""
    return {
        word: {
            label: _KEY.sub("KEY", _UID.sub("UID", value))
            for label, value in (metadata.get(word) or {}).items()
        }
        for word in ("labels", "annotations")
    }


def _owners(metadata: Mapping[str, Any]) -> list[Any]:
    return [
        {**owner, "uid": _UID.sub("UID", owner["uid"])}
        for owner in metadata.get("ownerReferences") or ()
    ]
