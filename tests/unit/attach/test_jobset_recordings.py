"""Recordings of a JobSet that was broken, replayed through the tracker: each tells its story.

Each line of a story is the moment in seconds, the change, the index of the place, and the last letters
of the pod's name.
"""

from __future__ import annotations

import pytest
from support.jobs import recordings

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

pytestmark = pytest.mark.skipif(
    bool(recordings.missing()), reason=f"Kubernetes: {recordings.missing()}"
)


def line(change: JobChange) -> str:
    """Return a change as a line of a story."""
    at = f"{change.at_s:.2f}"
    if isinstance(change, JobRestarted):
        return f"{at} restart {change.attempt}"
    if isinstance(change, NodeReadinessChanged):
        places = ",".join(str(key.index) for key in change.places)
        return f"{at} {change.node} {'ready' if change.is_ready else 'silent'} ({places})"
    if isinstance(change, JobEnded | JobReplaced):
        return f"{at} {change}"
    pod = f"{change.place.index} {change.pod[-5:]}"
    match change:
        case PlaceTaken():
            return f"{at} taken {pod}"
        case PlaceEmptied():
            return f"{at} empty {pod} {change.cause}"
        case PodTerminating():
            return f"{at} terminating {pod}"
        case ReadinessChanged():
            return f"{at} {'ready' if change.is_ready else 'unready'} {pod}"
        case ContainerEnded():
            return f"{at} ended {pod} {change.exit_code} {change.reason}"
        case ContainerRestarted():
            return f"{at} restarted {pod} {change.restart_count}"


def replay(name: str) -> tuple[JobTracker, list[JobChange]]:
    """Return the tracker after a recording, and all changes."""
    tracker = JobTracker(membership(parse_reference("jobset/train"), None))
    changes = tracker.list_job(None, 0, 0.0) + tracker.list_pods([], 0, 0.0)
    spec = None  # of the JobSet, recorded once
    for observation in recordings.recording(name):
        if observation["what"] != "watch":
            continue
        take = {"Pod": tracker.pod_event, "JobSet": tracker.job_event}.get(observation["kind"])
        if take is not None:
            recorded = observation["object"]
            if observation["kind"] == "JobSet":
                spec = recorded.get("spec") or spec
                recorded["spec"] = spec
            changes += take(observation["event"], observation["object"], observation["t"])
    return tracker, changes


STORIES = {
    "kill_rank": """
        0.77 taken 0 hjbjk
        0.81 taken 2 bmd4c
        0.83 taken 1 x8txb
        1.52 ready 0 hjbjk
        1.57 ready 1 x8txb
        1.65 ready 2 bmd4c
        16.65 ended 1 x8txb 1 Error
        16.65 unready 1 x8txb
        17.58 ended 0 hjbjk 1 Error
        17.58 unready 0 hjbjk
        17.77 empty 1 x8txb Failed
        18.07 ended 2 bmd4c 1 Error
        18.07 unready 2 bmd4c
        18.69 terminating 0 hjbjk
        18.70 terminating 2 bmd4c
        18.78 empty 0 hjbjk Failed
        19.19 empty 2 bmd4c Failed
        19.70 restart 1
        19.74 terminating 1 x8txb
        20.13 taken 0 zn5sd
        20.17 taken 2 cnmkp
        20.23 taken 1 b67cm
        20.93 ready 0 zn5sd
        21.03 ready 2 cnmkp
        21.12 ready 1 b67cm
    """,
    "kill_container": """
        0.78 taken 0 ndzpz
        0.82 taken 1 424mw
        0.83 taken 2 wdfxx
        1.54 ready 0 ndzpz
        1.67 ready 1 424mw
        2.08 ready 2 wdfxx
        17.29 ended 1 424mw 137 Error
        17.29 unready 1 424mw
        18.42 empty 1 424mw Failed
        19.32 terminating 2 wdfxx
        19.35 terminating 0 ndzpz
        20.01 ended 0 ndzpz 1 Error
        20.01 unready 0 ndzpz
        20.01 empty 0 ndzpz Failed
        20.02 ended 2 wdfxx 1 Error
        20.02 unready 2 wdfxx
        20.02 empty 2 wdfxx Failed
        20.34 restart 1
        20.37 terminating 1 424mw
        20.95 taken 0 kcgtc
        20.98 taken 2 kwgfs
        21.00 taken 1 5n4zq
        21.66 ready 0 kcgtc
        21.67 ready 2 kwgfs
        22.02 ready 1 5n4zq
    """,
    "delete_pod": """
        0.80 taken 0 c2qz5
        0.84 taken 1 ml6sq
        0.84 taken 2 zlt7j
        1.65 ready 1 ml6sq
        1.71 ready 2 zlt7j
        1.75 ready 0 c2qz5
        13.98 terminating 1 ml6sq
        14.97 terminating 2 zlt7j
        14.98 terminating 0 c2qz5
        15.18 empty 1 ml6sq deleted
        16.26 ended 2 zlt7j 1 Error
        16.26 unready 2 zlt7j
        16.26 empty 2 zlt7j Failed
        16.36 ended 0 c2qz5 1 Error
        16.36 unready 0 c2qz5
        16.36 empty 0 c2qz5 Failed
        17.02 restart 1
        17.22 taken 0 xp9nk
        17.25 taken 2 gctlt
        17.26 taken 1 jn7th
        17.90 ready 1 jn7th
        17.97 ready 0 xp9nk
        18.32 ready 2 gctlt
    """,
    "power_cut": """
        0.82 taken 0 vljsb
        0.84 taken 1 7l5wp
        0.85 taken 2 9mfml
        1.50 ready 0 vljsb
        1.76 ready 2 9mfml
        1.77 ready 1 7l5wp
        39.13 unready 1 7l5wp
        39.13 node1 silent (1)
        56.02 ended 1 7l5wp 255 Unknown
        56.02 node1 ready (1)
        57.05 empty 1 7l5wp Failed
        58.05 terminating 2 9mfml
        58.06 terminating 0 vljsb
        58.64 ended 0 vljsb 1 Error
        58.64 unready 0 vljsb
        58.64 empty 0 vljsb Failed
        59.24 ended 2 9mfml 1 Error
        59.24 unready 2 9mfml
        59.24 empty 2 9mfml Failed
        60.14 restart 1
        60.19 terminating 1 7l5wp
        60.26 taken 0 vdkmx
        60.29 taken 2 sd6n6
        60.29 taken 1 9k5hg
        60.88 ready 0 vdkmx
        60.98 ready 2 sd6n6
        61.08 ready 1 9k5hg
    """,
}


@pytest.mark.parametrize("name", STORIES)
def test_a_recording_tells_its_story(name: str) -> None:
    _, changes = replay(name)
    assert [line(change) for change in changes] == [
        text.strip() for text in STORIES[name].strip().splitlines()
    ]


@pytest.mark.parametrize("name", STORIES)
def test_the_places_after_a_recording_are_those_of_the_second_attempt(name: str) -> None:
    tracker, changes = replay(name)
    places = tracker.places()
    assert places.restart_attempt == 1
    assert places.job is not None
    assert (places.job.pods_wanted, places.job.outcome) == (3, "")
    assert [place.key for place in places.places] == [
        PlaceKey("train-workers-0", index) for index in range(3)
    ]
    for place in places.places:
        (former,) = place.former_pods
        assert place.is_ready
        assert place.pod is not None
        assert (former.restart_attempt, place.pod.restart_attempt) == (0, 1)
        assert former.is_deleted
        taken = [
            change
            for change in changes
            if isinstance(change, PlaceTaken) and change.place == place.key
        ]
        assert [change.uid for change in taken] == [former.uid, place.pod.uid]
        assert taken[1].previous_uid == former.uid
        assert place.since_s == taken[1].at_s


@pytest.mark.parametrize("name", STORIES)
def test_lists_in_the_middle_of_a_recording_change_nothing(name: str) -> None:
    """A list of the objects that exist says what the events have said."""
    tracker = JobTracker(membership(parse_reference("jobset/train"), None))
    pods: dict[str, dict[str, object]] = {}
    for observation in recordings.recording(name):
        if observation["what"] != "watch" or observation["kind"] != "Pod":
            continue
        pod = observation["object"]
        uid, version = pod["metadata"]["uid"], int(pod["metadata"]["resourceVersion"])
        tracker.pod_event(observation["event"], pod, observation["t"])
        if observation["event"] == "DELETED":
            pods.pop(uid, None)
        else:
            pods[uid] = pod
        assert tracker.list_pods(list(pods.values()), version, observation["t"]) == []
