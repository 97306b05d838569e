"""The tracker of a job: lists and events of the API server in, places and changes out.

It makes no requests, and reads no clock. Events may be missing, repeated or out of order: a state
that is older than the known one is ignored, and a list corrects what events have left out.

-> ``watch.py`` feeds it. ``places.py`` and ``changes.py``: its results. ``pod_changes.py``: the
changes of a single pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from chaoskit.attach.jobs.changes import (
    JobChange,
    JobEnded,
    JobReplaced,
    JobRestarted,
    NodeReadinessChanged,
    PlaceEmptied,
    PlaceTaken,
)
from chaoskit.attach.jobs.job_state import JobState, read_job
from chaoskit.attach.jobs.kinds import PODS
from chaoskit.attach.jobs.membership import JobMembership, PlaceKey
from chaoskit.attach.jobs.places import JobPlaces, Place
from chaoskit.attach.jobs.pod_changes import pod_changes
from chaoskit.attach.jobs.pod_state import PodState, as_version, condition_statuses, read_pod

DELETED = "DELETED"
#: Ended pods that are kept for each place. A crashing job makes a new one every few seconds.
_FORMER_MAX = 100


@dataclass(slots=True)
class _Record:
    """A pod, which may be deleted by now, and its place.

    Attributes:
        first_version: lowest resource version that was seen of the pod. It orders pods that were
            created in the same second.
        is_former: True once the pod has ended or left its place. It may be forgotten since then.
    """

    place: PlaceKey
    pod: PodState
    first_version: int
    is_former: bool = False

    @property
    def creation_order(self) -> tuple[str, int, int, str]:
        """A key by which the newest pod is the last one."""
        pod = self.pod
        return pod.created, pod.restart_attempt, self.first_version, pod.uid

    @property
    def age_order(self) -> tuple[bool, str, int, int, str]:
        """A key by which the pod that holds the place is the last one."""
        return not self.pod.is_terminating, *self.creation_order


@dataclass(slots=True)
class _HeldPlace:
    """The pod that holds a place.

    Attributes:
        record: the pod; None if the place is empty. It is kept here until the next change, as the
            pod may be deleted or forgotten before.
        last_uid: identifier of the last pod that held the place.
        since_s: monotonic time of the last change.
    """

    record: _Record | None
    last_uid: str
    since_s: float


class JobTracker:
    """The state machine that follows the pods of a job.

    Args:
        membership: the rules by which pods belong to the job.
    """

    def __init__(self, membership: JobMembership) -> None:
        self._membership = membership
        self._records: dict[str, _Record] = {}  # by UID
        self._by_place: dict[PlaceKey, dict[str, _Record]] = {}
        self._versions: dict[str, int] = {}  # by UID, also of deleted pods since the last list
        self._former: dict[PlaceKey, dict[str, _Record]] = {}  # by UID, oldest first
        self._holders: dict[PlaceKey, _HeldPlace] = {}
        self._positions: dict[PlaceKey, int] = {}
        self._listed_version: int | None = None
        self._nodes: dict[str, bool] = {}  # readiness, by the objects of nodes
        self._silent_nodes: dict[str, float] = {}  # node -> since when it was reported as silent
        self._job: JobState | None = None
        self._job_version = 0
        self._job_was_seen = False
        self._attempt = 0

    @property
    def job(self) -> JobState | None:
        """The state of the job's object, or None if there is none."""
        return self._job

    def places(self) -> JobPlaces:
        """Return all places at present."""
        keys = sorted(self._holders, key=lambda key: (self._positions.get(key, 0), key))
        return JobPlaces(tuple(map(self._describe, keys)), self._job, self._attempt)

    def list_pods(
        self, pods: Iterable[Mapping[str, Any]], version: int, now_s: float
    ) -> list[JobChange]:
        """Take a complete list of the pods, and return the changes since the last state.

        A pod that is missing from it is gone. A list that is older than the last one is ignored.

        Args:
            pods: objects of the API server.
            version: resource version of the list; 0 if it cannot be compared.
            now_s: monotonic time.
        """
        if version and version < (self._listed_version or 0):
            return []
        changes: list[JobChange] = []
        listed = set[str]()
        for pod in pods:
            listed.add(str(pod["metadata"]["uid"]))
            changes += self._apply(pod, is_deletion=False, is_listed=True, now_s=now_s)
        for uid, record in list(self._records.items()):
            if uid not in listed and (not version or record.pod.version <= version):
                changes += self._delete(uid, version, now_s)
        # the version of the list takes the place of those of the pods that were deleted before it
        self._versions = {
            uid: last_version
            for uid, last_version in self._versions.items()
            if uid in self._records or last_version > version
        }
        self._listed_version = version
        return changes + list(self._node_changes(now_s))

    def pod_event(self, event: str, pod: Mapping[str, Any], now_s: float) -> list[JobChange]:
        """Take an event about a pod, and return the changes that it means.

        Args:
            event: ``ADDED``, ``MODIFIED`` or ``DELETED``.
            pod: the object of the API server.
            now_s: monotonic time.
        """
        changes = self._apply(pod, is_deletion=event == DELETED, is_listed=False, now_s=now_s)
        return changes + list(self._node_changes(now_s))

    def list_nodes(self, nodes: Iterable[Mapping[str, Any]], now_s: float) -> list[JobChange]:
        """Take a complete list of the cluster's nodes, and return the changes that it means."""
        listed = {str(node["metadata"]["name"]): _is_ready(node) for node in nodes}
        self._nodes = dict.fromkeys(self._nodes, False) | listed  # a missing node was deleted
        return list(self._node_changes(now_s))

    def node_event(self, event: str, node: Mapping[str, Any], now_s: float) -> list[JobChange]:
        """Take an event about a node, and return the changes that it means."""
        self._nodes[str(node["metadata"]["name"])] = event != DELETED and _is_ready(node)
        return list(self._node_changes(now_s))

    def job_event(self, event: str, job: Mapping[str, Any], now_s: float) -> list[JobChange]:
        """Take an event about the job's object, and return the changes that it means."""
        version = as_version(job["metadata"].get("resourceVersion"))
        if version and version <= self._job_version:
            return []
        self._job_version = version
        state = read_job(self._membership.reference.kind, job)
        return self._replace_job(None if event == DELETED else state, now_s)

    def list_job(
        self, job: Mapping[str, Any] | None, version: int, now_s: float
    ) -> list[JobChange]:
        """Take the job's object from a list, and return the changes that it means.

        Args:
            job: the object; None if the list has none.
            version: resource version of the list.
            now_s: monotonic time.
        """
        if job is not None:
            return self.job_event("ADDED", job, now_s)
        if version and version < self._job_version:
            return []
        self._job_version = version
        return self._replace_job(None, now_s)

    def _apply(
        self, pod: Mapping[str, Any], *, is_deletion: bool, is_listed: bool, now_s: float
    ) -> list[JobChange]:
        """Take a state of a pod, unless it is older than the known one."""
        placed = self._membership.place_of(pod)
        if placed is None:
            return []
        place, position = placed
        state = read_pod(pod)
        if not self._is_news(state, is_deletion, is_listed):
            return []
        self._positions.setdefault(place, position)
        self._versions[state.uid] = max(state.version, self._versions.get(state.uid, 0))
        record = self._records.get(state.uid)
        if record is None and is_deletion:  # its whole life was missed
            missed = _Record(place, replace(state, is_deleted=True), state.version)
            self._keep_former(missed)
            return []
        changes: list[JobChange] = []
        if record is None:
            record = self._records[state.uid] = _Record(place, state, state.version)
            self._by_place.setdefault(place, {})[state.uid] = record
            if self._listed_version is not None:  # the first list is the beginning, and no change
                changes += pod_changes(place, PodState(state.uid, state.name), state, now_s)
        else:
            before, record.pod = record.pod, state
            if is_deletion:  # it says more than the request for it
                before = replace(before, is_terminating=state.is_terminating)
            changes += pod_changes(place, before, state, now_s)
        if is_deletion:
            return changes + self._delete(state.uid, state.version, now_s)
        return changes + self._settle(place, now_s) + self._attempt_change(state, now_s)

    def _is_news(self, state: PodState, is_deletion: bool, is_listed: bool) -> bool:
        """Return whether a state is newer than the known one of the pod."""
        if not state.version:
            return True  # it cannot be compared
        last_version = self._versions.get(state.uid)
        if last_version is None:
            return is_listed or state.version > (self._listed_version or 0)
        return state.version > last_version or (is_deletion and state.version == last_version)

    def _delete(self, uid: str, version: int, now_s: float) -> list[JobChange]:
        """Remove a pod that the API server has no longer."""
        record = self._records.pop(uid)
        del self._by_place[record.place][uid]
        self._versions[uid] = max(version, record.pod.version)
        record.pod = replace(record.pod, is_deleted=True, is_ready=False)
        self._keep_former(record)
        return self._settle(record.place, now_s)

    def _settle(self, place: PlaceKey, now_s: float) -> list[JobChange]:
        """Determine which pod holds a place, and return the change if it is another one."""
        records = list(self._by_place.get(place, {}).values())
        live = [record for record in records if not record.pod.has_ended]
        newest = max(live, key=lambda record: record.age_order, default=None)
        holder, former = self._holders.get(place), self._former.get(place, {})
        if newest is not None:
            former.pop(newest.pod.uid, None)
            newest.is_former = False
        for record in records:
            has_left = record.pod.uid in former or _is_held_by(holder, record)
            if record is not newest and (record.pod.has_ended or has_left):
                self._keep_former(record)
        if newest is None:
            return self._empty(place, holder, now_s)
        if _is_held_by(holder, newest):
            return []
        uid, previous = newest.pod.uid, "" if holder is None else holder.last_uid
        self._holders[place] = _HeldPlace(newest, uid, now_s)
        return [PlaceTaken(now_s, place, uid, newest.pod.name, previous)]

    def _empty(self, place: PlaceKey, holder: _HeldPlace | None, now_s: float) -> list[JobChange]:
        """Leave a place without a pod, and return the change if it had one."""
        if holder is None:
            self._holders[place] = _HeldPlace(None, "", now_s)
            return []
        if holder.record is None:
            return []
        pod = holder.record.pod
        self._holders[place] = _HeldPlace(None, pod.uid, now_s)
        cause = "deleted" if pod.phase not in ("Failed", "Succeeded") else pod.phase
        return [PlaceEmptied(now_s, place, pod.uid, pod.name, cause)]

    def _keep_former(self, record: _Record) -> None:
        """Keep a pod that holds its place no longer, and forget the oldest one of too many."""
        if record.is_former:  # it is kept already, or was forgotten
            return
        record.is_former = True
        pods = self._former.get(record.place, {}) | {record.pod.uid: record}
        newest = sorted(pods.values(), key=lambda former: former.creation_order)[-_FORMER_MAX:]
        self._former[record.place] = {former.pod.uid: former for former in newest}

    def _node_changes(self, now_s: float) -> Iterator[NodeReadinessChanged]:
        """Yield changes of the readiness of nodes with present pods."""
        places: dict[str, list[PlaceKey]] = {}
        silent = set[str]()
        for key in sorted(self._holders):
            if (pod := self._present(key)) is not None and pod.node:
                places.setdefault(pod.node, []).append(key)
                if not self._is_node_ready(pod):
                    silent.add(pod.node)
        for node in sorted(silent ^ self._silent_nodes.keys()):
            if node in silent or node in places:
                yield NodeReadinessChanged(
                    now_s, node, node not in silent, tuple(places.get(node, ()))
                )
        self._silent_nodes = {node: self._silent_nodes.get(node, now_s) for node in silent}

    def _is_node_ready(self, pod: PodState) -> bool:
        """Return whether the node of a pod is ready, by its object or else by the pod's state."""
        return self._nodes.get(pod.node, not pod.is_node_silent)

    def _attempt_change(self, pod: PodState, now_s: float) -> list[JobChange]:
        """Return the restart of a job of which only the pods are followed, if a pod shows one."""
        if self._membership.reference.kind is not PODS or pod.restart_attempt <= self._attempt:
            return []
        is_first = self._listed_version is None
        self._attempt = pod.restart_attempt
        return [] if is_first else [JobRestarted(now_s, self._attempt)]

    def _replace_job(self, state: JobState | None, now_s: float) -> list[JobChange]:
        """Take a state of the job's object, and return the changes between it and the last one."""
        before, self._job = self._job, state
        if state is None:
            return [] if before is None else [JobReplaced(now_s, "", before.uid)]
        if before is None or before.uid != state.uid:
            is_first = before is None and not self._job_was_seen
            self._job_was_seen = True
            self._attempt = state.restarts
            replaced = JobReplaced(now_s, state.uid, "" if before is None else before.uid)
            changes: list[JobChange] = [] if is_first else [replaced]
            outcome_before = ""
        else:
            changes = []
            outcome_before = before.outcome
            if state.restarts > self._attempt:
                self._attempt = state.restarts
                changes.append(JobRestarted(now_s, state.restarts))
        if state.outcome and state.outcome != outcome_before:
            changes.append(JobEnded(now_s, state.outcome, state.reason, state.message))
        return changes

    def _present(self, place: PlaceKey) -> PodState | None:
        """Return the pod that holds a place, or None if it is empty."""
        record = self._holders[place].record
        return record.pod if record is not None else None

    def _describe(self, key: PlaceKey) -> Place:
        """Return a place as plain data."""
        pod = self._present(key)
        return Place(
            key,
            pod,
            self._holders[key].since_s,
            tuple(record.pod for record in self._former.get(key, {}).values()),
            None if pod is None else self._silent_nodes.get(pod.node),
        )


def _is_held_by(holder: _HeldPlace | None, record: _Record) -> bool:
    """Return whether this pod is the one that holds a place."""
    return holder is not None and holder.record is record


def _is_ready(node: Mapping[str, Any]) -> bool:
    """Return whether the control plane regards a node as ready."""
    return condition_statuses((node.get("status") or {}).get("conditions")).get("Ready") == "True"
