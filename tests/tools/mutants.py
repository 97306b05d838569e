"""Mutation testing of the folders in ``CORES``:
``python tests/tools/mutants.py --count 40 --seed 7``.

A mutant has a change of one of three kinds: a condition or comparison is negated, a statement or
call is dropped, or the value that a function returns or yields is emptied. The mutant is written
into this checkout, and tests are run in stages until one of them fails. The stages are the unit
tests that import the mutated module, those that import a module that uses it, 500 simulated
histories, the gate and, with ``--last nightly``, everything. A mutant that survives all stages is
code that no test needs.

The option ``--in PATH`` draws the mutants from one file or folder of a core instead, and may be
repeated.

A JSON file holds the result: the place and change of each mutant, and the stage and test that
caught it. The checkout must have no uncommitted changes; each file is restored, even if the run is
interrupted.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).resolve().parents[2]
CORES = (
    "chaoskit/agent",
    "chaoskit/coordinator",
    "chaoskit/daemon",
    "chaoskit/logs",
    "chaoskit/process",
    "chaoskit/wire",
    "chaoskit/runtime",
    "chaoskit/runlog",
    "chaoskit/experiment",
    "chaoskit/history",
    "chaoskit/sla",
)
_EMPTY = {
    "bool": "False",
    "bytes": "b''",
    "dict": "{}",
    "float": "0.0",
    "int": "0",
    "list": "[]",
    "str": "''",
    "tuple": "()",
}
STAGES = ("unit", "neighbours", "simulation", "gate", "nightly")
_LIMIT_S = 3600.0


class Mutant(NamedTuple):
    """A change of the source: the bytes from ``begin`` to ``end`` are replaced.

    Attributes:
        path: the path of the file, relative to the checkout.
        line: the first line of the changed code, from 1.
        change: a description of the change.
    """

    path: str
    line: int
    change: str
    begin: int
    end: int
    by: str

    def apply(self, source: bytes) -> bytes:
        """Return the source of the file with the change."""
        return source[: self.begin] + self.by.encode() + source[self.end :]


# -- making ----------------------------------------------------------------------------------------


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Return every mutant of the functions of a file, in the order of their places."""
    source = path.read_bytes()
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    mutants = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for verb, part, by in _changes(function):
            assert part.end_lineno is not None
            assert part.end_col_offset is not None
            begin = starts[part.lineno - 1] + part.col_offset
            end = starts[part.end_lineno - 1] + part.end_col_offset
            text = source[begin:end].decode()
            changed = by.replace("{text}", text)
            if (
                changed != text
            ):  # a nested function is visited again, by itself: that visit overwrites this one
                change = f"{verb} {text!r}"
                place = str(path.relative_to(root))
                mutants[begin, end, verb] = Mutant(place, part.lineno, change, begin, end, changed)
    return [mutants[place] for place in sorted(mutants)]


def _changes(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield a verb, the part of the function that is changed, and a template of the text that
    replaces the part.
    """
    for node in ast.walk(function):
        for condition in _conditions(node):
            yield "negate", condition, "(not ({text}))"
        if _is_dropped(node):
            yield "drop", node, "pass"
        if isinstance(node, ast.Return) and node.value is not None:
            empty = _empty(function.returns)
            yield "empty", node.value, "{text}" if ast.unparse(node.value) == empty else empty
        if (
            isinstance(node, (ast.Yield, ast.YieldFrom))
            and node.value is not None
            and _is_iterator(function)
        ):
            yield "empty", node, "(yield from ())"


def _conditions(node: ast.AST) -> list[ast.expr]:
    """Return the conditions that a node holds, and the node itself if it is a comparison."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.match_case):
        return [] if node.guard is None else [node.guard]
    return [node] if isinstance(node, ast.Compare) else []


def _is_dropped(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Return whether a node is a statement that does something, and that binds no new variable."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Await))
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    is_bare_return = isinstance(node, ast.Return) and node.value is None
    return is_bare_return or isinstance(node, (ast.AugAssign, ast.Continue, ast.Break))


def _empty(annotation: ast.expr | None) -> str:
    """Return the text of the empty value of a return type; ``None`` of a type that has none."""
    kind = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return _EMPTY.get(kind.id, "None") if isinstance(kind, ast.Name) else "None"


def _is_iterator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a caller iterates over what a function yields: a context manager or fixture
    yields once.
    """
    decorators = {
        name
        for decorator in function.decorator_list
        for name in re.findall(r"\w+", ast.unparse(decorator))
    }
    return isinstance(function, ast.FunctionDef) and decorators.isdisjoint(
        {"contextmanager", "fixture"}
    )


def drawn(count: int, seed: int, places: Sequence[str] = CORES) -> list[Mutant]:
    """Return mutants drawn at random, the same for the same seed and sources; each place has its
    share.

    Args:
        places: files or folders of the cores, relative to the checkout.
    """
    chance = random.Random(seed)
    sample = []
    for number, place in enumerate(places):
        share = count // len(places) + (number < count % len(places))
        path = ROOT / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        sample += chance.sample([mutant for file in files for mutant in mutants_of(file)], share)
    return sample


# -- trying ----------------------------------------------------------------------------------------


@contextmanager
def in_place(mutant: Mutant, root: Path = ROOT) -> Iterator[None]:
    """Put the mutant into the checkout, or into another tree, for the duration of the context."""
    path = root / mutant.path
    before = path.read_bytes()
    path.write_bytes(mutant.apply(before))
    try:
        yield
    finally:
        path.write_bytes(before)


def unit_tests(path: str) -> tuple[list[str], list[str]]:
    """Return the test files that import the module, and those that import only modules that use it.

    Users of the module are modules of its core that import it directly or through others of the
    core.
    """
    module = _module(Path(path))
    core = next(ROOT / core for core in CORES if Path(path).is_relative_to(core))
    package = {_module(file): file for file in sorted(core.rglob("*.py"))}
    users: set[str] = set()
    while (
        new_users := {name for name, file in package.items() if _imports(file, {module, *users})}
        - users
        - {module}
    ):
        users |= new_users
    own_stage = {
        *(ROOT / "tests" / "cluster" / "timing").glob("test_*.py"),
        ROOT / "tests/simulation/histories/test_simulation.py",
    }
    files = sorted({*(ROOT / "tests").rglob("test_*.py")} - own_stage)
    direct = [file for file in files if _imports(file, {module})]
    near = [file for file in files if file not in direct and _imports(file, users)]
    return [str(file.relative_to(ROOT)) for file in direct], [
        str(file.relative_to(ROOT)) for file in near
    ]


def _module(path: Path) -> str:
    parts = (path.relative_to(ROOT) if path.is_absolute() else path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: Path, modules: Collection[str]) -> bool:
    return not _imported(file).isdisjoint(modules)


@cache
def _imported(file: Path) -> set[str]:
    """Return the modules that a file imports anywhere, and the names that it imports from them,
    which may be modules.
    """
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def stages(mutant: Mutant) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the pytest arguments of each stage that concerns the mutant, the cheapest
    first.
    """
    direct, near = unit_tests(mutant.path)
    if direct:
        yield "unit", [*direct, "-m", "not costly and not slow_case"]
    parallel = ["--numprocesses", "3", "--dist", "loadgroup"]
    if near:
        yield "neighbours", [*parallel, *near, "-m", "not costly and not slow_case"]
    if mutant.path.startswith(CORES[:7]):
        yield (
            "simulation",
            [
                "tests/simulation/histories/test_simulation.py",
                "-k",
                "test_histories and replicated-0",
            ],
        )
    yield "gate", [*parallel, "--gate", "--ignore", "tests/cluster/timing"]
    yield "nightly", [*parallel, "--ignore", "tests/cluster/timing"]


class Catch(NamedTuple):
    """The stage that caught a mutant, with the test that failed or a note that the stage did not
    end.
    """

    stage: str
    test: str


def caught_by(mutant: Mutant, last: str) -> Catch | None:
    """Return the first stage, up to ``last``, in which a test fails, or None."""
    tried = STAGES[: STAGES.index(last) + 1]
    for stage, arguments in stages(mutant):
        if stage not in tried:
            break
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "300",
            *arguments,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"CHAOSKIT_NIGHT": "1"} if stage == "nightly" else {}
        try:
            ran = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                env=environment,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Catch(stage, f"no end within {_LIMIT_S:g} s")
        if ran.returncode not in (0, 5):  # 5: nothing was selected
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
            return Catch(stage, failed[1] if failed else "pytest did not end well")
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw mutants, run the stages on each, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40, help="mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="chooses them")
    parser.add_argument(
        "--in",
        action="append",
        dest="places",
        help="a file or folder of a core; all cores by default",
    )
    parser.add_argument(
        "--last", choices=STAGES, default="gate", help="stage after which a mutant has survived"
    )
    parser.add_argument("--list", action="store_true", help="show the mutants and try none")
    parser.add_argument(
        "--output", type=Path, default=Path(".tox/mutants.json"), help="where the result is written"
    )
    options = parser.parse_args(arguments)
    places = [Path(place).resolve().relative_to(ROOT) for place in options.places or ()]
    if stray := [
        place for place in places if not any(place.is_relative_to(core) for core in CORES)
    ]:
        parser.error(f"--in: {stray[0]} is in none of {', '.join(CORES)}")
    mutants = drawn(options.count, options.seed, [str(place) for place in places] or CORES)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.path}:{mutant.line}: {mutant.change}")
        return 0
    if subprocess.run(["git", "diff", "--quiet"], cwd=ROOT, check=False).returncode:
        parser.error(
            "commit or stash your changes first: files of this checkout are changed and put back"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the context puts the file back
    results = []
    for number, mutant in enumerate(mutants, 1):
        began_s = time.monotonic()
        with in_place(mutant):
            catch = caught_by(mutant, options.last)
        took_s = round(time.monotonic() - began_s, 1)
        summary = f"{mutant.path}:{mutant.line} {mutant.change}: {catch.stage if catch else 'SURVIVED'} ({took_s} s)"
        print(f"{number}/{len(mutants)} {summary}", flush=True)
        results.append(
            {**mutant._asdict(), "caught_by": catch and catch._asdict(), "seconds": took_s}
        )
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["caught_by"] is None for result in results))


if __name__ == "__main__":
    sys.exit(main())
