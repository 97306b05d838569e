"""Output and exit of commands: a line for users, a JSON object for programs, an exit status.

-> cli/app.py: the exit status of errors. report/terminal.py: the console of all commands.
"""

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
from typer.core import TyperArgument, TyperCommand, TyperOption

from chaoskit.errors import BadInput, closest_name, shown
from chaoskit.plaintext import one_line
from chaoskit.vocabulary import EXIT_BAD_INPUT

if TYPE_CHECKING:
    from rich.console import Console

    from chaoskit.elastic.client import RequestReply

EXIT_FAILED = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT

_VALUE_LENGTH_MAX = 200
_PAIR_OPTIONS = ("--setting", "--limit")  # options that take NAME=VALUE, as --set does
_NO_COMMAND = re.compile("No such command '(.*?)'")
_PAIR_PREFIXES = ("--set=", "--setting=", "--limit=")

#: Click's class, which some versions of typer contain under another name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on standard output, and messages on standard error."
    ),
]

RunDirectory = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN_DIR]",
        help="Directory of the run. Default: the newest run below ./chaoskit-runs.",
    ),
]

Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="Directory of the run. Default: the newest running run below ./chaoskit-runs.",
    ),
]


class _Command(TyperCommand):
    """A command that rejects empty texts as values of its options and arguments.

    ``--report "$DIR"`` with an unset variable would otherwise mean the working directory, or no
    directory.
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
    """A typer app whose commands reject empty texts."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Any:
        return super().command(name, cls=cls or _Command, **settings)


def command_app(help_text: str = "") -> typer.Typer:
    """Return the typer app of a command or, with ``help_text``, of a group of commands.

    Its commands raise BadInput for an empty text as the value of an option or argument.
    """
    return _App(
        help=help_text or None,
        no_args_is_help=bool(help_text),
        add_completion=False,
        rich_markup_mode="rich",
        callback=(lambda: None)
        if help_text
        else None,  # a callback makes it a group, even of one command
    )


def console(is_json: bool = False) -> Console:
    """Return a console on standard output.

    Args:
        is_json: print on standard error, because JSON is printed on standard output.
    """
    from chaoskit.report.terminal import Terminal

    return Terminal(stderr=is_json)


def print_json(document: Any) -> None:
    """Print a value as one line of JSON on standard output."""
    sys.stdout.write(json.dumps(document) + "\n")


def add_summary(summary: Path, text: str) -> None:
    """Append Markdown to a file. Raise BadInput if it cannot be written."""
    try:
        with summary.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise BadInput(
            "summary", str(summary), f"name a file that can be written ({error.strerror})"
        ) from None


def reply_text(reply: RequestReply) -> str:
    """Return the reply of a running job as one line, with ``refused`` if it was not accepted."""
    return reply.reason if reply.accepted else f"refused: {reply.reason}"


def end_in_order(signum: int, frame: FrameType | None) -> None:
    """Handle the first signal: raise SystemExit with 128 plus the number of the signal.

    The exception unwinds the command, which ends the processes that it started. Further signals
    are ignored, because they would disturb that.
    """
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + signum)


# -- bad input -------------------------------------------------------------------------------------


def report_bad_input(
    error: BadInput, arguments: Sequence[str], options: Mapping[str, str], is_json: bool
) -> int:
    """Print one line about bad input on standard error, and return exit status 2.

    Args:
        arguments: the command line without ``chaoskit``.
        options: the option or argument that sets each field.
        is_json: print the error as JSON, too.
    """
    if is_json:
        plain = (
            error.value
            if isinstance(error.value, (int, float, bool, type(None)))
            else str(error.value)
        )
        print_json({"error": {"field": error.field, "value": plain, "remedy": error.remedy}})
    sys.stderr.write(
        f"chaoskit: {one_line(f'{wrong_part(error, arguments, options)}: {error.remedy}')}\n"
    )
    return EXIT_BAD_INPUT


def wrong_part(error: BadInput, arguments: Sequence[str], options: Mapping[str, str]) -> str:
    """Return the wrong part of the command line as the user typed it.

    Examples are ``--nodes 0``, ``SCRIPT job`` and ``--set steps=many``. A field without an option
    is returned with its value, such as ``nodes=0``.
    """
    option = options.get(error.field)
    is_script_option = error.field.startswith("options.")
    arguments = [
        part
        for word in arguments
        for part in (word.split("=", 1) if word.startswith(_PAIR_PREFIXES) else [word])
    ]
    for index, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if option is not None and option.startswith("--") and name == option:
            return argument if equals else _shortened(shlex.join(arguments[index : index + 2]))
        previous = arguments[index - 1] if index else ""
        if previous == "--set":
            is_wrong = is_script_option and name == error.field.removeprefix("options.")
        else:
            is_wrong = previous in _PAIR_OPTIONS and name == error.field
        if equals and is_wrong:
            return _shortened(shlex.join((previous, argument)))
    if option is None:
        return (
            error.field
            if error.value is None
            else f"{error.field}={_shortened(shown(error.value))}"
        )
    return (
        option
        if error.value in (None, "")
        else f"{option} {_shortened(shlex.quote(str(error.value)))}"
    )


def _shortened(text: str) -> str:
    """Return a text, cut to 200 characters and followed by ``...`` if it is longer."""
    return text if len(text) <= _VALUE_LENGTH_MAX else f"{text[:_VALUE_LENGTH_MAX]}..."


def report_misuse(error: Exception, arguments: Sequence[str], is_json: bool) -> int:
    """Print an error of typer in the form of :func:`report_bad_input`, and return exit status 2."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "chaoskit"
    message = str(getattr(error, "message", "")).strip(".").partition("\n")[0]
    parameter, option = getattr(error, "param", None), getattr(error, "option_name", None)
    kind = type(error).__name__
    if parameter is not None:
        field, name, value = (
            parameter.name,
            option_name(parameter),
            _option_value(option_name(parameter), arguments),
        )
        remedy = (
            "it is missing"
            if kind == "MissingParameter"
            else _imperative(message.partition(",")[0])
        )
    elif option is not None and kind != "NoSuchOption":
        field, name, value, remedy = "option", option, None, message.partition("' ")[2] or message
    elif option is not None:
        closest = closest_name(option, getattr(error, "possibilities", None) or ())
        field, name, value, arguments = "option", option, None, ()
        remedy = "there is no such option" + (f", write {closest}" if closest else "")
    elif (unknown := _NO_COMMAND.match(message)) and context is not None:
        field, name, value = "command", "command", unknown[1]
        closest = closest_name(value, context.command.list_commands(context))
        remedy = "no such command" + (f"; write {command} {closest}" if closest else "")
    else:
        field, name, value = "command", "command", None
        remedy = message[:1].lower() + message[1:] if message else "it is missing"
    return report_bad_input(
        BadInput(field, value, f"{remedy}; see {command} --help"),
        arguments,
        {field: name},
        is_json,
    )


def _imperative(message: str) -> str:
    """Return a message of typer as an imperative."""
    expected = message.removeprefix("Input should be ")
    return f"use {expected}" if expected.startswith("a ") else f"use a value {expected}"


def option_name(parameter: TyperArgument | TyperOption) -> str:
    """Return the name of an option as it is typed, or of an argument as the help shows it.

    Examples are ``--nodes`` and ``SCRIPT``. An option has its first long name.
    """
    names: list[str] = [name for name in parameter.opts if name.startswith("--")]
    return (
        names[0]
        if names
        else str(parameter.metavar or parameter.name).strip("[]").partition("|")[0].upper()
    )


def _option_value(name: str, arguments: Sequence[str]) -> str | None:
    """Return the value of an option on the command line; None if the option is not there.

    It is "" if the option is the last word.
    """
    for index, argument in enumerate(arguments):
        option, equals, text = argument.partition("=")
        if option == name:
            return text if equals else " ".join(arguments[index + 1 : index + 2])
    return None
