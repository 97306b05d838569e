"""Tests with signals that the parent has blocked or ignored: programs still end, and their end is
noticed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.nodes.supervisors import on_unix
from support.waiting import LIMIT_S, wait_until

ALL = signal.valid_signals()
#: The parent of chaoskit, as a scheduler or a CI runner may be: it blocks or ignores, and starts the rest as a program.
PARENT = "import os, signal, sys; signal.{how}; os.execvp(sys.argv[1], sys.argv[1:])"
BLOCKS = "pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
IGNORES = "signal(signal.SIGCHLD, signal.SIG_IGN)"


@contextmanager
def blocked() -> Iterator[None]:
    """Block all signals in this thread: programs that it starts inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_supervisor_sees_the_end_of_its_programs_and_its_own(tmp_path: Path) -> None:
    with blocked():
        supervisor = on_unix(tmp_path)
    try:
        assert os.waitstatus_to_exitcode(supervisor.exit_of(supervisor.start("leave", 7))) == 7
        stays = supervisor.start("stay")
        assert blocked_signals(stays.pid) == 0
        os.kill(stays.pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(supervisor.exit_of(stays)) == -signal.SIGTERM
    finally:
        supervisor.close()


def blocked_signals(pid: int) -> int:
    """Return the mask of the main thread of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16)


@pytest.mark.parametrize("how", [BLOCKS, IGNORES])
def test_a_suite_that_fails_is_known_to_have_failed(how: str, tmp_path: Path) -> None:
    """The status of an ended child would be lost and read as 0 if SIGCHLD stayed ignored."""
    suite = tmp_path / "test_wrong.py"
    suite.write_text("def test_wrong(): assert False\n")
    command = [sys.executable, "-m", "chaoskit", "test", str(suite), "-q"]
    started = [sys.executable, "-c", PARENT.format(how=how), *command]
    ended = subprocess.run(
        started, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr


def test_a_command_ends_at_sigterm(tmp_path: Path) -> None:
    """The parent of the command had blocked the signal."""
    suite, ready = tmp_path / "test_long.py", tmp_path / "ready"
    suite.write_text(
        f"import pathlib, time\ndef test_long():\n    pathlib.Path({str(ready)!r}).touch()\n    time.sleep(600)\n"
    )
    command = [
        sys.executable,
        "-c",
        PARENT.format(how=BLOCKS),
        sys.executable,
        "-m",
        "chaoskit",
        "test",
        str(suite),
    ]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as ended:
        try:
            wait_until(ready.exists, "the test of the suite")
            ended.terminate()
            _, errors = ended.communicate(timeout=LIMIT_S)
        finally:
            ended.kill()
    assert ended.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in errors
