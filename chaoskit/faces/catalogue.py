"""``chaoskit faults``: what can be broken, and how one can tell that it was."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, fields
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from faults import CATALOGUE, Fault

_ARGUMENT = re.compile(r"^(\w+): (.*)$")


def catalogue() -> list[dict[str, Any]]:
    """Every fault as plain data: name, effect, evidence, parameters."""
    return [_entry(fault) for fault in CATALOGUE]


def _entry(fault: type[Fault]) -> dict[str, Any]:
    meanings = {**_meanings(Fault), **_meanings(fault)}
    parameters = []
    for item in fields(fault):
        required = item.default is MISSING
        default = None if required else getattr(item.default, "value", item.default)
        parameters.append(
            {
                "name": item.name,
                "type": str(item.type),
                "required": required,
                "default": default,
                "meaning": meanings.get(item.name, ""),
            }
        )
    return {"name": fault.__name__, "effect": fault.effect, "evidence": fault.evidence, "parameters": parameters}


def _meanings(fault: type[Fault]) -> dict[str, str]:
    """What the docstring's ``Args:`` says about each parameter."""
    _, _, section = (inspect.getdoc(fault) or "").partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section).splitlines():
        begins = _ARGUMENT.match(line)
        if begins:
            name = begins[1]
            found[name] = begins[2]
        elif name and line.startswith(" "):
            found[name] += " " + line.strip()
    return {name: meaning.replace("``", "") for name, meaning in found.items()}


def render_catalogue() -> RenderableType:
    """The catalogue for a terminal."""
    blocks: list[RenderableType] = []
    for entry in catalogue():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column()
        for one in entry["parameters"]:
            shown = f"{one['name']}" if one["required"] else f"{one['name']}={one['default']!r}"
            table.add_row(shown, one["meaning"])
        blocks += [
            Text.assemble((entry["name"], "bold"), f"  {entry['effect']}"),
            Padding(Text.assemble(("evidence: ", "dim"), entry["evidence"]), (0, 0, 0, 2)),
            Padding(table, (0, 0, 1, 4)),
        ]
    example = 'from faults import Kill\nchaos.run("gpt", nodes=4, faults=[Kill(rank=2, at_step=20)])'
    return Group(*blocks, Text(example, "dim"))
