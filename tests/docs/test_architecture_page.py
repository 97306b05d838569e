"""The map of the architecture is up to date, and each place of "Where is ...?" exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from map import BEGIN, END, package_map

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
QUESTIONS = (ROOT / "docs" / "architecture" / "where.md").read_text()
PLACES = re.findall(r"`([\w/]+\.py):(\w+)`", QUESTIONS)
LINES_MAX = 160


def test_the_map_is_up_to_date() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.strip("\n") == package_map(), "python docs/generate/map.py --write"


def test_the_page_stays_short() -> None:
    assert len(PAGE.read_text().splitlines()) <= LINES_MAX


def test_there_are_twenty_questions_or_more() -> None:
    questions = [
        line
        for line in QUESTIONS.splitlines()
        if line.startswith("| ") and "?" in line.split("|")[1]
    ]
    assert len(questions) >= 20
    assert all("`" in line for line in questions)


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_a_place_exists(file: str, name: str) -> None:
    names = {getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body}
    assigned = {
        target.id
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert name in names | assigned


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").rglob("*.md"), key=str), ids=lambda page: page.name
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    for link in re.findall(r"\]\((?!http|#)([^)#\s]+)", text):
        assert (page.parent / link).exists(), link


#: Files of users, which heads of modules give as examples.
EXAMPLES = {"train.py", "test_it.py"}


def test_files_that_the_head_of_a_module_names_exist() -> None:
    """Heads name the file with the other half of an answer; a file that moves takes them along."""
    folders = ("chaoskit", "faults", "suites", "fixtures", "tests", "docs", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    relative_paths = {
        "/".join(path.relative_to(ROOT).parts[first:])
        for path in files
        for first in range(len(path.relative_to(ROOT).parts))
    }
    missing_files = [
        (str(path.relative_to(ROOT)), name)
        for path in files
        if path.relative_to(ROOT).parts[0] in folders[:4]
        for name in re.findall(
            r"[\w/-]*\w+\.py\b", ast.get_docstring(ast.parse(path.read_text())) or ""
        )
        if name not in relative_paths | EXAMPLES
    ]
    assert missing_files == []
