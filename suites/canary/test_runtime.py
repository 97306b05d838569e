"""Tests that no mistake of the runtime ends as passed, except those that the page explains."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from chaoskit import Chaos, Verdict
from chaoskit.suites.canary.mistakes import CELLS, EXACT, FAST, MISTAKES, Mistake
from chaoskit.suites.canary.runs import run
from chaoskit.suites.canary.telling import LIMIT, Record, record_trial


def _cases(which: Callable[[Mistake], dict[str, str]]) -> dict[str, tuple[Mistake, str]]:
    """Return name of a case -> the mistake, and the cell."""
    return {
        f"{cell}-{mistake.when}-{mistake.function}": (mistake, cell)
        for mistake in MISTAKES
        for cell in which(mistake)
    }


_FOUND, _UNSEEN = _cases(lambda mistake: mistake.found_by), _cases(lambda mistake: mistake.unseen)


@pytest.mark.promise(
    "No mistake in the runtime counts as found by *unknown*.",
    case=[
        "exact-every-leaves_out_a_shard",
        "fast-once-halves_weights",
        "sharded-last-skips_the_update",
    ],
)
@pytest.mark.parametrize("case", _FOUND)
def test_a_mistake_of_the_runtime_fails(chaos: Chaos, case: str, record_property: Record) -> None:
    mistake, cell = _FOUND[case]
    outcome = run(chaos, cell, mistake)
    check = mistake.found_by[cell]
    record_trial(record_property, mistake.title, cell, outcome, check)
    assert check in [
        result.name for result in outcome.checks if result.verdict == Verdict.FAILED
    ], outcome.reasons
    assert outcome.verdict == Verdict.FAILED


@pytest.mark.parametrize("case", _UNSEEN)
def test_what_the_page_calls_unseen_is_not_seen(
    chaos: Chaos, case: str, record_property: Record
) -> None:
    """A mistake that is seen must be entered with the check that finds it."""
    mistake, cell = _UNSEEN[case]
    outcome = run(chaos, cell, mistake)
    record_trial(record_property, mistake.title, cell, outcome, mistake.unseen[cell], kind=LIMIT)
    assert outcome.verdict == Verdict.PASSED


@pytest.mark.parametrize(
    ("cell", "kind"), [*product(CELLS, ["sgd", "clip", "adam"]), (EXACT, "norm"), (FAST, "norm")]
)
def test_the_same_run_without_a_mistake_passes(chaos: Chaos, cell: str, kind: str) -> None:
    """The mistake makes the run fail, and nothing else."""
    outcome = run(chaos, cell, options={"kind": kind}, reference="on")
    assert outcome.verdict == Verdict.PASSED, outcome.reasons
