"""Requests to the API server, with time limits. Their errors are one line long.

-> kubernetes/api/rights.py: the rights that they need; background.py: requests in another thread;
watch_stream.py: the events of a watch; log_stream.py: the stream of a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate.kubernetes.api.log_stream import LogStream
from chaoskit.substrate.kubernetes.api.rights import with_remedy
from chaoskit.substrate.kubernetes.api.web_socket import open_web_socket
from chaoskit.substrate.kubernetes.options import SERVICE_ACCOUNT
from chaoskit.substrate.kubernetes.template import CONTAINER

ANSWER_S = 10.0
_KUBELETS = "kube-node-lease"  # namespace of the leases of machines
#: Kind of these leases in this module.
_KUBELET = "KubeletLease"
_PATHS = {
    "Pod": ("/api/v1", "pods"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Namespace": ("/api/v1", "namespaces"),
    "Node": ("/api/v1", "nodes"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    _KUBELET: (f"/apis/coordination.k8s.io/v1/namespaces/{_KUBELETS}", "leases"),
    "Job": ("/apis/batch/v1", "jobs"),
    "Event": ("/api/v1", "events"),
    "ResourceQuota": ("/api/v1", "resourcequotas"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "JobSet": ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    "TrainJob": ("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs"),
    "PyTorchJob": ("/apis/kubeflow.org/v1", "pytorchjobs"),
    "HyperPodPyTorchJob": ("/apis/sagemaker.amazonaws.com/v1", "hyperpodpytorchjobs"),
}
_CLUSTER_KINDS = ("Namespace", "Node", _KUBELET)
_OWN_NAMESPACE = Path(SERVICE_ACCOUNT) / "namespace"
#: Errors of the client for a malformed kubeconfig.
_NO_CONFIG = (TypeError, AttributeError, KeyError, ValueError)
_BUDGET = "DisruptionBudget"
_CHANNELS = "v4.channel.k8s.io"
_CONFLICTS_MAX = 5  # other clients may change a pod at the same time
_RETRY_STATUSES = (429, 500, 502, 503, 504)
_RETRY_STATUSES_OF_EVICTION = _RETRY_STATUSES[1:]  # to an eviction, 429 is the answer of a budget
_RETRY_PAUSE_S = 0.5
_EXTRA = "install chaoskit[kubernetes]"


class ApiError(HarnessError):
    """Error of a request that the API server refused or did not answer.

    Attributes:
        status: HTTP status; 0 if the server did not answer.
        causes: reasons of the refusal that the server names.
    """

    def __init__(self, message: str, status: int = 0, causes: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.status, self.causes = status, causes

    @property
    def is_refusal(self) -> bool:
        """True if the same request would be refused again.

        The server has answered, and it is not overloaded.
        """
        return (
            HTTPStatus.BAD_REQUEST <= self.status < HTTPStatus.INTERNAL_SERVER_ERROR
            and self.status not in _RETRY_STATUSES
        )

    @property
    def is_silence(self) -> bool:
        """True if the server has not answered at all."""
        return self.status == 0

    @property
    def is_budget_refusal(self) -> bool:
        """True if a PodDisruptionBudget forbids an eviction now."""
        return _BUDGET in self.causes


class ServedKind(NamedTuple):
    """A kind of objects that the server has.

    Attributes:
        path: path of the objects of this kind, in the namespace if they belong to one.
        group: API group; "" for the core group.
        plural: name of the resource, as rights name it.
        is_in_namespace: False for objects of the whole cluster.
    """

    path: str
    group: str
    plural: str
    is_in_namespace: bool


class KubernetesApi:
    """Client of a namespace of a cluster.

    A request to an overloaded or restarting server is repeated for 10 s. Errors are ApiError.

    Args:
        context: context of the kubeconfig; "" for its current one, or the service account of this
            pod.
        namespace: name of the namespace; "" for that of the context.
        kubeconfig: path of the file; "" for that of $KUBECONFIG, or the usual one.

    Attributes:
        server: URL of the API server.
        arguments: arguments that make an equal client in any environment.

    Raises:
        BadInput: if there is no such context, the kubeconfig is not valid, or the client package is
            missing.
    """

    def __init__(self, context: str = "", namespace: str = "", kubeconfig: str = "") -> None:
        try:
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
        except ImportError as error:
            raise BadInput("substrate", "kubernetes", f"{_EXTRA}: {error}") from None
        settings = client.Configuration()
        settings.retries = False  # retries would multiply the time limits of this class
        # the current value: the client package reads it only when it is imported
        file = (
            kubeconfig
            or os.environ.get("KUBECONFIG")
            or str(Path(config.KUBE_CONFIG_DEFAULT_LOCATION).expanduser())
        )
        # absolute, because a guard has another working directory
        file = os.pathsep.join(str(Path(path).absolute()) for path in file.split(os.pathsep))
        try:
            if Path(file).is_file():
                msgspec.yaml.decode(Path(file).read_bytes(), type=dict)
            try:
                config.load_kube_config(
                    file, context=context or None, client_configuration=settings
                )
                context, context_namespace = _context_of(config, file, context)
            except ConfigException:
                if context:
                    raise
                config.load_incluster_config(client_configuration=settings)
                context_namespace = _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
        except (ConfigException, OSError, msgspec.DecodeError, *_NO_CONFIG) as error:
            remedy = "give a kubeconfig (KUBECONFIG, ~/.kube/config) and a context of it, or run in a pod"
            raise BadInput("context", context, f"{remedy}: {_one_line(str(error))}") from None
        self.namespace, self.server = (
            namespace or context_namespace or "default",
            str(settings.host),
        )
        self.arguments = {"context": context, "namespace": self.namespace, "kubeconfig": file}
        self._client = client.ApiClient(settings)

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create an object and return it, or return an existing one of this name.

        The existing object is not changed. Under the name of a session or a pod it is this
        session's, as these names are never used again. Unknown fields are refused.

        Args:
            manifest: the object.
            dry_run: True to only check the object and return it with the server's defaults.

        Raises:
            ApiError: if the server refuses it or does not answer.
        """
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        path = self._path(manifest["kind"])
        try:
            return self._request_json("POST", path, query, manifest)
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            try:
                return self._request_json("GET", f"{path}/{manifest['metadata']['name']}")
            except ApiError:  # no such object: the conflict was another one, such as of a quota
                raise error from None

    def create_new(
        self, path: str, manifest: Mapping[str, Any], *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Create an object of any kind and return it. Unknown fields are refused.

        Args:
            path: path of the objects of its kind, of :meth:`served_kind`.
            manifest: the object.
            dry_run: True to only ask.

        Raises:
            ApiError: if the server refuses it or does not answer; with status 409 if an object of
                this name exists.
        """
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        return self._request_json("POST", path, query, manifest)

    def get(self, kind: str, name: str, *, is_repeated: bool = True) -> dict[str, Any]:
        """Return an object. Raises ApiError, with status 404 if there is none.

        Args:
            is_repeated: False to make the request once, even if the server is overloaded.
        """
        statuses = _RETRY_STATUSES if is_repeated else ()
        return self._request_json("GET", f"{self._path(kind)}/{name}", retry_statuses=statuses)

    def get_at(self, path: str, name: str) -> dict[str, Any]:
        """Return an object by the path of its kind. Raises ApiError, with status 404 for none."""
        return self._request_json("GET", f"{path}/{name}")

    def last_heard(self, machine: str) -> str:
        """Return the time at which a machine's kubelet last renewed its lease, or "".

        Raises ApiError.
        """
        return str(self.get(_KUBELET, machine)["spec"].get("renewTime", ""))

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change fields of an object and return it. Raises ApiError."""
        return self._request_json("PATCH", f"{self._path(kind)}/{name}", body=change)

    def find(self, kind: str, selector: str) -> Iterator[dict[str, Any]]:
        """Yield the objects that a label selector selects; "" for all.

        The request is made, and ApiError raised, when the first one is asked for.
        """
        yield from self._request_json("GET", self._path(kind), [("labelSelector", selector)])[
            "items"
        ]

    def serves(self, kind: str) -> bool:
        """Return whether the server has a kind of objects, such as by an installed CRD.

        Raises ApiError.
        """
        base, plural = _PATHS[kind]
        try:
            resources = self._request_json("GET", base)["resources"]
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return False
        return any(resource["name"] == plural for resource in resources)

    def served_kind(self, api_version: str, kind: str) -> ServedKind | None:
        """Return where the server has the objects of any kind; None if it has no such kind.

        Raises ApiError.

        Args:
            api_version: version of the API as manifests name it, such as ``apps/v1``.
            kind: kind of the objects, such as ``StatefulSet``.
        """
        group, _, _ = api_version.rpartition("/")
        base = f"/apis/{api_version}" if group else f"/api/{api_version}"
        try:
            resources = self._request_json("GET", base)["resources"]
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return None
        for resource in resources:
            if resource["kind"] == kind and "/" not in resource["name"]:
                plural, is_in_namespace = str(resource["name"]), bool(resource["namespaced"])
                scope = f"/namespaces/{self.namespace}" if is_in_namespace else ""
                return ServedKind(f"{base}{scope}/{plural}", group, plural, is_in_namespace)
        return None

    def list_all(self, kind: str, selector: str = "", name: str = "") -> tuple[list[Any], str]:
        """Return the objects that a label selector selects, and the resource version of the list.

        A watch can continue from that version. Raises ApiError.

        Args:
            kind: kind of the objects.
            selector: label selector; "" for all.
            name: name of the only object to be listed; "" for all.
        """
        query = [("labelSelector", selector), *_by_name(name)]
        answer = self._request_json("GET", self._path(kind), query)
        return answer["items"], str(answer["metadata"].get("resourceVersion") or "")

    def open_watch(
        self, kind: str, version: str, *, selector: str = "", name: str = "", silence_s: float
    ) -> Any:
        """Return the open answer to a watch request. Raises ApiError.

        See :mod:`..api.watch_stream` for its events.

        Args:
            kind: kind of the objects.
            version: resource version after which the events begin.
            selector: label selector; "" for all.
            name: name of the only object to be watched; "" for all.
            silence_s: seconds without any event after which reading from the answer fails.
        """
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("labelSelector", selector),
            *_by_name(name),
        ]
        return self._open("GET", self._path(kind), query, limit_s=(ANSWER_S, silence_s))

    def pods_on(self, machine: str) -> list[dict[str, Any]]:
        """Return the pods on a machine, of all namespaces. Raises ApiError."""
        pods: list[dict[str, Any]] = self._request_json(
            "GET", "/api/v1/pods", [("fieldSelector", f"spec.nodeName={machine}")]
        )["items"]
        return pods

    def events_about(self, pod: str, reason: str = "") -> list[dict[str, Any]]:
        """Return the events about a pod, for this reason; "" for any reason. Raises ApiError."""
        about = f"involvedObject.name={pod}"
        query = [("fieldSelector", f"{about},reason={reason}" if reason else about)]
        events: list[dict[str, Any]] = self._request_json("GET", self._path("Event"), query)[
            "items"
        ]
        return events

    def answers(self, limit_s: float) -> bool:
        """Return whether the server answers anything within ``limit_s``. Raises nothing."""
        try:
            self._request_once("GET", "/version", limit_s=limit_s)
        except ApiError as error:
            return error.status != 0
        return True

    def delete(
        self,
        kind: str,
        name: str,
        *,
        grace_s: int | None = None,
        owned_first: bool = False,
        uid: str = "",
    ) -> bool:
        """Delete an object as :meth:`delete_at`, by its kind."""
        return self.delete_at(
            self._path(kind), name, grace_s=grace_s, owned_first=owned_first, uid=uid
        )

    def delete_at(
        self,
        path: str,
        name: str,
        *,
        grace_s: int | None = None,
        owned_first: bool = False,
        uid: str = "",
    ) -> bool:
        """Delete an object and all that it owns, and do not wait for the end.

        Return whether there was one. Raises ApiError, with status 409 for another UID.

        Args:
            path: path of the objects of its kind.
            name: name of the object.
            grace_s: seconds that processes of a pod get to end; None for the pod's own.
            owned_first: True to delete the owned objects first; else they are deleted in the background.
            uid: identifier that the object must have; "" for any.
        """
        options: dict[str, Any] = {
            "propagationPolicy": "Foreground" if owned_first else "Background"
        }
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self._request_json("DELETE", f"{path}/{name}", body=options)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True

    def evict(self, pod: str, grace_s: int, *, uid: str = "") -> None:
        """Evict a pod, and do not wait for its end.

        Raises ApiError, such as for a refusal by a PodDisruptionBudget (``is_budget_refusal``), and
        with status 409 for another UID.

        Args:
            uid: identifier that the pod must have; "" for any.
        """
        options: dict[str, Any] = {"gracePeriodSeconds": grace_s}
        if uid:
            options["preconditions"] = {"uid": uid}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod},
            "deleteOptions": options,
        }
        self._request(
            "POST",
            f"{self._path('Pod')}/{pod}/eviction",
            body=body,
            retry_statuses=_RETRY_STATUSES_OF_EVICTION,
        )

    def log(self, pod: str, lines: int) -> str:
        """Return the last lines that the node's container in a pod has printed, or "".

        "" is returned, too, if the log cannot be read.
        """
        query = [("container", CONTAINER), ("tailLines", str(lines))]
        try:
            return (
                self._request("GET", f"{self._path('Pod')}/{pod}/log", query)
                .decode(errors="replace")
                .strip()
            )
        except ApiError:
            return ""

    def log_head(self, pod: str, container: str, limit_bytes: int) -> str:
        """Return the first bytes of the log of a container's present life.

        Raises ApiError if the server refuses the request or does not answer.
        """
        query = [("container", container), ("limitBytes", str(limit_bytes))]
        return self._request("GET", f"{self._path('Pod')}/{pod}/log", query).decode(
            errors="replace"
        )

    def follow_log(
        self,
        pod: str,
        container: str,
        *,
        previous: bool = False,
        since: str = "",
        tail_lines: int | None = None,
        silence_s: float,
    ) -> LogStream:
        """Return a stream of the log of a container, with a timestamp before each line.

        Return when the headers of the answer have arrived; an empty log has them, too. The stream
        follows a container that runs, and ends after the last line of another.

        Args:
            previous: True for the log of the life before the present one.
            since: time of the first line, in RFC 3339 with whole seconds; "" for the whole file.
            tail_lines: number of lines at the end of the file to begin with; None for all.
            silence_s: seconds without data after which reading raises TimeoutError.

        Raises:
            ApiError: if the server refuses the request or does not answer.
        """
        query = [("container", container), ("follow", "true"), ("timestamps", "true")]
        if previous:
            query.append(("previous", "true"))
        if since:
            query.append(("sinceTime", since))
        if tail_lines is not None:
            query.append(("tailLines", str(tail_lines)))
        limits_s = (ANSWER_S, silence_s)
        answer = self._open("GET", f"{self._path('Pod')}/{pod}/log", query, limit_s=limits_s)
        return LogStream(answer)

    def ask_kubelet(self, pod: str, container: str, limit_s: float) -> None:
        """Read a byte of the log of a container, which the kubelet of its machine answers.

        The request is made once.

        Raises:
            ApiError: if the server refuses the request, or no answer came within the limit.
        """
        query = [("container", container), ("tailLines", "1"), ("limitBytes", "1")]
        path = f"{self._path('Pod')}/{pod}/log"
        self._request_once("GET", path, query, limit_s=limit_s)

    def version(self) -> str:
        """Return the version of the server. Raises ApiError."""
        return str(self._request_json("GET", "/version")["gitVersion"])

    def may(self, verb: str, group: str, resource: str, *, everywhere: bool = False) -> bool:
        """Return whether the user has this right, in the namespace or the whole cluster.

        Raises ApiError.
        """
        name, _, subresource = resource.partition("/")
        namespace = "" if everywhere else self.namespace
        attributes = {
            "namespace": namespace,
            "verb": verb,
            "group": group,
            "resource": name,
            "subresource": subresource,
        }
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        review = {**kind, "spec": {"resourceAttributes": attributes}}
        answer = self._request_json(
            "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review
        )
        return bool(answer["status"]["allowed"])

    def add_ephemeral_container(
        self, pod: str, uid: str, container: Mapping[str, Any], *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Add an ephemeral container to a pod, and return the pod.

        It cannot be removed, and its name must be new. Pod Security and other admission answer a
        dry run, too.

        Args:
            pod: name of the pod.
            uid: identifier of the pod. Another pod of this name is left alone.
            container: the container.
            dry_run: True to only ask.

        Raises:
            ApiError: if the server refuses it or does not answer. The status is 404 if the pod is
                gone, also if another one has its name.
        """
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        path = f"{self._path('Pod')}/{pod}/ephemeralcontainers"
        for tries_left in reversed(range(_CONFLICTS_MAX)):
            present_pod = self.get("Pod", pod)
            if present_pod["metadata"]["uid"] != uid:
                raise ApiError(f"{pod} is another pod by now", HTTPStatus.NOT_FOUND)
            present = present_pod["spec"].get("ephemeralContainers", ())
            if any(entry["name"] == container["name"] for entry in present):
                return present_pod  # by an attempt whose answer was lost
            change = {
                "metadata": {"resourceVersion": present_pod["metadata"]["resourceVersion"]},
                "spec": {"ephemeralContainers": [*present, dict(container)]},
            }
            try:
                return self._request_json("PATCH", path, query, change)
            except ApiError as error:  # the pod has changed since it was read
                if error.status != HTTPStatus.CONFLICT or not tries_left:
                    raise
        raise AssertionError

    def attach(self, pod: str, container: str) -> Any:
        """Return a WebSocket to the standard input and output of a container. Raises ApiError.

        The first byte of each message is the number of its stream: 0 for input, 1 for output, and 3
        for the status of the API server at the end.
        """
        query = [("container", container), ("stdin", "true"), ("stdout", "true")]
        return self._open_socket(
            f"{self._path('Pod')}/{pod}/attach", query, f"the streams of {container} in {pod}"
        )

    def exec(self, pod: str, container: str, command: Sequence[str]) -> Any:
        """Start a program in a container that runs, and return a WebSocket to its streams.

        Stream 2 is its standard error; see :meth:`attach` for the others. Raises ApiError.
        """
        streams = [(name, "true") for name in ("stdin", "stdout", "stderr")]
        query = [("container", container), *streams, *(("command", word) for word in command)]
        return self._open_socket(
            f"{self._path('Pod')}/{pod}/exec", query, f"{command[0]} in {container} of {pod}"
        )

    def forward(self, pod: str, port: int) -> Any:
        """Return a WebSocket to a port of a pod, through the API server. Raises ApiError.

        See :mod:`..port_forward` for its protocol.
        """
        query = [("ports", str(port))]
        return self._open_socket(
            f"{self._path('Pod')}/{pod}/portforward", query, f"port {port} of {pod}"
        )

    def _open_socket(self, path: str, query: list[tuple[str, str]], target: str) -> Any:
        """Return a WebSocket, whose messages begin with the number of their stream.

        Args:
            target: its other end, for messages.

        Raises:
            ApiError: if the server refuses it or does not answer in time.
        """
        from websocket import WebSocketException

        headers: dict[str, str] = {}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        headers = {name.lower(): value for name, value in headers.items()}
        headers["sec-websocket-protocol"] = _CHANNELS
        url = f"{self.server}{path}?{urlencode(query)}"
        try:
            return open_web_socket(self._client.configuration, url, headers, ANSWER_S)
        except (WebSocketException, OSError) as error:
            status, body = getattr(error, "status_code", 0), getattr(error, "resp_body", b"") or b""
            # prefer the server's own words
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = with_remedy(_one_line(json.loads(body)["message"]))
                raise ApiError(message, status) from None
            raise ApiError(f"no stream to {target}: {_one_line(str(error))}", status) from None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _path(self, kind: str) -> str:
        """Return the path of the objects of a kind, in the namespace if they belong to one."""
        base, plural = _PATHS[kind]
        return (
            f"{base}/{plural}"
            if kind in _CLUSTER_KINDS
            else f"{base}/namespaces/{self.namespace}/{plural}"
        )

    def _request_json(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        retry_statuses: Collection[int] = _RETRY_STATUSES,
    ) -> dict[str, Any]:
        """Make a request as :meth:`_request`, and return the decoded JSON of the answer.

        Raises ApiError, also if the answer is not JSON.
        """
        answer = self._request(method, path, query, body, retry_statuses)
        try:
            decoded: dict[str, Any] = json.loads(answer)
        except ValueError:  # an answer of a proxy on the way
            detail = f"{self.server} answered with text that is not JSON: {answer[:60]!r}"
            raise ApiError(detail, HTTPStatus.BAD_GATEWAY) from None
        return decoded

    def _request(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        retry_statuses: Collection[int] = _RETRY_STATUSES,
    ) -> bytes:
        """Make a request and return the answer. Raises ApiError.

        Args:
            retry_statuses: statuses of an overloaded or restarting server, after which the request is
                repeated for a while.
        """
        until_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return self._request_once(method, path, query, body)
            except ApiError as error:
                if (
                    error.status not in retry_statuses
                    or time.monotonic() + _RETRY_PAUSE_S > until_s
                ):
                    raise
                time.sleep(_RETRY_PAUSE_S)

    def _request_once(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        limit_s: float = ANSWER_S,
    ) -> bytes:
        """Make a request a single time, and return the answer. Raises ApiError."""
        from urllib3.exceptions import HTTPError

        answer = self._open(method, path, query, body, limit_s)
        try:
            data: bytes = answer.data
        except (HTTPError, OSError) as error:
            raise ApiError(f"the API server {self.server} does not answer: {error}") from None
        return data

    def _open(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        limit_s: float | tuple[float, float] = ANSWER_S,
    ) -> Any:
        """Make a request, and return the answer before its body is read. Raises ApiError.

        Args:
            limit_s: seconds for a connection, and seconds for each read; one number for both.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            return self._client.call_api(
                path,
                method,
                query_params=query or [],
                header_params={"Accept": "application/json", "Content-Type": kind},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=limit_s,
            )
        except ApiException as error:
            raise ApiError(*_refusal(error)) from None
        except (HTTPError, OSError) as error:
            raise ApiError(f"the API server {self.server} does not answer: {error}") from None
        except AttributeError as error:  # the client reads the body of an answer that did not come
            raise ApiError(
                f"the API server {self.server} does not answer: {_one_line(str(error.__context__))}"
            ) from None


def _refusal(error: Any) -> tuple[str, int, frozenset[str]]:
    """Return the arguments of an :class:`ApiError` for an error of the client.

    The message is in the server's own words if it gave any.
    """
    status = error.status or 0
    try:
        answer = json.loads(error.body)
        causes = (answer.get("details") or {}).get("causes") or ()
        return (
            with_remedy(_one_line(answer["message"])),
            status,
            frozenset(str(cause.get("reason")) for cause in causes),
        )
    except (TypeError, ValueError, KeyError, AttributeError):
        return f"{status} {error.reason}", status, frozenset()


def _by_name(name: str) -> list[tuple[str, str]]:
    """Return the query parameters that select the object of a name; none for ""."""
    return [("fieldSelector", f"metadata.name={name}")] if name else []


def _one_line(text: str) -> str:
    """Return the text on one line."""
    return " ".join(text.split())


def _context_of(config: Any, file: str, context: str) -> tuple[str, str]:
    """Return the name of a context and its namespace, which is "" if the context sets none.

    Args:
        config: the configuration module of the client package.
        file: path of the kubeconfig.
        context: name of the context; "" for the current one.
    """
    contexts, current = config.list_kube_config_contexts(file)
    selected = (
        next((candidate for candidate in contexts if candidate["name"] == context), current)
        if context
        else current
    )
    return str(selected["name"]), str(selected["context"].get("namespace") or "")
