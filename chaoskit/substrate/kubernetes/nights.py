"""The CronJob of ``chaoskit nightly run`` in a namespace, and its account. Makes nothing of a cluster."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.installation import ACCOUNT, LABELS, USERS, role
from chaoskit.substrate.kubernetes.options import VARIABLE
from chaoskit.substrate.kubernetes.pods.manifests import CONTAINER_SECURITY, POD_SECURITY, Manifest
from chaoskit.vocabulary import EXIT_BAD_INPUT, Verdict

#: Of all its objects; of a ConfigMap and a Secret, too, whose variables it gets where they are there.
NIGHTLY = "chaoskit-nightly"
#: Where its volume is, whatever is in the image.
NIGHTS = "/nights"
#: Names the Job of a night, in its environment.
NIGHT_JOB = "CHAOSKIT_NIGHT_JOB"
#: Exit statuses of a night that is over: it is not begun again. One that was killed has another.
OVER = (
    Verdict.FAILED.exit_code,
    EXIT_BAD_INPUT,
    Verdict.UNKNOWN.exit_code,
    Verdict.ERROR.exit_code,
)
_OF_NIGHTS = LABELS | {"app.kubernetes.io/component": "night"}
_GRACE_S = 180  # what it has broken is put back
_LATE_S = 600  # so late it may begin
_DEADLINE_S = 12 * 3600
_TRIES = 6


@dataclass(frozen=True, slots=True)
class NightlyJob:
    """What users choose of it.

    Attributes:
        image: with Python, torch, chaoskit[kubernetes], and in its working directory the repository with the tests.
        plan: of the night, below that directory. claim: a PersistentVolumeClaim of the namespace.
        schedule: five fields of cron, in the time zone ``zone``.
    """

    image: str
    plan: str = "nightly.yaml"
    claim: str = NIGHTLY
    schedule: str = "0 1 * * *"
    zone: str = "Etc/UTC"


def nightly_job(namespace: str, chosen: NightlyJob) -> list[Manifest]:
    """The account of nights, with the role of people and the right to their Lease; and the CronJob."""
    within: Manifest = {"namespace": namespace, "labels": LABELS}
    subjects = [{"kind": "ServiceAccount", "name": NIGHTLY, "namespace": namespace}]
    bindings: list[Manifest] = [
        {
            "apiVersion": f"{rights.RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name, **within},
            "roleRef": {"apiGroup": rights.RBAC, "kind": "Role", "name": granted},
            "subjects": subjects,
        }
        for name, granted in ((NIGHTLY, NIGHTLY), (f"{NIGHTLY}-{USERS}", USERS))
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NIGHTLY, **within}},
        role(NIGHTLY, within, rights.NIGHT_RIGHTS),
        *bindings,
        {
            "apiVersion": "batch/v1",
            "kind": "CronJob",
            "metadata": {"name": NIGHTLY, **within},
            "spec": {
                "schedule": chosen.schedule,
                "timeZone": chosen.zone,
                "concurrencyPolicy": "Forbid",
                "startingDeadlineSeconds": _LATE_S,
                "jobTemplate": {"metadata": {"labels": _OF_NIGHTS}, "spec": _job(chosen)},
            },
        },
    ]


def _job(chosen: NightlyJob) -> Manifest:
    """A pod that was killed is followed by another one, which goes on; a night that is over is not begun again."""
    over = {"containerName": "night", "operator": "In", "values": list(OVER)}
    moved = [{"type": "DisruptionTarget"}]  # drained or preempted: that is no try
    return {
        "backoffLimit": _TRIES,
        "activeDeadlineSeconds": _DEADLINE_S,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": over},
                {"action": "Ignore", "onPodConditions": moved},
            ]
        },
        "template": {"metadata": {"labels": _OF_NIGHTS}, "spec": _pod(chosen)},
    }


def _pod(chosen: NightlyJob) -> Manifest:
    variables = {
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        f"{VARIABLE}IMAGE": chosen.image,
        f"{VARIABLE}SERVICE_ACCOUNT": ACCOUNT,
        f"{VARIABLE}HARNESS": "pod",
        # the repository belongs to another user than that of the pod
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    container = {
        "name": "night",
        "image": chosen.image,
        "command": ["chaoskit", "nightly", "run", chosen.plan],
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {
                "name": NIGHT_JOB,
                "valueFrom": {
                    "fieldRef": {
                        "fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"
                    }
                },
            },
            {
                "name": f"{VARIABLE}OWN_MACHINE",
                "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
            },
        ],
        "envFrom": [
            {"configMapRef": {"name": NIGHTLY, "optional": True}},
            {"secretRef": {"name": NIGHTLY, "optional": True}},
        ],
        "securityContext": deepcopy(CONTAINER_SECURITY),
        "volumeMounts": [
            {"name": "nights", "mountPath": NIGHTS},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "restartPolicy": "Never",
        "serviceAccountName": NIGHTLY,
        "terminationGracePeriodSeconds": _GRACE_S,
        "enableServiceLinks": False,
        "securityContext": deepcopy(POD_SECURITY),
        "containers": [container],
        "volumes": [
            {"name": "nights", "persistentVolumeClaim": {"claimName": chosen.claim}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
