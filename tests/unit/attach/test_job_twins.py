"""Tests of results of second jobs that later runs of a session use again."""

from __future__ import annotations

import pytest

from chaoskit.attach.twin.cache import JobTwins
from chaoskit.attach.twin.progress import StepGoal
from chaoskit.experiment.twin.command_twin import CommandTwin


def result(last: int, failure: str = "") -> CommandTwin:
    """Return the result of a second job that has shown the steps up to ``last``."""
    return CommandTwin(dict.fromkeys(range(1, last + 1), 1), {}, f"twin-{last}", failure=failure)


def goal(last: int) -> StepGoal:
    return StepGoal(first=1, last=last, target=100, printing_nodes=1)


@pytest.mark.parametrize(("last", "is_used"), [(9, True), (10, True), (11, False)])
def test_a_result_serves_runs_that_need_no_later_step(last: int, is_used: bool) -> None:
    twins = JobTwins()
    twins.put("a", result(10))
    assert (twins.get("a", goal(last)) is not None) is is_used


def test_a_result_belongs_to_its_job_and_its_file() -> None:
    twins = JobTwins()
    twins.put("a", result(10))
    assert twins.get("b", goal(5)) is None


def test_a_result_that_came_further_takes_the_place_of_another() -> None:
    twins = JobTwins()
    twins.put("a", result(10))
    twins.put("a", result(20))
    twin = twins.get("a", goal(15))
    assert twin is not None
    assert twin.run_id == "twin-20"


def test_a_second_job_that_failed_is_tried_again() -> None:
    twins = JobTwins()
    twins.put("a", result(10, "it has failed"))
    assert twins.get("a", goal(5)) is None
