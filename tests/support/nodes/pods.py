"""A Kubernetes cluster for tests: nodes of it run on this machine, and so can mount its files.

A variable of its own names it: tests make namespaces and pods, which the cluster of $KUBECONFIG may not be there for.

Its pods have this machine's Python and this checkout, each read-only; nothing that a run writes is shared with them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil

from chaoskit.substrate.kubernetes.api.rights import RBAC
from chaoskit.substrate.kubernetes.installation import USERS, installation
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods.manifests import ALLOWED, ALLOWED_VALUE
from chaoskit.substrate.kubernetes.template import ROLES
from support.waiting import wait_until

VARIABLE_OF_TESTS = "CHAOSKIT_TEST_KUBECONFIG"
#: Names the program that has made the cluster on this machine, and can break its machines.
VARIABLE_OF_TOOL = "CHAOSKIT_TEST_CLUSTER"
ROOT = Path(__file__).parents[3]
NAMESPACE = os.environ.get("CHAOSKIT_TEST_NAMESPACE", "chaoskit-tests")
IMAGE = "local.test/host:1"  # nothing but the links that make a mounted /usr work
#: What the cluster itself puts into a namespace, and what tells of things that were there.
_STANDING = {"configmaps/kube-root-ca.crt", "serviceaccounts/default"}
#: Of kinds that are installed.
GROUPS = {
    "ServiceAccount": "/api/v1",
    "ConfigMap": "/api/v1",
    "PersistentVolumeClaim": "/api/v1",
    "Role": f"/apis/{RBAC}/v1",
    "RoleBinding": f"/apis/{RBAC}/v1",
    "CronJob": "/apis/batch/v1",
}
_TELLING = ("events", "endpointslices")


@functools.cache
def unavailable() -> str:
    """Why there is no such cluster; "" if there is. One that does not answer is no reason to skip anything."""
    if not os.environ.get(VARIABLE_OF_TESTS):
        return f"no {VARIABLE_OF_TESTS} names a cluster for tests"
    return "" if find_spec("kubernetes") else "the package kubernetes is not installed"


def ask(method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """What the API server answers, as the user of the kubeconfig. Raises OSError."""
    return json.loads(_answer(method, path, body, "application/json"))


def log(pod: str) -> str:
    """What a pod has printed. Raises OSError."""
    return _answer("GET", f"/api/v1/namespaces/{namespace()}/pods/{pod}/log", None, "*/*").decode()


def _answer(method: str, path: str, body: Mapping[str, Any] | None, accepted: str) -> bytes:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    try:
        answer = _client().call_api(
            path,
            method,
            header_params={"Accept": accepted, "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=10,
        )
    except (ApiException, HTTPError) as error:
        raise OSError(str(error)) from error
    data: bytes = answer.data
    return data


@functools.cache
def _client() -> Any:
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(os.environ[VARIABLE_OF_TESTS], client_configuration=settings)
    settings.retries = False
    return client.ApiClient(settings)


@functools.cache
def namespace() -> str:
    """A namespace in which runs may take place; made if it is not there."""
    metadata = {"name": NAMESPACE, "labels": {ALLOWED: ALLOWED_VALUE}}
    try:
        ask("GET", f"/api/v1/namespaces/{NAMESPACE}")
    except OSError:
        ask(
            "POST",
            "/api/v1/namespaces",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
        )
    wait_until(lambda: set(everything(standing=True)) >= _STANDING, "what each namespace has")
    return NAMESPACE


def everything(*, standing: bool = False) -> list[str]:
    """Names of all objects in the namespace, of every kind that can be listed."""
    found = list[str]()
    for group, resource in _kinds():
        path = f"{group}/namespaces/{NAMESPACE}/{resource}"
        found += [f"{resource}/{one['metadata']['name']}" for one in ask("GET", path)["items"]]
    return sorted(set(found) if standing else set(found) - _STANDING)


@functools.cache
def _kinds() -> list[tuple[str, str]]:
    groups = [
        "/api/v1",
        *(
            f"/apis/{one['preferredVersion']['groupVersion']}"
            for one in ask("GET", "/apis")["groups"]
        ),
    ]
    return [
        (group, resource["name"])
        for group in groups
        for resource in ask("GET", group)["resources"]
        if resource["namespaced"]
        and "list" in resource["verbs"]
        and resource["name"] not in _TELLING
    ]


def pods(selector: str = "") -> dict[str, Any]:
    """Pods of the namespace, by name."""
    found = ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}")["items"]
    return {one["metadata"]["name"]: one for one in found}


def events(job: str) -> list[Any]:
    """The Events about a Job that chaoskit has written."""
    found = ask(
        "GET", f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name={job}"
    )["items"]
    return [one for one in found if one.get("reportingComponent") == "chaoskit"]


def delete(pod: str, grace_s: int = 0) -> None:
    """Delete a pod, as anything else on the cluster may."""
    ask("DELETE", f"/api/v1/namespaces/{namespace()}/pods/{pod}", {"gracePeriodSeconds": grace_s})


def evict(pod: str) -> None:
    """Evict a pod, as ``kubectl drain`` does: it has the grace of its own."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    ask("POST", f"/api/v1/namespaces/{namespace()}/pods/{pod}/eviction", body)


def delete_job(session: str) -> None:
    """Delete the Job of a session, as ``kubectl delete job`` does."""
    ask(
        "DELETE",
        f"/apis/batch/v1/namespaces/{namespace()}/jobs/{session}",
        {"propagationPolicy": "Background"},
    )


def api_server() -> psutil.Process | None:
    """Its process, where that is on this machine."""
    host, _, port = str(_client().configuration.host).removeprefix("https://").partition(":")
    wanted = {f"--bind-address={host}", f"--secure-port={port}"}
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "kube-apiserver" and wanted <= set(
            process.info["cmdline"] or ()
        ):
            return process
    return None


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """No pod of a session may be disrupted, as long as a ``with`` lasts."""
    path = f"/apis/policy/v1/namespaces/{namespace()}/poddisruptionbudgets"
    selector = {"matchLabels": {"app.kubernetes.io/name": "chaoskit"}}
    spec = {"minAvailable": "100%", "selector": selector}
    body = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "all"},
        "spec": spec,
    }
    ask("POST", path, body)
    try:
        yield
    finally:
        ask("DELETE", f"{path}/all")


@contextlib.contextmanager
def installed(manifests: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Objects of the namespace are there, as long as a ``with`` lasts."""
    with contextlib.ExitStack() as undone:
        for one in manifests:
            path = f"{GROUPS[one['kind']]}/namespaces/{namespace()}/{one['kind'].lower()}s"
            ask("POST", path, one)
            undone.callback(
                ask,
                "DELETE",
                f"{path}/{one['metadata']['name']}",
                {"propagationPolicy": "Background"},
            )
        yield


@contextlib.contextmanager
def person() -> Iterator[str]:
    """A kubeconfig of someone with the role of people and nothing else, beside what an administrator has installed."""
    made = [one for one in installation(namespace(), "restricted") if one["kind"] != "Namespace"]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "person"}}
    reference = {"apiGroup": RBAC, "kind": "Role", "name": USERS}
    subject = {"kind": "ServiceAccount", "name": "person", "namespace": namespace()}
    bound = {"metadata": {"name": "person"}, "roleRef": reference, "subjects": [subject]}
    made += [account, {"apiVersion": f"{RBAC}/v1", "kind": "RoleBinding", **bound}]
    with installed(made):
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = ask(
            "POST", f"/api/v1/namespaces/{namespace()}/serviceaccounts/person/token", wanted
        )["status"]["token"]
        told = msgspec.yaml.decode(Path(os.environ[VARIABLE_OF_TESTS]).read_bytes())
        told["users"] = [{"name": one["name"], "user": {"token": token}} for one in told["users"]]
        yield json.dumps(told)


@contextlib.contextmanager
def priority_class(value: int | None) -> Iterator[str]:
    """The name of a PriorityClass, which is there as long as a ``with`` lasts; None: of one that is not."""
    group, name = "/apis/scheduling.k8s.io/v1/priorityclasses", "chaoskit-tests"
    if value is not None:
        ask("POST", group, {"metadata": {"name": name}, "value": value})
    try:
        yield name
    finally:
        if value is not None:
            ask("DELETE", f"{group}/{name}")


@contextlib.contextmanager
def gpus(counts: Mapping[str, int]) -> Iterator[None]:
    """Machines claim to have so many GPUs, as long as a ``with`` lasts. There is no device behind them."""
    name = "nvidia.com/gpu"
    try:
        for machine, count in counts.items():
            ask(
                "PATCH",
                f"/api/v1/nodes/{machine}/status",
                {"status": {"capacity": {name: str(count)}}},
            )
            wait_until(
                lambda machine=machine: name in _allocatable(machine), f"the GPUs of {machine}"
            )
        yield
    finally:
        for machine in counts:
            gone = {"status": {"capacity": {name: None}, "allocatable": {name: None}}}
            ask("PATCH", f"/api/v1/nodes/{machine}/status", gone)


def _allocatable(machine: str) -> Mapping[str, str]:
    amounts: Mapping[str, str] = ask("GET", f"/api/v1/nodes/{machine}")["status"]["allocatable"]
    return amounts


@contextlib.contextmanager
def quota(pods: int) -> Iterator[None]:
    """No more pods than these may be made, as long as a ``with`` lasts."""
    path = f"/api/v1/namespaces/{namespace()}/resourcequotas"
    spec = {"hard": {"pods": str(pods)}}
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all"}, "spec": spec}
    ask("POST", path, body)
    try:
        wait_until(lambda: ask("GET", f"{path}/all")["status"].get("used"), "the quota in force")
        yield
    finally:
        ask("DELETE", f"{path}/all")


def mounts() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes with this Python and this checkout, and where a container mounts them."""
    # not the checkout as a whole: an environment in it may lie in a folder that only its owner may pass
    sources = (str(ROOT / name) for name in ("chaoskit", "faults", "suites", "fixtures", "tests"))
    mounted = dict.fromkeys(["/usr", sys.base_prefix, sys.prefix, *sources])
    names = {path: f"mount{number}" for number, path in enumerate(mounted)}
    volumes = [{"name": name, "hostPath": {"path": path}} for path, name in names.items()]
    return volumes, [
        {"name": name, "mountPath": path, "readOnly": True} for path, name in names.items()
    ]


def template(directory: Path, *, roles: dict[str, Any] | None = None, **node: Any) -> str:
    """Write a file with a template for pods with this Python, and return its path.

    Args:
        roles: resources of the pods of the driver and of the coordinator. node: more fields of the node's container.
    """
    volumes, mounted = mounts()
    containers = [{"name": "node", "image": IMAGE, "volumeMounts": mounted, **node}]
    if roles is not None:
        containers += [{"name": role, "resources": roles} for role in ROLES]
    path = directory / "template.json"
    path.write_text(json.dumps({"spec": {"containers": containers, "volumes": volumes}}))
    return str(path)


def options(directory: Path, **more: Any) -> KubernetesOptions:
    """For pods of the namespace."""
    told: dict[str, Any] = {"namespace": namespace(), "python": sys.executable}
    if "template" not in more and "image" not in more:
        told["template"] = template(directory)
    return KubernetesOptions(**{**told, **more})


def environment(directory: Path) -> dict[str, str]:
    """The same, for another process."""
    told = {"NAMESPACE": namespace(), "PYTHON": sys.executable, "TEMPLATE": template(directory)}
    cluster = {"KUBECONFIG": os.environ[VARIABLE_OF_TESTS]}
    return {**os.environ, **cluster, **{f"{VARIABLE}{name}": value for name, value in told.items()}}


def levers(directory: Path) -> str:
    """A file with commands that break machines of the cluster, and its API server, and some that only say so."""
    told = {
        "power-cut": {"do": _tool("power-cut"), "undo": _power_on()},
        "api-stop": {"do": _signal("STOP"), "undo": _signal("CONT")},
        "nothing": {"do": ["true", "{machine}"], "undo": ["true"]},
        "no-stop": {"do": ["true"], "undo": ["true"]},
        "broken": {"do": ["sh", "-c", "echo no way to {machine} >&2; exit 3"], "undo": ["true"]},
    }
    path = directory / "levers.json"
    path.write_text(json.dumps(told))
    return str(path)


def _tool(act: str) -> list[str]:
    """Of what has made the cluster: its machines are node0, node1 and so on."""
    return [
        "sh",
        "-c",
        f'exec "$0" node {act} "${{1#node}}"',
        os.environ[VARIABLE_OF_TOOL],
        "{machine}",
    ]


def _power_on() -> list[str]:
    """A machine that boots has no network of a pod that it had before: here the kernel keeps these for minutes, as
    sockets are open that wait for answers, and new pods get their addresses. One that has its power keeps them.
    """
    script = (
        'n="${1#node}"; case $("$0" in "$n" ip -br link show eth0) in *NO-CARRIER*)'
        ' for one in $("$0" in "$n" ip -br link show type veth | grep -o "^veth[^@ ]*"); do'
        ' "$0" in "$n" ip link delete "$one"; done;; esac; exec "$0" node start "$n"'
    )
    return ["sh", "-c", script, os.environ[VARIABLE_OF_TOOL], "{machine}"]


def _signal(name: str) -> list[str]:
    server = api_server()
    assert server is not None
    return ["kill", f"-{name}", str(server.pid)]


def no_tool() -> str:
    """Why machines of the cluster cannot be broken; "" if they can."""
    return (
        ""
        if os.environ.get(VARIABLE_OF_TOOL)
        else f"no {VARIABLE_OF_TOOL} names what has made the cluster"
    )


def machines() -> list[str]:
    """Names of the cluster's machines."""
    return [str(one["metadata"]["name"]) for one in ask("GET", "/api/v1/nodes")["items"]]


def is_ready(machine: str) -> bool:
    """Whether the API server holds a machine for ready."""
    found = ask("GET", f"/api/v1/nodes/{machine}")["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in found)


@contextlib.contextmanager
def labelled(machine: str, label: str) -> Iterator[None]:
    """A machine has a label, as long as a ``with`` lasts."""
    path = f"/api/v1/nodes/{machine}"
    ask("PATCH", path, {"metadata": {"labels": {label: "true"}}})
    try:
        yield
    finally:
        ask("PATCH", path, {"metadata": {"labels": {label: None}}})


@contextlib.contextmanager
def cordoned(machine: str) -> Iterator[None]:
    """No pod is bound to a machine, as long as a ``with`` lasts."""
    path = f"/api/v1/nodes/{machine}"
    ask("PATCH", path, {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        ask("PATCH", path, {"spec": {"unschedulable": None}})


def restarts(pod: Mapping[str, Any]) -> int:
    """How often containers of a pod were started again."""
    return sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ()))


def run_python(code: str, *arguments: str, directory: Path) -> subprocess.Popen[bytes]:
    """A runner of its own, which can be killed. It says a line when it is where the test wants it."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=environment(directory), stdout=subprocess.PIPE, start_new_session=True
    )
