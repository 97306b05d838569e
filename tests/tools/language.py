"""Meters of language and layout: ``python tests/tools/language.py`` prints them, ``--write`` lowers the ceilings.

``tests/language.toml`` has a ceiling for each file that is above 0. A ceiling may only shrink, and
a file without one has 0. ``tests/test_language.py`` runs this in the gate.
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CEILINGS = ROOT / "tests" / "language.toml"
#: Packages that users import, and the folders that are measured in addition.
LIBRARY = ("chaoskit", "faults")
MEASURED = (*LIBRARY, "suites", "fixtures", "benchmarks", "tests")

PEOPLE = re.compile(
    r"\b(who|whom|whoever|whomever|nobody|somebody|anybody|everybody|everyone)\b", re.IGNORECASE
)
#: First words of docstrings that begin in the middle of a thought.
MIDDLE = (
    *(
        "What",
        "Whether",
        "Of",
        "Who",
        "Whom",
        "Whose",
        "How",
        "Why",
        "Where",
        "When",
        "Which",
        "As",
        "Until",
        "By",
    ),
    *(
        "For",
        "From",
        "That",
        "Those",
        "These",
        "The same",
        "It",
        "One",
        "Nothing",
        "To be",
        "And",
        "But",
        "Also",
    ),
    *(
        "So",
        "Not",
        "Only",
        "In",
        "On",
        "At",
        "With",
        "Without",
        "Beside",
        "Between",
        "After",
        "Before",
    ),
)
_MIDDLE = re.compile(rf"({'|'.join(MIDDLE)})\b")
VAGUE = frozenset(
    ("one", "told", "found", "said", "mine", "theirs", "known", "wanted", "who", "seen", "heard")
)
SUBJECT_MAX = 72
#: Subjects of the commits after this one are checked.
CHECKED_SINCE = "f0e389c1"
_BAD_SUBJECT = re.compile(r"(What|Who|Whoever|Whose|Whom)\b")


class Meter(NamedTuple):
    """Counts of one file.

    Attributes:
        people: words for people, in docstrings and comments.
        middle: docstrings that begin in the middle of a thought.
        vague: variables with a vague name.
    """

    people: int
    middle: int
    vague: int


def measure(source: str) -> Meter:
    """Return the counts of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    prose = [token.string for token in tokens if token.type == tokenize.COMMENT]
    middle = vague = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            prose.append(docstring)
            middle += _MIDDLE.match(docstring) is not None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            vague += node.id in VAGUE
    return Meter(sum(len(PEOPLE.findall(text)) for text in prose), middle, vague)


def python_files(folders: Iterable[str]) -> Iterator[Path]:
    """Yield the Python files of ``folders``."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def meters() -> dict[str, Meter]:
    """Return the counts of each file that is above 0 in one of them."""
    counts = {
        str(path.relative_to(ROOT)): measure(path.read_text()) for path in python_files(MEASURED)
    }
    return {name: meter for name, meter in counts.items() if any(meter)}


def ceilings() -> dict[str, Meter]:
    """Return the counts that a file may have; files that are not among them may have none."""
    files = tomllib.loads(CEILINGS.read_text())["files"]
    return {name: Meter(*counts) for name, counts in files.items()}


def class_names() -> dict[str, list[str]]:
    """Return the names of classes that are defined more than once in the library, with their files."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path in python_files(LIBRARY):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def deepest_chain() -> list[str]:
    """Return the longest chain of classes of the library, each followed by the class that it is built upon."""
    bases: dict[str, list[str]] = {}
    for path in python_files(LIBRARY):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def chain(name: str, above: tuple[str, ...] = ()) -> list[str]:
        if name in above or name not in bases:
            return []
        return [
            name,
            *max((chain(base, (*above, name)) for base in bases[name]), key=len, default=[]),
        ]

    return max(map(chain, bases), key=len)


def bad_subjects() -> list[str]:
    """Return the subjects of commits that are too long, or begin in the middle of a thought.

    A copy of the tree without its history has none.
    """
    command = [
        "git",
        "-C",
        str(ROOT),
        "log",
        "--no-merges",
        "--format=%s",
        f"{CHECKED_SINCE}..HEAD",
    ]
    subjects = subprocess.run(
        command, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    return [
        subject for subject in subjects if len(subject) > SUBJECT_MAX or _BAD_SUBJECT.match(subject)
    ]


def write(counts: dict[str, Meter]) -> None:
    """Write the ceilings."""
    head = (
        "# Words for people, docstrings that begin in the middle of a thought, and vague variables that a file may\n"
        "# have: see tests/tools/language.py. These numbers may only shrink; a file that is not named has none.\n"
        "\n[files]\n"
    )
    lines = [
        f'"{name}" = [{", ".join(map(str, meter))}]\n' for name, meter in sorted(counts.items())
    ]
    CEILINGS.write_text(head + "".join(lines))


def main() -> int:
    """Print the meters, or lower the ceilings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help=f"lower the ceilings of {CEILINGS.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--subjects", action="store_true", help="check the subjects of commits, and nothing else"
    )
    options = parser.parse_args()
    if options.subjects:
        bad = bad_subjects()
        print("".join(f"reword the subject of a commit: {subject}\n" for subject in bad), end="")
        return int(bool(bad))
    counts = meters()
    if options.write:
        before = ceilings() if CEILINGS.exists() else counts
        kept = {
            name: Meter(*map(min, meter, before.get(name, (0, 0, 0))))
            for name, meter in counts.items()
        }
        write({name: meter for name, meter in kept.items() if any(meter)})
    for name, meter in sorted(counts.items()):
        print(f"{name}: people {meter.people}, middle {meter.middle}, vague {meter.vague}")
    print(
        f"sum: {[sum(column) for column in zip(*counts.values(), strict=True)]} in {len(counts)} files"
    )
    print(f"class names defined more than once: {class_names()}")
    print(f"deepest chain of classes: {deepest_chain()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
