"""Promises of the documentation and the tests that hold them: ``python tests/support/promises.py > docs/promises.md``.

A test case states what it holds by quoting one sentence: ``@pytest.mark.promise("No healthy process restarts.")``, or
``pytest.param(..., marks=pytest.mark.promise("..."))`` for one of its cases. The sentence stands in the README or in
docs/; the gate runs every such case.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
_GENERATED = ROOT / "docs" / "promises.md"
_HEAD = """# Promises and their tests

Sentences of the README and the documentation, and the tests in the gate that hold them. Written by
`python tests/support/promises.py`.
"""


class Promise(NamedTuple):
    """A marker in a test file.

    Attributes:
        text: the quoted sentence.
        test: file and function, as ``tests/test_x.py::test_y``.
    """

    text: str
    test: str


def marked() -> list[Promise]:
    """Every marker in the tests and the suites, by file and line."""
    return [promise for path in _test_files() for promise in _marked_in(path)]


def _test_files() -> list[Path]:
    return sorted(path for folder in ("tests", "suites") for path in (ROOT / folder).rglob("test_*.py"))


def _marked_in(path: Path) -> Iterator[Promise]:
    for function in ast.parse(path.read_text()).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "promise":
                yield Promise(ast.literal_eval(call.args[0]), f"{path.relative_to(ROOT)}::{function.name}")


def places(text: str) -> list[str]:
    """Documents in which a sentence stands, whatever its line breaks."""
    wanted = " ".join(text.split())
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        str(path.relative_to(ROOT))
        for path in documents
        if path != _GENERATED and wanted in " ".join(path.read_text().split())
    ]


def page() -> str:
    """The page of all promises, by document."""
    tests: dict[str, list[str]] = defaultdict(list)
    for promise in marked():
        if promise.test not in tests[promise.text]:
            tests[promise.text].append(promise.test)
    by_place: dict[str, list[str]] = defaultdict(list)
    for text in tests:
        by_place[(places(text) or ["nowhere"])[0]].append(text)
    lines = [_HEAD]
    for place, texts in sorted(by_place.items()):
        lines += [f"## {place}", "", "| promise | tests |", "|---|---|"]
        lines += [f"| {_cell(text)} | {'<br>'.join(f'`{test}`' for test in tests[text])} |" for text in texts]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
