"""Tests that harmless changes of a run change no verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chaoskit import Chaos, Verdict, judge_directory
from chaoskit.suites.canary.harmless import IN_JOURNALS, IN_RUNS, Harmless, OtherRun
from chaoskit.suites.canary.journals import Journals
from chaoskit.suites.canary.mistakes import CELLS, EXACT
from chaoskit.suites.canary.runs import run
from chaoskit.suites.canary.telling import HARMLESS, Record, record_trial

pytestmark = pytest.mark.costly


@pytest.mark.promise("Each of these runs is *passed*.", cell="exact")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("harmless", IN_JOURNALS, ids=lambda harmless: harmless.name)
def test_a_harmless_change_of_journals_passes(
    copy_of_a_run: Callable[[str], Path], harmless: Harmless, cell: str, record_property: Record
) -> None:
    directory = copy_of_a_run(cell)
    journals, before = Journals(directory), Journals(directory).files
    harmless.change(journals)
    assert journals.files != before
    journals.write()
    outcome = judge_directory(directory)
    record_trial(record_property, harmless.name, cell, outcome, kind=HARMLESS)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons


@pytest.mark.parametrize("other", IN_RUNS, ids=lambda other: other.name)
def test_a_harmless_change_of_the_run_passes(
    chaos: Chaos, other: OtherRun, record_property: Record
) -> None:
    outcome = run(chaos, EXACT, **other.plan)
    record_trial(record_property, other.name, EXACT, outcome, kind=HARMLESS)
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
