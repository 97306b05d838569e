"""Membership of pods in a job: the label selector for them, and the place that each of them has.

A place outlives its pods: a successor has the place of the pod that it replaces.

-> ``kinds.py``: the labels. ``tracker.py``: the pods of each place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chaoskit.attach.jobs.job_state import trainer_jobs
from chaoskit.attach.jobs.kinds import (
    COMPLETION_INDEX,
    HYPERPOD,
    JOB,
    JOB_GLOBAL_INDEX,
    JOB_NAME,
    JOBSET,
    JOBSET_NAME,
    POD_INDEX,
    PYTORCHJOB,
    REPLICA_INDEX,
    REPLICA_TYPE,
    REPLICATED_JOB,
    STATEFULSET,
    TEMPLATE_HASH,
    TRAINING_JOB,
    TRAINJOB,
)
from chaoskit.attach.jobs.reference import JobReference

_ORDINAL = re.compile(r".*?-(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class PlaceKey:
    """The identity of a place. It stays the same when pods, Jobs and JobSets are made anew.

    Attributes:
        owner: name of the object that numbers the pods; of a PyTorchJob, the type of the replica.
            A pod without an index is a place of its own, with its name here.
        index: index of the pod. It is not a rank.
    """

    owner: str
    index: int

    @property
    def node_name(self) -> str:
        """The name of the place as a node of a run, such as ``llama-1``."""
        return f"{self.owner}-{self.index}"

    def __str__(self) -> str:
        return f"{self.owner}[{self.index}]"


@dataclass(frozen=True, slots=True)
class JobMembership:
    """The rules by which pods belong to a job.

    Attributes:
        reference: the job.
        selector: label selector of its pods; "" for all pods of the namespace.
        replicated_jobs: names of the replicated jobs that train; None for all of them.
    """

    reference: JobReference
    selector: str
    replicated_jobs: frozenset[str] | None = None

    def place_of(self, pod: Mapping[str, Any]) -> tuple[PlaceKey, int] | None:
        """Return the place of a pod and the position of its owner among others, or None.

        None means that the pod does not belong to the job, although the selector matches it.

        Args:
            pod: the object of the API server.
        """
        kind, name = self.reference.kind, self.reference.name
        labels = _labels(pod)
        if kind in (JOBSET, TRAINJOB):
            replicated_jobs = self.replicated_jobs
            is_trainer = replicated_jobs is None or labels.get(REPLICATED_JOB) in replicated_jobs
            if labels.get(JOBSET_NAME) != name or not is_trainer:
                return None
        elif kind is HYPERPOD:
            match = re.fullmatch(rf"({re.escape(name)}-pod(?:-.*)?)-(\d+)", _name(pod))
            return None if match is None else (PlaceKey(match[1], int(match[2])), 0)
        elif kind is PYTORCHJOB:
            if labels.get(TRAINING_JOB) != name:
                return None
        elif kind in (STATEFULSET, JOB) and controller_of(pod) != (kind.kind, name):
            return None
        return _place(pod)


def membership(reference: JobReference, job: Mapping[str, Any] | None) -> JobMembership:
    """Return the rules by which pods belong to a job.

    Args:
        reference: the job.
        job: its object, for a TrainJob that of its JobSet; None for pods that a selector names.
    """
    kind, name = reference.kind, reference.name
    if kind is STATEFULSET and job is not None:
        return JobMembership(reference, selector_text(job["spec"].get("selector") or {}))
    if kind is TRAINJOB and job is not None:
        return JobMembership(reference, f"{JOBSET_NAME}={name}", trainer_jobs(job))
    selectors = {
        JOB.word: f"{JOB_NAME}={name}",
        JOBSET.word: f"{JOBSET_NAME}={name}",
        PYTORCHJOB.word: f"{TRAINING_JOB}={name}",
    }
    return JobMembership(reference, selectors.get(kind.word, reference.selector))


def controller_of(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return kind and name of the object that controls a pod, or None for a pod without one."""
    for owner in pod["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["kind"]), str(owner["name"])
    return None


def job_of(pod: Mapping[str, Any]) -> str:
    """Return a reference to the job of a pod, or "" if nothing controls the pod.

    Pods of the several Jobs of one JobSet, and of the ReplicaSets of one Deployment, have the same.
    """
    labels, controller = _labels(pod), controller_of(pod)
    if JOBSET_NAME in labels:
        return f"{JOBSET.word}/{labels[JOBSET_NAME]}"
    if controller is None:
        return ""
    kind, name = controller
    template_hash = labels.get(TEMPLATE_HASH, "")
    if kind == "ReplicaSet" and template_hash and name.endswith(f"-{template_hash}"):
        return f"deployment/{name.removesuffix(f'-{template_hash}')}"
    return f"{kind.lower()}/{name}"


def selector_text(selector: Mapping[str, Any]) -> str:
    """Return the label selector of an object as the text that requests have.

    Args:
        selector: ``matchLabels`` and ``matchExpressions``.
    """
    terms = [f"{key}={value}" for key, value in (selector.get("matchLabels") or {}).items()]
    for expression in selector.get("matchExpressions") or ():
        key, values = expression["key"], ",".join(expression.get("values") or ())
        terms.append(
            {
                "In": f"{key} in ({values})",
                "NotIn": f"{key} notin ({values})",
                "Exists": str(key),
                "DoesNotExist": f"!{key}",
            }[expression["operator"]]
        )
    return ",".join(terms)


def _place(pod: Mapping[str, Any]) -> tuple[PlaceKey, int]:
    """Return the place of a pod by its labels, and the position of its owner among others."""
    labels, controller = _labels(pod), controller_of(pod)
    if (index := _index(labels, REPLICA_INDEX)) is not None and TRAINING_JOB in labels:
        replica = labels.get(REPLICA_TYPE, "").lower()
        return PlaceKey(replica, index), 0 if replica == "master" else 1
    if (index := _index(labels, COMPLETION_INDEX)) is not None:
        owner = labels.get(JOB_NAME) or (controller[1] if controller else "")
        return PlaceKey(owner, index), _index(labels, JOB_GLOBAL_INDEX) or 0
    if controller is not None and controller[0] == STATEFULSET.kind:
        index = _index(labels, POD_INDEX)
        if index is None and (match := _ORDINAL.fullmatch(_name(pod))):
            index = int(match[1])  # Kubernetes before 1.28 sets no label
        if index is not None:
            return PlaceKey(controller[1], index), 0
    return PlaceKey(_name(pod), 0), 0


def _labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def _index(labels: Mapping[str, str], label: str) -> int | None:
    """Return the number that a label holds, or None if it holds none."""
    text = labels.get(label, "")
    return int(text) if text.isdecimal() else None
