"""A version that is being compared: pytest in a directory of its own, which runs one test at a time."""

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

#: Of an environment, in the name of a version.
ENVIRONMENT = "env:"
_PLUGIN = "chaoskit_in_arm"
_START_S = 300.0
_RUN_S = 1800.0  # a run has a deadline of its own; this is for what hangs outside of it
_END_S = 60.0
_TAIL_BYTES = 4096


class Version(NamedTuple):
    """What is compared, as it was named: ``v1.2``, ``.``, ``env:PATH`` or ``v1.2,env:PATH``.

    Attributes:
        revision: "" for the files as they are. python: the interpreter.
    """

    name: str
    revision: str
    python: str

    @classmethod
    def parse(cls, name: str) -> Version:
        """Raises BadInput if it names no environment that is there."""
        revision, python = "", sys.executable
        for part in name.split(","):
            if not part.startswith(ENVIRONMENT):
                revision = part.strip()
                continue
            place = Path.cwd() / Path(part.removeprefix(ENVIRONMENT)).expanduser()
            python = str(place / "bin" / "python" if place.is_dir() else place)
            if not os.access(python, os.X_OK):
                raise BadInput(
                    "version", name, "name an environment, such as env:.venv, or a Python in it"
                )
        return cls(name, revision, python)

    def has_xdist(self) -> bool:
        """Whether its pytest may spread tests over processes: here they run one at a time."""
        if self.python == sys.executable:
            return importlib.util.find_spec("xdist") is not None
        return any(Path(self.python).parent.parent.glob("lib/python*/site-packages/xdist"))


class ArmProcess:
    """Pytest with the tests of one version.

    Args:
        directory: in which the version is checked out. arguments: of pytest, as the user gave them, for ``root``.
        below: the directory of the user, below the root.
        scratch: for what it needs; its log is there.

    Attributes:
        tests: names of those that use the fixture ``chaos``, once they are collected.

    Raises:
        HarnessError: if it cannot be started.
    """

    def __init__(
        self,
        version: Version,
        directory: Path,
        arguments: Sequence[str],
        *,
        root: Path,
        below: Path,
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
        self._rest = b""
        command = [
            version.python,
            "-m",
            "pytest",
            "-p",
            _PLUGIN,
            *_moved(arguments, root, directory),
        ]
        command += [
            "-p",
            "no:cacheprovider",
            "--chaos-repeats=1",
            *(["-n0"] if version.has_xdist() else []),
        ]
        command += [
            f"--chaos-save={scratch / 'records.jsonl'}"
        ]  # without a place for them no records are made
        command += [
            "--chaos-history=",
            "-o",
            "chaos_history=",
        ]  # the caller keeps what is to be kept
        me = os.getpid()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=directory / below,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment(scratch, orders, answers, root),
                    pass_fds=(orders, answers),
                    preexec_fn=lambda: _prepare(me),  # noqa: PLW1509 -- it takes no lock that another thread may hold
                )
        except OSError as error:
            raise HarnessError(f"{version.name}: pytest cannot be started: {error}") from error
        finally:
            os.close(orders)
            os.close(answers)
        self.tests: list[str] = []

    def _environment(self, scratch: Path, orders: int, answers: int, root: Path) -> dict[str, str]:
        """Code of the repository is imported from this version of it, wherever it was installed from."""
        inside = [Path(entry) for entry in sys.path if entry and Path(entry).is_relative_to(root)]
        places = [
            self.directory / entry.relative_to(root)
            for entry in inside
            if "site-packages" not in entry.parts
        ]
        places += [self.directory / "src", self.directory]
        path = [str(scratch), *(str(place) for place in dict.fromkeys(places) if place.is_dir())]
        given = os.environ.get("PYTHONPATH", "")
        outside = [
            entry
            for entry in given.split(os.pathsep)
            if entry and not Path(entry).is_relative_to(root)
        ]
        own = {
            "PYTHONPATH": os.pathsep.join([*path, *outside]),
            in_arm.PIPES: f"{orders},{answers}",
        }
        return {**os.environ, **own}

    def await_tests(self) -> None:
        """Wait until its tests are collected. Raises HarnessError if it ends before that."""
        self.tests = self._answer(_START_S)["tests"]

    def run(self, test: str) -> ArmReport:
        """Run a test once. Raises HarnessError if the process ends, or does not answer."""
        order = json.dumps({"run": test}) + "\n"
        self._is_busy = True
        try:
            os.write(self._orders, order.encode())
        except BrokenPipeError:
            raise HarnessError(self._why_over()) from None
        answer = self._answer(_RUN_S)
        self._is_busy = False
        try:
            records = [decode(line.encode()) for line in answer["records"]]
        except msgspec.MsgspecError as error:
            raise HarnessError(
                f"{self.version.name}: its records cannot be read, as of a later chaoskit: {error}"
            ) from None
        runs = [record for record in records if isinstance(record, RunRecord)]
        plans = [record for record in records if isinstance(record, SeriesRecord)]
        return ArmReport(runs, answer["seconds"], answer["trouble"], plans)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not await_readable([self._answers], left_s):
                raise HarnessError(
                    f"{self.version.name}: no answer within {timeout_s:g} s; its log ends: {self._tail()}"
                )
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise HarnessError(self._why_over())
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer: dict[str, Any] = msgspec.json.decode(line, type=dict)
        except msgspec.MsgspecError as error:
            raise HarnessError(f"{self.version.name}: an answer cannot be read: {error}") from None
        return answer

    def _why_over(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return f"{self.version.name}: pytest ended with {self._process.returncode}: {self._tail()}"

    def _tail(self) -> str:
        """What its log says last: the lines of an error where there are such."""
        data = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        lines = [
            line.strip()
            for line in data.splitlines()
            if line.strip() and not line.startswith(("=", "_"))
        ]
        errors = [line for line in lines if line.startswith(("E ", "ERROR", "ImportError"))]
        return "; ".join((errors or lines)[-3:]) or "its log is empty"

    def close(self) -> None:
        """End it, and all that it has started: at once where a run is under way."""
        os.close(self._orders)  # the end of its input
        if self._is_busy:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its guard puts back what is left
                self._process.wait()
        os.close(self._answers)


def _prepare(parent_pid: int) -> None:
    """In the child: it ends with its parent, and can be interrupted also where a shell has started that with ``&``."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _moved(arguments: Sequence[str], root: Path, directory: Path) -> list[str]:
    """Absolute paths in the user's repository, as they are in another version of it."""
    found = []
    for argument in arguments:
        option, mark, value = (
            argument.partition("=") if argument.startswith("-") else ("", "", argument)
        )
        if value.startswith("/") and Path(value.partition("::")[0]).is_relative_to(root):
            value = str(directory / Path(value).relative_to(root))
        found.append(f"{option}{mark}{value}")
    return found
