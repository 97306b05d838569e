"""Process of a compared version: pytest in its own directory, which runs one test at a time.

-> versions/in_arm.py: the other end, a plugin inside this pytest. versions/run.py: the turns.
-> nightly/repeats.py runs the tests of a night in such a process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chaoskit.errors import BadInput, HarnessError
from chaoskit.history.record import RunRecord, SeriesRecord
from chaoskit.history.store import decode
from chaoskit.process.linux import await_readable, die_with_parent
from chaoskit.versions import in_arm
from chaoskit.versions.schedule import ArmReport

#: The prefix of an environment in the name of a version.
ENVIRONMENT = "env:"
_PLUGIN = "chaoskit_in_arm"
_START_S = 300.0
_RUN_S = 1800.0  # a run has a deadline of its own; this limit is for hangs outside of it
_END_S = 60.0
_TAIL_BYTES = 4096


class Version(NamedTuple):
    """A version to compare, named as ``v1.2``, ``.``, ``env:PATH`` or ``v1.2,env:PATH``.

    Attributes:
        revision: the revision; "" or ``.`` for the files as they are.
        python: the path of the interpreter; that of this process if the name has no environment.
    """

    name: str
    revision: str
    python: str

    @classmethod
    def parse(cls, name: str) -> Version:
        """Return the version that a name stands for. The revision is not looked up here.

        Raise BadInput if its environment has no Python that can be run.
        """
        revision, python = "", sys.executable
        for part in name.split(","):
            if not part.startswith(ENVIRONMENT):
                revision = part.strip()
                continue
            path = Path.cwd() / Path(part.removeprefix(ENVIRONMENT)).expanduser()
            python = str(path / "bin" / "python" if path.is_dir() else path)
            if not os.access(python, os.X_OK):
                raise BadInput(
                    "version", name, "name an environment, such as env:.venv, or a Python in it"
                )
        return cls(name, revision, python)

    def has_xdist(self) -> bool:
        """Return True if its environment has xdist, which is disabled: tests run one at a time."""
        if self.python == sys.executable:
            return importlib.util.find_spec("xdist") is not None
        return any(Path(self.python).parent.parent.glob("lib/python*/site-packages/xdist"))


class ArmProcess:
    """Pytest with the tests of one version.

    Call :meth:`await_tests` before the first :meth:`run`, and :meth:`close` at the end, also after
    an error.

    Args:
        directory: the directory in which the version is checked out.
        arguments: arguments of pytest, as the user gave them for ``root``.
        root: the user's repository.
        subdirectory: the user's directory, relative to the root.
        scratch: a directory for the plugin and the log, which must not exist.

    Attributes:
        tests: the names of the tests that use the fixture ``chaos``; empty before
            :meth:`await_tests`.

    Raises:
        HarnessError: if pytest cannot be started.
    """

    def __init__(
        self,
        version: Version,
        directory: Path,
        arguments: Sequence[str],
        *,
        root: Path,
        subdirectory: Path,
        scratch: Path,
    ) -> None:
        self.version, self.directory = version, directory
        self._is_busy = False
        try:
            scratch.mkdir(parents=True)
            shutil.copy(in_arm.__file__, scratch / f"{_PLUGIN}.py")
        except OSError as error:
            raise HarnessError(f"{version.name}: pytest cannot be started: {error}") from error
        self._log = scratch / "log"
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._buffer = b""
        command = [
            version.python,
            "-m",
            "pytest",
            "-p",
            _PLUGIN,
            *_relocated(arguments, root, directory),
        ]
        command += [
            "-p",
            "no:cacheprovider",
            "--chaos-repeats=1",
            *(["-n0"] if version.has_xdist() else []),
        ]
        command += [
            f"--chaos-save={scratch / 'records.jsonl'}"
        ]  # records are only made if there is a file for them
        command += ["--chaos-history=", "-o", "chaos_history="]  # the caller keeps the records
        parent_pid = os.getpid()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=directory / subdirectory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment(scratch, orders, answers, root),
                    pass_fds=(orders, answers),
                    preexec_fn=lambda: _prepare_child(parent_pid),  # noqa: PLW1509 -- it takes no lock that another thread may hold
                )
        except OSError as error:
            raise HarnessError(f"{version.name}: pytest cannot be started: {error}") from error
        finally:
            os.close(orders)
            os.close(answers)
        self.tests: list[str] = []

    def _environment(self, scratch: Path, orders: int, answers: int, root: Path) -> dict[str, str]:
        """Return an environment in which pytest imports the repository's code of this version.

        Directories of the user's own checkout are left out of the path of imports.
        """
        inside = [
            Path(directory)
            for directory in sys.path
            if directory and Path(directory).is_relative_to(root)
        ]
        candidates = [
            self.directory / directory.relative_to(root)
            for directory in inside
            if "site-packages" not in directory.parts
        ]
        candidates += [self.directory / "src", self.directory]
        path = [
            str(scratch),
            *(str(candidate) for candidate in dict.fromkeys(candidates) if candidate.is_dir()),
        ]
        python_path = os.environ.get("PYTHONPATH", "")
        outside = [
            directory
            for directory in python_path.split(os.pathsep)
            if directory and not Path(directory).is_relative_to(root)
        ]
        variables = {
            "PYTHONPATH": os.pathsep.join([*path, *outside]),
            in_arm.PIPES: f"{orders},{answers}",
        }
        return {**os.environ, **variables}

    def await_tests(self) -> None:
        """Wait until the tests are collected, and set ``tests``.

        Raise HarnessError if pytest ends before that, or does not answer within 5 minutes.
        """
        self.tests = self._read_answer(_START_S)["tests"]

    def run(self, test: str) -> ArmReport:
        """Run a test once, and return its report. A test that fails is no error.

        Raise HarnessError if pytest ends, does not answer within 30 minutes, or sends records that
        this chaoskit cannot read.
        """
        order = json.dumps({"run": test}) + "\n"
        self._is_busy = True
        try:
            os.write(self._orders, order.encode())
        except BrokenPipeError:
            raise HarnessError(self._end_message()) from None
        answer = self._read_answer(_RUN_S)
        self._is_busy = False
        try:
            records = [decode(line.encode()) for line in answer["records"]]
        except msgspec.MsgspecError as error:
            raise HarnessError(
                f"{self.version.name}: its records cannot be read by this chaoskit: {error}"
            ) from None
        runs = [record for record in records if isinstance(record, RunRecord)]
        plans = [record for record in records if isinstance(record, SeriesRecord)]
        return ArmReport(runs, answer["seconds"], answer["trouble"], plans)

    def _read_answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer. Raise HarnessError if pytest ends or none comes in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not await_readable([self._answers], left_s):
                raise HarnessError(
                    f"{self.version.name}: no answer within {timeout_s:g} s; its log ends: {self._tail()}"
                )
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise HarnessError(self._end_message())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer: dict[str, Any] = msgspec.json.decode(line, type=dict)
        except msgspec.MsgspecError as error:
            raise HarnessError(f"{self.version.name}: an answer cannot be read: {error}") from None
        return answer

    def _end_message(self) -> str:
        """Wait for the end of pytest, and return an error message with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return f"{self.version.name}: pytest ended with {self._process.returncode}: {self._tail()}"

    def _tail(self) -> str:
        """Return the last lines of the log, or its error lines if there are any, as one line."""
        data = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        lines = [
            line.strip()
            for line in data.splitlines()
            if line.strip() and not line.startswith(("=", "_"))
        ]
        errors = [line for line in lines if line.startswith(("E ", "ERROR", "ImportError"))]
        return "; ".join((errors or lines)[-3:]) or "its log is empty"

    def close(self) -> None:
        """End pytest and its children. A test that is running is interrupted.

        Pytest is killed if it does not end within 2 minutes.
        """
        os.close(self._orders)  # the end of its input ends the session
        if self._is_busy:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its undo guard restores what is left
                self._process.wait()
        os.close(self._answers)


def _prepare_child(parent_pid: int) -> None:
    """Prepare the child: it ends with its parent, and SIGINT interrupts it.

    A shell that starts a command with ``&`` makes it ignore SIGINT, which is inherited.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _relocated(arguments: Sequence[str], root: Path, directory: Path) -> list[str]:
    """Return arguments with absolute paths in the repository moved to another version of it."""
    moved = []
    for argument in arguments:
        option, mark, path = (
            argument.partition("=") if argument.startswith("-") else ("", "", argument)
        )
        if path.startswith("/") and Path(path.partition("::")[0]).is_relative_to(root):
            path = str(directory / Path(path).relative_to(root))
        moved.append(f"{option}{mark}{path}")
    return moved
