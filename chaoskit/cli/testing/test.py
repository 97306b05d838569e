"""``chaoskit test``: run suites of chaos tests with pytest, in a separate process.

-> pytest_plugin.py: the fixture ``chaos``, and the exit code of a session.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from chaoskit.cli.output import EXIT_INTERRUPTED, Json, command_app, print_json
from chaoskit.errors import BadInput, name_remedy
from chaoskit.launcher.launch import fresh_directory
from chaoskit.process.host_checks import require_writable
from chaoskit.process.linux import die_with_parent
from chaoskit.report.statistics import estimate_recovery
from chaoskit.report.store import FILE_NAME, decode_outcome
from chaoskit.vocabulary import EXIT_BAD_INPUT, Verdict

_PYTEST_INTERNAL_ERROR, _PYTEST_USAGE_ERROR, _PYTEST_NO_TESTS = 3, 4, 5

app = command_app()


def suite_words() -> list[str]:
    """Return words for completion in a shell: suites, and files of the working directory."""
    return [*suite_names(), *sorted(path.name for path in Path().iterdir())]


@app.command("test", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run_tests(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(
            help="A suite of chaoskit, such as smoke, or a path to tests.",
            autocompletion=suite_words,
        ),
    ],
    report: Annotated[
        Path | None, typer.Option(help="Directory for outcomes, journals and report.html.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of every run.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Number of runs of each chaos test.")] = None,
    is_json: Json = False,
) -> int:
    """Run a suite of chaos tests with pytest; further arguments go to pytest.

    Exit code 0: passed, 1: failed, 2: bad input, 10: unknown (a fault has no
    evidence), 11: error (chaoskit itself failed).

    Example: [cyan]chaoskit test smoke -k killed -x[/]
    """
    suite_arguments(suite)  # an error leaves no directory behind
    if repeats is not None and repeats < 1:
        raise BadInput("repeats", repeats, "use 1 or more")
    directory = report or fresh_directory(None, Path(suite.partition("::")[0]).stem)
    require_writable("report", directory)
    earlier = set(directory.rglob(FILE_NAME))
    arguments = [f"--chaos-report={directory}"]
    arguments += [f"--chaos-seed={seed}"] if seed is not None else []
    arguments += [f"--chaos-repeats={repeats}"] if repeats is not None else []
    code = run_suite(suite, [*arguments, *context.args], quiet=is_json)
    if is_json:
        written = [path.read_bytes() for path in sorted({*directory.rglob(FILE_NAME)} - earlier)]
        recovery = estimate_recovery(map(decode_outcome, written)).plain()
        outcomes = [json.loads(data) for data in written]
        print_json(
            {
                "exit_code": code,
                "directory": str(directory),
                "recovery": recovery,
                "outcomes": outcomes,
            }
        )
    return code


def suite_names() -> list[str]:
    """Return the names of the suites that come with chaoskit."""
    package = importlib.util.find_spec("chaoskit.suites")
    locations = package.submodule_search_locations if package else None
    return sorted(module.name for module in pkgutil.iter_modules(locations) if module.ispkg)


def suite_arguments(suite: str) -> list[str]:
    """Return the arguments of pytest that select a suite of chaoskit, or a path.

    A path may name a test, as ``file.py::test`` does.

    Raises:
        BadInput: if there is neither.
    """
    name, _, _ = suite.partition("::")
    if name in suite_names():
        return ["--pyargs", f"chaoskit.suites.{suite}"]
    if Path(name).exists():
        return [suite]
    remedy = f"name one of {', '.join(suite_names())}, or a file or directory of tests"
    raise BadInput("suite", suite, name_remedy(name, suite_names(), remedy))


def run_suite(suite: str, arguments: list[str], *, quiet: bool = False) -> int:
    """Run pytest, and return the exit code of chaoskit: 0, 1, 2, 10 or 11.

    It is 2 for wrong arguments and if there are no tests, 11 if pytest itself fails or is killed,
    else that of pytest. An interruption of this process also ends pytest.

    Args:
        quiet: send pytest's output to standard error.

    Raises:
        BadInput: if there is no such suite, or pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise BadInput("suite", suite, "install pytest")
    command = [sys.executable, "-m", "pytest", *suite_arguments(suite), *arguments]
    parent_pid = os.getpid()
    process = subprocess.Popen(
        command,
        stdout=sys.stderr if quiet else None,
        preexec_fn=lambda: die_with_parent(parent_pid),  # noqa: PLW1509 -- this process has one thread
    )
    try:
        code = process.wait()
    except BaseException as error:
        if not (
            getattr(error, "code", None) == EXIT_INTERRUPTED and sys.stdin.isatty()
        ):  # Ctrl-C at a terminal reaches both processes
            process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if code in (_PYTEST_USAGE_ERROR, _PYTEST_NO_TESTS):
        return EXIT_BAD_INPUT
    if code < 0 or code == _PYTEST_INTERNAL_ERROR:
        return Verdict.ERROR.exit_code
    return code
