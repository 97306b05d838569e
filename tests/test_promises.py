"""Promises that tests quote: each stands in the documentation, and the page of all of them is up to date."""

from __future__ import annotations

from support.promises import ROOT, marked, page, places


def test_each_promise_stands_in_the_documentation() -> None:
    """A sentence that was reworded or removed takes its test along."""
    assert [promise for promise in marked() if not places(promise.text)] == []


def test_a_sentence_that_stands_nowhere_is_noticed() -> None:
    """Else the check above would hold for anything."""
    assert places("Every GPU repairs itself.") == []


def test_the_page_is_up_to_date() -> None:
    """``python tests/support/promises.py > docs/promises.md`` writes it anew."""
    assert (ROOT / "docs" / "promises.md").read_text() == page()
