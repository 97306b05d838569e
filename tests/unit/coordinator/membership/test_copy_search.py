"""Tests of the search for copies of the state, which does not depend on the times of ticks."""

from __future__ import annotations

import msgspec
import pytest

from chaoskit.coordinator.membership.copy_search import CopySearch
from chaoskit.coordinator.membership.limits import LIMITS
from chaoskit.wire.messages import Endpoint, OfferedSnapshot


def test_the_time_without_copies_counts_from_the_end_of_the_questions_whoever_looked() -> None:
    """A replay has no ticks: its patience must end at the time at which it ended before."""
    watched, replayed = CopySearch(), CopySearch()
    for search in (watched, replayed):
        assert search.begin(["a", "b"], 10.0) == ["a", "b"]
        search.answer("a", (), 10.5)
    for tick_s in (10.6, 12.1, 13.0):  # "b" is silent
        watched.begin(["a", "b"], tick_s)
        watched.without_copies_s(tick_s)
    assert (
        watched.without_copies_s(15.0)
        == replayed.without_copies_s(15.0)
        == pytest.approx(15.0 - (10.0 + LIMITS.recall_s))
    )


def test_the_time_without_copies_counts_from_the_last_answer() -> None:
    search = CopySearch()
    search.begin(["a"], 10.0)
    assert search.without_copies_s(10.25) == 0.0
    search.answer("a", (), 10.5)
    assert search.without_copies_s(11.0) == pytest.approx(0.5)


def test_answers_are_void_if_the_ranks_trained_on_after_them() -> None:
    """Copies that some nodes told of are too old beside those of a node that answers later and went further."""
    search = CopySearch()
    search.begin(["a", "b"], 10.0)
    search.answer("a", (), 10.01, committed=6)
    search.answer("b", (), 10.02, committed=7)  # ranks may be apart by a step
    assert not search.outdated
    search.forget_answers()
    search.begin(["a", "b"], 11.0)
    search.answer("a", (), 11.01, number=1, committed=7)
    search.answer("b", (), 11.3, number=1, committed=7)
    assert not search.outdated
    search.forget_answers()
    search.begin(["a", "b"], 12.0)
    search.answer("a", (), 12.01, number=2, committed=7)
    search.answer("b", (), 12.3, number=2, committed=9)
    assert search.outdated


def test_a_difference_between_ranks_that_stays_is_asked_about_once() -> None:
    """Two nodes that never come closer do not keep each other's answers void."""
    search = CopySearch()
    for number in range(2):
        search.begin(["a", "b"], 10.0 + number)
        search.answer("a", (), 10.01 + number, number=number, committed=6)
        search.answer("b", (), 10.3 + number, number=number, committed=7)
        assert search.outdated == (number == 0)
        search.forget_answers()


def test_while_all_ranks_train_on_a_slow_node_does_not_keep_the_other_answers_fresh() -> None:
    """A world that grows is not held up by a node without members; then its ranks are steps ahead of what was told."""
    search = CopySearch()
    search.begin(["a", "b"], 10.0)
    search.answer("a", (), 10.01)
    late_s = 10.02 + LIMITS.fresh_s
    assert search.has_open_questions
    assert not search.is_stale(late_s, trains_on=False)
    assert search.is_stale(late_s, trains_on=True)
    assert not search.is_stale(10.0 + LIMITS.fresh_s, trains_on=True)


def test_a_copy_beside_a_corrupt_one_of_the_same_age_is_taken() -> None:
    """A rank that took its piece over from another node has it copied anew: in another place, with the same seal."""
    search = CopySearch()
    damaged, renewed = (
        OfferedSnapshot("a", "a.0", 3, 1, 8, "ab", Endpoint("host", "", 7000, 100, 4), inode=inode)
        for inode in (1, 2)
    )
    search.begin(["a"], 10.0)
    search.answer("a", [damaged], 10.1)
    search.fail(damaged, True, 10.2)
    search.forget_answers()
    search.begin(["a"], 11.0)
    elsewhere = Endpoint("host", "", 8000, 100, 5)
    damaged, renewed = (
        msgspec.structs.replace(copy, endpoint=elsewhere) for copy in (damaged, renewed)
    )
    search.answer("a", [damaged, renewed], 11.1, number=1)
    assert search.copies.restorable == (renewed,)
