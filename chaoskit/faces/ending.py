"""How every command ends when it does not end well: one line, the right exit code, nothing left running."""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Any

import typer

from chaoskit.errors import BadInput
from chaoskit.plaintext import one_line
from chaoskit.vocabulary import EXIT_BAD_INPUT

#: Click's; some versions of typer bring it along under another name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def print_json(value: Any) -> None:
    """One line on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def end_in_order(signum: int, frame: FrameType | None) -> None:
    """The first signal unwinds the command, which ends what it started; further ones would only disturb that."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signum)


def refuse(error: BadInput, machine: bool) -> int:
    """Say what is wrong with the input, in one line. Returns the exit code."""
    if machine:
        plain = error.value if isinstance(error.value, (int, float, bool, type(None))) else str(error.value)
        print_json({"error": {"field": error.field, "value": plain, "remedy": error.remedy}})
    sys.stderr.write(f"chaoskit: {one_line(str(error))}\n")
    return EXIT_BAD_INPUT


def misused(error: Exception, machine: bool) -> int:
    """The same for what typer itself refused."""
    message = str(getattr(error, "message", "")).strip(".")
    parameter = getattr(error, "param", None)
    if parameter is not None:
        value = _given(getattr(parameter, "opts", []))
        wanted = message.partition(",")[0].replace("Input should be", "use")
        return refuse(BadInput(parameter.name, value, wanted if value else "give it; --help shows how"), machine)
    given = " ".join(["chaoskit", *sys.argv[1:]])
    return refuse(BadInput("command", given, f"{message or 'mend the command line'}; see --help"), machine)


def _given(names: list[str]) -> str | None:
    """What follows an option on the command line."""
    for place, argument in enumerate(sys.argv):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else " ".join(sys.argv[place + 1 : place + 2])
    return None
