"""Rights that each side needs for its requests, with reasons.

Roles and the doctor use these tables.

-> kubernetes/examination.py checks them; kubernetes/installation.py makes roles of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from chaoskit.substrate.kubernetes.options import KubernetesOptions

RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class Right:
    """A right to make requests in a namespace.

    Attributes:
        resource: plural name of the resource, followed by a slash and its subresource if there is
            one.
        verbs: verbs of the requests.
        why: reason for which the right is needed.
        group: API group; "" for the core group.
    """

    resource: str
    verbs: tuple[str, ...]
    why: str
    group: str = ""


#: Rights of a driver, and of the user if pytest itself drives runs.
DRIVER_RIGHTS = (
    Right(
        "pods",
        ("create", "delete", "get", "list", "patch"),
        "the pods of nodes and of the coordinator",
    ),
    Right("pods/eviction", ("create",), "the faults EvictPod and DrainMachine"),
    Right("pods/log", ("get",), "the log of a pod that ended before its supervisor connected"),
    Right("events", ("list",), "the reasons for images that are not pulled and for preempted pods"),
)
#: Rights of a driver to write Events. Runs take place without them, too.
EVENT_RIGHTS = (
    Right(
        "events",
        ("create",),
        "faults, losses and recoveries of runs, as Events of the session's Job",
    ),
)
#: Rights of the user that runs pytest, with an installed account for drivers.
CLIENT_RIGHTS = (
    Right("namespaces", ("get",), "the label that allows runs in the namespace"),
    Right(
        "jobs",
        ("create", "delete", "get", "list", "patch"),
        "the session's Job, which owns all other objects",
        "batch",
    ),
    Right(
        "pods",
        ("create", "delete", "get", "list"),
        "the driver's pod, and a check of the template before its creation",
    ),
    Right("pods/log", ("get",), "the log of a driver's pod that ended"),
    Right("pods/portforward", ("create", "get"), "the stream to the driver"),
    Right("secrets", ("create",), "the token of the session"),
    Right(
        "networkpolicies",
        ("create",),
        "the policy that admits connections only from pods of the session",
        "networking.k8s.io",
    ),
)
#: Rights of the user to create an account, which can have no right that the user lacks.
MAKING_ACCOUNTS = (
    Right("serviceaccounts", ("create",), "the account of a session's driver"),
    Right(
        "roles",
        ("create",),
        "the role of the driver's account, with no right that the client lacks",
        RBAC,
    ),
    Right("rolebindings", ("create",), "the binding of the driver's role to its account", RBAC),
)
#: Additional rights of the user to create an account for the driver of each session.
ACCOUNT_RIGHTS = (*MAKING_ACCOUNTS, *DRIVER_RIGHTS)
#: Additional rights of a user that breaks machines. They are cluster-wide, as machines are.
MACHINE_RIGHTS = (
    Right("nodes", ("get", "patch"), "the label that protects a machine; cordons and taints"),
    Right("pods", ("list",), "the check for others' pods on a machine"),
    Right(
        "leases",
        ("get",),
        "the check that a repaired machine renews its lease",
        "coordination.k8s.io",
    ),
)

#: Rights of a night in addition to those of a user.
NIGHT_RIGHTS = (
    Right(
        "leases",
        ("create", "delete", "get", "patch"),
        "one night at a time in the namespace",
        "coordination.k8s.io",
    ),
)
#: Rights for a check before a run. Runs take place without them, too.
ADVISORY_RIGHTS = (
    Right("resourcequotas", ("list",), "the check that the pods of a run fit into the quotas"),
)
#: Rights of a user that injects faults into a job that already runs.
ATTACH_RIGHTS = (
    Right("namespaces", ("get",), "the label that allows faults in the namespace"),
    Right("pods", ("list",), "the pods of the job"),
    Right("pods", ("watch",), "the end of these pods, and their successors"),
)
#: Further rights of such a user for the logs of the job.
LOG_RIGHTS = (
    Right("pods", ("get",), "the lives of the containers whose logs are followed"),
    Right("pods/log", ("get",), "the logs of the job's containers, from which steps are read"),
)
#: Further rights of such a user for faults in the processes and the network of pods.
HAND_RIGHTS = (
    Right("pods", ("get",), "the state of the container of a hand, and the user of its target"),
    Right("pods/ephemeralcontainers", ("patch",), "the container of a hand"),
    Right("pods/attach", ("create", "get"), "requests to a hand, and its answers"),
)
#: Rights of such a user that asks for hands by exec instead. A role of their own has them.
EXEC_RIGHTS = (
    Right("pods", ("get",), "the proof that the pod of a hand is the same one"),
    Right("pods/exec", ("create", "get"), "hands by exec in the container of their target"),
)
_OTHER_POD = Right("pods", ("get",), "the proof that a pod of the same name is another one")
#: Further rights of such a user for faults that delete pods.
DELETE_RIGHTS = (Right("pods", ("delete",), "the faults DeletePod and LoseNode"), _OTHER_POD)
#: Further rights of such a user for faults that evict pods.
EVICT_RIGHTS = (
    Right("pods/eviction", ("create",), "the faults EvictPod and DrainMachine"),
    _OTHER_POD,
)
#: Further rights of such a user for faults that let the scheduler preempt pods.
PREEMPT_RIGHTS = (
    Right(
        "pods",
        ("create", "delete", "get", "list"),
        "the pod for which the fault PreemptPod lets the scheduler preempt another one",
    ),
    Right("events", ("list",), "the proof that the scheduler preempted a pod"),
)
#: Further rights of such a user for faults that kill the first process of a container.
CRASH_RIGHTS = (Right("pods", ("get",), "the container that the fault KillContainer kills"),)
#: Further rights of such a user to try hands on a throw-away pod.
DOCTOR_RIGHTS = (
    Right(
        "pods",
        ("create", "delete"),
        "the throw-away pod of chaoskit cluster doctor --attach",
    ),
)
#: Further rights of such a user for the loss of a machine, which is proved by its silence.
SILENCE_RIGHTS = (
    Right("pods/log", ("get",), "requests that the machine of the fault LoseMachine must answer"),
)
#: Resources and groups of the objects of such jobs, by kind.
JOB_RESOURCES = {
    "StatefulSet": ("statefulsets", "apps"),
    "Job": ("jobs", "batch"),
    "JobSet": ("jobsets", "jobset.x-k8s.io"),
    "TrainJob": ("trainjobs", "trainer.kubeflow.org"),
    "PyTorchJob": ("pytorchjobs", "kubeflow.org"),
    "HyperPodPyTorchJob": ("hyperpodpytorchjobs", "sagemaker.amazonaws.com"),
}
#: Cluster-wide rights of such a user. Without them, pods show later that their node is silent.
ATTACH_NODE_RIGHTS = (
    Right("nodes", ("list",), "the readiness of the nodes of the pods"),
    Right("nodes", ("watch",), "changes of that readiness"),
)
#: Kinds of the objects of each kind of jobs. The last one owns the pods.
ATTACH_KINDS = (
    ("StatefulSet",),
    ("Job",),
    ("JobSet",),
    ("TrainJob", "JobSet"),
    ("PyTorchJob",),
    ("HyperPodPyTorchJob",),
)


def of_twin_object(resource: str, group: str) -> Right:
    """Return the right that an object of a second job needs, an unbroken run to compare with."""
    return Right(resource, ("create", "delete", "get"), "the second job of a twin", group)


#: Rights of such a user for a second job. A role of their own has them. Other kinds in its file need
#: the same.
TWIN_RIGHTS = (
    *(of_twin_object(resource, group) for resource, group in JOB_RESOURCES.values()),
    of_twin_object("services", ""),
    Right("services", ("list",), "leftovers of second jobs, which chaoskit cleanup lists"),
)
#: Rights of such a user beside those to find and follow jobs.
ATTACH_LISTS = (
    LOG_RIGHTS,
    HAND_RIGHTS,
    DELETE_RIGHTS,
    EVICT_RIGHTS,
    PREEMPT_RIGHTS,
    CRASH_RIGHTS,
    SILENCE_RIGHTS,
    DOCTOR_RIGHTS,
)
_OF_DRIVEN = ("pods/portforward",)


def of_attach(kinds: Iterable[str]) -> tuple[Right, ...]:
    """Return the rights to find and follow a job that already runs.

    Args:
        kinds: kinds of its objects. The last one owns the pods, and is followed.
    """
    resources = [JOB_RESOURCES[kind] for kind in kinds]
    to_find = [
        Right(resource, ("list",), "the job, and the number of its pods", group)
        for resource, group in resources
    ]
    to_follow = [
        Right(resource, ("watch",), "restarts and the end of the job", group)
        for resource, group in resources[-1:]
    ]
    return (*ATTACH_RIGHTS, *to_find, *to_follow)


def of_attach_role() -> tuple[Right, ...]:
    """Return the rights of the role for users that inject faults into jobs of any kind."""
    to_find = [right for kinds in ATTACH_KINDS for right in of_attach(kinds)]
    further = [right for rights in ATTACH_LISTS for right in rights]
    return tuple(dict.fromkeys([*to_find, *further]))


def of_session(options: KubernetesOptions) -> tuple[Right, ...]:
    """Return the rights that a session with these options needs in its namespace."""
    if options.has_driver:
        return CLIENT_RIGHTS if options.service_account else CLIENT_RIGHTS + ACCOUNT_RIGHTS
    return (
        tuple(right for right in CLIENT_RIGHTS if right.resource not in _OF_DRIVEN) + DRIVER_RIGHTS
    )


def rules(rights: Iterable[Right]) -> list[dict[str, Any]]:
    """Return rights as the rules of a Role."""
    return [
        {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
        for right in rights
    ]


def with_remedy(message: str) -> str:
    """Return an error message of the API server, with a remedy if a right is missing."""
    if " is forbidden: User " not in message:
        return message
    return f"{message}: have it granted (chaoskit cluster manifests prints the roles of drivers and of people)"
