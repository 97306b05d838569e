"""Checks of a job before anything happens to it, as far as its objects show a reason against it.

-> ``find.py`` asks the API server for the objects. ``places.py``: the places that are checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaoskit.attach.jobs.containers import training_container
from chaoskit.attach.jobs.job_state import JobState
from chaoskit.attach.jobs.kinds import ANCESTOR_STEP, JOB_NAME, PODS, TRAINER_STEP, TRAINJOB
from chaoskit.attach.jobs.membership import JobMembership, PlaceKey, job_of
from chaoskit.attach.jobs.places import JobPlaces, Place
from chaoskit.attach.jobs.pod_state import ContainerState, PodState
from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.pods.state import pending

_FIELD = "job"
_CRASH_LOOP = "CrashLoopBackOff"
#: A container that has ended is in a crash loop from this number of restarts on.
_CRASHES_MIN = 2
_SHOWN_MAX = 5


def check_object(membership: JobMembership, job: JobState | None) -> None:
    """Refuse a job whose object shows that no training runs, or that its pods are interchangeable.

    Raises:
        BadInput: if it has ended, is suspended, has no indexes, or has no trainers.
    """
    reference = membership.reference
    if job is None:
        return
    if job.outcome:
        why = ", ".join(filter(None, (job.reason, job.message)))
        ended = f"this one is {job.outcome}" + (f" ({why})" if why else "")
        raise BadInput(_FIELD, str(reference), f"name a job that runs: {ended}")
    if job.is_suspended:
        raise BadInput(_FIELD, str(reference), "resume it first: it is suspended")
    if not job.is_indexed:
        remedy = "its completionMode is not Indexed, so its pods have no places"
        selector = f"pods/{JOB_NAME}={reference.name}"
        raise BadInput(_FIELD, str(reference), f"name its pods, as {selector}: {remedy}")
    if reference.kind is TRAINJOB and not membership.replicated_jobs:
        label = f"{ANCESTOR_STEP}={TRAINER_STEP}"
        raise BadInput(
            _FIELD,
            str(reference),
            f"use a runtime with a replicated job that has the label {label}: its JobSet has none",
        )


def check_owners(membership: JobMembership, pods: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a label selector that matches pods of several jobs.

    Raises:
        BadInput: if it does.
    """
    if membership.reference.kind is not PODS:
        return
    owners = sorted({job_of(pod) or "pods without an owner" for pod in pods})
    if len(owners) > 1:
        remedy = "add labels until it matches the pods of one job"
        raise BadInput(
            _FIELD, str(membership.reference), f"{remedy}: it matches those of {_some(owners)}"
        )


def check_places(
    membership: JobMembership,
    namespace: str,
    places: JobPlaces,
    pods: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse a job whose pods do not all run.

    Args:
        membership: the rules by which pods belong to the job.
        namespace: name of the namespace, for messages.
        places: the places of the job.
        pods: the objects of its pods.

    Raises:
        BadInput: if it has no pods, only pods that ended, fewer than it asks for, or pods that are
            in a crash loop or do not run yet.
    """
    reference = str(membership.reference)
    if not places.places:
        labels = f" with {membership.selector}" if membership.selector else ""
        raise BadInput(
            _FIELD, reference, f"wait for its pods: namespace {namespace} has none{labels}"
        )
    filled = [place for place in places.places if place.pod is not None]
    if not filled:
        ends = _some([_end(place) for place in places.places])
        raise BadInput(_FIELD, reference, f"name a job that runs: all pods have ended: {ends}")
    for place in filled:
        if place.pod is not None:
            _check_crash_loop(reference, place.pod)
    pods_wanted = places.job.pods_wanted if places.job is not None else None
    if pods_wanted is not None and len(filled) < pods_wanted:
        empty = [str(place.key) for place in places.places if place.pod is None]
        which = f": no pod holds {_some(empty)}" if empty else ""
        raise BadInput(
            _FIELD,
            reference,
            f"wait for its pods: it asks for {pods_wanted}, and {len(filled)} of them exist{which}",
        )
    live = {place.pod.uid: place.pod.name for place in filled if place.pod is not None}
    for pod in pods:
        name = live.get(str(pod["metadata"]["uid"]))
        if name is not None and (pod.get("status") or {}).get("phase") != "Running":
            reason = pending(f"pod {name}", pod) or f"pod {name} does not run yet"
            raise BadInput(_FIELD, reference, f"wait for its pods: {reason}")


def choose_containers(
    membership: JobMembership, places: JobPlaces, named: str
) -> dict[PlaceKey, str]:
    """Return the name of the container that trains, for each place with a pod.

    Args:
        membership: the rules by which pods belong to the job.
        places: the places of the job.
        named: name that the user gave; "" for none.

    Raises:
        BadInput: if a pod has no container of that name, or several and no rule selects one.
    """
    kind = membership.reference.kind
    return {
        place.key: training_container(place.pod.name, place.pod.container_names, kind, named)
        for place in places.places
        if place.pod is not None
    }


def check_containers(
    membership: JobMembership, places: JobPlaces, containers: Mapping[PlaceKey, str]
) -> None:
    """Refuse a job with a container that trains and does not run at present.

    Args:
        membership: the rules by which pods belong to the job.
        places: the places of the job.
        containers: name of the container that trains, for each place with a pod.

    Raises:
        BadInput: if one does not run.
    """
    reference = str(membership.reference)
    for place in places.places:
        if place.pod is None:
            continue
        container = place.pod.container(containers[place.key])
        if container.state == "terminated" and container.restart_count >= _CRASHES_MIN:
            raise BadInput(_FIELD, reference, _crash_loop(place.pod, container))
        if container.state != "running":
            reason = container.reason or container.state or "no state"
            raise BadInput(
                _FIELD,
                reference,
                f"wait for its pods: container {container.name} of pod {place.pod.name} "
                f"does not run ({reason})",
            )


def _check_crash_loop(reference: str, pod: PodState) -> None:
    """Refuse a pod with a container in a crash loop. Raises BadInput."""
    for container in pod.containers:
        if container.state == "waiting" and container.reason == _CRASH_LOOP:
            raise BadInput(_FIELD, reference, _crash_loop(pod, container))


def _crash_loop(pod: PodState, container: ContainerState) -> str:
    """Return the remedy for a container that ends again and again."""
    code = container.last_exit_code if container.exit_code is None else container.exit_code
    end = "" if code is None else f", the last time with exit code {code}"
    return (
        f"repair it first: container {container.name} of pod {pod.name} is in a crash loop "
        f"({container.restart_count} restarts{end})"
    )


def _end(place: Place) -> str:
    """Return the end of the last pod of a place, in words."""
    pod = place.former_pods[-1]
    codes = [
        f"exit code {container.exit_code}"
        for container in pod.containers
        if container.exit_code is not None
    ]
    return f"{pod.name} {pod.phase}" + (f" ({', '.join(codes)})" if codes else "")


def _some(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(names[:_SHOWN_MAX])
    more = len(names) - _SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown
