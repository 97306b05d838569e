"""The CronJob of ``chaoskit nightly run`` in a namespace, and its account.

These functions make no requests to the API server.

-> nightly/places.py: how a night holds the namespace; cli/machine/cluster.py prints the objects.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.installation import ACCOUNT, LABELS, USERS, role
from chaoskit.substrate.kubernetes.options import VARIABLE
from chaoskit.substrate.kubernetes.pods.manifests import CONTAINER_SECURITY, POD_SECURITY, Manifest
from chaoskit.vocabulary import EXIT_BAD_INPUT, Verdict

#: Name of all its objects, and of an optional ConfigMap and Secret with variables for it.
NIGHTLY = "chaoskit-nightly"
#: Path of its volume.
NIGHTS = "/nights"
#: Environment variable with the Job of a night.
NIGHT_JOB = "CHAOSKIT_NIGHT_JOB"
#: Exit statuses of a night that is over and does not start again. A killed one has another status.
OVER = (
    Verdict.FAILED.exit_code,
    EXIT_BAD_INPUT,
    Verdict.UNKNOWN.exit_code,
    Verdict.ERROR.exit_code,
)
_NIGHT_LABELS = LABELS | {"app.kubernetes.io/component": "night"}
_GRACE_S = 180  # time to repair what it has broken
_LATE_S = 600  # maximum delay of its start
_DEADLINE_S = 12 * 3600
_TRIES = 6


@dataclass(frozen=True, slots=True)
class NightlyJob:
    """The user's settings of the CronJob of nights.

    Attributes:
        image: image with Python, torch and chaoskit[kubernetes]; its working directory is the
            repository with the tests.
        plan: plan of the night, below that directory.
        claim: a PersistentVolumeClaim of the namespace.
        schedule: five fields of cron.
        zone: time zone of the schedule.
    """

    image: str
    plan: str = "nightly.yaml"
    claim: str = NIGHTLY
    schedule: str = "0 1 * * *"
    zone: str = "Etc/UTC"


def nightly_job(namespace: str, settings: NightlyJob) -> list[Manifest]:
    """Return the manifests of the account of nights, its roles, and the CronJob.

    The account has the role of users and the right to the Lease of nights.
    """
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
                "schedule": settings.schedule,
                "timeZone": settings.zone,
                "concurrencyPolicy": "Forbid",
                "startingDeadlineSeconds": _LATE_S,
                "jobTemplate": {"metadata": {"labels": _NIGHT_LABELS}, "spec": _job(settings)},
            },
        },
    ]


def _job(settings: NightlyJob) -> Manifest:
    """Return the spec of the Job of a night.

    A killed pod is followed by another one that goes on. A night that is over does not start again.
    """
    over_codes = {"containerName": "night", "operator": "In", "values": list(OVER)}
    disrupted = [{"type": "DisruptionTarget"}]  # a drained or preempted pod does not count as a try
    return {
        "backoffLimit": _TRIES,
        "activeDeadlineSeconds": _DEADLINE_S,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": over_codes},
                {"action": "Ignore", "onPodConditions": disrupted},
            ]
        },
        "template": {"metadata": {"labels": _NIGHT_LABELS}, "spec": _pod(settings)},
    }


def _pod(settings: NightlyJob) -> Manifest:
    """Return the spec of the pod of a night."""
    variables = {
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        f"{VARIABLE}IMAGE": settings.image,
        f"{VARIABLE}SERVICE_ACCOUNT": ACCOUNT,
        f"{VARIABLE}HARNESS": "pod",
        # the repository belongs to another user than that of the pod
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }
    container = {
        "name": "night",
        "image": settings.image,
        "command": ["chaoskit", "nightly", "run", settings.plan],
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
            {"name": "nights", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
