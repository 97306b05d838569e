"""The manifest of a throw-away pod on which hands are tried. These functions make no requests.

-> ``doctor.py`` creates it. ``substrate/kubernetes/pods/resources.py``: its small requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaoskit.substrate.kubernetes.pods import pod_placement, resources
from chaoskit.substrate.kubernetes.pods.manifests import Manifest

#: Labels of such pods. None is a label of a job, so that no controller or service takes them.
COMPONENT_LABEL = "app.kubernetes.io/component"
COMPONENT = "hand-doctor"
LABELS = {"app.kubernetes.io/name": "chaoskit", COMPONENT_LABEL: COMPONENT}
#: Seconds after which the cluster ends such a pod, also if nothing deletes it.
LIFE_S = 600
_SLEEP = "sleep {0} || exec python3 -c 'import time; time.sleep({0})'"
#: Fields of a pod that matter to hands and to its admission. None of them has an effect on others.
_POD_FIELDS = (
    "dnsPolicy",
    "enableServiceLinks",
    "hostNetwork",
    "hostPID",
    "hostUsers",
    "imagePullSecrets",
    "nodeSelector",
    "os",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "shareProcessNamespace",
    "tolerations",
)
_CONTAINER_FIELDS = ("name", "image", "imagePullPolicy", "resources", "securityContext")
#: Volumes of which each pod has a copy of its own, or which are read only.
_OWN_VOLUMES = ("configMap", "downwardAPI", "emptyDir", "projected", "secret")
#: Volumes that are copied if no container of the pod writes to them.
_SHARED_VOLUMES = ("hostPath", "nfs", "persistentVolumeClaim")
_TOKEN_PREFIX = "kube-api-access-"  # the API server adds such a volume to each pod


def trial_pod(name: str, pod: Mapping[str, Any], container: str) -> Manifest:
    """Return a pod that only sleeps, on the machine of a pod of a job.

    It is like that pod in what decides about hands: image, rights, account, placement, and volumes
    that it cannot harm. It requests no devices and few other resources.

    Args:
        name: name of the new pod.
        pod: the object of the job's pod.
        container: name of its container that trains.
    """
    spec = pod["spec"]
    volumes = _harmless_volumes(spec)
    names = {volume["name"] for volume in volumes}
    like = next(entry for entry in spec["containers"] if entry["name"] == container)
    mounts = [mount for mount in like.get("volumeMounts") or () if mount["name"] in names]
    own_container = {
        **{field: like[field] for field in _CONTAINER_FIELDS if field in like},
        "command": ["sh", "-c", _SLEEP.format(LIFE_S)],
        "volumeMounts": mounts,
    }
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(LABELS)},
        "spec": {
            **{field: spec[field] for field in _POD_FIELDS if field in spec},
            "activeDeadlineSeconds": LIFE_S,
            "automountServiceAccountToken": False,
            "containers": [own_container],
            "restartPolicy": "Never",
            "volumes": volumes,
        },
    }
    resources.make_small(manifest["spec"], container, None)
    pod_placement.only_on(manifest, [str(spec["nodeName"])])
    return manifest


def _harmless_volumes(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the volumes of a pod that another pod can have without an effect on it."""
    written = {
        mount["name"]
        for entry in (*(spec.get("initContainers") or ()), *spec["containers"])
        for mount in entry.get("volumeMounts") or ()
        if not mount.get("readOnly")
    }
    return [
        volume
        for volume in spec.get("volumes") or ()
        if not volume["name"].startswith(_TOKEN_PREFIX)
        and (
            any(kind in volume for kind in _OWN_VOLUMES)
            or (volume["name"] not in written and any(kind in volume for kind in _SHARED_VOLUMES))
        )
    ]
