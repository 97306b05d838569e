"""Promises that tests quote: each stands in the documentation, and in the file of changes that turn
features off.
"""

from __future__ import annotations

import pytest
from features_off import Off, entries, without_entry
from promises import ROOT, marked, page, places

#: May only become smaller: a new promise needs an entry in ``tests/tools/promises_off.toml``.
WITHOUT_ENTRY = 191


def test_each_promise_stands_in_the_documentation() -> None:
    """Each quoted sentence stands in the documentation: a sentence that is reworded must be changed
    in its test.
    """
    assert [promise for promise in marked() if not places(promise.text)] == []


def test_a_sentence_that_stands_nowhere_is_noticed() -> None:
    """A sentence that is in no document has no places, so that the test above can fail."""
    assert places("Every GPU repairs itself.") == []


def test_the_page_is_up_to_date() -> None:
    """The page is that of the markers; ``python tests/tools/promises.py > docs/promises.md``
    updates it.
    """
    assert (ROOT / "docs" / "promises.md").read_text() == page()


def test_each_promise_is_in_an_entry_or_is_listed_without_one() -> None:
    """Each sentence stands in ``tests/tools/promises_off.toml``, in an entry or in the list of
    those that lack one.
    """
    broken = {text for off in entries() for text in off.promises}
    without = without_entry()
    assert broken | set(without) == {promise.text for promise in marked()}
    assert broken & set(without) == set()
    assert len(without) == len(set(without)) == WITHOUT_ENTRY


@pytest.mark.parametrize("off", entries(), ids=lambda off: off.what)
def test_a_change_that_turns_a_feature_off_can_be_made(off: Off) -> None:
    """The function exists, and its replacement body is valid Python and differs from the
    original.
    """
    off.mutant()
