"""Tests of ``chaoskit canary``: a table of mistakes with the checks that find them, and a status
for those that passed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaoskit.cli.testing.canary import CanaryResult, read_report
from chaoskit.errors import HarnessError

LIMIT_S = 280.0
PICK = ("-k", "test_a_mistake_of_the_runtime_fails and exact-once-halves_weights")

#: A plugin of pytest with which the canary's runs have no mistake at all: what must not pass does.
FAITHFUL = """
from chaoskit.suites.canary import runs
runs.order = lambda directory, mistake, when: None
"""


def canary(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a directory of its own."""
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(directory / "cache")}
    command = [sys.executable, "-m", "chaoskit", "canary", *arguments]
    return subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.promise("The status is 0 if no mistake has passed, else 1.")
@pytest.mark.costly
@pytest.mark.slow
def test_a_mistake_that_is_found_is_told_with_its_check(tmp_path: Path) -> None:
    done = canary(tmp_path, "--report", "found", "--json", *PICK)
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 0, done.stderr
    (row,) = report["tried"]
    assert row == {
        "what": "weights are halved (the first step after a recovery)",
        "cell": "exact",
        "check": "losses equal the twin's",
        "verdict": "failed",
        "kind": "mistake",
    }


@pytest.mark.costly
@pytest.mark.slow
def test_a_mistake_that_passes_is_shown_and_fails(tmp_path: Path) -> None:
    (tmp_path / "faithful.py").write_text(FAITHFUL)
    done = canary(tmp_path, "--report", "passed", "-p", "faithful", *PICK)
    assert done.returncode == 1, done.stderr
    assert "mistakes: 1, known limits: 0, harmless changes: 0, wrong verdicts: 1" in done.stdout
    (row,) = read_report(tmp_path / "passed" / "canary.xml")
    assert (row.verdict, row.is_wrong) == ("passed", True)


def test_bad_input_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = canary(tmp_path, "--report", "file")
    assert done.returncode == 2
    assert "--report file: choose a directory" in done.stderr


def test_help_teaches_by_an_example(tmp_path: Path) -> None:
    assert 'chaoskit canary -k "exact and restore"' in canary(tmp_path, "--help").stdout


def test_only_a_mistake_may_not_pass() -> None:
    def is_wrong(verdict: str, kind: str) -> bool:
        return CanaryResult("", "", "", verdict, kind).is_wrong

    assert [is_wrong("passed", kind) for kind in ("mistake", "limit", "harmless")] == [
        True,
        False,
        False,
    ]
    assert [is_wrong("failed", kind) for kind in ("mistake", "limit", "harmless")] == [
        False,
        True,
        True,
    ]


def test_a_report_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="left no report"):
        list(read_report(tmp_path / "missing.xml"))
    (tmp_path / "torn.xml").write_text("<testsuites>")
    with pytest.raises(HarnessError, match="left no report"):
        list(read_report(tmp_path / "torn.xml"))


def test_tests_that_try_nothing_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    fields = {"what": "w", "cell": "exact", "check": "c", "verdict": "failed", "kind": "mistake"}
    rows = "".join(
        f'<property name="canary.{name}" value="{text}"/>' for name, text in fields.items()
    )
    path.write_text(
        f"<testsuites><testsuite><testcase name='one'/><testcase name='two'><properties>{rows}</properties></testcase>"
        "</testsuite></testsuites>"
    )
    assert list(read_report(path)) == [CanaryResult(**fields)]
