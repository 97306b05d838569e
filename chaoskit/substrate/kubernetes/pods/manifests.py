"""What the objects of a session look like. Nothing here speaks to a cluster."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from ipaddress import ip_network
from typing import Any

from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods import placement, resources

Manifest = dict[str, Any]

#: Of a namespace in which runs may take place.
ALLOWED = "chaoskit.dev/chaos"
ALLOWED_VALUE = "allowed"
#: Labels of every object: the session; of a pod the node that it is now, and a name that no other pod ever has.
SESSION, STATION, PLACE = "chaoskit.dev/session", "chaoskit.dev/station", "chaoskit.dev/place"
#: Labels of a pod of a node in a run: the run's directory, the ranks there, and the generation of their world.
RUN, RANKS, GENERATION = "chaoskit.dev/run", "chaoskit.dev/ranks", "chaoskit.dev/generation"
#: An annotation of them: the test of their run, as pytest names it.
TEST = "chaoskit.dev/test"
_LABEL_LENGTH = 63
#: An annotation of its Job.
STARTED_BY = "chaoskit.dev/started-by"
#: Where files of runs lie in a pod.
FILES = "/var/lib/chaoskit"
_TOKEN = "/var/lib/chaoskit-token"
_ADDRESS, _MACHINE = "CHAOSKIT_ADDRESS", "CHAOSKIT_MACHINE"
_USER = 1000
#: What Pod Security calls *restricted*, and a root file system that cannot be written.
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
#: Added to the place of a pod: that of its network helper. Also the name of the container.
HELPER = "chaoskit-network"
_OF_THE_NODE = (
    "image",
    "imagePullPolicy",
    "env",
    "volumeMounts",
)  # what its container has from that of the node
#: On which the supervisor of a driver listens, on the loopback of its pod.
DRIVER_PORT = 7070
DRIVER_STATION = "driver"
#: The station of a pod that may take the place of a lost one begins so.
STANDBY = "standby"
#: Fields of a pod that have no bearing on where it may be, and those that let it onto a machine.
_OF_ANY_POD = (
    "automountServiceAccountToken",
    "enableServiceLinks",
    "imagePullSecrets",
    "securityContext",
    "tolerations",
)
_SHM = "1Gi"
_GRACE_S = 30
#: A Job that has ended stays for so many seconds, so that its state can be read.
TTL_S = 30


def labels(session: str, component: str) -> dict[str, str]:
    """Labels of an object of a session."""
    return {
        "app.kubernetes.io/name": "chaoskit",
        "app.kubernetes.io/managed-by": "chaoskit",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": session,
        SESSION: session,
    }


def station_labels(station: str) -> dict[str, str | None]:
    """Return the labels of a pod that has become that of a station, such as one that stood by."""
    component = COORDINATOR if station == COORDINATOR else "node"
    return {STATION: station, "app.kubernetes.io/component": component}


def world_labels(run: str, ranks: Sequence[int], generation: int) -> dict[str, str | None]:
    """Return the labels of a pod in a run; None for the ranks of a pod that has none in this generation.

    ``run``: name of the run's directory, which has the name of the test in it.
    """
    there = "_".join(map(str, sorted(ranks))) or None
    return {
        RUN: _label_value(run),
        RANKS: there and _label_value(there),
        GENERATION: str(generation),
    }


def world_annotations(
    run: str, test: str, ranks: Sequence[int], generation: int
) -> dict[str, str | None]:
    """Return the annotations of a pod in a run: what its labels say, not shortened, and the test.

    None stands for the ranks of a pod that has none in this generation, and for the test of a run that has none.
    """
    there = ",".join(map(str, sorted(ranks))) or None
    return {RUN: run, TEST: test or None, RANKS: there, GENERATION: str(generation)}


def _label_value(text: str) -> str:
    """Return a text as a label may have it: letters, digits and ``-_.``, with letters or digits at its ends."""
    plain = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-"
        for letter in text
    )
    return plain[:_LABEL_LENGTH].strip("-_.")


def selector(session: str) -> str:
    """The label selector of all objects of a session."""
    return f"{SESSION}={session}"


def job(
    session: str, pod: Manifest, *, started_by: str, deadline_s: int, parallelism: int = 1
) -> Manifest:
    """The owner of everything else, with a pod in it, the coordinator's or the driver's: when that has ended, all goes.

    ``parallelism``: 0 for a job whose pod is to be made later. Its deadline counts; that of a suspended one does not.
    """
    kept = {
        name: pod["metadata"][name] for name in ("labels", "annotations") if name in pod["metadata"]
    }
    inside = {"metadata": kept, "spec": pod["spec"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": session,
            "labels": labels(session, "session"),
            "annotations": {STARTED_BY: started_by},
        },
        "spec": {
            "parallelism": parallelism,
            "backoffLimit": 0,
            "activeDeadlineSeconds": deadline_s,
            "ttlSecondsAfterFinished": TTL_S,
            "template": inside,
        },
    }


def owner(job: str, uid: str) -> Manifest:
    """The reference by which the collector of garbage knows what belongs to a job."""
    return {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": uid}


def secret(
    session: str, token: str, owned_by: Manifest, given: Mapping[str, Any] | None = None
) -> Manifest:
    """The token with which supervisors authenticate; and what a driver makes pods with: their owner and template."""
    data = {"token": token, "owner": owned_by["uid"]} | (
        {"template": json.dumps(given)} if given else {}
    )
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": session,
            "labels": labels(session, "token"),
            "ownerReferences": [owned_by],
        },
        "data": {name: base64.b64encode(value.encode()).decode() for name, value in data.items()},
    }


def driver_rights(
    session: str, namespace: str, owned_by: Manifest, *, writes_events: bool = True
) -> list[Manifest]:
    """The account of a driver, and the role that lets it do what it must (:data:`.rights.DRIVER_RIGHTS`).

    ``writes_events``: whether it may write Events, too. A user that may not cannot grant it.
    """
    granted = rights.DRIVER_RIGHTS + (rights.EVENT_RIGHTS if writes_events else ())
    metadata = {
        "name": session,
        "labels": labels(session, DRIVER_STATION),
        "ownerReferences": [owned_by],
    }
    bound = {"apiVersion": f"{rights.RBAC}/v1", "metadata": metadata}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"kind": "Role", **bound, "rules": rights.rules(granted)},
        {
            "kind": "RoleBinding",
            **bound,
            "roleRef": {"apiGroup": rights.RBAC, "kind": "Role", "name": session},
            "subjects": [{"kind": "ServiceAccount", "name": session, "namespace": namespace}],
        },
    ]


def network_policy(session: str, runner: str, owned_by: Manifest) -> Manifest:
    """Pods of a session are reached by each other, and by the runner: its address; "" where that is one of them."""
    selected = {"matchLabels": {SESSION: session}}
    outside = [{"ipBlock": {"cidr": str(ip_network(runner))}}] if runner else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": session,
            "labels": labels(session, "network"),
            "ownerReferences": [owned_by],
        },
        "spec": {
            "podSelector": selected,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": selected}, *outside]}],
        },
    }


def _container(command: list[str], image: str) -> Manifest:
    """The container of a node, hardened."""
    container: Manifest = {
        "name": template.CONTAINER,
        "command": command,
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": _MACHINE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "securityContext": deepcopy(CONTAINER_SECURITY),
        "volumeMounts": [
            {"name": "chaoskit-files", "mountPath": FILES},
            {"name": "chaoskit-tmp", "mountPath": "/tmp"},
            {"name": "chaoskit-shm", "mountPath": "/dev/shm"},
            {"name": "chaoskit-token", "mountPath": _TOKEN, "readOnly": True},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return container | ({"image": image} if image else {})


def pod(
    session: str,
    station: str,
    name: str,
    runner: str,
    options: KubernetesOptions,
    given: Mapping[str, Any],
    owned_by: Manifest | None = None,
) -> Manifest:
    """A pod whose first process is a supervisor.

    Args:
        station: the node, or the coordinator. runner: ``host:port`` that the supervisor dials.
        given: a template, as :func:`chaoskit.substrate.kubernetes.template.read` gives it.
    """
    where = ["--address", f"$({_ADDRESS})", "--machine", f"$({_MACHINE})"]
    dial = ["--dial", runner, "--place", name, *where]
    made, container = _supervised(session, station, name, dial, options, given)
    if options.network_faults == "allow":
        made["spec"].setdefault("initContainers", []).append(
            _helper(container, name, dial, options)
        )
        made["spec"]["volumes"].append({"name": HELPER, "emptyDir": {}})
    if owned_by is not None:
        made["metadata"]["ownerReferences"] = [owned_by]
    return made


def preemptor(like: Manifest, place: str, machine: str, priority_class: str) -> Manifest:
    """A pod that asks for no resources, must be on a machine, and not beside the pod of a place; it ends at once.

    ``like``: a pod of the session. What has no bearing on where a pod may be is taken from it.
    """
    spec = like["spec"]
    node = next(one for one in spec["containers"] if one["name"] == template.CONTAINER)
    container = {
        name: node[name]
        for name in ("name", "image", "imagePullPolicy", "securityContext")
        if name in node
    }
    none = dict.fromkeys(resources.PLAIN, "0")  # what is not named at all, a namespace may set
    container |= {"command": [node["command"][0], "-c", ""], "resources": {"requests": none}}
    apart = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {PLACE: place}},
    }
    made: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": like["metadata"]["name"],
            "labels": {
                name: like["metadata"]["labels"][name] for name in (SESSION, STATION, PLACE)
            },
            "ownerReferences": like["metadata"].get("ownerReferences", []),
        },
        "spec": {
            **{name: spec[name] for name in _OF_ANY_POD if name in spec},
            "restartPolicy": "Never",
            "priorityClassName": priority_class,
            "affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
            },
            "containers": [container],
        },
    }
    placement.only_on(made, [machine])
    return made


def helper_place(place: str) -> str:
    """The place of a pod's network helper."""
    return f"{place}-{HELPER}"


def _helper(node: Manifest, place: str, dial: list[str], options: KubernetesOptions) -> Manifest:
    """A container beside that of the node, which may change the network of the pod. It ends after the node's."""
    dialed = [helper_place(place) if one == place else one for one in dial]
    command = [
        options.python,
        "-m",
        "chaoskit.substrate.supervisor",
        "--cold",
        "--network",
        *dialed,
    ]
    security = CONTAINER_SECURITY | {
        "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"]}
    }
    kept: Manifest = {name: deepcopy(node[name]) for name in _OF_THE_NODE if name in node}
    own = {
        "XTABLES_LOCKFILE": "/tmp/xtables.lock",  # the usual place cannot be written
        "PYTHONNOUSERSITE": "1",  # nothing that a job has written is run as root
    }
    shared = ("chaoskit-files", "chaoskit-tmp", "chaoskit-shm")
    mounts = [one for one in kept.get("volumeMounts", ()) if one["name"] not in shared]
    return {
        **kept,
        "env": [
            *kept.get("env", ()),
            *({"name": name, "value": value} for name, value in own.items()),
        ],
        "volumeMounts": [*mounts, {"name": HELPER, "mountPath": "/tmp"}],
        "name": HELPER,
        "command": [*command, "--token-file", f"{_TOKEN}/token", "--grace-s", "0"],
        "restartPolicy": "Always",  # one that starts before the node's container, and ends after it
        "securityContext": security | {"runAsUser": 0, "runAsNonRoot": False},
    }


def driver(session: str, options: KubernetesOptions, given: Mapping[str, Any]) -> Manifest:
    """The pod of a driver, which makes the others. Its supervisor listens, as the client comes to it."""
    listen = ["--cold", "--listen", str(DRIVER_PORT)]
    made, container = _supervised(
        session, DRIVER_STATION, f"{session}-{DRIVER_STATION}", listen, options, given
    )
    account = {
        "serviceAccountName": options.service_account or session,
        "automountServiceAccountToken": True,
    }
    made["spec"] |= account
    container["env"] = [
        *container["env"],
        *(
            {"name": name, "value": value}
            for name, value in options.for_driver(session, _TOKEN).items()
        ),
        {"name": f"{VARIABLE}ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {
            "name": f"{VARIABLE}OWN_MACHINE",
            "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}},
        },
    ]
    return made


def _apart(session: str, component: str) -> Manifest:
    """Each on a machine of its own, as far as there are as many."""
    selected = {SESSION: session, "app.kubernetes.io/component": component}
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selected},
    }


def _supervised(
    session: str,
    station: str,
    name: str,
    reached: list[str],
    options: KubernetesOptions,
    given: Mapping[str, Any],
) -> tuple[Manifest, Manifest]:
    """A pod whose first process is a supervisor, and its container. ``reached``: how runner and supervisor meet."""
    supervisor = [options.python, "-m", "chaoskit.substrate.supervisor"]
    command = [*supervisor, *reached, "--echo-logs", "--token-file", f"{_TOKEN}/token"]
    container = _container(command, options.image)
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": deepcopy(POD_SECURITY),
        "containers": [container],
        "volumes": [
            {"name": "chaoskit-files", "emptyDir": {}},
            {"name": "chaoskit-tmp", "emptyDir": {}},
            {"name": "chaoskit-shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHM}},
            {"name": "chaoskit-token", "secret": {"secretName": session, "defaultMode": 0o440}},
        ],
    }
    is_node = station not in (COORDINATOR, DRIVER_STATION)
    component = "node" if is_node else station
    metadata: Manifest = {
        "name": name,
        "labels": {**labels(session, component), STATION: station, PLACE: name},
    }
    if is_node:
        spec["topologySpreadConstraints"] = [_apart(session, component)]
    made = deepcopy(
        template.merge({"metadata": metadata, "spec": spec}, template.without_roles(given))
    )
    if not is_node:
        resources.make_small(
            made["spec"], template.CONTAINER, template.resources_of(given, station)
        )
    if not is_node or station.startswith(STANDBY):
        placement.rather_not_on(made, options.breakable)
    container = next(one for one in made["spec"]["containers"] if one["name"] == template.CONTAINER)
    container["command"] += ["--grace-s", str(made["spec"]["terminationGracePeriodSeconds"])]
    return {"apiVersion": "v1", "kind": "Pod", **made}, container
