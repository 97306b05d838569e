"""Tests of the skip policy: in CI, a skip fails unless its reason is listed in
``tests/skips.toml``.

The policy is in conftest.py in the root.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[3] / "conftest.py"
TESTS = """
import pytest

def test_listed():
    pytest.skip("needs a CUDA device")

@pytest.mark.skipif(True, reason="needs a tool that nothing installs")
def test_unlisted(): pass

def test_runs(): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a project with the conftest of this repository, a list of one reason, and tests that
    skip.
    """
    pytester.makeconftest(CONFTEST.read_text())
    pytester.mkdir("tests")
    (pytester.path / "tests" / "skips.toml").write_text(
        '[[skip]]\nreason = "needs a CUDA .*"\ncause = "no GPU"\n'
    )
    pytester.makepyfile(test_one=TESTS)
    return pytester


def test_an_unlisted_skip_fails_in_ci(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of the failure names the reason and the list."""
    monkeypatch.setenv("CI", "true")
    result = project.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*skipped in CI: needs a tool that nothing installs*", "*skips.toml*"]
    )


def test_an_unlisted_skip_of_a_whole_file_fails_in_ci(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests of the file are not even collected, so only this failure shows that they are
    missing.
    """
    monkeypatch.setenv("CI", "true")
    project.makepyfile(
        test_two='import pytest\npytest.importorskip("no_such_module", reason="no such module")'
    )
    result = project.runpytest_inprocess("-p", "no:cacheprovider", "test_two.py")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*skipped in CI: no such module*"])


def test_a_developer_may_skip(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips outside CI are allowed, since a developer's machine may lack anything."""
    monkeypatch.delenv("CI", raising=False)
    project.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, skipped=2)


def test_outcomes_and_durations_are_kept(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is a JSON object with an entry for each test."""
    monkeypatch.delenv("CI", raising=False)
    project.runpytest_inprocess("-p", "no:cacheprovider", "--durations-file", "kept/times.json")
    kept = json.loads((project.path / "kept" / "times.json").read_text())
    assert {name.partition("::")[2]: test["outcome"] for name, test in kept.items()} == {
        "test_listed": "skipped",
        "test_unlisted": "skipped",
        "test_runs": "passed",
    }
    assert all(0 <= test["seconds"] < 60 for test in kept.values())
