"""Objects that an administrator creates once so that users can run with few rights.

There is no workload among them. Roles of the whole cluster are optional.

-> cli/machine/cluster.py prints them; kubernetes/api/rights.py has the rights of each role.
"""

from __future__ import annotations

from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.pods.manifests import ALLOWED, ALLOWED_VALUE, Manifest

#: The service account of drivers, and the role of users.
ACCOUNT, USERS = "chaoskit-driver", "chaoskit-user"
#: The role of users that break machines, too.
MACHINE_USERS = "chaoskit-machines"
#: The role of users that inject faults into jobs that already run, and that of the cluster for it.
ATTACH_USERS, ATTACH_NODE_USERS = "chaoskit-attach", "chaoskit-attach-nodes"
ATTACH_EXEC_USERS = "chaoskit-attach-exec"
ATTACH_TWIN_USERS = "chaoskit-attach-twin"
#: Labels of all objects that an administrator creates.
LABELS = {"app.kubernetes.io/name": "chaoskit", "app.kubernetes.io/component": "installation"}


def installation(namespace: str, security: str) -> list[Manifest]:
    """Return the manifests of a namespace for runs, the account of drivers, and the role of users.

    Args:
        namespace: name of the namespace.
        security: the level of Pod Security that the namespace enforces: ``restricted``,
            ``baseline`` or ``privileged``.
    """
    labels = LABELS | {ALLOWED: ALLOWED_VALUE, "pod-security.kubernetes.io/enforce": security}
    metadata = {"namespace": namespace, "labels": LABELS}
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": labels},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, **metadata}},
        role(ACCOUNT, metadata, rights.DRIVER_RIGHTS + rights.EVENT_RIGHTS),
        {
            "apiVersion": f"{rights.RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": ACCOUNT, **metadata},
            "roleRef": {"apiGroup": rights.RBAC, "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        },
        role(USERS, metadata, rights.CLIENT_RIGHTS + rights.ADVISORY_RIGHTS),
    ]


def machine_rights() -> Manifest:
    """Return the manifest of the cluster's role for users that break machines.

    See :mod:`chaoskit.substrate.kubernetes.machines.machines`.
    """
    return role(MACHINE_USERS, {"labels": LABELS}, rights.MACHINE_RIGHTS, kind="ClusterRole")


def attach_roles(namespace: str) -> list[Manifest]:
    """Return the manifests of the roles for faults in jobs that already run.

    The first one is of the namespace of the jobs, which itself is left as it is. The others are
    optional. One is of the cluster, and lets the state of nodes be seen. One lets hands be started
    by exec, which allows any program in any pod of the namespace. One lets a second job be created.
    """
    metadata = {"namespace": namespace, "labels": LABELS}
    return [
        role(ATTACH_USERS, metadata, rights.of_attach_role()),
        role(ATTACH_NODE_USERS, {"labels": LABELS}, rights.ATTACH_NODE_RIGHTS, kind="ClusterRole"),
        role(ATTACH_EXEC_USERS, metadata, rights.EXEC_RIGHTS),
        role(ATTACH_TWIN_USERS, metadata, rights.TWIN_RIGHTS),
    ]


def role(
    name: str, within: Manifest, granted: tuple[rights.Right, ...], kind: str = "Role"
) -> Manifest:
    """Return the manifest of a role, with annotations that give the reason for its rights.

    Args:
        within: fields of its metadata, such as the namespace.
        granted: its rights.
        kind: ``Role``, or ``ClusterRole`` for a role of the whole cluster.
    """
    reasons = dict[str, list[str]]()
    for right in granted:
        reasons.setdefault(f"chaoskit.dev/{right.resource.replace('/', '.')}", []).append(right.why)
    annotations = {name: "; ".join(texts) for name, texts in reasons.items()}
    metadata = {"name": name, **within, "annotations": annotations}
    return {
        "apiVersion": f"{rights.RBAC}/v1",
        "kind": kind,
        "metadata": metadata,
        "rules": rights.rules(granted),
    }
