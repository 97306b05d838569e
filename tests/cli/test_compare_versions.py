"""Tests of ``chaoskit compare`` on real repositories: two versions run in turns, and leave no
trace.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.repository import JOB, TESTS, Project
from support.runs import run
from support.waiting import wait_until

from chaoskit.errors import BadInput
from chaoskit.history.record import new_id
from chaoskit.history.session import read
from chaoskit.history.store import RunHistory
from chaoskit.process.linux import descendants
from chaoskit.versions.trees import Repository


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of temporary files, which only this test uses."""
    made = tmp_path / "scratch"
    made.mkdir()
    monkeypatch.setenv("TMPDIR", str(made))
    return made


def left_behind(scratch: Path) -> list[Path]:
    return [*scratch.glob("chaoskit-compare-*")]


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise(
    "Both versions are checked out into directories of their own, and their chaos tests run in turns"
)
@pytest.mark.promise("**The phase that grew is named** where recoveries take longer")
@pytest.mark.promise("**What looks worse is run again** in a second session")
def test_a_version_that_recovers_slower_is_found(project: Project) -> None:
    project.write(**{"pauses.py": "IN_FIRST_STEP_S = 0.1\n"})
    done = project.compare(
        "HEAD",
        ".",
        "test_it.py",
        "--number",
        "recovery",
        "--summary",
        "told.md",
        "--history",
        "kept",
    )
    assert done.returncode == 1, done.stderr
    assert "the phase first_good_step grew" in done.stdout
    assert (
        "1 test of both versions in turns, 14 to 56 runs each; regressions are run again"
        in done.stderr
    )
    assert "about " in done.stderr
    assert "❌ | test_it.py::test_kill | recovery" in (project.path / "told.md").read_text()
    kept = read(str(project.path / "kept")).runs
    assert {kept_run.commit for kept_run in kept} == {project.git("rev-parse", "HEAD")}
    assert {kept_run.covariates["sources"] for kept_run in kept} == {"changed"}
    assert len({kept_run.session for kept_run in kept}) == 1


@pytest.mark.costly
@pytest.mark.promise("Your working tree is not touched")
def test_a_comparison_leaves_no_trace(project: Project, scratch: Path) -> None:
    project.write(**{"new.py": "", "pauses.py": "IN_FIRST_STEP_S = 0.0  # changed\n"})
    objects = sorted((project.path / ".git").rglob("*"))
    before = [
        project.git("status", "--porcelain"),
        project.git("branch", "--all"),
        project.git("worktree", "list"),
    ]
    status, findings = project.findings("HEAD", ".", "test_it.py", "--budget", "1s")
    assert status == 10
    assert [finding["reason"] for finding in findings] == [
        "the budget is spent after 0 runs a side"
    ]
    assert before == [
        project.git("status", "--porcelain"),
        project.git("branch", "--all"),
        project.git("worktree", "list"),
    ]
    assert objects == sorted((project.path / ".git").rglob("*"))
    assert not left_behind(scratch)


@pytest.mark.costly
def test_a_killed_comparison_leaves_no_process_and_no_directory(
    project: Project, scratch: Path
) -> None:
    command = [sys.executable, "-m", "chaoskit", "compare", "HEAD", ".", "test_it.py"]
    project.write(**{"new.py": ""})
    process = subprocess.Popen(
        command, cwd=project.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert any("runs each" in line for line in process.stderr)
    below = descendants(process.pid)
    assert below
    assert left_behind(scratch)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    wait_until(lambda: not left_behind(scratch), "the directories of the versions are removed")
    wait_until(lambda: not any(map(is_alive, below)), "all that it has started has ended")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.costly
@pytest.mark.promise("nothing could be compared: a version does not start, or has other tests")
def test_a_version_that_does_not_start_is_incomparable(project: Project) -> None:
    base = project.git("rev-parse", "HEAD")
    project.write(**{"test_it.py": "import a_module_that_is_not_there\n"})
    status, findings = project.findings(base, project.commit(), "test_it.py")
    assert status == 10
    (finding,) = findings
    assert finding["change"] == "incomparable"
    assert "No module named 'a_module_that_is_not_there'" in finding["reason"]


@pytest.mark.costly
@pytest.mark.promise(
    "*Incomparable* is a test that makes no run in one of the versions, with what it said"
)
def test_a_test_that_makes_no_run_is_incomparable(project: Project) -> None:
    base = project.git("rev-parse", "HEAD")
    project.write(**{"train.py": "import a_module_that_is_not_there\n"})
    status, findings = project.findings(base, project.commit(), "test_it.py")
    assert status == 10
    (finding,) = findings
    assert finding["change"] == "incomparable"
    assert finding["reason"].startswith("after: the test made no conclusive run: ")


@pytest.mark.costly
def test_a_version_with_other_tests_is_incomparable(project: Project) -> None:
    base = project.git("rev-parse", "HEAD")
    project.write(**{"test_it.py": TESTS.replace("test_kill", "test_other")})
    done = project.compare(base, project.commit(), "test_it.py", "--json")
    compared = json.loads(done.stdout)
    assert done.returncode == 10
    assert [finding["change"] for finding in compared["findings"]] == ["no reference"]
    assert compared["absent"] == ["test_it.py::test_kill"]


@pytest.mark.costly
def test_a_test_that_is_another_experiment_is_incomparable(project: Project) -> None:
    base = project.git("rev-parse", "HEAD")
    project.write(**{"test_it.py": TESTS.replace("steps=10", "steps=11")})
    status, findings = project.findings(base, project.commit(), "test_it.py")
    assert status == 10
    assert [finding["reason"] for finding in findings] == [
        "the test runs another experiment now: options, faults or settings differ"
    ]


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise(
    "Where a rank has imported a file of the repository from elsewhere, the test is *incomparable*"
)
def test_code_of_another_version_is_noticed(project: Project) -> None:
    base = project.git("rev-parse", "HEAD")
    project.write(**{"train.py": f"import sys\nsys.path.insert(0, {str(project.path)!r})\n{JOB}"})
    status, findings = project.findings(base, project.commit(), "test_it.py")
    assert status == 10
    (finding,) = findings
    assert finding["reason"].startswith(
        "after: the test made no conclusive run: "
        f"its ranks imported {project.path / 'pauses.py'}, which is not of this version"
    )


@pytest.mark.costly
def test_a_budget_that_cannot_do_is_said_and_is_no_success(project: Project) -> None:
    """The comparison ends before the turns, and names the time that it would take."""
    project.write(**{"new.py": ""})
    done = project.compare("HEAD", ".", "test_it.py", "--budget", "1s")
    assert done.returncode == 10
    assert "chaoskit: a budget of 1 s is too short: " in done.stderr


@pytest.mark.costly
@pytest.mark.promise("The code of the repository is imported from the version that is compared")
def test_packages_that_are_installed_are_imported_from_the_version(project: Project) -> None:
    """The path of a package is on PYTHONPATH or in a .pth file, as for an editable installation."""
    project.write(**{"src/mine/__init__.py": "VERSION = 1\n", "train.py": f"import mine\n{JOB}"})
    project.write(
        **{
            "test_it.py": f"import mine\nassert 'chaoskit-compare' in mine.__file__, mine.__file__\n{TESTS}"
        }
    )
    base = project.commit()
    project.write(**{"src/mine/__init__.py": "VERSION = 2\n"})
    later = project.commit()
    path = os.pathsep.join(filter(None, [str(project.path / "src"), os.environ.get("PYTHONPATH")]))
    done = project.compare(base, later, "test_it.py", "--budget", "1s", "--json", PYTHONPATH=path)
    assert [finding["reason"] for finding in json.loads(done.stdout)["findings"]] == [
        "the budget is spent after 0 runs a side"
    ]


@pytest.mark.costly
@pytest.mark.promise("runs a command of the shell in each directory first")
def test_a_version_is_prepared_first(project: Project) -> None:
    """Files that git does not have, such as a compiled extension, are made in each version."""
    project.write(**{"train.py": f"import made\n{JOB}", ".gitignore": "__pycache__\nmade.py\n"})
    base = project.commit()
    project.write(**{"new.py": ""})
    later = project.commit()
    prepare = ["--prepare", "git rev-parse HEAD > made.py && sed -i 's/.*/COMMIT = \"&\"/' made.py"]
    status, findings = project.findings(base, later, "test_it.py", "--budget", "1s", *prepare)
    assert (status, [finding["reason"] for finding in findings]) == (
        10,
        ["the budget is spent after 0 runs a side"],
    )
    status, findings = project.findings(
        base, later, "test_it.py", "--prepare", "echo no compiler; exit 3"
    )
    assert (status, [finding["reason"] for finding in findings]) == (
        10,
        ["before: the preparation failed: no compiler"],
    )


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.promise("compares two versions of PyTorch")
def test_two_environments_are_compared(project: Project) -> None:
    (project.path / "data").symlink_to(sys.prefix)
    status, findings = project.findings("env:data", ".", "test_it.py", "--budget", "1s")
    assert status == 10
    assert [finding["reason"] for finding in findings] == [
        "the budget is spent after 0 runs a side"
    ]


class TestVersions:
    """The names of versions, and the names that are refused before anything is started."""

    def test_the_working_tree_is_all_files_but_ignored_ones(
        self, project: Project, tmp_path: Path
    ) -> None:
        project.write(
            **{"data": "large", "new.py": "NEW = 1\n", "pauses.py": "IN_FIRST_STEP_S = 2.0\n"}
        )
        index = (project.path / ".git" / "index").read_bytes()
        repository = Repository(project.path, tmp_path)
        commit = repository.commit_of(".")
        repository.check_out(commit, tmp_path / "out")
        assert (tmp_path / "out" / "new.py").read_text() == "NEW = 1\n"
        assert (tmp_path / "out" / "pauses.py").read_text() == "IN_FIRST_STEP_S = 2.0\n"
        assert not (tmp_path / "out" / "data").exists()
        assert (project.path / ".git" / "index").read_bytes() == index
        assert commit != project.git("rev-parse", "HEAD")

    def test_a_tree_without_changes_is_head(self, project: Project, tmp_path: Path) -> None:
        assert Repository(project.path, tmp_path).commit_of(".") == project.git("rev-parse", "HEAD")

    def test_the_merge_base_is_where_the_branch_left(
        self, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("GITHUB_BASE_REF", "CI_MERGE_REQUEST_DIFF_BASE_SHA"):
            monkeypatch.delenv(name, raising=False)
        base = project.git("rev-parse", "HEAD")
        project.git("checkout", "--quiet", "-b", "feature")
        project.write(**{"a.py": ""})
        tip = project.commit()
        project.git("checkout", "--quiet", "main")
        project.write(**{"b.py": ""})
        project.commit()
        project.git("checkout", "--quiet", "feature")
        repository = Repository(project.path, tmp_path)
        assert repository.commit_of("merge-base") == base
        monkeypatch.setenv("CI_MERGE_REQUEST_DIFF_BASE_SHA", tip)
        assert repository.commit_of("merge-base") == tip
        monkeypatch.delenv("CI_MERGE_REQUEST_DIFF_BASE_SHA")
        monkeypatch.setenv("GITHUB_BASE_REF", "release")
        with pytest.raises(
            BadInput, match=r"fetch release with its history \(actions/checkout: fetch-depth: 0\)"
        ):
            repository.commit_of("merge-base")

    def test_a_shallow_clone_can_be_compared(self, project: Project, tmp_path: Path) -> None:
        project.write(**{"a.py": ""})
        project.commit()
        shallow = tmp_path / "shallow"
        subprocess.run(
            ["git", "clone", "-q", "--depth", "1", f"file://{project.path}", str(shallow)],
            check=True,
        )
        repository = Repository(shallow, tmp_path)
        repository.check_out(repository.commit_of("HEAD"), tmp_path / "out")
        assert (tmp_path / "out" / "a.py").is_file()
        with pytest.raises(BadInput, match="a shallow clone has no other commit"):
            repository.commit_of("HEAD~1")

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["nothing", "."], "name a commit, a branch, merge-base"),
            (["HEAD", "main"], "name another version: both are"),
            (["HEAD", "."], "name another version: both are"),
            (["merge-base", "HEAD"], "HEAD is on the branch that it would be merged into"),
            (["env:/nowhere", "."], "name an environment, such as env:.venv"),
            (["HEAD", ".", "--budget", "soon"], "give a time above 0, such as 90s, 10m or 2h"),
            (["HEAD", ".", "--tolerance", "-1"], "use a share above 0"),
            (["HEAD", ".", "--number", "speed"], "name a duration, or a quotient of two"),
            (["--output=/tmp/x", "."], "BEFORE --output=/tmp/x: name a commit"),
        ],
    )
    def test_what_is_no_version_is_refused(
        self, project: Project, arguments: list[str], told: str
    ) -> None:
        environment = {"GITHUB_BASE_REF": "", "CI_MERGE_REQUEST_DIFF_BASE_SHA": ""}
        done = project.compare(*arguments, **environment)
        assert done.returncode == 2, done.stderr
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1

    def test_outside_of_a_repository_it_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="run the command in a git repository"):
            Repository(tmp_path, tmp_path)


# -- records, as they are --------------------------------------------------------------------------


def keep(place: Path, recovery_s: Mapping[str, float]) -> None:
    history = RunHistory(str(place))
    for commit, seconds in recovery_s.items():
        session = new_id()
        spread = [seconds * (0.98 + 0.01 * number) for number in range(8)]
        runs = [
            run(seconds_each, commit=commit, session=session, series="one" * 5)
            for seconds_each in spread
        ]
        history.add(session, runs)


def chaoskit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chaoskit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.promise("compares what was recorded, by the rules of [histories](history.md)")
def test_commits_of_a_history_are_compared(tmp_path: Path) -> None:
    keep(tmp_path / "kept", {"aaaa": 0.05, "bbbb": 0.05, "cccc": 0.10})
    same = chaoskit("compare", f"{tmp_path}/kept@aaaa", f"{tmp_path}/kept@bbbb", "--json")
    assert same.returncode == 0, same.stderr
    worse = chaoskit("compare", f"{tmp_path}/kept@aaaa", f"{tmp_path}/kept@cccc")
    assert worse.returncode == 1
    assert "recovery / step" in worse.stdout
    none = chaoskit("compare", f"{tmp_path}/kept@aaaa", f"{tmp_path}/kept@dddd")
    assert none.returncode == 2
    assert "name a commit or a session of which" in none.stderr


@pytest.mark.promise("**A regression that is known** is no failure until a day")
def test_what_was_accepted_is_shown_and_no_failure(tmp_path: Path) -> None:
    keep(tmp_path / "kept", {"aaaa": 0.05, "cccc": 0.10})
    now = [f"{tmp_path}/kept@aaaa", f"{tmp_path}/kept@cccc"]
    accepted = chaoskit(
        "accept", f"{tmp_path}/kept", "test_kill", "--reason", "sums", "--until", "2999-01-01"
    )
    assert accepted.returncode == 0, accepted.stderr
    done = chaoskit("compare", *now)
    assert done.returncode == 0
    assert "accepted until 2999-01-01: sums" in done.stdout
    assert "regressed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["test_kill", "--reason", "x", "--until", "tomorrow"], "give a day, such as 2026-12-31"),
        (["test_kill", "--reason", "x", "--until", "2020-01-01"], "give today or a later day"),
        (["test_kill", "--reason", " ", "--until", "2999-01-01"], "give a reason"),
        (["nothing", "--reason", "x", "--until", "2999-01-01"], "name one of"),
        (
            ["test_kill", "--reason", "x", "--until", "2999-01-01", "--number", "speed"],
            "use one of",
        ),
    ],
)
def test_what_accepts_nothing_is_refused(tmp_path: Path, arguments: list[str], told: str) -> None:
    keep(tmp_path / "kept", {"aaaa": 0.05})
    done = chaoskit("accept", f"{tmp_path}/kept", *arguments)
    assert done.returncode == 2
    assert told in done.stderr


def test_what_was_accepted_for_another_number_fails(tmp_path: Path) -> None:
    keep(tmp_path / "kept", {"aaaa": 0.05, "cccc": 0.10})
    options = ["--reason", "x", "--until", "2999-01-01", "--number", "step"]
    assert chaoskit("accept", f"{tmp_path}/kept", "test_kill", *options).returncode == 0
    assert chaoskit("compare", f"{tmp_path}/kept@aaaa", f"{tmp_path}/kept@cccc").returncode == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a repository to another user")
def test_a_repository_of_another_user_is_read_where_git_is_told_so(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod's image belongs to root, for example. Variables that name another repository, such as a
    hook's, are ignored.
    """
    for path in [project.path, *project.path.rglob("*")]:
        os.chown(path, 12345, 12345)
    with pytest.raises(BadInput, match="dubious ownership"):
        Repository(project.path, tmp_path)
    for name, setting in {"COUNT": "1", "KEY_0": "safe.directory", "VALUE_0": "*"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", setting)
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert Repository(project.path, tmp_path).root == project.path
