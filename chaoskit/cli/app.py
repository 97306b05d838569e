"""Command line: the list of commands, and the exit status of each.

-> cli/output.py: the lines about bad input. vocabulary.py: the exit status of each verdict.
-> cli/help.py: the text of ``--help``. pytest_plugin.py: the exit status of a pytest session.
"""

from __future__ import annotations

import io
import signal
import sys
import traceback
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from chaoskit.cli.output import (
    EXIT_INTERRUPTED,
    USAGE_ERROR,
    end_in_order,
    option_name,
    print_json,
    report_bad_input,
    report_misuse,
)
from chaoskit.errors import BadInput, HarnessError, closest_name, error_line
from chaoskit.plaintext import printable
from chaoskit.process.linux import restore_signals, signal_name
from chaoskit.vocabulary import Verdict

#: Panel of the help -> the folder with the modules of its commands.
_FOLDERS = {"Train": "training", "Test": "testing", "Observe": "training", "Machine": "machine"}

#: Command -> its panel in the help. Its module has its name and an ``app``.
COMMANDS = {
    "launch": "Train",
    "scale": "Train",
    "checkpoint": "Train",
    "rules": "Train",
    "demo": "Test",
    "test": "Test",
    "attach": "Test",
    "replay": "Test",
    "report": "Test",
    "history": "Test",
    "compare": "Test",
    "accept": "Test",
    "sla": "Test",
    "nightly": "Test",
    "judge": "Test",
    "canary": "Test",
    "faults": "Test",
    "top": "Observe",
    "trace": "Observe",
    "node": "Machine",
    "doctor": "Machine",
    "cluster": "Machine",
    "cleanup": "Machine",
}

#: Former name of a command -> the command that replaced it.
_RENAMED = {
    "run": "test",
    "health": "node check",
    "quarantine": "node list, node cordon or node uncordon",
    "notice": "node drain",
    "janitor": "cleanup",
}


def _module_of(command: str) -> str:
    """Return the name of the module of a command."""
    return f"chaoskit.cli.{_FOLDERS[COMMANDS[command]]}.{command}"


class _Commands(TyperGroup):
    """A group that imports the module of a command when the command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command, with its help and panel; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        command: Any = typer.main.get_command(import_module(_module_of(cmd_name)).app)
        command.name, command.rich_help_panel = cmd_name, COMMANDS[cmd_name]
        return _with_help(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the first argument. Raise BadInput with the closest name if it is no command."""
        name = args[0]
        if (
            name not in COMMANDS and not ctx.resilient_parsing
        ):  # no error for a shell that completes a line
            closest = _RENAMED.get(name) or closest_name(name, COMMANDS)
            remedy = (
                f"write chaoskit {closest}" if closest else "chaoskit --help lists the commands"
            )
            raise BadInput("command", name, f"no such command; {remedy}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Break distributed PyTorch training for real, and judge with evidence how it comes back.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Print the version and exit, if it is asked for."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"chaoskit {installed('chaoskit')}")
        raise typer.Exit


def run(arguments: list[str]) -> int:
    """Run a command line, and print its errors on standard error.

    With ``--json``, errors are also printed as a JSON object on standard output.

    Args:
        arguments: the command line without ``chaoskit``.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad input, 10 unknown, 11 chaoskit failed; or another
        one that the command returns.
    """
    is_json = "--json" in arguments
    root: Any = _with_help(typer.main.get_command(app))
    try:
        result = root.main(arguments, prog_name="chaoskit", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except BadInput as error:
        return report_bad_input(error, arguments, _options_of(root, arguments), is_json)
    except HarnessError as error:
        if is_json:
            print_json({"error": {"harness": error_line(error)}})
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])  # such as the end of a log
        if error.__cause__ is not None and (reason := error_line(error.__cause__)) not in text:
            text += f"\ncaused by {type(error.__cause__).__name__}: {reason}"
        sys.stderr.write(f"chaoskit: error: {printable(text)}\n")
        return Verdict.ERROR.exit_code
    except USAGE_ERROR as error:
        return report_misuse(error, arguments, is_json)
    except Exception as error:  # noqa: BLE001 - a bug of chaoskit must not look like a failed job
        if is_json:
            print_json({"error": {"harness": f"{type(error).__name__}: {error}"}})
        traceback.print_exc()
        return Verdict.ERROR.exit_code


def _with_help(command: Any) -> Any:
    """Make a command and its subcommands write their help by :mod:`chaoskit.cli.help`.

    Return the command. Commands that are not imported yet get their help when they are.
    """
    command.format_help = partial(_write_help, command)
    if not isinstance(command, _Commands):
        for subcommand in getattr(command, "commands", {}).values():
            _with_help(subcommand)
    return command


def _write_help(command: Any, context: Any, formatter: Any) -> None:
    """Write the help of a command to the formatter of typer."""
    from chaoskit.cli.help import write_help  # imports rich

    write_help(command, context, formatter)


def _options_of(command: Any, arguments: list[str]) -> dict[str, str]:
    """Return the fields of a command, each with the option or argument that sets it.

    An example: ``{"nodes": "--nodes", "job": "SCRIPT"}``.

    Args:
        arguments: the command line, which names the command.
    """
    fields: dict[str, str] = {"command": "command"}
    for word in arguments:
        if (
            not isinstance(command, TyperGroup)
            or (subcommand := command.get_command(typer.Context(command), word)) is None
        ):
            break
        if isinstance(command, _Commands):
            fields |= getattr(import_module(_module_of(word)), "FIELDS", {})
        command = subcommand
    return {parameter.name: option_name(parameter) for parameter in command.params} | fields


def main() -> None:
    """Run the command line of this process, and exit with its status.

    A command that a signal ends exits with 128 plus the number of the signal.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal without Unicode gets question marks, not a traceback
    restore_signals()
    signal.signal(
        signal.SIGINT, end_in_order
    )  # even if the "&" of a script has made it ignored, which no user chose
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup makes SIGHUP ignored
            signal.signal(signum, end_in_order)
    try:
        code = run(sys.argv[1:])
    except SystemExit as error:
        if error.code == EXIT_INTERRUPTED:
            sys.stderr.write(
                "chaoskit: interrupted; everything that this command had started was ended\n"
            )
        elif isinstance(error.code, int) and error.code > 128:
            name = signal_name(error.code - 128)
            sys.stderr.write(
                f"chaoskit: ended by {name}; everything that this command had started was ended\n"
            )
        raise
    sys.exit(code)
