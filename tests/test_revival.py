"""Who is asked for copies of the state, and for how long: what does not depend on when somebody looks."""

from __future__ import annotations

import pytest

from chaoskit.control.revival import RECALL_S, Revival


def test_the_time_without_copies_counts_from_the_end_of_the_questions_whoever_looked() -> None:
    """A replay knows no ticks: it must come to the end of the patience when the first coordinator did."""
    watched, replayed = Revival(), Revival()
    for revival in (watched, replayed):
        assert revival.begin(["a", "b"], 10.0) == ["a", "b"]
        revival.answer("a", (), 10.5)
    for tick_s in (10.6, 12.1, 13.0):  # "b" is silent
        watched.begin(["a", "b"], tick_s)
        watched.bare_s(tick_s)
    assert watched.bare_s(15.0) == replayed.bare_s(15.0) == pytest.approx(15.0 - (10.0 + RECALL_S))


def test_the_time_without_copies_counts_from_the_last_answer() -> None:
    revival = Revival()
    revival.begin(["a"], 10.0)
    assert revival.bare_s(10.25) == 0.0
    revival.answer("a", (), 10.5)
    assert revival.bare_s(11.0) == pytest.approx(0.5)
