"""Promises of the documentation and the tests that hold them:
``python tests/tools/promises.py > docs/promises.md``.

A test names a promise that it holds by quoting its sentence:
``@pytest.mark.promise("No healthy process restarts.")``. Parameters select the cases that hold it:
``promise("...", world=[2, 3], phase="reduce")``. All of these must be equal; a list stands for any
of its values. A single case is marked by ``pytest.param(..., marks=pytest.mark.promise("..."))``.
The sentence stands in the README or in docs/; docs/architecture/gate.md says when such a case runs.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parent.parent.parent
_GENERATED = ROOT / "docs" / "promises.md"
_HEAD = """# Promises and their tests

Sentences of the README and the documentation, and the tests that hold them: in every gate or, where it says so, at
night ([which test runs when](architecture/gate.md)). Written by `python tests/tools/promises.py`.
"""


class Promise(NamedTuple):
    """A marker in a test file.

    Attributes:
        text: the quoted sentence.
        test: file and function, as ``tests/test_x.py::test_y``.
        at_night: its cases are marked slow, and not in every gate.
    """

    text: str
    test: str
    at_night: bool


def marked() -> list[Promise]:
    """Return every marker in the tests and the suites, by file and line."""
    return [promise for path in _test_files() for promise in _marked_in(path)]


def _test_files() -> list[Path]:
    return sorted(
        path for folder in ("tests", "suites") for path in (ROOT / folder).rglob("test_*.py")
    )


def _marked_in(path: Path) -> Iterator[Promise]:
    body = ast.parse(path.read_text()).body
    lists = {
        target.id: statement.value
        for statement in body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for function in body:
        if isinstance(function, ast.FunctionDef):
            named = [
                lists.get(decorator.id, decorator) if isinstance(decorator, ast.Name) else decorator
                for decorator in function.decorator_list
            ]
            slow = [_parameters(decorator) for decorator in named if _marker(decorator) == "slow"]
            for decorator in function.decorator_list:
                for marker in _quoted(decorator, lists):
                    at_night = any(cases <= _parameters(marker) for cases in slow)
                    text = ast.literal_eval(marker.args[0])
                    yield Promise(text, f"{path.relative_to(ROOT)}::{function.name}", at_night)


def _marker(decorator: ast.expr) -> str:
    """Return the name of a marker, with or without parameters; empty for any other decorator."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (
        called.attr
        if ast.unparse(called).startswith("pytest.mark.") and isinstance(called, ast.Attribute)
        else ""
    )


def _parameters(marker: ast.expr) -> set[tuple[str | None, str]]:
    """Return the names and values, as source, of the parameters that choose the cases of
    ``marker``.
    """
    keywords = marker.keywords if isinstance(marker, ast.Call) else []
    return {(keyword.arg, ast.unparse(keyword.value)) for keyword in keywords}


def _quoted(decorator: ast.expr, lists: dict[str, ast.expr]) -> Iterator[ast.Call]:
    """Yield the promises in a decorator, and in lists of the module that it names, such as
    ``parametrize("fault", FAULTS)``.
    """
    if _is_promise(decorator):  # its lists are parameter values, not promises
        lists = {}
    for node in ast.walk(decorator):
        if _is_promise(node):
            yield node
        elif isinstance(node, ast.Name) and node.id in lists:
            yield from _quoted(
                lists[node.id], {name: values for name, values in lists.items() if name != node.id}
            )


def _is_promise(node: ast.AST) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "promise"
    )


def places(text: str) -> list[str]:
    """Return the documents that contain the sentence ``text``, whatever its line breaks."""
    sentence = " ".join(text.split())
    return [place for place, words in _documents().items() if sentence in words]


@cache
def _documents() -> dict[str, str]:
    """Return the text of each document by its path, with single spaces for line breaks."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {
        str(path.relative_to(ROOT)): " ".join(path.read_text().split())
        for path in paths
        if path != _GENERATED
    }


def page() -> str:
    """Return the page of all promises, by document."""
    tests: dict[str, list[str]] = defaultdict(list)
    for promise in marked():
        cell = f"`{promise.test}`" + (", at night" if promise.at_night else "")
        if cell not in tests[promise.text]:
            tests[promise.text].append(cell)
    by_place: dict[str, list[str]] = defaultdict(list)
    for text in tests:
        by_place[(places(text) or ["nowhere"])[0]].append(text)
    lines = [_HEAD]
    for place, texts in sorted(by_place.items()):
        lines += [f"## {place}", "", "| promise | tests |", "|---|---|"]
        lines += [f"| {_cell(text)} | {'<br>'.join(tests[text])} |" for text in texts]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
