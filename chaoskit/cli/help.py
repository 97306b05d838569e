"""Help of commands for terminals of any width. Names are never broken.

Paragraphs and options are wrapped once.

-> cli/app.py makes commands use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from chaoskit.cli.output import console, option_name

_GAP = 2
_NAME_SHARE = 0.42  # longer names have a line of their own
_NO_PANEL = "Commands"


class _TwoColumns:
    """Names with their descriptions, in two columns.

    The description of a long name begins on the next line.
    """

    def __init__(self, rows: Sequence[tuple[Text, Text]], name_width_min: int) -> None:
        self._rows, self._name_width_min = rows, name_width_min

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        longest = max(self._name_width_min, *(cell_len(name.plain) for name, _ in self._rows))
        start = min(longest, int(width * _NAME_SHARE)) + _GAP
        for name, description in self._rows:
            lines = list(description.wrap(console, width - start))
            line = name.copy()
            if cell_len(name.plain) + _GAP > start or not lines:
                yield line
                line = Text()
            for wrapped in lines:
                wrapped.rstrip()
                line.append(" " * (start - cell_len(line.plain)))
                yield line.append_text(wrapped)
                line = Text()


def write_help(command: Any, context: Any, formatter: Any) -> None:
    """Write the help of a command into the formatter of the command line library."""
    terminal = console()
    with terminal.capture() as captured:
        terminal.print(Group(*_blocks(command, context)))
    formatter.write("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _blocks(command: Any, context: Any) -> Iterator[RenderableType]:
    """Yield the parts of the help: usage, text, arguments, options, subcommands."""
    yield Padding(Text.assemble(("Usage: ", "yellow"), (_usage(command, context), "bold")), (1, 1))
    for number, paragraph in enumerate(_paragraphs(command.help or "")):
        text = Text.from_markup(paragraph)
        text.style = "dim" if number else ""
        yield Padding(text, (0, 1, 1, 1))
    parameters = [parameter for parameter in command.get_params(context) if not parameter.hidden]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    yield from _panel("Arguments", [_parameter(parameter, context) for parameter in arguments])
    yield from _panel("Options", [_parameter(parameter, context) for parameter in options])
    panels: dict[str, list[tuple[Text, Text]]] = {}
    for subcommand in _commands(command, context):
        summary = next(iter(_paragraphs(subcommand.help or "")), "")
        row = Text(subcommand.name, "bold cyan"), Text.from_markup(summary)
        panels.setdefault(subcommand.rich_help_panel or _NO_PANEL, []).append(row)
    longest = max((len(name.plain) for rows in panels.values() for name, _ in rows), default=0)
    for title, rows in panels.items():
        yield from _panel(title, rows, longest)


def _usage(command: Any, context: Any) -> str:
    """Return the command line, such as ``chaoskit launch [OPTIONS] SCRIPT``."""
    words = [context.command_path, "[OPTIONS]"]
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            name = option_name(parameter)
            words.append(name if parameter.required else f"[{name}]")
    if hasattr(command, "list_commands"):
        words.append("COMMAND [ARGS]...")
    return " ".join(words)


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a docstring, each as one line."""
    return [
        " ".join(paragraph.split())
        for paragraph in inspect.cleandoc(text).split("\n\n")
        if paragraph.strip()
    ]


def _parameter(parameter: Any, context: Any) -> tuple[Text, Text]:
    """Return the name of a parameter with its type, and its description with its default."""
    name, record = parameter.get_help_record(context)
    text = parameter.help or ""
    description = Text.from_markup(" ".join(text.split()))
    if remarks := record.removeprefix(text).strip():
        description.append(f" {remarks}", "dim")
    if parameter.param_type_name == "argument":
        return Text(option_name(parameter), "bold cyan"), description
    return _option(name), description


def _option(name: str) -> Text:
    """Return an option such as ``--nodes <int>`` in two colours."""
    text = Text()
    for word in name.split():
        text.append(" " if text else "").append(
            word, "bold cyan" if word.startswith("-") else "yellow"
        )
    return text


def _panel(
    title: str, rows: Sequence[tuple[Text, Text]], name_width_min: int = 0
) -> Iterator[RenderableType]:
    """Yield a panel with rows of a name and a description; nothing if there are none."""
    if rows:
        yield Panel(
            _TwoColumns(rows, name_width_min), title=title, title_align="left", border_style="dim"
        )


def _commands(command: Any, context: Any) -> Iterable[Any]:
    """Return the visible commands of a group, in their order; none for a single command."""
    names = command.list_commands(context) if hasattr(command, "list_commands") else ()
    return [child for name in names if not (child := command.get_command(context, name)).hidden]
