"""What an administrator makes once, so that others can run with few rights. No workload, and nothing of the cluster."""

from __future__ import annotations

from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.pods.manifests import ALLOWED, ALLOWED_VALUE, Manifest

#: The service account of drivers, and the role of people.
ACCOUNT, USERS = "chaoskit-driver", "chaoskit-user"
#: The role of people that break machines, too.
MACHINE_USERS = "chaoskit-machines"
#: Of all that an administrator makes.
LABELS = {"app.kubernetes.io/name": "chaoskit", "app.kubernetes.io/component": "installation"}


def installation(namespace: str, security: str) -> list[Manifest]:
    """A namespace in which runs may take place, the account of drivers, and the role of people.

    Args:
        security: the level of Pod Security that the namespace enforces: ``restricted``, ``baseline`` or ``privileged``.
    """
    labels = LABELS | {ALLOWED: ALLOWED_VALUE, "pod-security.kubernetes.io/enforce": security}
    within = {"namespace": namespace, "labels": LABELS}
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": labels},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, **within}},
        role(ACCOUNT, within, rights.DRIVER_RIGHTS + rights.EVENT_RIGHTS),
        {
            "apiVersion": f"{rights.RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": ACCOUNT, **within},
            "roleRef": {"apiGroup": rights.RBAC, "kind": "Role", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
        },
        role(USERS, within, rights.CLIENT_RIGHTS + rights.ADVISORY_RIGHTS),
    ]


def machine_rights() -> Manifest:
    """A role of the cluster for people that break machines; see
    :mod:`chaoskit.substrate.kubernetes.machines.machines`.
    """
    return role(MACHINE_USERS, {"labels": LABELS}, rights.MACHINE_RIGHTS, kind="ClusterRole")


def role(
    name: str, within: Manifest, granted: tuple[rights.Right, ...], kind: str = "Role"
) -> Manifest:
    """A role, whose annotations say what the rights to each resource are for."""
    reasons = dict[str, list[str]]()
    for right in granted:
        reasons.setdefault(f"chaoskit.dev/{right.resource.replace('/', '.')}", []).append(right.why)
    why = {name: "; ".join(whys) for name, whys in reasons.items()}
    metadata = {"name": name, **within, "annotations": why}
    return {
        "apiVersion": f"{rights.RBAC}/v1",
        "kind": kind,
        "metadata": metadata,
        "rules": rights.rules(granted),
    }
