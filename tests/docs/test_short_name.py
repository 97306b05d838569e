"""The package ``chaoskit.faults`` is also ``faults``; a project may have its own packages
``faults`` and ``fixtures``.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
BROKEN = "raise RuntimeError('a module of the project is imported')"
#: What a project may have under a name that this repository uses at its top level: file -> content.
PROJECTS = {
    "package": {
        "faults/__init__.py": "MINE = True\n",
        "faults/base.py": BROKEN,
        "faults/kinds.py": BROKEN,
    },
    "module": {"faults.py": "MINE = True\n"},
    "folder without __init__": {"faults/mine.py": "MINE = True\n"},
    "fixtures and suites": {"fixtures/__init__.py": BROKEN, "suites/__init__.py": BROKEN},
}
TEST = """
import chaoskit, pytest
from chaoskit.cli.app import main
from chaoskit.faults import Kill

def test_library(chaos):
    assert all(getattr(chaoskit, name) for name in chaoskit.__all__)
    with pytest.raises(chaoskit.BadInput, match="name a Python file"):
        chaos.run("absent.py", nodes=2, steps=10, faults=[Kill(rank=9, at_step=3)], twin=False)

def test_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["chaoskit", "faults", "Kill"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "SIGKILL" in capsys.readouterr().out
"""


def run_python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = {"XDG_CACHE_HOME": str(directory / "cache"), "XDG_STATE_HOME": str(directory / "state")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        cwd=directory,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(params=PROJECTS)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name, content in (PROJECTS[request.param] | {"test_it.py": TEST}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def test_a_project_may_have_packages_of_these_names(project: Path) -> None:
    """The library, the command line and the plugin import nothing of the project, although its
    folder is first on the path.
    """
    tested = run_python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    assert "2 passed" in tested.stdout, tested.stdout + tested.stderr


def test_a_project_imports_its_own_package_beside_ours(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "__init__.py").write_text(
        "from chaoskit.faults import Kill\n\nclass Mine(Kill): ...\n"
    )
    (tmp_path / "faults" / "base.py").write_text("MINE = True\n")
    code = "import chaoskit.faults.base, faults.base; from faults import Mine; print(faults.base.MINE, Mine(rank=1))"
    own = run_python(tmp_path, "-c", code)
    assert own.stdout.startswith("True Mine(rank=1"), own.stderr


SAME = """
import importlib, pkgutil, sys
first, second = sys.argv[1:]
for package in (importlib.import_module(first), importlib.import_module(second)):
    names = [module.name.removeprefix("chaoskit.") for module in pkgutil.walk_packages(package.__path__, "faults.")]
assert importlib.import_module("faults") is importlib.import_module("chaoskit.faults")
for name in names:
    short, long = (importlib.import_module(f"{prefix}{name}") for prefix in ("", "chaoskit."))
    assert short is long and short.__spec__.name == short.__name__ == f"chaoskit.{name}", name
print(len(names))
"""


@pytest.mark.parametrize(
    ("order", "in_the_repository"),
    [(("faults", "chaoskit.faults"), True), (("chaoskit.faults", "faults"), False)],
)
def test_both_names_are_the_same_modules(
    order: tuple[str, str], in_the_repository: bool, tmp_path: Path
) -> None:
    """The names are the same modules in any folder, even in the repository, where the folder
    ``faults`` is found first.
    """
    loaded = run_python(ROOT if in_the_repository else tmp_path, "-c", SAME, *order)
    assert loaded.stderr == ""
    assert int(loaded.stdout) == len(list((ROOT / "faults").rglob("*.py"))) - 1


def test_the_short_name_has_no_module_that_the_long_one_lacks(tmp_path: Path) -> None:
    missing = run_python(tmp_path, "-c", "import faults.nowhere")
    assert "No module named 'faults.nowhere'" in missing.stderr


def test_the_product_imports_by_the_long_name() -> None:
    """The suites and fixtures use the long name, too, since they run in projects of users."""
    places = [
        path
        for folder in ("chaoskit", "faults", "suites", "fixtures")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert [
        str(path) for path in places if {"faults", "suites", "fixtures"} & set(imported(path))
    ] == []


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level names that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]
