"""The search for a job that already runs, with all checks before anything happens to it.

-> ``reference.py``: the text that names it. ``checks.py``: the checks of its objects.
``watch.py``: its changes from then on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaoskit.attach.jobs.checks import (
    check_containers,
    check_object,
    check_owners,
    check_places,
    choose_containers,
)
from chaoskit.attach.jobs.kinds import JobKind
from chaoskit.attach.jobs.membership import JobMembership, PlaceKey, membership
from chaoskit.attach.jobs.places import JobPlaces
from chaoskit.attach.jobs.pod_state import as_version
from chaoskit.attach.jobs.reference import JobReference, parse_reference
from chaoskit.attach.jobs.tracker import JobTracker
from chaoskit.attach.required_rights import require_rights
from chaoskit.errors import BadInput, closest_name
from chaoskit.substrate.kubernetes.api.requests import KubernetesApi
from chaoskit.substrate.kubernetes.api.rights import ATTACH_NODE_RIGHTS, of_attach
from chaoskit.substrate.kubernetes.session import require_allowed

_FIELD = "job"


@dataclass(frozen=True, slots=True)
class JobListing:
    """The objects of a job at one moment, from which a tracker can begin.

    Attributes:
        job: object of the job; None for pods that a selector names.
        pods: objects of its pods.
        version: resource version of the list of the pods.
        at_s: monotonic time of the list.
    """

    job: Mapping[str, Any] | None
    pods: tuple[Mapping[str, Any], ...]
    version: int
    at_s: float

    def give_to(self, tracker: JobTracker) -> None:
        """Let a new tracker begin with these objects."""
        tracker.list_job(self.job, 0, self.at_s)
        tracker.list_pods(self.pods, self.version, self.at_s)


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job that runs, and passed all checks.

    Attributes:
        reference: the reference that names it.
        namespace: name of its namespace.
        membership: the rules by which pods belong to it.
        places: its places when it was looked up. All pods that it asks for run.
        containers: name of the container that trains, for each place.
        listing: its objects when it was looked up. A watch reports the changes since then.
        sees_nodes: True if the user may watch nodes.
        note: text that users must see beside the job; "" for none.
    """

    reference: JobReference
    namespace: str
    membership: JobMembership
    places: JobPlaces
    containers: Mapping[PlaceKey, str] = field(hash=False)
    listing: JobListing = field(hash=False, repr=False)
    sees_nodes: bool = False
    note: str = ""


def find_job(api: KubernetesApi, text: str, *, container: str = "") -> FoundJob:
    """Return a job that runs in the namespace of a client.

    Args:
        api: client of the namespace.
        text: reference to the job, such as ``statefulset/llama``.
        container: name of the container that trains; "" for the one that the rules select.

    Raises:
        BadInput: if the reference is malformed, a right is missing, the namespace does not allow
            faults, the job does not exist, or its pods do not all run.
        ApiError: if the server does not answer.
    """
    reference = parse_reference(text)
    kinds = object_kinds(reference.kind)
    _check_kinds(api, reference, kinds)
    require_rights(api, of_attach(kinds))
    require_allowed(api)
    job = None
    for kind in kinds:
        job = _find_object(api, reference, kind)
    members = membership(reference, job)
    pods, version = api.list_all("Pod", members.selector)
    listing = JobListing(job, tuple(pods), as_version(version), time.monotonic())
    tracker = JobTracker(members)
    listing.give_to(tracker)
    check_object(members, tracker.job)
    check_owners(members, pods)
    places = tracker.places()
    check_places(members, api.namespace, places, pods)
    containers = choose_containers(members, places, container)
    check_containers(members, places, containers)
    return FoundJob(
        reference,
        api.namespace,
        members,
        places,
        containers,
        listing,
        sees_nodes=all(
            api.may(verb, right.group, right.resource, everywhere=True)
            for right in ATTACH_NODE_RIGHTS
            for verb in right.verbs
        ),
        note=reference.kind.note,
    )


def object_kinds(kind: JobKind) -> tuple[str, ...]:
    """Return the kinds of the objects of a job. The last of them owns the pods."""
    return tuple(dict.fromkeys(filter(None, (kind.kind, kind.watched))))


def _check_kinds(api: KubernetesApi, reference: JobReference, kinds: tuple[str, ...]) -> None:
    """Refuse a kind that the cluster does not have.

    Raises:
        BadInput: if its CRD is not installed.
        ApiError: if the server does not answer.
    """
    for kind in kinds:
        if not api.serves(kind):
            remedy = f"use a cluster with the kind {kind}: its CRD is not installed at {api.server}"
            raise BadInput(_FIELD, str(reference), remedy)


def _find_object(api: KubernetesApi, reference: JobReference, kind: str) -> dict[str, Any]:
    """Return an object of a job.

    Raises:
        BadInput: if the namespace has no such object.
        ApiError: if the server refuses the request or does not answer.
    """
    objects, _ = api.list_all(kind)
    names: dict[str, dict[str, Any]] = {str(entry["metadata"]["name"]): entry for entry in objects}
    if reference.name in names:
        return names[reference.name]
    if kind != reference.kind.kind:
        remedy = f"wait for its controller: it has made no {kind} of this name"
    elif closest := closest_name(reference.name, names):
        remedy = f"write {reference.kind.word}/{closest}"
    else:
        existing = ", ".join(sorted(names)[:10]) or "none"
        remedy = f"name an object of namespace {api.namespace}; it has these: {existing}"
    raise BadInput(_FIELD, str(reference), remedy)
