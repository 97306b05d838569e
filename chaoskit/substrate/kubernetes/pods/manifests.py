"""The objects of a session as manifests.

These functions make no requests to the API server.

-> kubernetes/session.py and driver_pod.py create the objects; kubernetes/template.py: which fields
a user may change.
"""

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
from chaoskit.substrate.kubernetes.pods import pod_placement, resources

Manifest = dict[str, Any]

#: Label of a namespace in which runs may take place.
ALLOWED = "chaoskit.dev/chaos"
ALLOWED_VALUE = "allowed"
#: Labels: the session of an object; the station of a pod, and a name that no other pod ever has.
SESSION, STATION, PLACE = "chaoskit.dev/session", "chaoskit.dev/station", "chaoskit.dev/place"
#: Labels of a node's pod in a run: the run's directory, its ranks, and their generation.
RUN, RANKS, GENERATION = "chaoskit.dev/run", "chaoskit.dev/ranks", "chaoskit.dev/generation"
#: Annotation of a node's pod: the pytest name of the test of its run.
TEST = "chaoskit.dev/test"
_LABEL_LENGTH = 63
#: Annotation of a session's Job: the user or the night that started it.
STARTED_BY = "chaoskit.dev/started-by"
#: The directory of the files of runs in a pod.
FILES = "/var/lib/chaoskit"
_TOKEN = "/var/lib/chaoskit-token"
_ADDRESS, _MACHINE = "CHAOSKIT_ADDRESS", "CHAOSKIT_MACHINE"
_USER = 1000
#: The Pod Security level *restricted*, with a read-only root file system.
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
#: Suffix of the place of a network helper, and name of its container.
HELPER = "chaoskit-network"
#: Fields that a helper has from the node's container.
_COPIED_FIELDS = ("image", "imagePullPolicy", "env", "volumeMounts")
#: Port on the loopback of a driver's pod on which its supervisor listens.
DRIVER_PORT = 7070
DRIVER_STATION = "driver"
#: Prefix of the stations of pods that may replace a lost one.
STANDBY = "standby"
#: Fields of a pod that do not restrict its placement, or that let it onto a machine.
_PREEMPTOR_FIELDS = (
    "automountServiceAccountToken",
    "enableServiceLinks",
    "imagePullSecrets",
    "securityContext",
    "tolerations",
)
_SHM = "1Gi"
_GRACE_S = 30
#: Time in seconds that an ended Job stays, so that its state can be read.
TTL_S = 30


def labels(session: str, component: str) -> dict[str, str]:
    """Return the labels of an object of a session."""
    return {
        "app.kubernetes.io/name": "chaoskit",
        "app.kubernetes.io/managed-by": "chaoskit",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": session,
        SESSION: session,
    }


def station_labels(station: str) -> dict[str, str | None]:
    """Return the labels of a pod that a station has got later, such as a former standby."""
    component = COORDINATOR if station == COORDINATOR else "node"
    return {STATION: station, "app.kubernetes.io/component": component}


def world_labels(run: str, ranks: Sequence[int], generation: int) -> dict[str, str | None]:
    """Return the labels of a pod in a run. The ranks are None if it has none in this generation.

    Args:
        run: name of the run's directory, which contains the name of the test.
        ranks: ranks of the pod in this generation.
        generation: number of the generation.
    """
    text = "_".join(map(str, sorted(ranks))) or None
    return {RUN: _label_value(run), RANKS: text and _label_value(text), GENERATION: str(generation)}


def world_annotations(
    run: str, test: str, ranks: Sequence[int], generation: int
) -> dict[str, str | None]:
    """Return the annotations of a pod in a run: the values of its labels in full, and the test.

    The annotation of the ranks is None if the pod has none in this generation. That of the test is
    None if the run has none.
    """
    text = ",".join(map(str, sorted(ranks))) or None
    return {RUN: run, TEST: test or None, RANKS: text, GENERATION: str(generation)}


def _label_value(text: str) -> str:
    """Return a text as the value of a label, shortened and with other characters as ``-``.

    It has letters, digits and ``-_.``, with letters or digits at its ends.
    """
    value = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-"
        for letter in text
    )
    return value[:_LABEL_LENGTH].strip("-_.")


def selector(session: str) -> str:
    """Return the label selector of all objects of a session."""
    return f"{SESSION}={session}"


def job(
    session: str, pod: Manifest, *, started_by: str, deadline_s: int, parallelism: int = 1
) -> Manifest:
    """Return the Job that owns all other objects of a session.

    When its pod has ended, all of them go.

    Args:
        session: name of the session.
        pod: manifest of its pod: the coordinator's or the driver's.
        started_by: the user or the night that starts the session.
        deadline_s: deadline of the Job, in seconds.
        parallelism: 0 for a Job whose pod is created later. Its deadline counts; that of a
            suspended Job does not.
    """
    kept = {
        name: pod["metadata"][name] for name in ("labels", "annotations") if name in pod["metadata"]
    }
    pod_template = {"metadata": kept, "spec": pod["spec"]}
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
            "template": pod_template,
        },
    }


def owner(job: str, uid: str) -> Manifest:
    """Return the reference by which the garbage collector finds the objects that a Job owns."""
    return {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": uid}


def secret(
    session: str, token: str, owned_by: Manifest, pod_template: Mapping[str, Any] | None = None
) -> Manifest:
    """Return the Secret with the token by which supervisors authenticate.

    It also has the data for a driver's pods: their owner, and the template ``pod_template``.
    """
    data = {"token": token, "owner": owned_by["uid"]} | (
        {"template": json.dumps(pod_template)} if pod_template else {}
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
    """Return the account of a driver, its role, and the binding of both.

    The role has :data:`.rights.DRIVER_RIGHTS`.

    Args:
        session: name of the session.
        namespace: namespace of the account.
        owned_by: reference to the owner of these objects.
        writes_events: True if it may write Events, too. A user without this right cannot grant it.
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
    """Return the policy by which pods of a session are reached only by each other and the runner.

    Args:
        runner: address of the runner; "" if the runner is one of these pods.
    """
    pod_selector = {"matchLabels": {SESSION: session}}
    runner_blocks = [{"ipBlock": {"cidr": str(ip_network(runner))}}] if runner else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": session,
            "labels": labels(session, "network"),
            "ownerReferences": [owned_by],
        },
        "spec": {
            "podSelector": pod_selector,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pod_selector}, *runner_blocks]}],
        },
    }


def _container(command: list[str], image: str) -> Manifest:
    """Return the hardened container of a node.

    Args:
        image: its image; "" to leave that to the template.
    """
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
    pod_template: Mapping[str, Any],
    owned_by: Manifest | None = None,
) -> Manifest:
    """Return a pod whose first process is a supervisor.

    Args:
        station: the node, the coordinator, or a standby.
        name: name of the pod, and its place.
        runner: ``host:port`` that the supervisor dials.
        options: the user's options. With network faults the pod has a helper.
        pod_template: the template that :func:`chaoskit.substrate.kubernetes.template.read` returns.
        owned_by: reference to its owner, if that exists already.
    """
    identity = ["--address", f"$({_ADDRESS})", "--machine", f"$({_MACHINE})"]
    dial = ["--dial", runner, "--place", name, *identity]
    manifest, container = _supervised_pod(session, station, name, dial, options, pod_template)
    if options.network_faults == "allow":
        manifest["spec"].setdefault("initContainers", []).append(
            _helper_container(container, name, dial, options)
        )
        manifest["spec"]["volumes"].append({"name": HELPER, "emptyDir": {}})
    if owned_by is not None:
        manifest["metadata"]["ownerReferences"] = [owned_by]
    return manifest


def preemptor(like: Manifest, place: str, machine: str, priority_class: str) -> Manifest:
    """Return a pod for one machine that ends at once and may not run beside another pod.

    It requests no resources.

    Args:
        like: a pod of the session. Fields that do not restrict the placement are copied from it.
        place: place of the pod beside which it cannot run.
        machine: the machine on which it must run.
        priority_class: its priority class.
    """
    spec = like["spec"]
    node = next(
        candidate for candidate in spec["containers"] if candidate["name"] == template.CONTAINER
    )
    metadata = {
        "name": like["metadata"]["name"],
        "labels": {name: like["metadata"]["labels"][name] for name in (SESSION, STATION, PLACE)},
        "ownerReferences": like["metadata"].get("ownerReferences", []),
    }
    command = [node["command"][0], "-c", ""]
    beside = {PLACE: place}
    return preempting_pod(metadata, spec, node, command, beside, machine, priority_class)


def preempting_pod(
    metadata: Mapping[str, Any],
    like: Mapping[str, Any],
    container: Mapping[str, Any],
    command: Sequence[str],
    beside: Mapping[str, str],
    machine: str,
    priority_class: str,
) -> Manifest:
    """Return a pod for one machine that may not run beside other pods, and requests no resources.

    Args:
        metadata: metadata of the pod.
        like: specification of a pod that the cluster admits. Fields that do not restrict the
            placement are copied from it.
        container: a container of that pod, whose image is used.
        command: its command.
        beside: labels of the pods beside which it cannot run.
        machine: the machine on which it must run.
        priority_class: its priority class.
    """
    copied = ("name", "image", "imagePullPolicy", "securityContext")
    # a namespace may set requests that are not given
    no_requests = dict.fromkeys(resources.PLAIN, "0")
    own_container = {
        **{name: container[name] for name in copied if name in container},
        "command": list(command),
        "resources": {"requests": no_requests},
    }
    anti_affinity = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": dict(beside)},
    }
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": dict(metadata),
        "spec": {
            **{name: like[name] for name in _PREEMPTOR_FIELDS if name in like},
            "restartPolicy": "Never",
            "priorityClassName": priority_class,
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [anti_affinity]
                }
            },
            "containers": [own_container],
        },
    }
    pod_placement.only_on(manifest, [machine])
    return manifest


def helper_place(place: str) -> str:
    """Return the place of a pod's network helper."""
    return f"{place}-{HELPER}"


def _helper_container(
    node: Manifest, place: str, dial: list[str], options: KubernetesOptions
) -> Manifest:
    """Return the container that may change the network of the pod.

    It ends after the node's container.
    """
    dial_helper = [helper_place(place) if argument == place else argument for argument in dial]
    command = [
        options.python,
        "-m",
        "chaoskit.substrate.supervisor",
        "--cold",
        "--network",
        *dial_helper,
    ]
    security = CONTAINER_SECURITY | {
        "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"]}
    }
    kept: Manifest = {name: deepcopy(node[name]) for name in _COPIED_FIELDS if name in node}
    own = {
        "XTABLES_LOCKFILE": "/tmp/xtables.lock",  # the default path cannot be written
        "PYTHONNOUSERSITE": "1",  # root runs no code that a job has written
    }
    shared = ("chaoskit-files", "chaoskit-tmp", "chaoskit-shm")
    mounts = [mount for mount in kept.get("volumeMounts", ()) if mount["name"] not in shared]
    return {
        **kept,
        "env": [
            *kept.get("env", ()),
            *({"name": name, "value": value} for name, value in own.items()),
        ],
        "volumeMounts": [*mounts, {"name": HELPER, "mountPath": "/tmp"}],
        "name": HELPER,
        "command": [*command, "--token-file", f"{_TOKEN}/token", "--grace-s", "0"],
        "restartPolicy": "Always",  # a sidecar starts before the node's container and ends after it
        "securityContext": security | {"runAsUser": 0, "runAsNonRoot": False},
    }


def driver(session: str, options: KubernetesOptions, pod_template: Mapping[str, Any]) -> Manifest:
    """Return the pod of a driver, which creates the others.

    Its supervisor listens for the client.
    """
    listen = ["--cold", "--listen", str(DRIVER_PORT)]
    manifest, container = _supervised_pod(
        session, DRIVER_STATION, f"{session}-{DRIVER_STATION}", listen, options, pod_template
    )
    account = {
        "serviceAccountName": options.service_account or session,
        "automountServiceAccountToken": True,
    }
    manifest["spec"] |= account
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
    return manifest


def _spread_constraint(session: str, component: str) -> Manifest:
    """Return the constraint that spreads pods over machines, as far as there are enough."""
    match_labels = {SESSION: session, "app.kubernetes.io/component": component}
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": match_labels},
    }


def _supervised_pod(
    session: str,
    station: str,
    name: str,
    connection_options: list[str],
    options: KubernetesOptions,
    pod_template: Mapping[str, Any],
) -> tuple[Manifest, Manifest]:
    """Return a pod whose first process is a supervisor, and the container of that in the pod.

    Args:
        connection_options: arguments of the supervisor for its connection to the runner.
    """
    supervisor = [options.python, "-m", "chaoskit.substrate.supervisor"]
    command = [*supervisor, *connection_options, "--echo-logs", "--token-file", f"{_TOKEN}/token"]
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
        spec["topologySpreadConstraints"] = [_spread_constraint(session, component)]
    manifest = deepcopy(
        template.merge(
            {"metadata": metadata, "spec": spec}, template.without_resource_containers(pod_template)
        )
    )
    if not is_node:
        resources.make_small(
            manifest["spec"], template.CONTAINER, template.resources_of(pod_template, station)
        )
    if not is_node or station.startswith(STANDBY):
        pod_placement.rather_not_on(manifest, options.breakable)
    container = next(
        candidate
        for candidate in manifest["spec"]["containers"]
        if candidate["name"] == template.CONTAINER
    )
    container["command"] += ["--grace-s", str(manifest["spec"]["terminationGracePeriodSeconds"])]
    return {"apiVersion": "v1", "kind": "Pod", **manifest}, container
