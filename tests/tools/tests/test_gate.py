"""Tests of the selection of the gate. See conftest.py in the root."""

from __future__ import annotations

import json
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[3] / "conftest.py"
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

@pytest.mark.slow(case=2)
@pytest.mark.promise("It holds at night.")
@pytest.mark.parametrize("case", range(3))
def test_night(chaos, case): pass

@pytest.mark.slow
def test_kernel(): pass

@pytest.mark.parametrize("case", range(3))
def test_quick(case): pass
"""
SKIPS = CONFTEST.parent / "tests" / "skips.toml"
FLAKY = """
import pytest

@pytest.mark.parametrize("case", range(2))
def test_flaky(case): assert case

def test_broken(): assert False
"""
FLAKE = """
[[flake]]
test = "test_two.py::test_flaky"
since = 2026-01-31
cause = "a port is taken"
issue = "#1"
"""
#: May only become smaller: reasons for which CI may skip a test, and tests whose failure fails no gate.
SKIPS_LISTED = 6
FLAKES_LISTED = 0
CHEAP = {"test_quick[0]", "test_quick[1]", "test_quick[2]"}


def commit(directory: Path) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = [
        "git",
        "-C",
        str(directory),
        *identity,
        "commit",
        "--quiet",
        "--allow-empty",
        "--message",
        "next",
    ]
    subprocess.run(command, check=True)


def collected(pytester: pytest.Pytester, *options: str) -> set[str]:
    """Return the names of the selected tests."""
    output = pytester.runpytest_inprocess("--collect-only", "-q", *options).outlines
    return {line.partition("::")[2] for line in output if "::" in line}


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """Return a repository with the conftest of this one, and tests of each kind."""
    pytester.makeini("[pytest]\nmarkers =\n  promise\n  costly\n  slow")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(test_one=TESTS)
    subprocess.run(["git", "-C", str(pytester.path), "init", "--quiet"], check=True)
    commit(pytester.path)
    return pytester


def test_promises_and_all_that_does_not_train_are_in_every_gate(project: pytest.Pytester) -> None:
    """The other tests give a slice, which is the same for the same commit."""
    chosen = collected(project, "--gate")
    assert (
        CHEAP
        | {
            "test_promise[1]",
            "test_cases[1-3]",
            "test_cases[2-3]",
            "test_night[0]",
            "test_night[1]",
        }
        <= chosen
    )
    assert len(chosen) < 30
    assert collected(project, "--gate") == chosen


def test_the_slices_of_thirty_commits_are_all_tests(project: pytest.Pytester) -> None:
    """The slice moves with each commit. It also holds slow promises; slow tests that do not train
    are left out.
    """
    selections = []
    for _ in range(30):
        selections.append(collected(project, "--gate"))
        commit(project.path)
    assert set().union(*selections) == collected(project) - {"test_kernel"}
    assert sum("test_night[2]" in chosen for chosen in selections) == 1
    assert all(earlier != later for earlier, later in pairwise(selections))


def test_a_slice_can_be_chosen(project: pytest.Pytester) -> None:
    """A slice of another machine can be run on this one."""
    chosen = [collected(project, "--gate", "--gate-slice", str(number)) for number in range(30)]
    assert set().union(*chosen) == collected(project) - {"test_kernel"}
    assert collected(project, "--gate") == chosen[1], "the repository has one commit"


def test_a_shallow_clone_has_slices_too(project: pytest.Pytester) -> None:
    """A shallow clone counts one commit, so the hash chooses; otherwise all of its gates would take
    the same slice.
    """
    subprocess.run(["git", "-C", str(project.path), "add", "."], check=True)
    commit(project.path)
    clone = project.path.parent / "clone"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "1", f"file://{project.path}", str(clone)],
        check=True,
    )
    ask = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    head = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    result = project.runpytest_inprocess(
        "--rootdir", str(clone), "--collect-only", "--gate", str(clone)
    )
    result.stdout.fnmatch_lines([f"gate: slice {int(head, 16) % 30} of 30 *"])


def test_all_are_run_by_default(project: pytest.Pytester) -> None:
    """All tests are selected if the option is missing."""
    assert len(collected(project)) == 60 + 60 + 2 + 6 + 3 + 1 + 3


def test_a_promise_without_a_case_is_noticed(project: pytest.Pytester) -> None:
    """A parameter that was renamed or removed must not take its promise out of the gate in silence."""
    project.makepyfile(test_two=TESTS.replace("world=3)", "world=4)"))
    result = project.runpytest_inprocess("--collect-only", "-q")
    result.stdout.fnmatch_lines(
        ["*test_cases: no case has *'world': 4*marker promise('It holds here.')*"]
    )


def test_slow_cases_that_are_not_there_are_noticed(project: pytest.Pytester) -> None:
    """A parameter that was renamed would take a slow case into every gate."""
    project.makepyfile(test_two=TESTS.replace("slow(case=2)", "slow(number=2)"))
    result = project.runpytest_inprocess("--collect-only", "-q")
    result.stdout.fnmatch_lines(["*test_night: no case has {'number': 2}*"])


def test_tests_that_share_the_machine_run_in_one_process(project: pytest.Pytester) -> None:
    """Each launcher removes the containers that others have left; other tests are spread over the
    processes.
    """
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    folder = project.path / "tests" / "cluster" / "substrates"
    folder.mkdir(parents=True)
    cases = "import pytest\n@pytest.mark.parametrize('case', range(8))\ndef test_one(case): pass\n"
    for name in ("test_docker", "test_docker_commands", "test_others"):
        (folder / f"{name}.py").write_text(cases)
    done = project.runpytest_subprocess("-n", "2", "--dist", "loadgroup", "-v", "tests").outlines
    ran = [(line[1:4], "docker" in line) for line in done if line.startswith("[gw")]
    assert len(ran) == 24
    assert len({process for process, is_docker in ran if is_docker}) == 1
    assert len({process for process, _ in ran}) == 2


def test_cases_of_one_promise_are_run(project: pytest.Pytester) -> None:
    """The option ``--promise`` selects exactly the cases of a sentence; the file of the run names
    the sentence of each case.
    """
    assert collected(project, "--promise", "It holds here.") == {
        "test_cases[1-3]",
        "test_cases[2-3]",
    }
    assert len(collected(project, "--promise", "It holds here.", "--promise", "It holds.")) == 3
    assert collected(project, "--promise", "It holds") == set()


def test_what_is_kept_of_a_run_names_promises_and_failures(project: pytest.Pytester) -> None:
    """The file of ``--durations-file`` has the sentences of each case, and its error in short."""
    project.makepyfile(
        test_one="""
        import pytest

        @pytest.mark.promise("It holds.")
        def test_one():
            assert 1 == 2, "one"

        def test_two(): pass
        """
    )
    project.runpytest_inprocess("--durations-file", "kept.json")
    kept = json.loads((project.path / "kept.json").read_text())
    assert kept["test_one.py::test_one"]["promises"] == ["It holds."]
    assert kept["test_one.py::test_one"]["error"] == "AssertionError: one assert 1 == 2"
    assert kept["test_one.py::test_two"].keys() == {"outcome", "seconds"}


def test_a_quarantined_test_runs_and_fails_no_gate(project: pytest.Pytester) -> None:
    """Its failure is shown with the reason, its success is one of the run's; every other test still
    counts.
    """
    project.makepyfile(test_two=FLAKY)
    (project.path / "tests").mkdir()
    (project.path / "tests" / "skips.toml").write_text(FLAKE)
    result = project.runpytest_inprocess("-rx", "test_two.py")
    result.assert_outcomes(xfailed=1, xpassed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["XFAIL *::test_flaky?0? - quarantined since 2026-01-31, #1: a port is taken*"]
    )


def test_skips_and_flakes_become_fewer() -> None:
    """Both lists of ``tests/skips.toml`` may only shrink: lower the number here with each entry
    that goes.
    """
    lists = tomllib.loads(SKIPS.read_text())
    assert len(lists.get("skip", [])) == SKIPS_LISTED
    assert len(lists.get("flake", [])) == FLAKES_LISTED
    for flake in lists.get("flake", []):
        assert flake.keys() == {"test", "since", "cause", "issue"}
        path, _, name = flake["test"].partition("::")
        assert f"def {name.partition('[')[0]}(" in (CONFTEST.parent / path).read_text()
