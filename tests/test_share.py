"""A share of the tests that train is run on each commit: see conftest.py in the root."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"
TESTS = """
import pytest

@pytest.mark.parametrize("case", range(7))
def test_training(chaos, case): pass

@pytest.mark.costly
@pytest.mark.parametrize("case", range(4))
def test_costly(case): pass

@pytest.mark.each_commit
def test_each_commit(chaos): pass

@pytest.mark.parametrize("case", range(3))
def test_quick(case): pass
"""


def collected(pytester: pytest.Pytester, *options: str) -> list[str]:
    pytester.makeini("[pytest]\nmarkers =\n  each_commit\n  costly")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(test_one=TESTS)
    found = pytester.runpytest_inprocess("--collect-only", "-q", *options).outlines
    return [line.partition("::")[2] for line in found if "::" in line]


def test_one_in_three_of_a_file_and_all_that_does_not_train(pytester: pytest.Pytester) -> None:
    chosen = collected(pytester, "--one-in", "3")
    assert sum(name.startswith(("test_training", "test_costly")) for name in chosen) == 4
    assert {"test_each_commit", "test_quick[0]", "test_quick[1]", "test_quick[2]"} < set(chosen)
    assert collected(pytester, "--one-in", "3") == chosen


def test_all_of_them_unless_told_otherwise(pytester: pytest.Pytester) -> None:
    assert len(collected(pytester)) == 15


def test_a_share_that_is_none_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_inprocess("--one-in", "0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--one-in 0: use a whole number, 1 or more"])
