"""The help of a command, for terminals of any width: paragraphs and options are wrapped once, names never broken."""

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
_NAME_SHARE = 0.42  # a longer name has a line of its own
_NO_PANEL = "Commands"


class _Entries:
    """Names with their descriptions, in two columns; the description of a long name begins on the next line."""

    def __init__(self, entries: Sequence[tuple[Text, Text]], name_width_min: int) -> None:
        self._entries, self._name_width_min = entries, name_width_min

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        longest = max(self._name_width_min, *(cell_len(name.plain) for name, _ in self._entries))
        start = min(longest, int(width * _NAME_SHARE)) + _GAP
        for name, description in self._entries:
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
    """Write the help of a command into the formatter of its command line library."""
    shown = console()
    with shown.capture() as captured:
        shown.print(Group(*_blocks(command, context)))
    formatter.write("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _blocks(command: Any, context: Any) -> Iterator[RenderableType]:
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
    for below in _commands(command, context):
        summary = next(iter(_paragraphs(below.help or "")), "")
        entry = Text(below.name, "bold cyan"), Text.from_markup(summary)
        panels.setdefault(below.rich_help_panel or _NO_PANEL, []).append(entry)
    longest = max(
        (len(name.plain) for entries in panels.values() for name, _ in entries), default=0
    )
    for title, entries in panels.items():
        yield from _panel(title, entries, longest)


def _usage(command: Any, context: Any) -> str:
    """Return the command line: ``chaoskit launch [OPTIONS] SCRIPT``."""
    words = [context.command_path, "[OPTIONS]"]
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            name = option_name(parameter)
            words.append(name if parameter.required else f"[{name}]")
    if hasattr(command, "list_commands"):
        words.append("COMMAND [ARGS]...")
    return " ".join(words)


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a docstring, each in one line."""
    return [
        " ".join(paragraph.split())
        for paragraph in inspect.cleandoc(text).split("\n\n")
        if paragraph.strip()
    ]


def _parameter(parameter: Any, context: Any) -> tuple[Text, Text]:
    """Return the name of a parameter with what it takes, and its description with its default."""
    name, record = parameter.get_help_record(context)
    text = parameter.help or ""
    description = Text.from_markup(" ".join(text.split()))
    if remarks := record.removeprefix(text).strip():
        description.append(f" {remarks}", "dim")
    if parameter.param_type_name == "argument":
        return Text(option_name(parameter), "bold cyan"), description
    return _option(name), description


def _option(name: str) -> Text:
    """Return ``--nodes <int>`` in two colours."""
    text = Text()
    for word in name.split():
        text.append(" " if text else "").append(
            word, "bold cyan" if word.startswith("-") else "yellow"
        )
    return text


def _panel(
    title: str, entries: Sequence[tuple[Text, Text]], name_width_min: int = 0
) -> Iterator[RenderableType]:
    if entries:
        yield Panel(
            _Entries(entries, name_width_min), title=title, title_align="left", border_style="dim"
        )


def _commands(command: Any, context: Any) -> Iterable[Any]:
    """Return the commands of a group, in their order."""
    names = command.list_commands(context) if hasattr(command, "list_commands") else ()
    return [below for name in names if not (below := command.get_command(context, name)).hidden]
