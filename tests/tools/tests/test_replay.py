"""Tests of the judgement of a replay: the cases that fail when their feature is off. See
tests/tools/replay.py.
"""

from __future__ import annotations

from typing import Any

import replay

TEXT = "It holds."


def outcomes(*cases: str) -> dict[str, dict[str, Any]]:
    """Return the outcomes of cases a, b, ... of one promise."""
    return {
        name: {
            "outcome": outcome,
            "promises": [TEXT],
            **({"error": "no"} if outcome == "failed" else {}),
        }
        for name, outcome in zip("abc", cases, strict=False)
    }


def test_a_promise_notices_if_one_case_fails_that_passes_with_the_feature() -> None:
    """The report shows the error of that case."""
    judgement = replay.judged(TEXT, outcomes("passed", "passed"), outcomes("passed", "failed"))
    assert judgement == replay.Seen(failed={"b": "no"}, passed=1, left_out=0)
    assert not judgement.is_unnoticed
    assert replay.report(TEXT, judgement) == "  red: 'It holds.'\n       b: no"


def test_cases_that_pass_with_the_feature_off_are_told() -> None:
    """Such cases would pass with any behaviour, and the report says so."""
    judgement = replay.judged(TEXT, outcomes("passed"), outcomes("passed"))
    assert judgement.is_unnoticed
    assert "PASSES WITH ITS FEATURE OFF" in replay.report(TEXT, judgement)


def test_a_case_that_fails_with_the_feature_too_shows_nothing() -> None:
    """A case that is skipped on this machine shows nothing, either."""
    judgement = replay.judged(TEXT, outcomes("failed", "skipped"), {})
    assert judgement == replay.Seen(failed={}, passed=0, left_out=2)
    assert not judgement.is_unnoticed
    assert "NOT RUN HERE" in replay.report(TEXT, judgement)


def test_a_change_that_breaks_the_collection_shows_nothing() -> None:
    """A collection that breaks gives no outcome of any case."""
    judgement = replay.judged(TEXT, outcomes("passed"), {})
    assert judgement == replay.Seen(failed={}, passed=0, left_out=1)
    assert not judgement.is_unnoticed


def test_tests_that_do_not_end_without_the_feature_notice() -> None:
    """A hang counts as noticing: it is visible to a developer."""
    assert not replay.judged(TEXT, outcomes("passed"), None).is_unnoticed


def test_other_promises_of_the_same_tests_are_left_out() -> None:
    """Cases of another promise do not count, since a change may break several promises."""
    assert replay.judged("Another one.", outcomes("passed"), outcomes("failed")) == replay.Seen(
        {}, 0, 0
    )
