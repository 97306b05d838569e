"""Kinds of jobs that faults can be injected into, and the labels by which their pods are recognized.

An index of a pod is not a rank: a launcher numbers its ranks by itself, and a pod may have several.

Another kind is an entry here, a rule in ``membership.py``, the number of its pods in ``job_state.py``,
its path in ``substrate/kubernetes/api/requests.py``, and its rights in ``api/rights.py``.

-> ``reference.py``: the text that names a job. ``membership.py``: the place of a pod in a job.
"""

from __future__ import annotations

from dataclasses import dataclass

# StatefulSet and Job: documentation of Kubernetes, "Well-Known Labels".
POD_INDEX = "apps.kubernetes.io/pod-index"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"
# JobSet v0.12.
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
JOB_GLOBAL_INDEX = "jobset.sigs.k8s.io/job-global-index"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
# Trainer v2: a label of the templates of the JobSet, by which initializers differ from trainers.
ANCESTOR_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
TRAINER_STEP = "trainer"
# Training Operator v1.
TRAINING_JOB = "training.kubeflow.org/job-name"
REPLICA_TYPE = "training.kubeflow.org/replica-type"
REPLICA_INDEX = "training.kubeflow.org/replica-index"
# Deployments append this hash to the names of their ReplicaSets.
TEMPLATE_HASH = "pod-template-hash"

_UNTRIED = "recognized by documented names only: never tried with its controller"


@dataclass(frozen=True, slots=True)
class JobKind:
    """A kind of jobs.

    Attributes:
        word: the word for the kind in a reference.
        kind: kind of the object at the API server; "" for pods that a selector names.
        watched: kind of the object that owns the pods; that of a TrainJob is a JobSet.
        container: name of the container that trains, if a pod has several; "" if it is not fixed.
        note: text that users must see beside a job of this kind; "" for none.
    """

    word: str
    kind: str
    watched: str
    container: str = ""
    note: str = ""


STATEFULSET = JobKind("statefulset", "StatefulSet", "StatefulSet")
JOB = JobKind("job", "Job", "Job")
JOBSET = JobKind("jobset", "JobSet", "JobSet")
#: The name of the container is fixed by validation rules of the kind's runtimes.
TRAINJOB = JobKind("trainjob", "TrainJob", "JobSet", container="node")
#: The operator requires a container of this name.
PYTORCHJOB = JobKind("pytorchjob", "PyTorchJob", "PyTorchJob", container="pytorch", note=_UNTRIED)
HYPERPOD = JobKind("hyperpodpytorchjob", "HyperPodPyTorchJob", "HyperPodPyTorchJob", note=_UNTRIED)
#: Pods that a label selector names, of any owner.
PODS = JobKind("pods", "", "")

KINDS = {
    kind.word: kind for kind in (STATEFULSET, JOB, JOBSET, TRAINJOB, PYTORCHJOB, HYPERPOD, PODS)
}
