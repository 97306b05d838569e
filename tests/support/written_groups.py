"""The groups of a state that a function changes, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Collection

#: Methods that change a list, a set or a dictionary.
_CHANGES = {
    "add",
    "append",
    "clear",
    "difference_update",
    "discard",
    "extend",
    "pop",
    "remove",
    "setdefault",
    "update",
}


def written_groups(function: ast.FunctionDef, state: str, groups: Collection[str]) -> set[str]:
    """Return the groups of which a function changes a field, also through a variable that stands
    for a group.

    Args:
        state: name of the parameter that has the groups.
        groups: names of the groups.
    """
    aliases: dict[str, str] = {}
    written: set[str] = set()

    def group_of(node: ast.expr) -> str | None:
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
                owner == state and name in groups
            ):
                return name
            case ast.Name(id=name):
                return aliases.get(name)
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                return group_of(value)
        return None

    def note_aliases(target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, its_value in zip(target.elts, value.elts, strict=True):
                note_aliases(part, its_value)
        elif (
            isinstance(target, ast.Name)
            and isinstance(value, ast.Attribute)
            and (group := group_of(value))
        ):
            aliases[target.id] = group

    def note_write(target: ast.expr) -> None:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Attribute | ast.Subscript) and (group := group_of(part)):
                written.add(group)

    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    note_aliases(target, value)
                    note_write(target)
            case ast.AugAssign(target=target):
                note_write(target)
            case ast.Call(func=ast.Attribute(value=ast.Attribute() as changed, attr=name)) if (
                name in _CHANGES
            ):
                written.update(filter(None, [group_of(changed)]))
    return written


def writers(source: str, state: str, groups: Collection[str]) -> dict[str, set[str]]:
    """Return the functions of ``source`` that change a group, each with the groups that it
    changes.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    written = {function.name: written_groups(function, state, groups) for function in functions}
    return {name: changed for name, changed in written.items() if changed}
