"""What may be asked of the API server, by which side, and why. Roles and the doctor are made of this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from chaoskit.substrate.kubernetes.options import KubernetesOptions

RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class Right:
    """Requests that a side makes in its namespace.

    Attributes:
        resource: in the plural, with its part behind a slash if it has one. group: of its API; "" for the core.
    """

    resource: str
    verbs: tuple[str, ...]
    why: str
    group: str = ""


#: Rights of a driver; and of the user where pytest itself drives runs.
DRIVER_RIGHTS = (
    Right(
        "pods",
        ("create", "delete", "get", "list", "patch"),
        "the pods of nodes and of the coordinator",
    ),
    Right("pods/eviction", ("create",), "the faults EvictPod and DrainMachine"),
    Right("pods/log", ("get",), "why a pod ended before its supervisor came"),
    Right(
        "events", ("list",), "why an image is not pulled; whether the scheduler has preempted a pod"
    ),
)
#: What lets a driver write Events, beside them; runs take place without it all the same.
EVENT_RIGHTS = (
    Right(
        "events",
        ("create",),
        "faults, losses and recoveries of runs, as Events of the session's Job",
    ),
)
#: Rights of the user that runs pytest, with an installed account for drivers.
CLIENT_RIGHTS = (
    Right("namespaces", ("get",), "whether runs are allowed there"),
    Right(
        "jobs",
        ("create", "delete", "get", "list", "patch"),
        "the session, which owns everything else",
        "batch",
    ),
    Right(
        "pods",
        ("create", "delete", "get", "list"),
        "the driver's pod; a check of the template before it is made",
    ),
    Right("pods/log", ("get",), "why the driver's pod ended"),
    Right("pods/portforward", ("create", "get"), "the stream to the driver"),
    Right("secrets", ("create",), "the token of the session"),
    Right(
        "networkpolicies",
        ("create",),
        "pods are reached by those of their session",
        "networking.k8s.io",
    ),
)
#: What the user needs to make an account, which may have no right that the user does not have.
MAKING_ACCOUNTS = (
    Right("serviceaccounts", ("create",), "the account of a session's driver"),
    Right("roles", ("create",), "what it may do; more than the client may, it cannot get", RBAC),
    Right("rolebindings", ("create",), "which account that is for", RBAC),
)
#: What the user needs beside them to make an account for each session's driver.
ACCOUNT_RIGHTS = (*MAKING_ACCOUNTS, *DRIVER_RIGHTS)
#: What a user needs beside them that breaks machines: of the cluster, as machines belong to no namespace.
MACHINE_RIGHTS = (
    Right("nodes", ("get", "patch"), "whether a machine is protected; cordons and taints"),
    Right("pods", ("list",), "whether others' pods are on it"),
    Right(
        "leases",
        ("get",),
        "whether a machine that was put back is heard again",
        "coordination.k8s.io",
    ),
)

#: What a night needs beside those of a user.
NIGHT_RIGHTS = (
    Right(
        "leases",
        ("create", "delete", "get", "patch"),
        "one night at a time in the namespace",
        "coordination.k8s.io",
    ),
)


#: Rights without which a check before a run cannot be made; the run takes place all the same.
ADVISORY_RIGHTS = (
    Right("resourcequotas", ("list",), "whether the pods of a run fit into the quotas"),
)
_OF_DRIVEN = ("pods/portforward",)


def of_session(options: KubernetesOptions) -> tuple[Right, ...]:
    """Return the rights that a session with these options needs in its namespace."""
    if options.has_driver:
        return CLIENT_RIGHTS if options.service_account else CLIENT_RIGHTS + ACCOUNT_RIGHTS
    return (
        tuple(right for right in CLIENT_RIGHTS if right.resource not in _OF_DRIVEN) + DRIVER_RIGHTS
    )


def rules(rights: Iterable[Right]) -> list[dict[str, Any]]:
    """Rights as a Role has them."""
    return [
        {"apiGroups": [one.group], "resources": [one.resource], "verbs": list(one.verbs)}
        for one in rights
    ]


def with_remedy(message: str) -> str:
    """Return what the API server answers to a request; where a right is missing, with the remedy."""
    if " is forbidden: User " not in message:
        return message
    return f"{message}: have it granted (chaoskit cluster manifests prints the roles of drivers and of people)"
