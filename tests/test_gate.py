"""What the gate selects: see conftest.py in the root."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"
TESTS = """
import pytest

@pytest.mark.parametrize("case", range(60))
def test_training(chaos, case): pass

@pytest.mark.costly
@pytest.mark.parametrize("case", range(60))
def test_costly(case): pass

@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.promise("It holds."))])
def test_promise(chaos, case): pass

@pytest.mark.promise("It holds here.", case=[1, 2], world=3)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", range(3))
def test_cases(chaos, case, world): pass

@pytest.mark.parametrize("case", range(3))
def test_quick(case): pass
"""
CHEAP = {"test_quick[0]", "test_quick[1]", "test_quick[2]"}


def commit(directory: Path) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(directory), *who, "commit", "--quiet", "--allow-empty", "--message", "next"]
    subprocess.run(command, check=True)


def collected(pytester: pytest.Pytester, *options: str) -> set[str]:
    """Names of the selected tests."""
    found = pytester.runpytest_inprocess("--collect-only", "-q", *options).outlines
    return {line.partition("::")[2] for line in found if "::" in line}


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repository with the conftest of this one, and tests of each kind."""
    pytester.makeini("[pytest]\nmarkers =\n  promise\n  costly")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(test_one=TESTS)
    subprocess.run(["git", "-C", str(pytester.path), "init", "--quiet"], check=True)
    commit(pytester.path)
    return pytester


def test_promises_and_all_that_does_not_train_are_in_every_gate(project: pytest.Pytester) -> None:
    """Of the rest there is a slice, the same for the same commit."""
    chosen = collected(project, "--gate")
    assert CHEAP | {"test_promise[1]", "test_cases[1-3]", "test_cases[2-3]"} <= chosen
    assert len(chosen) < 30
    assert collected(project, "--gate") == chosen


def test_the_slices_of_thirty_commits_are_all_tests(project: pytest.Pytester) -> None:
    """The slice moves with each commit."""
    seen = []
    for _ in range(30):
        seen.append(collected(project, "--gate"))
        commit(project.path)
    assert set().union(*seen) == collected(project)
    assert all(one != two for one, two in pairwise(seen))


def test_all_are_run_by_default(project: pytest.Pytester) -> None:
    """Without the option nothing is left out."""
    assert len(collected(project)) == 60 + 60 + 2 + 6 + 3


def test_a_promise_without_a_case_is_noticed(project: pytest.Pytester) -> None:
    """A parameter that was renamed or removed must not take its promise out of the gate in silence."""
    project.makepyfile(test_two=TESTS.replace("world=3)", "world=4)"))
    result = project.runpytest_inprocess("--collect-only", "-q")
    result.stdout.fnmatch_lines(["*test_cases has no case of the promise 'It holds here.': *'world': 4*"])
