"""Tests of a limit on file sizes (``ulimit -f``): a small one is refused before a run, others are
named by errors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import LIMIT_S

NAMED = "4096 bytes here; allow more (`ulimit -f unlimited`)"
JOB_FILE = Path(__file__).parents[2] / "jobs" / "failing" / "troubled.py"
#: Runs a body in a process whose files may have 4096 bytes.
LIMITED = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
JOURNAL = """
import sys
from pathlib import Path
from chaoskit.journal import Journal
from chaoskit.vocabulary import Event
journal = Journal(Path(sys.argv[1]), "harness", role="", node="")
for step in range(1000):
    journal.write(Event.COMMIT, step=step)
"""
JOB = """
from pathlib import Path
from chaoskit.runtime.worker.failure import failure_of
import sys
try:
    (Path(sys.argv[1]) / "state").write_bytes(bytes(10_000))
except OSError as error:
    print(failure_of(error).error, file=sys.stderr)
"""
REASON = """
import os, sys
from chaoskit.process.linux import reason_of
descriptor = os.memfd_create("state")
try:
    os.ftruncate(descriptor, 10_000)
except OSError as error:
    print(reason_of(error), file=sys.stderr)
"""
HARNESS = """
import sys
from chaoskit import BadInput, Harness
try:
    Harness(directory=sys.argv[1])
except BadInput as error:
    print(error, file=sys.stderr)
"""


def errors(code: str, directory: Path) -> str:
    """Return the standard error of a process with the limit."""
    command = [sys.executable, "-B", "-c", LIMITED + code, str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return ended.stderr


@pytest.mark.parametrize("code", [JOURNAL, JOB, REASON], ids=["journal", "job", "memory"])
def test_an_error_of_a_file_that_is_too_large_names_the_limit(code: str, tmp_path: Path) -> None:
    printed = errors(code, tmp_path)
    assert NAMED in printed
    assert "File too large" in printed


def test_a_small_limit_is_refused_before_a_run(tmp_path: Path) -> None:
    (line,) = errors(HARNESS, tmp_path / "runs").splitlines()
    assert line.startswith("ulimit -f='4096 bytes': allow larger files (`ulimit -f unlimited`)")
    assert not (tmp_path / "runs").exists()


def test_a_launch_refuses_it_in_one_line(tmp_path: Path) -> None:
    script = f"ulimit -f 8; exec {sys.executable} -B -m chaoskit launch {JOB_FILE}:plain --nodes 1 --set steps=20"
    variables = os.environ | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    ended = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "ulimit -f" in ended.stderr + ended.stdout
