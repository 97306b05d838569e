"""Promises that tests quote: each stands in the documentation, and in the file of changes that turn features off."""

from __future__ import annotations

import pytest
from promises import ROOT, marked, page, places
from replay import DRAFTS, Off, entries, without_entry

#: May only become smaller: a new promise needs an entry in ``tests/tools/promises_off.toml``.
WITHOUT_ENTRY = 191


def test_each_promise_stands_in_the_documentation() -> None:
    """A sentence that was reworded or removed takes its test along."""
    assert [promise for promise in marked() if not places(promise.text)] == []


def test_a_sentence_that_stands_nowhere_is_noticed() -> None:
    """Else the check above would hold for anything."""
    assert places("Every GPU repairs itself.") == []


def test_the_page_is_up_to_date() -> None:
    """``python tests/tools/promises.py > docs/promises.md`` writes it anew."""
    assert (ROOT / "docs" / "promises.md").read_text() == page()


def test_each_promise_is_in_an_entry_or_is_listed_without_one() -> None:
    """Each sentence stands in ``tests/tools/promises_off.toml``, in an entry or in the list of those that lack one."""
    broken = {text for off in entries() for text in off.promises}
    without = without_entry()
    assert broken | set(without) == {promise.text for promise in marked()}
    assert broken & set(without) == set()
    assert len(without) == len(set(without)) == WITHOUT_ENTRY


@pytest.mark.parametrize("off", [*entries(), *entries(DRAFTS)], ids=lambda off: off.what)
def test_a_change_that_turns_a_feature_off_can_be_made(off: Off) -> None:
    """Its text stands exactly once in its file, and what replaces it is another text."""
    assert off.mutant().apply((ROOT / off.file).read_bytes()) != (ROOT / off.file).read_bytes()


def test_a_change_of_what_stands_nowhere_is_noticed() -> None:
    """A text that was reworded takes its entry along."""
    off = Off("nothing", [], "chaoskit/errors.py", "every GPU repairs itself", "")
    with pytest.raises(ValueError, match="stands there 0 times"):
        off.mutant()
