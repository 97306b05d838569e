"""A Kubernetes cluster for tests: its nodes run on this machine, and so can mount its files.

A special variable names it: tests make namespaces and pods, which may be unwanted on the cluster of
$KUBECONFIG.

Its pods have this machine's Python and this checkout, each read-only; no file that a run writes is
shared with them.
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
from chaoskit.substrate.kubernetes.template import RESOURCE_CONTAINERS
from support.waiting import wait_until

VARIABLE_OF_TESTS = "CHAOSKIT_TEST_KUBECONFIG"
#: The variable with the program that made the cluster on this machine, and can break its machines.
VARIABLE_OF_TOOL = "CHAOSKIT_TEST_CLUSTER"
ROOT = Path(__file__).parents[3]
NAMESPACE = os.environ.get("CHAOSKIT_TEST_NAMESPACE", "chaoskit-tests")
IMAGE = "local.test/host:1"  # contains only the links that make a mounted /usr work
#: Objects that the cluster itself puts into a namespace, and kinds that describe former objects.
_STANDING = {"configmaps/kube-root-ca.crt", "serviceaccounts/default"}
#: Resources of installed kinds.
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
    """Return why there is no such cluster, or "" if there is.

    A cluster that does not answer is no reason for a skip.
    """
    if not os.environ.get(VARIABLE_OF_TESTS):
        return f"no {VARIABLE_OF_TESTS} names a cluster for tests"
    return "" if find_spec("kubernetes") else "the package kubernetes is not installed"


def ask(method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the answer of the API server to the user of the kubeconfig.

    Raise OSError if it fails.
    """
    return json.loads(_answer(method, path, body, "application/json"))


def stream(path: str) -> Iterator[bytes]:
    """Yield pieces of an answer when they arrive, such as the events of a watch.

    Raise OSError if the API server refuses the request or does not answer.
    """
    from urllib3.exceptions import HTTPError

    try:
        yield from _open("GET", path, None, "application/json", limit_s=60).stream()
    except HTTPError as error:
        raise OSError(str(error)) from error


def log(pod: str) -> str:
    """Return the output of a pod. Raise OSError if the API server does not answer."""
    return _answer("GET", f"/api/v1/namespaces/{namespace()}/pods/{pod}/log", None, "*/*").decode()


def _answer(method: str, path: str, body: Mapping[str, Any] | None, accepted: str) -> bytes:
    data: bytes = _open(method, path, body, accepted).data
    return data


def _open(
    method: str, path: str, body: Mapping[str, Any] | None, accepted: str, limit_s: float = 10
) -> Any:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    try:
        return _client().call_api(
            path,
            method,
            header_params={"Accept": accepted, "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=limit_s,
        )
    except (ApiException, HTTPError) as error:
        raise OSError(str(error)) from error


@functools.cache
def _client() -> Any:
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(os.environ[VARIABLE_OF_TESTS], client_configuration=settings)
    settings.retries = False
    return client.ApiClient(settings)


@functools.cache
def namespace() -> str:
    """Return a namespace in which runs may take place; it is created if it does not exist."""
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
    """Return names of all objects in the namespace, of every kind that can be listed."""
    names = list[str]()
    for group, resource in _kinds():
        path = f"{group}/namespaces/{NAMESPACE}/{resource}"
        names += [
            f"{resource}/{resource_object['metadata']['name']}"
            for resource_object in ask("GET", path)["items"]
        ]
    return sorted(set(names) if standing else set(names) - _STANDING)


@functools.cache
def _kinds() -> list[tuple[str, str]]:
    groups = [
        "/api/v1",
        *(
            f"/apis/{group['preferredVersion']['groupVersion']}"
            for group in ask("GET", "/apis")["groups"]
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
    """Return the pods of the namespace, by name."""
    items = ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={selector}")["items"]
    return {pod["metadata"]["name"]: pod for pod in items}


def events(job: str) -> list[Any]:
    """Return the Events about a Job that chaoskit has written."""
    events = ask(
        "GET", f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name={job}"
    )["items"]
    return [event for event in events if event.get("reportingComponent") == "chaoskit"]


def delete(pod: str, grace_s: int = 0) -> None:
    """Delete a pod, as any other client of the cluster may."""
    ask("DELETE", f"/api/v1/namespaces/{namespace()}/pods/{pod}", {"gracePeriodSeconds": grace_s})


def evict(pod: str) -> None:
    """Evict a pod, as ``kubectl drain`` does, with the pod's own grace period."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    ask("POST", f"/api/v1/namespaces/{namespace()}/pods/{pod}/eviction", body)


def delete_job(session: str) -> None:
    """Delete the Job of a session, as ``kubectl delete job`` does."""
    ask(
        "DELETE",
        f"/apis/batch/v1/namespaces/{namespace()}/jobs/{session}",
        {"propagationPolicy": "Background"},
    )


def processes(pod: Mapping[str, Any]) -> list[psutil.Process]:
    """Return the processes of a pod's containers. The kernel of this machine runs them."""
    ids = [
        status["containerID"].rpartition("/")[2] for status in pod["status"]["containerStatuses"]
    ]
    return [
        process
        for process in psutil.process_iter()
        if any(container in _cgroups(process.pid) for container in ids)
    ]


def _cgroups(pid: int) -> str:
    """Return the names of the cgroups of a process, or "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def api_server() -> psutil.Process | None:
    """Return the API server's process, or None if it is not on this machine."""
    host, _, port = str(_client().configuration.host).removeprefix("https://").partition(":")
    server_options = {f"--bind-address={host}", f"--secure-port={port}"}
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "kube-apiserver" and server_options <= set(
            process.info["cmdline"] or ()
        ):
            return process
    return None


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """Allow no disruption of a session's pods until the context ends."""
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
    """Create objects of the namespace, and delete them when the context ends."""
    with contextlib.ExitStack() as undone:
        for manifest in manifests:
            path = (
                f"{GROUPS[manifest['kind']]}/namespaces/{namespace()}/{manifest['kind'].lower()}s"
            )
            ask("POST", path, manifest)
            undone.callback(
                ask,
                "DELETE",
                f"{path}/{manifest['metadata']['name']}",
                {"propagationPolicy": "Background"},
            )
        yield


@contextlib.contextmanager
def person() -> Iterator[str]:
    """Yield a kubeconfig of a user with the role of people only, beside an administrator's
    installation.
    """
    manifests = [
        manifest
        for manifest in installation(namespace(), "restricted")
        if manifest["kind"] != "Namespace"
    ]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "person"}}
    reference = {"apiGroup": RBAC, "kind": "Role", "name": USERS}
    subject = {"kind": "ServiceAccount", "name": "person", "namespace": namespace()}
    bound = {"metadata": {"name": "person"}, "roleRef": reference, "subjects": [subject]}
    manifests += [account, {"apiVersion": f"{RBAC}/v1", "kind": "RoleBinding", **bound}]
    with installed(manifests):
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = ask(
            "POST", f"/api/v1/namespaces/{namespace()}/serviceaccounts/person/token", request
        )["status"]["token"]
        kubeconfig = msgspec.yaml.decode(Path(os.environ[VARIABLE_OF_TESTS]).read_bytes())
        kubeconfig["users"] = [
            {"name": user["name"], "user": {"token": token}} for user in kubeconfig["users"]
        ]
        yield json.dumps(kubeconfig)


@contextlib.contextmanager
def priority_class(value: int | None) -> Iterator[str]:
    """Yield the name of a PriorityClass that exists until the context ends; for None, of a class
    that does not exist.
    """
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
    """Let machines claim ``counts`` GPUs until the context ends. There is no device behind them."""
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
    """Limit the number of pods until the context ends."""
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
    """Return volumes with this Python and this checkout, and where a container mounts them."""
    # Not the whole checkout: an environment in it may lie in a folder that only its owner may pass.
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
        roles: resources of the pods of the driver and of the coordinator.
        node: more fields of the node's container.
    """
    volumes, mounted = mounts()
    containers = [{"name": "node", "image": IMAGE, "volumeMounts": mounted, **node}]
    if roles is not None:
        containers += [{"name": role, "resources": roles} for role in RESOURCE_CONTAINERS]
    path = directory / "template.json"
    path.write_text(json.dumps({"spec": {"containers": containers, "volumes": volumes}}))
    return str(path)


def options(directory: Path, **more: Any) -> KubernetesOptions:
    """Return options for pods of the namespace."""
    settings: dict[str, Any] = {"namespace": namespace(), "python": sys.executable}
    if "template" not in more and "image" not in more:
        settings["template"] = template(directory)
    return KubernetesOptions(**{**settings, **more})


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of another process with the same options."""
    settings = {"NAMESPACE": namespace(), "PYTHON": sys.executable, "TEMPLATE": template(directory)}
    cluster = {"KUBECONFIG": os.environ[VARIABLE_OF_TESTS]}
    return {
        **os.environ,
        **cluster,
        **{f"{VARIABLE}{name}": value for name, value in settings.items()},
    }


def levers(directory: Path) -> str:
    """Write a file with commands that break machines of the cluster and its API server, or only
    claim to. Return its path.
    """
    commands = {
        "power-cut": {"do": _tool("power-cut"), "undo": _power_on()},
        "api-stop": {"do": _signal("STOP"), "undo": _signal("CONT")},
        "nothing": {"do": ["true", "{machine}"], "undo": ["true"]},
        "no-stop": {"do": ["true"], "undo": ["true"]},
        "broken": {"do": ["sh", "-c", "echo no way to {machine} >&2; exit 3"], "undo": ["true"]},
    }
    path = directory / "levers.json"
    path.write_text(json.dumps(commands))
    return str(path)


def _tool(act: str) -> list[str]:
    """Return the command of the program that made the cluster; its machines are node0, node1 and so
    on.
    """
    return [
        "sh",
        "-c",
        f'exec "$0" node {act} "${{1#node}}"',
        os.environ[VARIABLE_OF_TOOL],
        "{machine}",
    ]


def _power_on() -> list[str]:
    """Return the command that switches a machine on again.

    A machine that boots has no network of its former pods. Here the kernel keeps these for minutes,
    as open sockets wait for answers, and new pods get their addresses. A machine that kept its
    power keeps them.
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
    """Return why machines of the cluster cannot be broken, or "" if they can."""
    return (
        ""
        if os.environ.get(VARIABLE_OF_TOOL)
        else f"no {VARIABLE_OF_TOOL} names what has made the cluster"
    )


def machines() -> list[str]:
    """Return the names of the cluster's machines."""
    return [str(machine["metadata"]["name"]) for machine in ask("GET", "/api/v1/nodes")["items"]]


def is_ready(machine: str) -> bool:
    """Return whether the API server regards a machine as ready."""
    conditions = ask("GET", f"/api/v1/nodes/{machine}")["status"]["conditions"]
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


@contextlib.contextmanager
def labelled(machine: str, label: str) -> Iterator[None]:
    """Give a machine a label until the context ends."""
    path = f"/api/v1/nodes/{machine}"
    ask("PATCH", path, {"metadata": {"labels": {label: "true"}}})
    try:
        yield
    finally:
        ask("PATCH", path, {"metadata": {"labels": {label: None}}})


@contextlib.contextmanager
def cordoned(machine: str) -> Iterator[None]:
    """Cordon a machine until the context ends: no pod is bound to it."""
    path = f"/api/v1/nodes/{machine}"
    ask("PATCH", path, {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        ask("PATCH", path, {"spec": {"unschedulable": None}})


def restarts(pod: Mapping[str, Any]) -> int:
    """Return how often containers of a pod were started again."""
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", ()))


def run_python(code: str, *arguments: str, directory: Path) -> subprocess.Popen[bytes]:
    """Start a runner in its own process, which can be killed.

    It prints a line at the place that the test waits for.
    """
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=environment(directory), stdout=subprocess.PIPE, start_new_session=True
    )
