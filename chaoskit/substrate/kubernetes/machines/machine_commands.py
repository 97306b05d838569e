"""Levers: commands of the user that break machines from outside, such as their power or cables.

-> kubernetes/machines/machines.py: which machine may be broken, and when its repair is complete.
"""

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
    """A command and the command that undoes it.

    The word ``{machine}`` in them stands for the machine.

    ``undo`` must end with status 0 within 10 s even if there is nothing to undo: a guard runs it
    after a kill.
    """

    do: tuple[str, ...]
    undo: tuple[str, ...]

    @property
    def is_for_machines(self) -> bool:
        """True if its commands name a machine."""
        return any(_MACHINE in word for word in (*self.do, *self.undo))


def read(path: str) -> Mapping[str, Lever]:
    """Return the levers of a file, by name. Raises BadInput if the file is not valid."""
    try:
        levers = msgspec.convert(read_document("levers", Path(path)), dict[str, Lever])
    except (BadInput, msgspec.ValidationError) as error:
        problem = error.remedy if isinstance(error, BadInput) else str(error)
        remedy = f"name a file with name: {{do: [...], undo: [...]}}, in YAML: {problem}"
        raise BadInput("levers", path, remedy) from None
    for name, lever in levers.items():
        if name in MARKS:
            raise BadInput(
                "levers",
                f"{path}: {name}",
                "use another name: this one is reserved for a mark of the API server",
            )
        if not lever.do or not lever.undo:
            raise BadInput(
                "levers",
                f"{path}: {name}",
                "set both do and undo, each to a command with its arguments",
            )
    return levers


def pull(name: str, lever: Lever, machine: str, undo: UndoLog) -> Callable[[], None]:
    """Run the command of a lever after its undo is recorded, and return a function that undoes it.

    A command that takes over 30 s counts as failed. The returned function raises HarnessError if
    the undo fails; the undo entry stays then.

    Raises:
        HarnessError: if the command fails; it is undone at once then.
        NotPutBack: if that undo fails, too. The undo entry stays for the guard.
    """
    entry = undo.plan(CommandEntry(shlex.join(_filled(lever.undo, machine))))

    def put_back() -> None:
        run_undo(name, lever, machine)
        entry.done()

    try:
        _run(f"lever {name}", [*_die_with_parent(), *_filled(lever.do, machine)])
    except HarnessError as failure:
        try:
            put_back()
        except HarnessError as error:  # the undo guard tries once more
            raise NotPutBack(f"{failure}; {error}") from failure
        raise
    return put_back


def run_undo(name: str, lever: Lever, machine: str) -> None:
    """Run the command that undoes a lever. Raises HarnessError if it fails."""
    _run(f"the undo of lever {name}", _filled(lever.undo, machine))


def _die_with_parent() -> list[str]:
    """Return the command that starts another one so that it does not outlive this process.

    Otherwise its undo could come before its effect.
    """
    path = shutil.which("setpriv")
    return [path, "--pdeathsig", "KILL", "--"] if path is not None else []


def _filled(words: tuple[str, ...], machine: str) -> list[str]:
    """Return the words of a command with the name of the machine filled in."""
    return [word.replace(_MACHINE, machine) for word in words]


def _run(title: str, command: list[str]) -> None:
    """Run a command, and wait for its end. Raises HarnessError if it fails or takes over 30 s."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"{title}: {error}") from error
    if ended.returncode:
        text = " ".join((ended.stderr or ended.stdout).decode(errors="replace").split()[-40:])
        raise HarnessError(f"{title} ended with status {ended.returncode}: {text}")
