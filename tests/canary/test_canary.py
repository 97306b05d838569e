"""The page of the canary names every mistake, with the check that finds it and the verdict."""

from __future__ import annotations

from pathlib import Path

from chaoskit.suites.canary import wrong_jobs
from chaoskit.suites.canary.damages import DAMAGES
from chaoskit.suites.canary.harmless import IN_JOURNALS, IN_RUNS
from chaoskit.suites.canary.mistakes import CELLS, MISTAKES, WHEN, Mistake

PAGE = Path(__file__).parents[2] / "docs" / "canary" / "canary.md"


def rows_of(section: str) -> list[str]:
    """Return the rows of the table in a section of the page, without its head."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def row_of(mistake: Mistake) -> str:
    return f"| {mistake.name} | {WHEN[mistake.when]} | {' | '.join(_cell(mistake, cell) for cell in CELLS)} |"


def harmless_rows() -> list[str]:
    journals = [f"| {change.name} | journals, in each cell |" for change in IN_JOURNALS]
    return [*journals, *(f"| {change.name} | the run, in `exact` |" for change in IN_RUNS)]


def _cell(mistake: Mistake, cell: str) -> str:
    if check := mistake.found_by.get(cell):
        return f"failed: {check}"
    return (
        f"passed: {mistake.unseen[cell]}"
        if cell in mistake.unseen
        else f"not tried: {mistake.untried[cell]}"
    )


def test_the_page_names_each_mistake_in_journals() -> None:
    assert rows_of("Mistakes in journals") == [
        f"| {damage.name} | {damage.verdict.value} |" for damage in DAMAGES
    ]


def test_the_page_names_each_mistake_of_the_runtime() -> None:
    assert rows_of("Mistakes of the runtime") == [row_of(mistake) for mistake in MISTAKES]


def test_the_page_names_each_harmless_change() -> None:
    assert rows_of("Harmless changes") == harmless_rows()


def test_each_mistake_has_a_name_of_its_own() -> None:
    names = [damage.name for damage in DAMAGES]
    assert len(set(names)) == len(names)
    runtime = [(mistake.name, mistake.when) for mistake in MISTAKES]
    assert len(set(runtime)) == len(runtime)


def test_each_mistake_has_something_to_say_of_each_cell() -> None:
    for mistake in MISTAKES:
        assert sorted([*mistake.found_by, *mistake.unseen, *mistake.untried]) == sorted(CELLS), (
            mistake.name
        )


def test_each_mistake_of_the_jobs_is_tried() -> None:
    assert {mistake.function for mistake in MISTAKES} == set(wrong_jobs.mistakes())
