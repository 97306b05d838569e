"""The page of the canary names every mistake, with its verdict."""

from __future__ import annotations

from pathlib import Path

from chaoskit.suites.canary.damages import DAMAGES

PAGE = Path(__file__).parent.parent / "docs" / "canary.md"


def test_the_page_is_up_to_date() -> None:
    section = PAGE.read_text().partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows == [f"| {damage.name} | {damage.verdict.value} |" for damage in DAMAGES]


def test_each_mistake_has_a_name_of_its_own() -> None:
    assert len({damage.name for damage in DAMAGES}) == len(DAMAGES)
