"""Tests of the end of the observation of a job that goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.experiment.injection.observation import NEW_STEPS, JobObservation

S = 10**9


def shown(observation: JobObservation, *steps: tuple[int, float]) -> JobObservation:
    for step, at_s in steps:
        observation.show(step, int(at_s * S))
    return observation


def test_enough_new_steps_after_the_observation_end_it() -> None:
    observation = shown(JobObservation(10.0), (1, 0.0), (2, 1.0), (3, 11.5), (4, 12.0))
    assert not observation.is_over(1 * S)
    assert shown(observation, (5, 12.5)).is_over(1 * S)


def test_steps_that_are_shown_again_are_not_new() -> None:
    """A job that went back to its last checkpoint has not recovered yet."""
    observation = shown(JobObservation(1.0), (20, 0.0), (15, 5.0), (16, 6.0), (17, 7.0), (18, 8.0))
    assert not observation.is_over(1 * S)


def test_a_later_act_begins_the_observation_anew() -> None:
    observation = shown(JobObservation(2.0), *((step, step) for step in range(10)))
    assert observation.is_over(5 * S)
    assert not observation.is_over(6 * S)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100)), max_size=60), st.integers(0, 90)
)
def test_it_is_over_exactly_if_the_last_new_steps_came_after_it(
    lines: list[tuple[int, int]], act_s: int
) -> None:
    """Compare with a count over the whole log."""
    lines = sorted(lines, key=lambda line: line[1])
    observation, highest, times = JobObservation(5.0), -1, list[int]()
    for step, at_s in lines:
        observation.show(step, at_s * S)
        if step > highest:
            highest = step
            times.append(at_s)
    late = [at_s for at_s in times if at_s >= act_s + 5]
    assert observation.is_over(act_s * S) == (len(late) >= NEW_STEPS)
