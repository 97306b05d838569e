"""The page of the canary names every mistake of the cell command, with its verdict."""

from __future__ import annotations

from pathlib import Path

from chaoskit import Verdict
from chaoskit.suites.canary.command_damages import COMMAND_DAMAGES

PAGE = Path(__file__).parents[2] / "docs" / "canary" / "canary.md"


def test_the_page_is_up_to_date() -> None:
    section = PAGE.read_text().partition("## Commands\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows == [f"| {damage.name} | {damage.verdict.value} |" for damage in COMMAND_DAMAGES]


def test_each_mistake_has_a_name_of_its_own_and_none_passes() -> None:
    assert len({damage.name for damage in COMMAND_DAMAGES}) == len(COMMAND_DAMAGES)
    assert Verdict.PASSED not in {damage.verdict for damage in COMMAND_DAMAGES}
