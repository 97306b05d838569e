"""Tests of the hand's independence: it runs as a directory on its own, on older interpreters, too."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "chaoskit" / "hand"
FILES = sorted(ROOT.rglob("*.py"))
OLDEST = (3, 9)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_the_standard_library_or_the_hand(path: Path) -> None:
    depth = len(path.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(path.read_text(), feature_version=OLDEST)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            assert not isinstance(node, ast.ImportFrom) or node.level <= depth
            continue
        assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
