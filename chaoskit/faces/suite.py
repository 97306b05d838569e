"""``chaoskit run``: a suite, by pytest in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

from chaoskit.errors import BadInput
from chaoskit.osprocess import die_with_parent
from chaoskit.vocabulary import EXIT_BAD_INPUT, Verdict

_PYTEST_INTERNAL_ERROR, _PYTEST_USAGE_ERROR, _PYTEST_NO_TESTS = 3, 4, 5


def suite_names() -> list[str]:
    """The suites that come with chaoskit."""
    found = importlib.util.find_spec("chaoskit.suites")
    places = found.submodule_search_locations if found else None
    return sorted(module.name for module in pkgutil.iter_modules(places))


def suite_arguments(suite: str) -> list[str]:
    """What pytest is told to run: a suite of chaoskit by name, or a path (``file.py::test`` too).

    Raises:
        BadInput: if there is neither.
    """
    name, _, _ = suite.partition("::")
    if name in suite_names():
        return ["--pyargs", f"chaoskit.suites.{suite}"]
    if Path(name).exists():
        return [suite]
    raise BadInput("suite", suite, f"name one of {', '.join(suite_names())}, or a file or directory of tests")


def run_suite(suite: str, arguments: list[str], *, quiet: bool = False) -> int:
    """Run pytest, and give the exit code of chaoskit: 0, 1, 2, 10 or 11. ``quiet`` leaves standard output alone.

    Raises:
        BadInput: if there is no such suite.
    """
    if importlib.util.find_spec("pytest") is None:
        raise BadInput("suite", suite, "install pytest")
    command = [sys.executable, "-m", "pytest", *suite_arguments(suite), *arguments]
    me = os.getpid()
    process = subprocess.Popen(
        command,
        stdout=2 if quiet else None,
        preexec_fn=lambda: die_with_parent(me),  # noqa: PLW1509 -- this process has one thread
    )
    try:
        code = process.wait()
    except BaseException as error:
        if not (isinstance(error, KeyboardInterrupt) and sys.stdin.isatty()):  # a terminal's Ctrl-C reaches both
            process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if code in (_PYTEST_USAGE_ERROR, _PYTEST_NO_TESTS):
        return EXIT_BAD_INPUT
    if code < 0 or code == _PYTEST_INTERNAL_ERROR:
        return Verdict.ERROR.exit_code
    return code
