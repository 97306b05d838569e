"""Everything that pyproject.toml names exists, and is listed once."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = {
    "dependencies": PROJECT["project"]["dependencies"],
    **PROJECT["project"]["optional-dependencies"],
}


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in requirements]


@pytest.mark.parametrize("group", GROUPS)
def test_no_requirement_stands_twice(group: str) -> None:
    packages = names(GROUPS[group])
    assert len(packages) == len(set(packages))
    if group != "dependencies":
        assert not set(packages) & set(names(GROUPS["dependencies"])), "it is installed anyway"


def test_no_line_of_the_constraints_stands_twice() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert len(lines) == len(set(lines))
    pinned = [line.partition("==")[0].lower() for line in lines if not line.startswith("#")]
    assert len(pinned) == len(set(pinned))


def test_the_layers_name_modules_that_exist() -> None:
    """A contract about a module that does not exist would check nothing."""
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    named = [name for layer in layers for name in re.findall(r"[a-z_.]+", layer)]
    assert [name for name in named if find_spec(name) is None] == []


def test_the_changelog_has_short_entries_under_one_heading() -> None:
    """Each entry has one line, and unreleased changes stand in one place."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("## "))
    assert (
        sum(
            "unreleased" in line.lower() or "not released" in line
            for line in lines
            if line.startswith("##")
        )
        == 1
    )
    entries = [line for line in lines[begin:] if line and not line.startswith("#")]
    assert [line for line in entries if not line.startswith("- ") or len(line) > 160] == []
