"""Tests of the creation of mutants and of the choice of their first tests. See
tests/tools/mutants.py.
"""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest

SOURCE = """\
def early(lines: list[str], most: int) -> list[str]:
    if not lines:
        return []
    found = [line for line in lines if len(line) <= most]
    found.sort()
    return found

def names(pods):
    for pod in pods:
        if pod.gone:
            continue
        yield pod.name

@contextmanager
def opened(path):
    yield path

def count(pods) -> int:
    total = 0
    total += len(pods)
    return total

def choose(event) -> int:
    match event:
        case "a" if late:
            self.count += 1
            return 7
    return 0
"""


def mutants_in(tmp_path: Path, source: str) -> list[tuple[str, str]]:
    """Return the mutants of a source: the change, and the line with the change."""
    path = tmp_path / "module.py"
    path.write_text(source)
    lines = []
    for mutant in mutants.mutants_of(path, tmp_path):
        changed = mutant.apply(path.read_bytes()).decode()
        lines.append((mutant.change, changed.splitlines()[mutant.line - 1].strip()))
    return lines


def test_mutants_are_of_three_kinds(tmp_path: Path) -> None:
    """Each kind has its places; an empty return, a variable and a context manager's yield are left
    alone.
    """
    assert dict(mutants_in(tmp_path, SOURCE)) == {
        "negate 'not lines'": "if (not (not lines)):",
        "negate 'len(line) <= most'": "found = [line for line in lines if (not (len(line) <= most))]",
        "drop 'found.sort()'": "pass",
        "empty 'found'": "return []",
        "negate 'pod.gone'": "if (not (pod.gone)):",
        "drop 'continue'": "pass",
        "empty 'yield pod.name'": "(yield from ())",
        "drop 'total += len(pods)'": "pass",
        "empty 'total'": "return 0",
        "negate 'late'": 'case "a" if (not (late)):',
        "drop 'self.count += 1'": "pass",
        "empty '7'": "return 0",
    }


def test_what_is_returned_is_emptied_by_its_type(tmp_path: Path) -> None:
    """A nested function has its own return type. An empty text stays as it is, in either kind of
    quotes.
    """
    source = 'def outer() -> str:\n    def inner() -> bool:\n        return ready\n    return name\n    return ""\n'
    assert mutants_in(tmp_path, source) == [
        ("empty 'ready'", "return False"),
        ("empty 'name'", "return ''"),
    ]


def test_each_place_has_its_share() -> None:
    drawn = mutants.drawn(3, seed=1, places=["chaoskit/sla", "chaoskit/history"])
    assert [Path(mutant.path).parent.name for mutant in drawn] == ["sla", "sla", "history"]
    assert drawn == mutants.drawn(3, seed=1, places=["chaoskit/sla", "chaoskit/history"])


def test_mutants_can_be_drawn_from_one_file() -> None:
    drawn = mutants.drawn(5, seed=1, places=["chaoskit/experiment/judge/judge.py"])
    assert [mutant.path for mutant in drawn] == ["chaoskit/experiment/judge/judge.py"] * 5
    assert "tests/unit/experiment/test_evidence.py" in mutants.unit_tests(drawn[0].path)[0]


@pytest.mark.parametrize("path", ["chaoskit/history/store.py", "chaoskit/sla/judge.py"])
def test_the_rooms_of_records_have_their_unit_tests(path: str) -> None:
    assert (mutants.ROOT / path).is_file()
    assert mutants.unit_tests(path)[0]


def test_a_mutant_is_tried_on_tests_of_modules_that_use_its_module() -> None:
    """No test imports the module of uneven work; tests of the control plane reach it."""
    direct, near = mutants.unit_tests("chaoskit/coordinator/detectors/workload.py")
    assert direct == []
    assert "tests/unit/coordinator/test_plane.py" in near


def test_a_module_that_is_imported_as_a_name_of_its_package_is_found() -> None:
    """The import ``from chaoskit.coordinator.membership import events`` counts as one of the
    module.
    """
    direct, _ = mutants.unit_tests("chaoskit/coordinator/membership/events.py")
    assert "tests/unit/coordinator/test_plane.py" in direct


def test_users_in_other_folders_of_the_core_are_found() -> None:
    """A module of a package within the runtime is used by modules above it."""
    direct, near = mutants.unit_tests("chaoskit/runtime/injection/numbers.py")
    assert "tests/unit/runtime/test_commit.py" in near
    assert "tests/cluster/faults/test_acts.py" in direct, "it imports the package"
