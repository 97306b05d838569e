"""Commands of the user's that break machines from outside: their power, their cables, the API server."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from chaoskit.errors import BadInput, HarnessError
from chaoskit.settings_file import read_document
from chaoskit.substrate.core.external_commands import NotPutBack
from chaoskit.substrate.kubernetes.machines.marks import MARKS
from chaoskit.substrate.undo import CommandEntry, UndoLog

_COMMAND_S = 30.0
_MACHINE = "{machine}"


class Lever(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command, and what undoes it; in their words ``{machine}`` stands for the machine.

    ``undo`` must end with status 0 within 10 s where nothing is to be undone, too: a guard runs it after a kill.
    """

    do: tuple[str, ...]
    undo: tuple[str, ...]

    @property
    def is_for_machines(self) -> bool:
        """Whether its commands name a machine."""
        return any(_MACHINE in word for word in (*self.do, *self.undo))


def read(path: str) -> Mapping[str, Lever]:
    """The levers of a file, by name. Raises BadInput if it has none."""
    try:
        found = msgspec.convert(read_document("levers", Path(path)), dict[str, Lever])
    except (BadInput, msgspec.ValidationError) as error:
        problem = error.remedy if isinstance(error, BadInput) else str(error)
        remedy = f"name a file with name: {{do: [...], undo: [...]}}, in YAML: {problem}"
        raise BadInput("levers", path, remedy) from None
    for name, lever in found.items():
        if name in MARKS:
            raise BadInput(
                "levers", f"{path}: {name}", "use another name: this is what the API server does"
            )
        if not lever.do or not lever.undo:
            raise BadInput(
                "levers",
                f"{path}: {name}",
                "give it both, do and undo: a command and its arguments",
            )
    return found


def pull(name: str, lever: Lever, machine: str, undo: UndoLog) -> Callable[[], None]:
    """Run the command of a lever, once its undo is written down. Gives what puts it back.

    Raises:
        HarnessError: if it fails; then it was put back at once.
    """
    entry = undo.plan(CommandEntry(shlex.join(_filled(lever.undo, machine))))

    def put_back() -> None:
        push_back(name, lever, machine)
        entry.done()

    try:
        _run(f"lever {name}", [*_ends_with_us(), *_filled(lever.do, machine)])
    except HarnessError as failure:
        try:
            put_back()
        except HarnessError as error:  # its guard tries once more
            raise NotPutBack(f"{failure}; {error}") from failure
        raise
    return put_back


def push_back(name: str, lever: Lever, machine: str) -> None:
    """Run the command that undoes a lever. Raises HarnessError if it fails."""
    _run(f"the undo of lever {name}", _filled(lever.undo, machine))


def _ends_with_us() -> list[str]:
    """What starts a command so that it does not outlive this process: its undo would come before its effect."""
    path = shutil.which("setpriv")
    return [path, "--pdeathsig", "KILL", "--"] if path is not None else []


def _filled(words: tuple[str, ...], machine: str) -> list[str]:
    return [word.replace(_MACHINE, machine) for word in words]


def _run(what: str, command: list[str]) -> None:
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"{what}: {error}") from error
    if ended.returncode:
        told = " ".join((ended.stderr or ended.stdout).decode(errors="replace").split()[-40:])
        raise HarnessError(f"{what} ended with status {ended.returncode}: {told}")
