"""Where commands write, and how they end: one line for people, one JSON object for machines, one exit status."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from chaoskit.errors import BadInput, closest_name, shown
from chaoskit.plaintext import one_line
from chaoskit.vocabulary import EXIT_BAD_INPUT

if TYPE_CHECKING:
    from rich.console import Console

    from chaoskit.elastic.client import RequestReply

EXIT_FAILED = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT

_VALUE_LENGTH_MAX = 200
_TAKES_PAIRS = ("--setting", "--limit")  # of NAME=VALUE, as --set
_NO_COMMAND = re.compile("No such command '(.*?)'")
_JOINED = ("--set=", "--setting=", "--limit=")

#: Click's; some versions of typer bring it along under another name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on standard output, and nothing else there."
    ),
]

RunDirectory = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN_DIR]", help="Directory of a run. Default: the newest below ./chaoskit-runs."
    ),
]

Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="Directory of the run. Default: the newest below chaoskit-runs that is running.",
    ),
]


class _Command(TyperCommand):
    """A command that refuses empty texts as values of its options and arguments.

    ``--report "$DIR"`` with an unset variable would otherwise mean the working directory, or nothing.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            values = given.get(str(parameter.name))
            if "" in (values if isinstance(values, (list, tuple)) else [values]):
                remedy = (
                    "give it a value" if parameter.required else "give it a value, or leave it out"
                )
                raise BadInput(str(parameter.name), "", remedy)
        return super().parse_args(ctx, args)


class _App(typer.Typer):
    """A typer app whose commands refuse empty texts."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Any:
        return super().command(name, cls=cls or _Command, **settings)


def command_app(help_text: str = "") -> typer.Typer:
    """The typer app of one command; with ``help_text``, of a group of commands."""
    return _App(
        help=help_text or None,
        no_args_is_help=bool(help_text),
        add_completion=False,
        rich_markup_mode="rich",
        callback=(lambda: None) if help_text else None,  # a group, even of one command
    )


def console(machine: bool = False) -> Console:
    """A console on standard output, or on standard error where JSON is printed."""
    from chaoskit.report.terminal import Terminal

    return Terminal(stderr=machine)


def print_json(value: Any) -> None:
    """Print one line on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def add_summary(summary: Path, text: str) -> None:
    """Add Markdown to a file. Raises BadInput if it cannot be written."""
    try:
        with summary.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise BadInput(
            "summary", str(summary), f"name a file that can be written ({error.strerror})"
        ) from None


def reply_text(reply: RequestReply) -> str:
    """The answer of a running job to a request, in a line."""
    return reply.reason if reply.accepted else f"refused: {reply.reason}"


def end_in_order(signum: int, frame: FrameType | None) -> None:
    """Unwind the command at the first signal, which ends what it started. Further signals would disturb that."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + signum)


# -- bad input ----------------------------------------------------------------------------------------------------


def refuse(
    error: BadInput, arguments: Sequence[str], options: Mapping[str, str], machine: bool
) -> int:
    """Print what is wrong with the input, in one line. Returns the exit status.

    Args:
        arguments: the command line without ``chaoskit``.
        options: field -> the option or argument that sets it.
    """
    if machine:
        plain = (
            error.value
            if isinstance(error.value, (int, float, bool, type(None)))
            else str(error.value)
        )
        print_json({"error": {"field": error.field, "value": plain, "remedy": error.remedy}})
    sys.stderr.write(
        f"chaoskit: {one_line(f'{as_typed(error, arguments, options)}: {error.remedy}')}\n"
    )
    return EXIT_BAD_INPUT


def as_typed(error: BadInput, arguments: Sequence[str], options: Mapping[str, str]) -> str:
    """The part of the command line that is wrong: ``--nodes 0``, ``SCRIPT job``, ``--set steps=many``."""
    option = options.get(error.field)
    of_script = error.field.startswith("options.")
    arguments = [
        part
        for one in arguments
        for part in (one.split("=", 1) if one.startswith(_JOINED) else [one])
    ]
    for place, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if option is not None and option.startswith("--") and name == option:
            return argument if equals else _short(shlex.join(arguments[place : place + 2]))
        before = arguments[place - 1] if place else ""
        if before == "--set":
            found = of_script and name == error.field.removeprefix("options.")
        else:
            found = before in _TAKES_PAIRS and name == error.field
        if equals and found:
            return _short(shlex.join((before, argument)))
    if option is None:
        return error.field if error.value is None else f"{error.field}={_short(shown(error.value))}"
    return (
        option if error.value in (None, "") else f"{option} {_short(shlex.quote(str(error.value)))}"
    )


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_LENGTH_MAX else f"{text[:_VALUE_LENGTH_MAX]}..."


def misused(error: Exception, arguments: Sequence[str], machine: bool) -> int:
    """Print what typer refused, in the same form. Returns the exit status."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "chaoskit"
    message = str(getattr(error, "message", "")).strip(".").partition("\n")[0]
    parameter, option = getattr(error, "param", None), getattr(error, "option_name", None)
    kind = type(error).__name__
    if parameter is not None:
        field, typed, value = (
            parameter.name,
            option_name(parameter),
            _given(option_name(parameter), arguments),
        )
        remedy = "it is missing" if kind == "MissingParameter" else _use(message.partition(",")[0])
    elif option is not None and kind != "NoSuchOption":
        field, typed, value, remedy = "option", option, None, message.partition("' ")[2] or message
    elif option is not None:
        closest = closest_name(option, getattr(error, "possibilities", None) or ())
        field, typed, value, arguments = "option", option, None, ()
        remedy = "there is no such option" + (f", write {closest}" if closest else "")
    elif (unknown := _NO_COMMAND.match(message)) and context is not None:
        field, typed, value = "command", "command", unknown[1]
        closest = closest_name(value, context.command.list_commands(context))
        remedy = "no such command" + (f"; write {command} {closest}" if closest else "")
    else:
        field, typed, value = "command", "command", None
        remedy = message[:1].lower() + message[1:] if message else "it is missing"
    return refuse(
        BadInput(field, value, f"{remedy}; see {command} --help"),
        arguments,
        {field: typed},
        machine,
    )


def _use(message: str) -> str:
    """A message of typer's as an imperative."""
    wanted = message.removeprefix("Input should be ")
    return f"use {wanted}" if wanted.startswith("a ") else f"use a value {wanted}"


def option_name(parameter: Any) -> str:
    """An option as it is typed (``--nodes``), or an argument as the help shows it (``SCRIPT``)."""
    names: list[str] = [name for name in parameter.opts if name.startswith("--")]
    return (
        names[0]
        if names
        else str(parameter.metavar or parameter.name).strip("[]").partition("|")[0].upper()
    )


def _given(name: str, arguments: Sequence[str]) -> str | None:
    """What follows an option on the command line."""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == name:
            return value if equals else " ".join(arguments[place + 1 : place + 2])
    return None
