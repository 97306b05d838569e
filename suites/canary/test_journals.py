"""Tests that no mistake in the journals of a run ends as passed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chaoskit import Outcome, Verdict, judge_directory
from chaoskit.suites.canary.damages import DAMAGES, Damage
from chaoskit.suites.canary.journals import Journals
from chaoskit.suites.canary.mistakes import CELLS
from chaoskit.suites.canary.telling import Record, record_trial

pytestmark = pytest.mark.costly

_Copy = Callable[[str], Path]


@pytest.mark.promise("None of these mistakes ends as *passed*.", cell="exact")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_mistake_in_the_journals_does_not_pass(
    copy_of_a_run: _Copy, damage: Damage, cell: str, record_property: Record
) -> None:
    directory = copy_of_a_run(cell)
    journals = Journals(directory)
    damage.change(journals)
    journals.write()
    outcome: Outcome = judge_directory(directory)
    record_trial(record_property, damage.name, cell, outcome)
    assert outcome.verdict == damage.verdict, outcome.reasons


@pytest.mark.parametrize("cell", CELLS)
def test_journals_that_are_written_anew_are_the_same(copy_of_a_run: _Copy, cell: str) -> None:
    """The mistake is caught, and not the rewriting of files."""
    directory = copy_of_a_run(cell)
    before = judge_directory(directory)
    Journals(directory).write()
    assert judge_directory(directory).verdict == before.verdict == Verdict.PASSED
