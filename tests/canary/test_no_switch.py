"""The product has no switch for the mistakes with which its verdicts are tested; they are made from
outside.

The test looks for names: no file of the product, and no setting, option or environment variable in
it, names a mistake of the canary, its jobs, or the file that orders a mistake. A switch with a name
of its own would not be found.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from chaoskit.suites.canary import wrong_jobs, wrong_worker

ROOT = Path(__file__).parents[2]
_KEYWORDS = {"sabotage", "wrong_jobs", "wrong_worker", "mistake.json"}


def product() -> list[Path]:
    """Return every module of the product, which is all but suites, tests and benchmarks."""
    return sorted(
        path
        for folder in ("chaoskit", "faults", "fixtures")
        for path in (ROOT / folder).rglob("*.py")
    )


def words_of(source: str) -> Iterator[str]:
    """Yield the names and texts of a module, without its comments."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(word := getattr(node, field, None), str):
                yield word
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def named_in(source: str) -> set[str]:
    """Return the words of a module that only the canary has."""
    banned = {*wrong_jobs.mistakes(), *_KEYWORDS}
    return {mistake for word in words_of(source) for mistake in banned if mistake in word}


def test_no_module_names_a_mistake() -> None:
    modules = {
        str(path.relative_to(ROOT)): named
        for path in product()
        if (named := named_in(path.read_text()))
    }
    assert modules == {}


def test_a_switch_would_be_found() -> None:
    """A switch in a name, an option, or an environment variable is found."""
    for source in (
        "def advance(self, *, skips_the_update=False): ...",
        "if os.environ.get('CHAOSKIT_HALVES_WEIGHTS'.lower()) or config.halves_weights: ...",
        "from chaoskit.suites.canary.wrong_jobs import train",
        "typer.Option('--clips_twice')",
    ):
        assert named_in(source), source
    assert named_in(Path(wrong_jobs.__file__).read_text()) >= set(wrong_jobs.mistakes())
    assert named_in(Path(wrong_worker.__file__).read_text()) >= {"mistake.json"}


def test_the_import_contract_names_every_part_of_the_product() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = [candidate for candidate in contracts if candidate["id"] == "canary"]
    parts = {
        path.stem
        for path in (ROOT / "chaoskit").iterdir()
        if (path / "__init__.py").exists() or path.suffix == ".py"
    }
    expected_modules = {f"chaoskit.{part}" for part in parts - {"__init__"}} | {"chaoskit.fixtures"}
    assert set(contract["source_modules"]) == expected_modules
