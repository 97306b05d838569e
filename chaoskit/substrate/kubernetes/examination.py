"""Checks of a cluster for the needs of a session and its runs. They create no objects.

``chaoskit doctor`` makes them, and so does each run before it starts. A check yields a finding, and
``preflight.py`` turns the first refusal into the error of a run.

-> kubernetes/api/rights.py: the rights that are checked; kubernetes/pods/pod_placement.py and
quotas.py: whether the pods find room.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

from chaoskit.errors import BadInput
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.api import rights
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi
from chaoskit.substrate.kubernetes.installation import ACCOUNT
from chaoskit.substrate.kubernetes.machines import machines, marks
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods import manifests, pod_placement, quotas
from chaoskit.substrate.kubernetes.pods.manifests import Manifest
from chaoskit.substrate.kubernetes.session import may_write_events, new_name, require_allowed

_REQUESTS = 8  # number of concurrent requests
_NODE = "node0"
#: Message of the server for a pod whose resources are inconsistent or outside of a LimitRange.
_RESOURCES = re.compile(r"\.resources\b|\bper (?:Container|Pod)\b")
_NO_IMAGE = re.compile(r"\.image: Required value")


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """The result of a check of a need of runs.

    Attributes:
        name: name of the need.
        text: the result, in words, for the user.
        refusal: error of a run on a cluster that does not meet the need; None if it does.
        is_limited: True if runs take place, but something of use to users is missing.
    """

    name: str
    text: str
    refusal: BadInput | None = None
    is_limited: bool = False

    @property
    def is_there(self) -> bool:
        """True if the cluster meets the need."""
        return self.refusal is None


def examine_cluster(options: KubernetesOptions) -> Iterator[ClusterFinding]:
    """Check the needs of a session and a run of one node, and yield a finding for each.

    The run is checked only if the cluster meets the needs of a session. If the server refuses a
    request or does not answer, that is the last finding.

    Raises:
        BadInput: if there is no such cluster, or the template cannot be read.
    """
    reason = options.unavailable()
    refusal = BadInput("substrate", "kubernetes", reason) if reason else None
    yield ClusterFinding(
        "options", reason or "an image or a template is set, and the client is installed", refusal
    )
    pod_template = template.read(options.template) if options.template else {}
    api = KubernetesApi(options.context, options.namespace)
    try:
        yield from _examine(api, options, pod_template)
    except ApiError as error:
        refusal = BadInput("context", api.server, f"use a cluster that answers: {error}")
        yield ClusterFinding("API server", str(error), refusal)
    finally:
        api.close()


def _examine(
    api: KubernetesApi, options: KubernetesOptions, pod_template: Manifest
) -> Iterator[ClusterFinding]:
    """Yield findings about the server, then about sessions and runs. Raises ApiError."""
    yield ClusterFinding("API server", f"{api.server}, {api.version()}")
    examination = Examination(api, options, pod_template)
    lacks_any = False
    for finding in examination.of_session():
        lacks_any = lacks_any or not finding.is_there
        yield finding
    if not lacks_any:
        actions = frozenset(marks.MARK_OF) if options.breakable else frozenset[type[Action]]()
        yield from examination.of_run(RunDemand(1, actions=actions))


class Examination:
    """Checks over one connection to a cluster.

    Args:
        options: the user's options.
        pod_template: the template of pods.
    """

    def __init__(
        self, api: KubernetesApi, options: KubernetesOptions, pod_template: Manifest
    ) -> None:
        self._api, self._options, self._pod_template = api, options, pod_template

    def of_session(self) -> Iterator[ClusterFinding]:
        """Check the namespace and the user's rights, and yield findings about them.

        The objects of a session are checked only if no right is missing. Raises ApiError if the
        server does not answer.
        """
        try:
            require_allowed(self._api)
            yield ClusterFinding("namespace", f"{self._api.namespace}: runs are allowed there")
        except BadInput as error:
            yield ClusterFinding("namespace", str(error), error)
        lacking = self._lacking(rights.of_session(self._options))
        yield from _rights_findings(
            "rights", "a session", rights.of_session(self._options), lacking, self._api.namespace
        )
        writes_events = may_write_events(self._api)
        # an installed account has rights of its own
        if not (self._options.has_driver and self._options.service_account):
            yield _events_finding(writes_events)
        if not lacking:
            yield self._objects_finding(writes_events)

    def _lacking(
        self, needed: Sequence[rights.Right], *, everywhere: bool = False
    ) -> list[tuple[rights.Right, str]]:
        """Return the needed rights that the user lacks, a pair of right and verb each.

        Raises ApiError.
        """
        requests = list(
            {
                (right.group, right.resource, verb): (right, verb)
                for right in needed
                for verb in right.verbs
            }.values()
        )

        def may(request: tuple[rights.Right, str]) -> bool:
            right, verb = request
            return self._api.may(verb, right.group, right.resource, everywhere=everywhere)

        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="ck-rights") as threads:
            return [
                request
                for request, granted in zip(requests, threads.map(may, requests), strict=True)
                if not granted
            ]

    def _objects_finding(self, writes_events: bool) -> ClusterFinding:
        """Return the finding of a dry run that creates the objects of a session."""
        arguments = (self._options, self._pod_template, self._api.namespace)
        try:
            for manifest in session_objects(new_name(), *arguments, writes_events=writes_events):
                self._dry_run(manifest)
        except BadInput as error:
            return ClusterFinding("objects", str(error), error)
        return ClusterFinding("objects", "the server accepts the objects of a session")

    def _dry_run(self, manifest: Manifest) -> Manifest:
        """Return an object as the server would create it.

        Raises:
            BadInput: if the server refuses it.
            ApiError: if a later attempt may succeed.
        """
        try:
            return self._api.create(manifest, dry_run=True)
        except ApiError as error:
            if not error.is_refusal:
                raise
            raise refusal_of(str(error), self._options, self._api.namespace) from None

    def of_run(self, demand: RunDemand, session: str = "") -> Iterator[ClusterFinding]:
        """Check the machines of faults and the room for pods, and yield findings about them.

        The room is not checked if the session has all pods of the run. Raises ApiError if the
        server does not answer.

        Args:
            demand: the needs of the run.
            session: name of the session that already has pods; "" for none.
        """
        marks_or_levers = {
            mark for action, mark in marks.MARK_OF.items() if action in demand.actions
        }
        if marks_or_levers:
            yield from self._machine_findings(marks_or_levers, session)
        missing = self._missing_pods(demand, session)
        if not missing:
            return
        try:
            pods = [(self._dry_run(manifest), count) for manifest, count in missing]
        except BadInput as error:
            yield ClusterFinding("room", str(error), error)
            return
        yield self._quota_finding(pods)
        yield self._placement_finding([pod for pod, _ in pods])

    def _machine_findings(
        self, marks_or_levers: Iterable[str], session: str
    ) -> Iterator[ClusterFinding]:
        """Yield findings about rights over machines, and a machine that may not be broken."""
        lacking = self._lacking(rights.MACHINE_RIGHTS, everywhere=True)
        yield from _rights_findings(
            "rights over machines", "breaking machines", rights.MACHINE_RIGHTS, lacking, ""
        )
        if not lacking and (reason := self._why_not_breakable(marks_or_levers, session)):
            refusal = BadInput(
                "machines", self._options.machines, f"name machines that can be broken: {reason}"
            )
            yield ClusterFinding("machines", reason, refusal)

    def _missing_pods(self, demand: RunDemand, session: str) -> list[tuple[Manifest, int]]:
        """Return the pods that a run needs and its session lacks, each with its number.

        Raises ApiError.
        """
        present = list(self._api.find("Pod", manifests.selector(session))) if session else []
        nodes = sum(
            pod["metadata"]["labels"].get("app.kubernetes.io/component") == "node"
            for pod in present
        )
        missing_nodes = max(0, demand.nodes + demand.standbys - nodes)
        pods = session_pods(new_name(), self._options, self._pod_template)
        by_station = {pod["metadata"]["labels"][manifests.STATION]: pod for pod in pods}
        counts = {
            station: missing_nodes if station == _NODE else int(not session)
            for station in by_station
        }
        return [(by_station[station], count) for station, count in counts.items() if count]

    def _quota_finding(self, pods: Sequence[tuple[Manifest, int]]) -> ClusterFinding:
        """Return the finding whether pods fit into the quotas."""
        try:
            reason = quotas.why_not_fitting(self._api.find("ResourceQuota", ""), pods)
        except (ApiError, ValueError):
            # such as without the right to read quotas; the server refuses pods that do not fit
            return ClusterFinding("quotas", "the quotas cannot be read")
        if not reason:
            return ClusterFinding(
                "quotas", f"{sum(count for _, count in pods)} pods fit into the quotas"
            )
        refusal = BadInput(
            "quota", self._api.namespace, f"use fewer nodes, or ask for a larger quota: {reason}"
        )
        return ClusterFinding("quotas", reason, refusal)

    def _placement_finding(self, pods: Iterable[Manifest]) -> ClusterFinding:
        """Return the finding whether machines take the pods and are large enough for them."""
        try:
            machines = self._visible_machines()
        except ApiError:  # machines belong to the cluster, and few users may list them
            return ClusterFinding("places", "machines cannot be listed")
        pods = list(pods)
        for pod in pods:
            if reason := pod_placement.why_nowhere(pod, machines):
                remedy = f"make one of them take pods again (kubectl uncordon NAME): {reason}"
                names = self._options.machines or ",".join(
                    machine["metadata"]["name"] for machine in machines
                )
                return ClusterFinding("places", reason, BadInput("machines", names, remedy))
        with contextlib.suppress(ValueError):
            too_small_reason = next(
                filter(None, (pod_placement.why_too_small(pod, machines) for pod in pods)), ""
            )
            if too_small_reason:
                return ClusterFinding(
                    "places",
                    f"{too_small_reason}: pods wait until such a machine is added",
                    is_limited=True,
                )
        return ClusterFinding("places", "machines take pods")

    def _visible_machines(self) -> list[Manifest]:
        """Return the machines that the user may read: all, or those that may be broken.

        Raises ApiError if the user may read none of them.
        """
        try:
            return list(self._api.find("Node", ""))
        except ApiError as error:
            if error.status != HTTPStatus.FORBIDDEN or not self._options.breakable:
                raise
        return [self._api.get("Node", name) for name in self._options.breakable]

    def _why_not_breakable(self, marks_or_levers: Iterable[str], session: str) -> str:
        """Return the reason why a machine cannot be broken, or "" if all can. Raises ApiError."""
        for name in self._options.breakable:
            try:
                reason = machines.why_not_breakable_now(
                    self._api, self._options, name, marks_or_levers, session
                )
            except ApiError as error:
                if not error.is_refusal:
                    raise
                return f"{name} cannot be read: {error}"
            if reason:
                return reason
        return ""


def session_pods(
    session: str, options: KubernetesOptions, pod_template: Manifest
) -> list[Manifest]:
    """Return a pod of each kind that a session has, as it is sent to the server.

    The order is: the driver's if there is one, the coordinator's, a node's.
    """
    pods = [manifests.driver(session, options, pod_template)] if options.has_driver else []
    if pods and not options.service_account:  # the session creates the account later
        pods[0]["spec"].pop("serviceAccountName")
    pods += [
        manifests.pod(session, name, f"{session}-{name}", "", options, pod_template)
        for name in (COORDINATOR, _NODE)
    ]
    pod_placement.only_on(pods[-1], options.breakable)
    return pods


def session_objects(
    session: str,
    options: KubernetesOptions,
    pod_template: Manifest,
    namespace: str,
    *,
    writes_events: bool = True,
) -> list[Manifest]:
    """Return the objects of a session that a server can check before any of them exists.

    Args:
        writes_events: True if the user may let a driver write Events.
    """
    pods = session_pods(session, options, pod_template)
    owner = manifests.owner(session, "00000000-0000-0000-0000-000000000000")
    job = manifests.job(session, pods[0], started_by="", deadline_s=1, parallelism=0)
    objects = [
        *pods,
        job,
        manifests.secret(session, "", owner, pod_template),
        manifests.network_policy(session, "", owner),
    ]
    if options.has_driver and not options.service_account:
        rights_of_driver = manifests.driver_rights(
            session, namespace, owner, writes_events=writes_events
        )
        account, role, _ = rights_of_driver  # a binding needs both to exist
        objects += [account, role]
    return objects


def refusal_of(message: str, options: KubernetesOptions, namespace: str) -> BadInput:
    """Return the BadInput for an object that the server refuses, with a remedy.

    Args:
        message: message of the server, by which the field and the remedy are chosen.
        options: the user's options.
        namespace: namespace of the object.
    """
    if "failed quota" in message:  # a quota limits resources that the pod does not set
        return BadInput(
            "template", options.template, f"set the resources of its container: {message}"
        )
    if "exceeded quota" in message:
        return BadInput(
            "quota", namespace, f"use fewer nodes, or ask for a larger quota: {message}"
        )
    if message.startswith("namespaces ") and message.endswith(" not found"):
        return BadInput("namespace", namespace, f"create it: {message}")
    if _NO_IMAGE.search(message):
        return BadInput("image", options.image, f"set an image, or a template with one: {message}")
    if _RESOURCES.search(message):
        remedy = "set the resources of its container node, driver or coordinator, or change the LimitRange"
        return BadInput("template", options.template, f"{remedy}: {message}")
    if "violates PodSecurity" in message:
        remedy = (
            "admit such pods (its label pod-security.kubernetes.io/enforce), or change the template"
        )
        return BadInput("namespace", namespace, f"{remedy}: {message}")
    if "looking up service account" in message:
        return BadInput(
            "service_account", options.service_account, f"use one of the namespace: {message}"
        )
    remedy = "change the template, the image, or your rights in the namespace"
    return BadInput("template", options.template, f"{remedy}: {message}")


def _events_finding(is_allowed: bool) -> ClusterFinding:
    """Return the finding about Events. Runs do not need the right to write them."""
    if is_allowed:
        return ClusterFinding(
            "events", "faults, losses and recoveries are written as Events of the session's Job"
        )
    lack = (
        "the right to create events is missing: "
        "kubectl get events shows no faults, losses and recoveries of runs"
    )
    return ClusterFinding("events", lack, is_limited=True)


def _rights_findings(
    name: str,
    purpose: str,
    needed: Sequence[rights.Right],
    lacking: Sequence[tuple[rights.Right, str]],
    namespace: str,
) -> Iterator[ClusterFinding]:
    """Yield a finding for each missing right, or one that all are granted.

    Those of missing rights have the same refusal, which names all of them.

    Args:
        name: name of the finding, and field of the refusal.
        purpose: use of the rights, in words.
        namespace: namespace of the rights; "" for cluster-wide rights.
    """
    scope = "" if namespace else " in the whole cluster"
    if not lacking:
        yield ClusterFinding(
            name,
            f"all {sum(len(right.verbs) for right in needed)} rights that {purpose} needs are granted",
        )
        return
    refusal = refusal_of_rights(name, lacking, namespace)
    for right, verb in lacking:
        reason = f"the right is missing; it is needed for: {right.why}"
        yield ClusterFinding(f"{verb} {right.resource}{scope}", reason, refusal)


def refusal_of_rights(
    name: str, lacking: Sequence[tuple[rights.Right, str]], namespace: str
) -> BadInput:
    """Return the BadInput for missing rights of the user, with a remedy.

    Args:
        name: field of the error.
        lacking: the missing rights, at least one, each with its verb.
        namespace: namespace of the rights; "" for cluster-wide rights.
    """
    names = ", ".join(f"{verb} {right.resource}" for right, verb in lacking)
    scope = f"in the namespace {namespace}" if namespace else "in the whole cluster"
    remedy = f"have them granted {scope} (chaoskit cluster manifests prints roles)"
    if {right.resource for right, _ in lacking} & {
        right.resource for right in rights.MAKING_ACCOUNTS
    }:
        remedy += f", or use an account that is installed ({VARIABLE}SERVICE_ACCOUNT={ACCOUNT})"
    return BadInput(name, names, f"{remedy}; the first is needed for: {lacking[0][0].why}")
