"""The tracker reports which pod holds a place, whatever happens to the events about it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import strategies as st
from support.jobs.objects import indexed_job, job_pod, pod, stateful_pod, stateful_set, status

from chaoskit.attach.jobs.changes import (
    ContainerEnded,
    ContainerRestarted,
    JobChange,
    JobEnded,
    JobReplaced,
    JobRestarted,
    NodeReadinessChanged,
    PlaceEmptied,
    PlaceTaken,
    PodTerminating,
    ReadinessChanged,
)
from chaoskit.attach.jobs.membership import PlaceKey, membership
from chaoskit.attach.jobs.reference import parse_reference
from chaoskit.attach.jobs.tracker import JobTracker

LLAMA = [PlaceKey("llama", index) for index in range(3)]
TRAIN = [PlaceKey("train", index) for index in range(3)]


def of_statefulset() -> JobTracker:
    return JobTracker(membership(parse_reference("statefulset/llama"), stateful_set()))


def of_job() -> JobTracker:
    return JobTracker(membership(parse_reference("job/train"), indexed_job()))


def test_the_first_list_fills_the_places() -> None:
    tracker = of_statefulset()
    changes = tracker.list_pods([stateful_pod(1), stateful_pod(0)], 10, 5.0)
    assert [type(change) for change in changes] == [PlaceTaken, PlaceTaken]
    places = tracker.places().places
    assert [place.key for place in places] == LLAMA[:2]
    assert [place.pod.uid for place in places if place.pod] == ["uid-llama-0", "uid-llama-1"]
    assert [place.since_s for place in places] == [5.0, 5.0]


def test_a_pod_that_is_deleted_by_force_is_replaced_by_one_of_the_same_name() -> None:
    tracker = of_statefulset()
    tracker.list_pods([stateful_pod(0, "a", version=1)], 10, 1.0)
    gone = tracker.pod_event("DELETED", stateful_pod(0, "a", version=11, terminating=True), 2.0)
    assert gone == [PlaceEmptied(2.0, LLAMA[0], "a", "llama-0", "deleted")]
    assert tracker.places().places[0].pod is None
    assert tracker.places().places[0].since_s == 2.0
    new = tracker.pod_event(
        "ADDED", stateful_pod(0, "b", version=12, created=9, phase="Pending"), 2.5
    )
    assert new == [PlaceTaken(2.5, LLAMA[0], "b", "llama-0", "a")]
    ready = tracker.pod_event("MODIFIED", stateful_pod(0, "b", version=13, created=9), 3.0)
    assert ready == [ReadinessChanged(3.0, LLAMA[0], "b", "llama-0", True)]
    (place,) = tracker.places().places
    assert (place.since_s, place.is_ready) == (2.5, True)
    assert [(former.uid, former.is_deleted) for former in place.former_pods] == [("a", True)]
    successor = tracker.places().successor(LLAMA[0], "a")
    assert successor is not None
    assert successor.uid == "b"
    assert tracker.places().successor(LLAMA[0], "b") is None


def test_a_failed_pod_stays_beside_its_successor() -> None:
    tracker = of_job()
    tracker.list_pods([job_pod(0, "old", version=1)], 10, 1.0)
    failed = job_pod(
        0,
        "old",
        version=11,
        phase="Failed",
        statuses=[status("terminated", exitCode=3, reason="Error")],
    )
    changes = tracker.pod_event("MODIFIED", failed, 2.0)
    assert (
        ContainerEnded(
            2.0, TRAIN[0], "uid-train-0-old", "train-0-old", "trainer", "containerd://0", 3, "Error"
        )
        in changes
    )
    assert changes[-1] == PlaceEmptied(2.0, TRAIN[0], "uid-train-0-old", "train-0-old", "Failed")
    tracker.pod_event("ADDED", job_pod(0, "new", version=12, created=12), 12.0)
    (place,) = tracker.places().places
    assert place.pod is not None
    assert place.pod.name == "train-0-new"
    (former,) = place.former_pods
    assert (former.name, former.phase, former.is_deleted) == ("train-0-old", "Failed", False)
    assert former.containers[0].exit_code == 3


def test_a_terminating_pod_holds_its_place_until_another_one_exists() -> None:
    tracker = of_job()
    tracker.list_pods([job_pod(0, "old", version=1, created=5)], 10, 1.0)
    changes = tracker.pod_event(
        "MODIFIED", job_pod(0, "old", version=11, created=5, terminating=True), 2.0
    )
    assert changes == [PodTerminating(2.0, TRAIN[0], "uid-train-0-old", "train-0-old")]
    assert not tracker.places().places[0].is_ready
    # created in the same second: the one that is not terminating holds the place
    changes = tracker.pod_event(
        "ADDED", job_pod(0, "new", version=12, created=5, phase="Pending"), 3.0
    )
    assert changes == [
        PlaceTaken(3.0, TRAIN[0], "uid-train-0-new", "train-0-new", "uid-train-0-old")
    ]
    former = tracker.places().places[0].former_pods
    assert [(pod.name, pod.is_terminating) for pod in former] == [("train-0-old", True)]


def test_the_newest_of_two_pods_of_an_index_holds_the_place() -> None:
    """Pods that were created in the same second are ordered by their first resource versions."""
    first, second = job_pod(0, "z", version=7, created=5), job_pod(0, "a", version=9, created=5)
    for order in ([first, second], [second, first]):
        tracker = of_job()
        tracker.list_pods(order, 10, 1.0)
        newest = tracker.places().places[0].pod
        assert newest is not None
        assert newest.name == "train-0-a"
        tracker.pod_event("MODIFIED", job_pod(0, "z", version=11, created=5), 2.0)
        assert tracker.places().places[0].pod == newest


def test_a_restart_of_a_container_is_reported_with_its_exit_code() -> None:
    tracker = of_statefulset()
    tracker.list_pods([stateful_pod(0, version=1, statuses=[status("running")])], 10, 1.0)
    ended = status("terminated", exitCode=137, reason="Error")
    changes = tracker.pod_event("MODIFIED", stateful_pod(0, version=11, statuses=[ended]), 2.0)
    identity = (LLAMA[0], "uid-llama-0", "llama-0", "trainer")
    assert changes == [ContainerEnded(2.0, *identity, "containerd://0", 137, "Error")]
    again = status("running", 1, last={"exitCode": 137, "reason": "Error"})
    changes = tracker.pod_event("MODIFIED", stateful_pod(0, version=12, statuses=[again]), 3.0)
    assert changes == [ContainerRestarted(3.0, *identity, 1, 0, 137, "Error")]
    place = tracker.places().places[0]
    assert place.since_s == 1.0  # the pod is the same
    assert place.pod is not None
    assert place.pod.containers[0].restart_count == 1


def test_a_deletion_shows_the_end_that_no_event_has_shown() -> None:
    tracker = of_job()
    tracker.list_pods([job_pod(0, "a", version=1, statuses=[status("running")])], 10, 1.0)
    ended = status("terminated", exitCode=9, reason="Error")
    last = job_pod(0, "a", version=15, phase="Failed", statuses=[ended])
    changes = tracker.pod_event("DELETED", last, 2.0)
    identity = (TRAIN[0], "uid-train-0-a", "train-0-a")
    assert changes == [
        ContainerEnded(2.0, *identity, "trainer", "containerd://0", 9, "Error"),
        ReadinessChanged(2.0, *identity, False),
        PlaceEmptied(2.0, *identity, "Failed"),
    ]
    assert tracker.places().places[0].former_pods[0].containers[0].exit_code == 9


def test_a_node_that_is_missing_from_a_list_was_deleted() -> None:
    conditions = [{"type": "Ready", "status": "True"}]
    node = {"metadata": {"name": "node0"}, "status": {"conditions": conditions}}
    tracker = of_statefulset()
    tracker.list_pods([stateful_pod(0)], 9, 1.0)
    tracker.list_nodes([node], 1.0)
    assert tracker.list_nodes([], 2.0) == [NodeReadinessChanged(2.0, "node0", False, (LLAMA[0],))]


def test_restarts_that_were_missed_are_counted() -> None:
    tracker = of_statefulset()
    tracker.list_pods([stateful_pod(0, version=1, statuses=[status("running")])], 10, 1.0)
    later = status("running", 4, last={"exitCode": 1, "reason": "Error"})
    (change,) = tracker.list_pods([stateful_pod(0, version=19, statuses=[later])], 20, 9.0)
    assert isinstance(change, ContainerRestarted)
    assert (change.restart_count, change.restarts_unseen, change.exit_code) == (4, 3, 1)


def test_a_restart_before_the_first_list_is_no_change() -> None:
    tracker = of_statefulset()
    changes = tracker.list_pods([stateful_pod(0, statuses=[status("running", 4)])], 10, 1.0)
    assert [type(change) for change in changes] == [PlaceTaken]


def test_an_old_event_changes_nothing() -> None:
    tracker = of_statefulset()
    tracker.list_pods([stateful_pod(0, "b", version=8)], 10, 1.0)
    assert tracker.pod_event("ADDED", stateful_pod(0, "a", version=3), 2.0) == []
    assert tracker.pod_event("DELETED", stateful_pod(0, "b", version=7), 2.0) == []
    assert tracker.pod_event("MODIFIED", stateful_pod(0, "b", version=8, phase="Failed"), 2.0) == []
    tracker.pod_event("DELETED", stateful_pod(0, "b", version=12), 3.0)
    assert tracker.pod_event("MODIFIED", stateful_pod(0, "b", version=11), 4.0) == []
    assert tracker.places().places[0].pod is None


def test_a_list_that_is_older_than_the_last_one_changes_nothing() -> None:
    tracker = of_statefulset()
    tracker.list_pods([stateful_pod(0, "b", version=8)], 10, 1.0)
    assert tracker.list_pods([], 9, 2.0) == []
    # a pod that is newer than the list cannot be missing from it
    tracker.pod_event("ADDED", stateful_pod(1, "c", version=15), 3.0)
    assert tracker.list_pods([stateful_pod(0, "b", version=8)], 12, 4.0) == []


def test_a_pod_that_left_the_selector_may_come_back() -> None:
    tracker = of_statefulset()
    tracker.list_pods([stateful_pod(0, "a", version=8)], 10, 1.0)
    tracker.pod_event("DELETED", stateful_pod(0, "a", version=11), 2.0)
    (change,) = [
        change
        for change in tracker.pod_event("ADDED", stateful_pod(0, "a", version=12), 3.0)
        if isinstance(change, PlaceTaken)
    ]
    assert change == PlaceTaken(3.0, LLAMA[0], "a", "llama-0", "a")
    assert tracker.places().places[0].former_pods == ()


def failed_pods(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Return failed pods of one place, the oldest one first."""
    return [
        job_pod(0, f"{number:03}", version=number + 1, created=number, phase="Failed")
        for number in range(first, first + count)
    ]


def test_the_holder_of_a_place_with_many_ended_pods_may_be_deleted() -> None:
    tracker = of_job()
    live = job_pod(0, "live", version=300, created=300)
    tracker.list_pods([*failed_pods(150), live], 300, 1.0)
    (emptied,) = [
        change
        for change in tracker.pod_event(
            "DELETED", job_pod(0, "live", version=301, created=300, terminating=True), 2.0
        )
        if isinstance(change, PlaceEmptied)
    ]
    assert emptied == PlaceEmptied(2.0, TRAIN[0], "uid-train-0-live", "train-0-live", "deleted")
    tracker.pod_event("ADDED", job_pod(0, "next", version=302, created=302), 3.0)
    assert holders(tracker) == {TRAIN[0]: "uid-train-0-next"}


def test_the_newest_ended_pods_of_a_place_are_kept() -> None:
    """They are kept whatever the order of the list, and are up to date."""
    tracker = of_job()
    tracker.list_pods([*failed_pods(90, 60), *failed_pods(60)], 300, 1.0)
    tracker.pod_event("ADDED", job_pod(0, "live", version=301, created=300), 2.0)
    for deleted in (10, 149):
        last = job_pod(0, f"{deleted:03}", version=400, created=deleted, phase="Failed")
        tracker.pod_event("DELETED", last, 3.0)
    former = tracker.places().places[0].former_pods
    assert [pod.name for pod in former] == [f"train-0-{number:03}" for number in range(50, 150)]
    assert [pod.name for pod in former if pod.is_deleted] == ["train-0-149"]


def silent_pod(version: int) -> dict[str, Any]:
    return stateful_pod(1, version=version, node="node1", ready=False, containers_ready="True")


def test_a_silent_node_shows_in_its_pods() -> None:
    tracker = of_statefulset()
    tracker.list_pods(
        [stateful_pod(0, version=1), stateful_pod(1, version=2, node="node1")], 9, 1.0
    )
    changes = tracker.pod_event("MODIFIED", silent_pod(11), 40.0)
    assert NodeReadinessChanged(40.0, "node1", False, (LLAMA[1],)) in changes
    tracker.pod_event("MODIFIED", stateful_pod(0, version=12), 50.0)
    assert [place.silent_since_s for place in tracker.places().places] == [None, 40.0]
    assert [place.is_node_ready for place in tracker.places().places] == [True, False]
    changes = tracker.pod_event("MODIFIED", stateful_pod(1, version=13, node="node1"), 60.0)
    assert NodeReadinessChanged(60.0, "node1", True, (LLAMA[1],)) in changes
    assert [place.silent_since_s for place in tracker.places().places] == [None, None]


def test_the_object_of_a_node_decides_whether_it_is_ready() -> None:
    def node(ready: str) -> dict[str, Any]:
        conditions = [{"type": "Ready", "status": ready}]
        return {"metadata": {"name": "node1"}, "status": {"conditions": conditions}}

    tracker = of_statefulset()
    tracker.list_pods([stateful_pod(1, version=1, node="node1")], 9, 1.0)
    assert tracker.list_nodes([node("True")], 1.0) == []
    assert tracker.node_event("MODIFIED", node("Unknown"), 30.0) == [
        NodeReadinessChanged(30.0, "node1", False, (LLAMA[1],))
    ]
    assert tracker.node_event("MODIFIED", node("Unknown"), 31.0) == []
    assert tracker.node_event("MODIFIED", node("True"), 50.0) == [
        NodeReadinessChanged(50.0, "node1", True, (LLAMA[1],))
    ]
    assert tracker.node_event("DELETED", node("True"), 60.0)[0].at_s == 60.0


def jobset(version: int, uid: str = "set", **status: Any) -> dict[str, Any]:
    metadata = {"name": "x", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {}, "status": status}


def test_restarts_and_the_end_of_a_jobset_are_reported_once() -> None:
    tracker = JobTracker(membership(parse_reference("jobset/x"), None))
    assert tracker.list_job(jobset(5, restarts=2), 6, 1.0) == []
    assert tracker.job_event("MODIFIED", jobset(7, restarts=3), 2.0) == [JobRestarted(2.0, 3)]
    assert tracker.job_event("MODIFIED", jobset(7, restarts=4), 2.5) == []  # no newer version
    failed = [{"type": "Failed", "status": "True", "reason": "ReachedMaxRestarts", "message": "m"}]
    changes = tracker.job_event("MODIFIED", jobset(9, restarts=3, conditions=failed), 3.0)
    assert changes == [JobEnded(3.0, "failed", "ReachedMaxRestarts", "m")]
    assert tracker.job_event("MODIFIED", jobset(10, restarts=3, conditions=failed), 4.0) == []
    assert tracker.places().restart_attempt == 3


def test_another_object_of_the_name_begins_anew() -> None:
    tracker = JobTracker(membership(parse_reference("jobset/x"), None))
    tracker.list_job(jobset(5, restarts=2), 6, 1.0)
    gone = tracker.job_event("DELETED", jobset(8, restarts=2), 2.0)
    assert gone == [JobReplaced(2.0, "", "set")]
    assert tracker.list_job(None, 7, 2.0) == []
    new = tracker.job_event("ADDED", jobset(9, "other", restarts=0), 3.0)
    assert new == [JobReplaced(3.0, "other", "")]
    assert tracker.places().restart_attempt == 0


def test_restarts_show_in_the_pods_of_a_selector() -> None:
    tracker = JobTracker(membership(parse_reference("pods/app=x"), None))
    label = "jobset.sigs.k8s.io/restart-attempt"
    tracker.list_pods([pod("a", version=1, labels={label: "1"})], 5, 1.0)
    changes = tracker.pod_event("ADDED", pod("b", version=6, labels={label: "2"}), 2.0)
    assert changes[-1] == JobRestarted(2.0, 2)


# Histories: a cluster makes, changes and removes pods of three places. The tracker receives some of
# the events, in any order, and lists between them.


@dataclass
class Cluster:
    """The truth: pods that exist, and every event about them."""

    version: int = 0
    made: int = 0
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def act(self, act: str, place: int, pick: int) -> None:
        self.version += 1
        uids = [uid for uid, pod in self.pods.items() if _index(pod) == place]
        if act == "create" or not uids:
            self.made += 1
            made = job_pod(place, f"p{self.made}", phase="Pending", created=self.made)
            self.pods[made["metadata"]["uid"]] = made
            self._emit("ADDED", made)
            return
        pod = self.pods[uids[pick % len(uids)]]
        if act == "delete":
            del self.pods[pod["metadata"]["uid"]]
            self._emit("DELETED", pod)
            return
        if act == "terminate":
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T01:00:00Z"
        elif pod["status"]["phase"] not in ("Failed", "Succeeded"):  # an end is final
            pod["status"]["phase"] = act
        self._emit("MODIFIED", pod)

    def _emit(self, event: str, pod: dict[str, Any]) -> None:
        pod["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((event, copy.deepcopy(pod)))

    def listing(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(pod) for pod in self.pods.values()]

    def holders(self) -> dict[PlaceKey, str]:
        """Return the pod that must hold each place, found by trying all of them."""
        holders: dict[PlaceKey, str] = {}
        for place in range(3):
            live = [
                pod
                for pod in self.pods.values()
                if _index(pod) == place and pod["status"]["phase"] in ("Pending", "Running")
            ]
            stays = [pod for pod in live if "deletionTimestamp" not in pod["metadata"]] or live
            if stays:
                newest = max(stays, key=lambda pod: pod["metadata"]["creationTimestamp"])
                holders[TRAIN[place]] = newest["metadata"]["uid"]
        return holders


def _index(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"])


def holders(tracker: JobTracker) -> dict[PlaceKey, str]:
    return {place.key: place.pod.uid for place in tracker.places().places if place.pod}


class Reader:
    """A reader of changes, which must come to the same holders as the tracker."""

    def __init__(self) -> None:
        self.holders: dict[PlaceKey, str] = {}
        self.last: dict[PlaceKey, str] = {}

    def read(self, changes: list[JobChange]) -> None:
        for change in changes:
            if isinstance(change, PlaceTaken):
                assert self.holders.get(change.place) != change.uid
                assert change.previous_uid == self.last.get(change.place, "")
                self.holders[change.place] = self.last[change.place] = change.uid
            elif isinstance(change, PlaceEmptied):
                assert self.holders.pop(change.place) == change.uid


ACTS = st.sampled_from(
    ["create", "create", "Running", "Running", "Failed", "Succeeded", "terminate", "delete"]
)
HISTORIES = st.lists(st.tuples(ACTS, st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=40)
THOUSANDS = hypothesis.settings(max_examples=600, deadline=None)


@THOUSANDS
@hypothesis.given(HISTORIES)
def test_holders_are_right_after_each_event(history: list[tuple[str, int, int]]) -> None:
    cluster, tracker, reader = Cluster(), of_job(), Reader()
    tracker.list_pods([], 0, 0.0)
    for moment, step in enumerate(history):
        cluster.act(*step)
        reader.read(tracker.pod_event(*cluster.events[-1], float(moment)))
        assert holders(tracker) == cluster.holders() == reader.holders


@THOUSANDS
@hypothesis.given(HISTORIES, st.data())
def test_a_list_mends_whatever_happened_to_the_events(
    history: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """Events are lost, repeated and out of order, and lists come late."""
    cluster, tracker, reader = Cluster(), of_job(), Reader()
    delivered = 0
    lists: list[tuple[list[dict[str, Any]], int]] = []
    for moment, step in enumerate(history):
        cluster.act(*step)
        lists.append((cluster.listing(), cluster.version))
        choice = data.draw(st.sampled_from(["none", "event", "event", "list", "old list"]))
        if choice == "event":
            event = data.draw(st.sampled_from(cluster.events))
            reader.read(tracker.pod_event(*copy.deepcopy(event), float(moment)))
            delivered += 1
        elif choice != "none":
            index = (
                len(lists) - 1 if choice == "list" else data.draw(st.integers(0, len(lists) - 1))
            )
            reader.read(tracker.list_pods(*copy.deepcopy(lists[index]), float(moment)))
        assert holders(tracker) == reader.holders
    reader.read(tracker.list_pods(cluster.listing(), cluster.version, 1000.0))
    assert holders(tracker) == cluster.holders() == reader.holders
    for event in data.draw(st.permutations(cluster.events)):  # all of them are old by now
        assert tracker.pod_event(*copy.deepcopy(event), 2000.0) == []
    assert holders(tracker) == cluster.holders()


@THOUSANDS
@hypothesis.given(HISTORIES, st.randoms(use_true_random=False))
def test_events_in_any_order_come_to_the_same_holders(
    history: list[tuple[str, int, int]], random: Any
) -> None:
    cluster, tracker = Cluster(), of_job()
    for step in history:
        cluster.act(*step)
    events = [*cluster.events, *cluster.events[: len(cluster.events) // 2]]
    random.shuffle(events)
    for event in events:
        tracker.pod_event(*copy.deepcopy(event), 0.0)
    assert holders(tracker) == cluster.holders()


@THOUSANDS
@hypothesis.given(HISTORIES)
def test_no_pod_is_in_two_states_of_a_place(history: list[tuple[str, int, int]]) -> None:
    cluster, tracker = Cluster(), of_job()
    for step in history:
        cluster.act(*step)
        tracker.pod_event(*cluster.events[-1], 0.0)
    for place in tracker.places().places:
        former = [pod.uid for pod in place.former_pods]
        assert len(set(former)) == len(former)
        assert place.pod is None or place.pod.uid not in former
        for ended in place.former_pods:
            assert ended.is_deleted != (ended.uid in cluster.pods)
