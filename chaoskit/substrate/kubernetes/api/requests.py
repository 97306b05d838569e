"""Requests to the API server, with limits; what they fail with is told in one line."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate.kubernetes.api.rights import with_remedy
from chaoskit.substrate.kubernetes.options import SERVICE_ACCOUNT
from chaoskit.substrate.kubernetes.template import CONTAINER

ANSWER_S = 10.0
_KUBELETS = "kube-node-lease"  # the namespace in which each machine has a lease
#: Kind of these leases, as it is asked for here.
_KUBELET = "KubeletLease"
_PLACES = {
    "Pod": ("/api/v1", "pods"),
    "Secret": ("/api/v1", "secrets"),
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
}
_OF_NO_NAMESPACE = ("Namespace", "Node", _KUBELET)
_OWN_NAMESPACE = Path(SERVICE_ACCOUNT) / "namespace"
#: What the client raises where a kubeconfig has another shape.
_NO_CONFIG = (TypeError, AttributeError, KeyError, ValueError)
_BUDGET = "DisruptionBudget"
_PORT_FORWARD = "v4.channel.k8s.io"
_AGAIN = (429, 500, 502, 503, 504)
_AGAIN_UNLESS_MANY = _AGAIN[1:]  # of an eviction 429 is the answer of a budget
_AGAIN_S = 0.5
_EXTRA = "install chaoskit[kubernetes]"


class ApiError(HarnessError):
    """The API server refused a request.

    Attributes:
        status: of HTTP; 0 where it did not answer. causes: reasons of the refusal, as the server names them.
    """

    def __init__(self, message: str, status: int = 0, causes: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.status, self.causes = status, causes

    @property
    def is_refusal(self) -> bool:
        """Return whether the same request would be refused again: the server has answered, and is not overloaded."""
        return (
            HTTPStatus.BAD_REQUEST <= self.status < HTTPStatus.INTERNAL_SERVER_ERROR
            and self.status not in _AGAIN
        )

    @property
    def is_silence(self) -> bool:
        """Return whether the server has not answered at all."""
        return self.status == 0


class EvictionRefused(ApiError):
    """A PodDisruptionBudget forbids an eviction now."""


class KubernetesApi:
    """One namespace of a cluster.

    Args:
        context: of the kubeconfig; "" for its current one, or the service account of this pod.
        namespace: "" for that of the context.
        kubeconfig: a file; "" for that of $KUBECONFIG, or the usual one.

    Attributes:
        arguments: that give the same again, whatever the environment says by then.

    Raises:
        BadInput: if there is no such context, or no client for it.
    """

    def __init__(self, context: str = "", namespace: str = "", kubeconfig: str = "") -> None:
        try:
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
        except ImportError as error:
            raise BadInput("substrate", "kubernetes", f"{_EXTRA}: {error}") from None
        settings = client.Configuration()
        settings.retries = False  # they would add up behind a limit of ours
        # as it is now: the client looked when it was imported
        file = (
            kubeconfig
            or os.environ.get("KUBECONFIG")
            or str(Path(config.KUBE_CONFIG_DEFAULT_LOCATION).expanduser())
        )
        file = os.pathsep.join(
            str(Path(one).absolute()) for one in file.split(os.pathsep)
        )  # a guard is elsewhere
        try:
            if Path(file).is_file():
                msgspec.yaml.decode(Path(file).read_bytes(), type=dict)
            try:
                config.load_kube_config(
                    file, context=context or None, client_configuration=settings
                )
                context, found = _context_of(config, file, context)
            except ConfigException:
                if context:
                    raise
                config.load_incluster_config(client_configuration=settings)
                found = _OWN_NAMESPACE.read_text(encoding="utf-8").strip()
        except (ConfigException, OSError, msgspec.DecodeError, *_NO_CONFIG) as error:
            remedy = "give a kubeconfig (KUBECONFIG, ~/.kube/config) and a context of it, or run in a pod"
            raise BadInput("context", context, f"{remedy}: {_line(str(error))}") from None
        self.namespace, self.server = namespace or found or "default", str(settings.host)
        self.arguments = {"context": context, "namespace": self.namespace, "kubeconfig": file}
        self._client = client.ApiClient(settings)

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Make an object, and give it; one of this name that is there already, too: names are never used again, so that
        one is ours. Fields that do not exist are refused. Raises ApiError.
        """
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        path = self._path(manifest["kind"])
        try:
            return self._ask("POST", path, query, manifest)
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            try:
                return self._ask("GET", f"{path}/{manifest['metadata']['name']}")
            except ApiError:  # it is not there: the conflict was another one, such as of a quota
                raise error from None

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """An object. Raises ApiError, with status 404 where there is none."""
        return self._ask("GET", f"{self._path(kind)}/{name}")

    def last_heard(self, machine: str) -> str:
        """When the kubelet of a machine has renewed its lease last; "" if never. Raises ApiError."""
        return str(self.get(_KUBELET, machine)["spec"].get("renewTime", ""))

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change fields of an object. Raises ApiError."""
        return self._ask("PATCH", f"{self._path(kind)}/{name}", body=change)

    def find(self, kind: str, selector: str) -> Iterator[dict[str, Any]]:
        """Objects with these labels. Raises ApiError."""
        yield from self._ask("GET", self._path(kind), [("labelSelector", selector)])["items"]

    def pods_on(self, machine: str) -> list[dict[str, Any]]:
        """Pods on a machine, of all namespaces. Raises ApiError."""
        found: list[dict[str, Any]] = self._ask(
            "GET", "/api/v1/pods", [("fieldSelector", f"spec.nodeName={machine}")]
        )["items"]
        return found

    def events_about(self, pod: str, reason: str = "") -> list[dict[str, Any]]:
        """Return what the cluster has told of a pod, for this reason or for any. Raises ApiError."""
        about = f"involvedObject.name={pod}"
        query = [("fieldSelector", f"{about},reason={reason}" if reason else about)]
        found: list[dict[str, Any]] = self._ask("GET", self._path("Event"), query)["items"]
        return found

    def answers(self, limit_s: float) -> bool:
        """Whether the server says anything within this time."""
        try:
            self._once("GET", "/version", limit_s=limit_s)
        except ApiError as error:
            return error.status != 0
        return True

    def delete(
        self, kind: str, name: str, *, grace_s: int | None = None, last: bool = False
    ) -> bool:
        """Delete an object and what it owns. Return whether there was one. Raises ApiError.

        ``last``: whether the object stays until its controller's pods are gone; else these go in the background.
        """
        query = [("propagationPolicy", "Foreground" if last else "Background")]
        if grace_s is not None:
            query.append(("gracePeriodSeconds", str(grace_s)))
        try:
            self._ask("DELETE", f"{self._path(kind)}/{name}", query)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return False
        return True

    def evict(self, pod: str, grace_s: int) -> None:
        """Have a pod evicted. Raises EvictionRefused where a PodDisruptionBudget forbids it, and ApiError."""
        options = {"gracePeriodSeconds": grace_s}
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod},
            "deleteOptions": options,
        }
        try:
            self._raw(
                "POST", f"{self._path('Pod')}/{pod}/eviction", body=body, again=_AGAIN_UNLESS_MANY
            )
        except ApiError as error:
            if _BUDGET in error.causes:
                raise EvictionRefused(str(error), error.status, error.causes) from None
            raise

    def log(self, pod: str, lines: int) -> str:
        """The end of what the node in a pod has printed; "" if it cannot be had."""
        query = [("container", CONTAINER), ("tailLines", str(lines))]
        try:
            return (
                self._raw("GET", f"{self._path('Pod')}/{pod}/log", query)
                .decode(errors="replace")
                .strip()
            )
        except ApiError:
            return ""

    def version(self) -> str:
        """The version of the server. Raises ApiError."""
        return str(self._ask("GET", "/version")["gitVersion"])

    def may(self, verb: str, group: str, resource: str, *, everywhere: bool = False) -> bool:
        """Whether the server would let us do this in the namespace, or in the whole cluster. Raises ApiError."""
        name, _, part = resource.partition("/")
        where = "" if everywhere else self.namespace
        wanted = {
            "namespace": where,
            "verb": verb,
            "group": group,
            "resource": name,
            "subresource": part,
        }
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        asked = {**kind, "spec": {"resourceAttributes": wanted}}
        answer = self._ask(
            "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=asked
        )
        return bool(answer["status"]["allowed"])

    def forward(self, pod: str, port: int) -> Any:
        """A WebSocket to a port of a pod, through the API server; see :mod:`..port_forward`. Raises ApiError."""
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url
        from websocket import WebSocketException, setdefaulttimeout

        setdefaulttimeout(ANSWER_S)  # until the stream is there
        headers: dict[str, str] = {}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        headers = {name.lower(): value for name, value in headers.items()} | {
            "sec-websocket-protocol": _PORT_FORWARD
        }
        url = f"{self.server}{self._path('Pod')}/{pod}/portforward"
        try:
            return create_websocket(
                self._client.configuration, get_websocket_url(url, [("ports", port)]), headers
            )
        except (WebSocketException, OSError) as error:
            status, body = getattr(error, "status_code", 0), getattr(error, "resp_body", b"") or b""
            with contextlib.suppress(
                ValueError, KeyError, TypeError
            ):  # the server's own words, where it gave any
                raise ApiError(_line(json.loads(body)["message"]), status) from None
            raise ApiError(
                f"no stream to port {port} of {pod}: {_line(str(error))}", status
            ) from None

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()

    def _path(self, kind: str) -> str:
        base, plural = _PLACES[kind]
        return (
            f"{base}/{plural}"
            if kind in _OF_NO_NAMESPACE
            else f"{base}/namespaces/{self.namespace}/{plural}"
        )

    def _ask(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        answer = self._raw(method, path, query, body)
        try:
            found: dict[str, Any] = json.loads(answer)
        except ValueError:  # of something on the way
            detail = f"{self.server} answers with something else than JSON: {answer[:60]!r}"
            raise ApiError(detail, HTTPStatus.BAD_GATEWAY) from None
        return found

    def _raw(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        again: Collection[int] = _AGAIN,
    ) -> bytes:
        """Ask again where the server is overloaded, or is being replaced, for a while."""
        until_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return self._once(method, path, query, body)
            except ApiError as error:
                if error.status not in again or time.monotonic() + _AGAIN_S > until_s:
                    raise
                time.sleep(_AGAIN_S)

    def _once(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        limit_s: float = ANSWER_S,
    ) -> bytes:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            answer = self._client.call_api(
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
            data: bytes = answer.data
        except ApiException as error:
            raise ApiError(*_refusal(error)) from None
        except (HTTPError, OSError) as error:
            raise ApiError(f"the API server {self.server} does not answer: {error}") from None
        except (
            AttributeError
        ) as error:  # of the client, which reads the body of an answer that did not come
            raise ApiError(
                f"the API server {self.server} does not answer: {_line(str(error.__context__))}"
            ) from None
        return data


def _refusal(error: Any) -> tuple[str, int, frozenset[str]]:
    """The arguments of an :class:`ApiError` for what the client raised: the server's own words, where it gave any."""
    status = error.status or 0
    try:
        answer = json.loads(error.body)
        causes = (answer.get("details") or {}).get("causes") or ()
        return (
            with_remedy(_line(answer["message"])),
            status,
            frozenset(str(cause.get("reason")) for cause in causes),
        )
    except (TypeError, ValueError, KeyError, AttributeError):
        return f"{status} {error.reason}", status, frozenset()


def _line(text: str) -> str:
    """The words without what would break a line."""
    return " ".join(text.split())


def _context_of(config: Any, file: str, context: str) -> tuple[str, str]:
    """The name of a context, and its namespace."""
    contexts, current = config.list_kube_config_contexts(file)
    chosen = (
        next((one for one in contexts if one["name"] == context), current) if context else current
    )
    return str(chosen["name"]), str(chosen["context"].get("namespace") or "")
