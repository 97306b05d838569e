"""Checks of a cluster that make nothing: what a session and its runs need, for the doctor and before each run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from chaoskit.substrate.kubernetes.pods import manifests, placement, quotas
from chaoskit.substrate.kubernetes.pods.actions import MachineDrain, MachineLoss, MachineTaint
from chaoskit.substrate.kubernetes.pods.manifests import Manifest
from chaoskit.substrate.kubernetes.session import may_write_events, new_name, require_allowed

_REQUESTS = 8  # that are under way at once
_NODE = "node0"
#: What a server says of a pod whose resources are inconsistent, or outside of a LimitRange.
_RESOURCES = re.compile(r"\.resources\b|\bper (?:Container|Pod)\b")
_NO_IMAGE = re.compile(r"\.image: Required value")
#: Actions on machines, with the mark that each puts on one, or "" for a lever.
_ON_MACHINES: Mapping[type[Action], str] = {
    MachineLoss: "",
    MachineDrain: marks.CORDON,
    MachineTaint: marks.TAINT,
}


@dataclass(frozen=True, slots=True)
class ClusterFinding:
    """One thing that runs need, in words; and how a run is refused where the cluster does not have it.

    ``is_limited``: whether runs take place, and something of use to people is missing.
    """

    name: str
    told: str
    refusal: BadInput | None = None
    is_limited: bool = False

    @property
    def is_there(self) -> bool:
        """Return whether the cluster has it."""
        return self.refusal is None


def examine_cluster(options: KubernetesOptions) -> Iterator[ClusterFinding]:
    """Examine what a session and a run of one node need, one thing after the other, until the rest cannot be asked.

    A server that stops answering is a finding, and the last one: what it was asked then is not known to be missing.

    Raises:
        BadInput: if there is no such cluster, or the template cannot be read.
    """
    reason = options.unavailable()
    refusal = BadInput("substrate", "kubernetes", reason) if reason else None
    yield ClusterFinding("options", reason or "an image, or a template, and the client", refusal)
    given = template.read(options.template) if options.template else {}
    api = KubernetesApi(options.context, options.namespace)
    try:
        yield from _examine(api, options, given)
    except ApiError as error:
        refusal = BadInput("context", api.server, f"use a cluster that answers: {error}")
        yield ClusterFinding("API server", str(error), refusal)
    finally:
        api.close()


def _examine(
    api: KubernetesApi, options: KubernetesOptions, given: Manifest
) -> Iterator[ClusterFinding]:
    """Yield findings about the server, then about sessions and runs. Raises ApiError."""
    yield ClusterFinding("API server", f"{api.server}, {api.version()}")
    examination = Examination(api, options, given)
    lacks_any = False
    for finding in examination.of_session():
        lacks_any = lacks_any or not finding.is_there
        yield finding
    if not lacks_any:
        actions = frozenset(_ON_MACHINES) if options.breakable else frozenset[type[Action]]()
        yield from examination.of_run(RunDemand(1, actions=actions))


class Examination:
    """Checks by one connection to a cluster."""

    def __init__(self, api: KubernetesApi, options: KubernetesOptions, given: Manifest) -> None:
        self._api, self._options, self._given = api, options, given

    def of_session(self) -> Iterator[ClusterFinding]:
        """Check the namespace, then the user's rights, then the objects of a session; what is missing ends it."""
        try:
            require_allowed(self._api)
            yield ClusterFinding("namespace", f"{self._api.namespace}: runs are allowed there")
        except BadInput as error:
            yield ClusterFinding("namespace", str(error), error)
        lacking = self._lacking(rights.of_session(self._options))
        yield from _rights(
            "rights", "a session", rights.of_session(self._options), lacking, self._api.namespace
        )
        writes_events = may_write_events(self._api)
        if not (
            self._options.has_driver and self._options.service_account
        ):  # an account has rights of its own
            yield _events_finding(writes_events)
        if not lacking:
            yield self._objects(writes_events)

    def _lacking(
        self, needed: Sequence[rights.Right], *, everywhere: bool = False
    ) -> list[tuple[rights.Right, str]]:
        asked = list(
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
                for request, granted in zip(asked, threads.map(may, asked), strict=True)
                if not granted
            ]

    def _objects(self, writes_events: bool) -> ClusterFinding:
        """Have the server check the objects of a session, with all that watches over the namespace."""
        where = (self._options, self._given, self._api.namespace)
        try:
            for manifest in session_objects(new_name(), *where, writes_events=writes_events):
                self._try(manifest)
        except BadInput as error:
            return ClusterFinding("objects", str(error), error)
        return ClusterFinding("objects", "the server accepts those of a session")

    def _try(self, manifest: Manifest) -> Manifest:
        """Return an object as the server would have it.

        Raises:
            BadInput: if the server refuses it. ApiError: if it may answer otherwise later.
        """
        try:
            return self._api.create(manifest, dry_run=True)
        except ApiError as error:
            if not error.is_refusal:
                raise
            raise refusal_of(str(error), self._options, self._api.namespace) from None

    def of_run(self, demand: RunDemand, session: str = "") -> Iterator[ClusterFinding]:
        """Check room for pods, and the machines of faults. ``session``: that has pods already; "" for none."""
        marks_or_levers = {
            mark for action, mark in _ON_MACHINES.items() if action in demand.actions
        }
        if marks_or_levers:
            yield from self._machines(marks_or_levers, session)
        missing = self._missing_pods(demand, session)
        if not missing:
            return
        try:
            pods = [(self._try(manifest), count) for manifest, count in missing]
        except BadInput as error:
            yield ClusterFinding("room", str(error), error)
            return
        yield self._room(pods)
        yield self._places([pod for pod, _ in pods])

    def _machines(self, marks_or_levers: Iterable[str], session: str) -> Iterator[ClusterFinding]:
        lacking = self._lacking(rights.MACHINE_RIGHTS, everywhere=True)
        yield from _rights(
            "rights over machines", "breaking machines", rights.MACHINE_RIGHTS, lacking, ""
        )
        if not lacking and (reason := self._why_not_breakable(marks_or_levers, session)):
            refusal = BadInput(
                "machines", self._options.machines, f"name machines that can be broken: {reason}"
            )
            yield ClusterFinding("machines", reason, refusal)

    def _missing_pods(self, demand: RunDemand, session: str) -> list[tuple[Manifest, int]]:
        """Return the pods that a run needs and its session does not have."""
        there = list(self._api.find("Pod", manifests.selector(session))) if session else []
        nodes = sum(
            one["metadata"]["labels"].get("app.kubernetes.io/component") == "node" for one in there
        )
        more = max(0, demand.nodes + demand.standbys - nodes)
        pods = session_pods(new_name(), self._options, self._given)
        made = {pod["metadata"]["labels"][manifests.STATION]: pod for pod in pods}
        counts = {station: more if station == _NODE else int(not session) for station in made}
        return [(made[station], count) for station, count in counts.items() if count]

    def _room(self, pods: Sequence[tuple[Manifest, int]]) -> ClusterFinding:
        try:
            reason = quotas.lacking(self._api.find("ResourceQuota", ""), pods)
        except (
            ApiError,
            ValueError,
        ):  # such as for want of the right to read quotas: the server will refuse the pods
            return ClusterFinding("quotas", "they cannot be read")
        if not reason:
            return ClusterFinding("quotas", f"{sum(count for _, count in pods)} pods fit into them")
        refusal = BadInput(
            "quota", self._api.namespace, f"use fewer nodes, or have more room granted: {reason}"
        )
        return ClusterFinding("quotas", reason, refusal)

    def _places(self, pods: Iterable[Manifest]) -> ClusterFinding:
        try:
            there = self._machines_seen()
        except ApiError:  # machines are of the whole cluster, and few users may list them
            return ClusterFinding("places", "machines cannot be listed")
        pods = list(pods)
        for pod in pods:
            if reason := placement.why_nowhere(pod, there):
                remedy = f"have one take pods again (kubectl uncordon NAME): {reason}"
                names = self._options.machines or ",".join(one["metadata"]["name"] for one in there)
                return ClusterFinding("places", reason, BadInput("machines", names, remedy))
        with contextlib.suppress(ValueError):
            small = next(filter(None, (placement.why_too_small(pod, there) for pod in pods)), "")
            if small:
                return ClusterFinding(
                    "places", f"{small}: pods wait until such a machine is made", is_limited=True
                )
        return ClusterFinding("places", "machines take pods")

    def _machines_seen(self) -> list[Manifest]:
        try:
            return list(self._api.find("Node", ""))
        except ApiError as error:
            if error.status != HTTPStatus.FORBIDDEN or not self._options.breakable:
                raise
        return [self._api.get("Node", name) for name in self._options.breakable]

    def _why_not_breakable(self, marks_or_levers: Iterable[str], session: str) -> str:
        """Return why a machine cannot be broken; "" if all can. Raises ApiError if the server does not answer."""
        namespace, is_open = self._api.namespace, self._options.strangers == "allow"
        for name in self._options.breakable:
            try:
                node = self._api.get("Node", name)
                pods = [] if is_open else self._api.pods_on(name)
            except ApiError as error:
                if not error.is_refusal:
                    raise
                return f"{name} cannot be looked at: {error}"
            for how in marks_or_levers:
                if reason := machines.why_not_breakable(node, how, pods, namespace, session):
                    return reason
        return ""


def session_pods(session: str, options: KubernetesOptions, given: Manifest) -> list[Manifest]:
    """Return a pod of each kind that a session has, as it is sent to the server."""
    made = [manifests.driver(session, options, given)] if options.has_driver else []
    if made and not options.service_account:  # its account is made with it
        made[0]["spec"].pop("serviceAccountName")
    made += [
        manifests.pod(session, name, f"{session}-{name}", "", options, given)
        for name in (COORDINATOR, _NODE)
    ]
    placement.only_on(made[-1], options.breakable)
    return made


def session_objects(
    session: str,
    options: KubernetesOptions,
    given: Manifest,
    namespace: str,
    *,
    writes_events: bool = True,
) -> list[Manifest]:
    """Return the objects of a session that a server can check before any of them is there.

    ``writes_events``: whether the user may let a driver write Events.
    """
    pods = session_pods(session, options, given)
    owner = manifests.owner(session, "00000000-0000-0000-0000-000000000000")
    job = manifests.job(session, pods[0], started_by="", deadline_s=1, parallelism=0)
    made = [
        *pods,
        job,
        manifests.secret(session, "", owner, given),
        manifests.network_policy(session, "", owner),
    ]
    if options.has_driver and not options.service_account:
        rights_of_driver = manifests.driver_rights(
            session, namespace, owner, writes_events=writes_events
        )
        account, role, _ = rights_of_driver  # a binding needs both
        made += [account, role]
    return made


def refusal_of(message: str, options: KubernetesOptions, namespace: str) -> BadInput:
    """Return the refusal of a user whose object the server does not accept, by what the server says."""
    if "failed quota" in message:  # a quota over resources, of which the pod names none
        return BadInput(
            "template", options.template, f"name the resources of its container: {message}"
        )
    if "exceeded quota" in message:
        return BadInput(
            "quota", namespace, f"use fewer nodes, or have more room granted: {message}"
        )
    if message.startswith("namespaces ") and message.endswith(" not found"):
        return BadInput("namespace", namespace, f"create it: {message}")
    if _NO_IMAGE.search(message):
        return BadInput("image", options.image, f"name one, or a template with one: {message}")
    if _RESOURCES.search(message):
        remedy = "set the resources of its container node, driver or coordinator, or change the LimitRange"
        return BadInput("template", options.template, f"{remedy}: {message}")
    if "violates PodSecurity" in message:
        remedy = "let such pods in (its label pod-security.kubernetes.io/enforce), or change the template"
        return BadInput("namespace", namespace, f"{remedy}: {message}")
    if "looking up service account" in message:
        return BadInput(
            "service_account", options.service_account, f"name one of the namespace: {message}"
        )
    remedy = "change the template, the image, or what you may do in the namespace"
    return BadInput("template", options.template, f"{remedy}: {message}")


def _events_finding(is_allowed: bool) -> ClusterFinding:
    """Return the finding about Events. Runs do not need the right to write them: their results are the same."""
    if is_allowed:
        return ClusterFinding(
            "events", "faults, losses and recoveries are written as Events of the session's Job"
        )
    lack = "you may not create events: kubectl get events shows no faults, losses and recoveries of runs"
    return ClusterFinding("events", lack, is_limited=True)


def _rights(
    name: str,
    purpose: str,
    needed: Sequence[rights.Right],
    lacking: Sequence[tuple[rights.Right, str]],
    namespace: str,
) -> Iterator[ClusterFinding]:
    """Yield what is missing, each with the one refusal that names all of it."""
    where = "" if namespace else " in the whole cluster"
    if not lacking:
        yield ClusterFinding(
            name, f"all {sum(len(right.verbs) for right in needed)} that {purpose} needs"
        )
        return
    refusal = refusal_of_rights(name, lacking, namespace)
    for right, verb in lacking:
        told = f"you may not, and it is needed: {right.why}"
        yield ClusterFinding(f"{verb} {right.resource}{where}", told, refusal)


def refusal_of_rights(
    name: str, lacking: Sequence[tuple[rights.Right, str]], namespace: str
) -> BadInput:
    """Return the refusal of a user without these rights. ``namespace``: "" for rights over the whole cluster."""
    names = ", ".join(f"{verb} {right.resource}" for right, verb in lacking)
    where = f"in the namespace {namespace}" if namespace else "in the whole cluster"
    remedy = f"have them granted {where} (chaoskit cluster manifests prints roles)"
    if {right.resource for right, _ in lacking} & {
        right.resource for right in rights.MAKING_ACCOUNTS
    }:
        remedy += f", or use an account that is installed ({VARIABLE}SERVICE_ACCOUNT={ACCOUNT})"
    return BadInput(name, names, f"{remedy}; the first is needed for: {lacking[0][0].why}")
