"""Tests of the progress of a second job: when it has shown enough, and why it will not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.jobs.objects import indexed_job, job_pod, stateful_pod, stateful_set, status

from chaoskit.attach.jobs.membership import PlaceKey, membership
from chaoskit.attach.jobs.places import JobPlaces
from chaoskit.attach.jobs.reference import parse_reference
from chaoskit.attach.jobs.tracker import JobTracker
from chaoskit.attach.logs.records import (
    ContainerLife,
    ContainerLine,
    HoleReason,
    LogHole,
    LogPlace,
)
from chaoskit.attach.twin.progress import StepGoal, TwinLog, why_failed
from chaoskit.stacks import LogPatterns

S = 10**9
WATCH = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.]+)")
GOAL = StepGoal(first=5, last=10, target=10, printing_nodes=1)


def line(step: int, loss: float = 1.0) -> ContainerLine:
    place = LogPlace("twin-0", "uid", "trainer")
    content = f"step {step} loss {loss}".encode()
    return ContainerLine(place, ContainerLife(0, "c"), "", 0, 0, content)


def log_of(*nodes: range) -> TwinLog:
    """Return the log of pods that have shown steps."""
    log = TwinLog(WATCH)
    for number, steps in enumerate(nodes):
        for step in steps:
            log.receive(f"twin-{number}", line(step, 1.0 + number))
    return log


def test_a_goal_is_reached_with_its_last_step() -> None:
    assert not log_of(range(1, 10)).has_shown(GOAL, 0)
    log = log_of(range(1, 11))
    assert log.has_shown(GOAL, 0)
    assert log.why_unusable(GOAL) == ""


def test_a_later_target_is_waited_for() -> None:
    goal = replace(GOAL, target=20)
    assert not log_of(range(1, 20)).has_shown(goal, 0)
    assert log_of(range(1, 21)).has_shown(goal, 0)


@pytest.mark.parametrize("nodes", [(range(1, 11),), (range(1, 11), range(1, 9))])
def test_lines_of_other_pods_may_come_later(nodes: tuple[range, ...]) -> None:
    goal, log = replace(GOAL, printing_nodes=2), log_of(*nodes)
    assert not log.has_shown(goal, 1 * S)
    assert not log.has_shown(goal, 5 * S)
    assert log.has_shown(goal, 7 * S)


def test_steps_that_not_all_pods_have_shown_are_left_out() -> None:
    counts, losses = log_of(range(1, 11), range(1, 9)).shown()
    assert counts == dict.fromkeys(range(1, 9), 2)
    assert losses == dict.fromkeys(range(1, 9), (1.0, 2.0))


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([], "its log shows no step (0 lines)"),
        ([1, 2, 3], "its log ends with step 3, before step 10"),
        ([*range(6, 11)], "its log begins with step 6, after step 5 of the job"),
        (
            [*range(1, 8), *range(5, 11)],
            "it was disturbed without a fault: its log on twin-0 goes back from step 7 to step 5",
        ),
    ],
)
def test_logs_that_cannot_be_compared(steps: list[int], reason: str) -> None:
    log = TwinLog(WATCH)
    for step in steps:
        log.receive("twin-0", line(step))
    assert log.why_unusable(GOAL).startswith(reason)


def test_a_hole_matters_in_a_log_that_shows_steps() -> None:
    hole = LogHole(line(1).place, 0, 0, HoleReason.ROTATED, "", "", "", 0)
    log = log_of(range(1, 11))
    log.receive("twin-1", hole)
    assert log.why_unusable(GOAL) == ""
    log.receive("twin-0", hole)
    assert log.why_unusable(GOAL).startswith("lines of its log may be missing: twin-0: the log was")


def places_of(reference: str, job: dict[str, Any], *pods: dict[str, Any]) -> JobPlaces:
    tracker = JobTracker(membership(parse_reference(reference), job))
    tracker.list_job(job, 1, 0.0)
    tracker.list_pods(pods, 1, 0.0)
    return tracker.places()


def test_a_container_that_ends_again_and_again() -> None:
    """Fewer ends may be those of pods that did not start together."""
    for restarts, reason in [
        (2, ""),
        (
            3,
            "container trainer at llama[1] has ended 3 times, the last time with exit code 7",
        ),
    ]:
        waiting = status("waiting", restarts, reason="CrashLoopBackOff", last={"exitCode": 7})
        pods = [stateful_pod(0), stateful_pod(1, statuses=[waiting])]
        places = places_of("statefulset/llama", stateful_set(2), *pods)
        containers = {place.key: "trainer" for place in places.places}
        assert why_failed(places, containers) == reason


def test_a_container_that_ends_well_again_and_again_has_not_failed() -> None:
    waiting = status("waiting", 5, reason="CrashLoopBackOff", last={"exitCode": 0})
    places = places_of("statefulset/llama", stateful_set(1), stateful_pod(0, statuses=[waiting]))
    assert why_failed(places, {PlaceKey("llama", 0): "trainer"}) == ""


def test_failed_pods_of_one_place_count() -> None:
    ended = [status("terminated", exitCode=3)]
    pods = [
        job_pod(0, suffix, phase="Failed", statuses=ended, created=number)
        for number, suffix in enumerate("abc")
    ]
    containers = {PlaceKey("train", 0): "trainer"}
    assert "has ended 3 times" in why_failed(
        places_of("job/train", indexed_job(1), *pods), containers
    )
    assert why_failed(places_of("job/train", indexed_job(1), *pods[:2]), containers) == ""


def test_a_job_that_has_failed() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}
    places = places_of("job/train", indexed_job(1, conditions=[failed]))
    assert why_failed(places, {}) == "it has failed (BackoffLimitExceeded, m)"
