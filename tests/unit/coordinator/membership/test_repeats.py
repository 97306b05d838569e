"""Tests of the end of a job by the same failure again and again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.coordinator.membership.strikes import Repeats


def test_the_same_failure_on_every_rank_ends_the_job() -> None:
    """Two ranks and a replacement fail alike at one step."""
    repeats = Repeats(tolerated=2)
    assert [repeats.note("ZeroDivisionError", 5) for _ in range(3)] == [False, False, True]


def test_a_failure_that_is_heard_twice_counts_once() -> None:
    """An agent tells it again to the next coordinator, or to this one."""
    repeats = Repeats(tolerated=2)
    assert not any(repeats.note("ZeroDivisionError", 5, worker) for worker in "aabab")
    assert repeats.note("ZeroDivisionError", 5, "c")


def test_progress_starts_the_count_again() -> None:
    """A failure that lets steps through is bad luck, or is at least not the end."""
    repeats = Repeats(tolerated=2)
    assert not any(repeats.note("ZeroDivisionError", step) for step in range(50))


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=60), st.integers(1, 5)
)
def test_only_a_run_longer_than_the_limit_ends_the_job(
    failures: list[tuple[str, int]], limit: int
) -> None:
    """The job ends exactly when the last ``limit + 1`` failures were the same, without a step in
    between.
    """
    repeats = Repeats(limit)
    for place, (error, step) in enumerate(failures):
        tail = failures[max(0, place - limit) : place + 1]
        assert repeats.note(error, step) == (
            len(tail) == limit + 1 and set(tail) == {(error, step)}
        )
