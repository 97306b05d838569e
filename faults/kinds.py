"""All kinds of faults: those of this package, those that other distributions bring, and any class by its place."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from chaoskit.errors import BadInput, closest_name
from chaoskit.faults import CATALOGUE
from chaoskit.faults.base import FAMILIES, Fault

#: Entry points of this group name classes of faults.
GROUP = "chaoskit.faults"


@cache
def kinds() -> tuple[type[Fault], ...]:
    """The catalogue, and after it what other installed distributions bring.

    Raises:
        BadInput: if what one of them brings is no fault, cannot be imported, or bears a name that is taken.
    """
    found = list(CATALOGUE)
    for entry in sorted(entry_points(group=GROUP)):
        kind = _loaded(entry)
        if kind.__name__ in {one.__name__ for one in found}:
            raise BadInput(
                "faults", entry.value, _remedy(entry, f"there is another {kind.__name__}")
            )
        found.append(kind)
    return tuple(found)


def _loaded(entry: EntryPoint) -> type[Fault]:
    try:
        kind = entry.load()
    except (ImportError, AttributeError) as error:
        raise BadInput("faults", entry.value, _remedy(entry, str(error))) from error
    if not isinstance(kind, type) or not issubclass(kind, Fault):
        raise BadInput("faults", entry.value, _remedy(entry, "it is no subclass of faults.Fault"))
    if kind.family not in FAMILIES:
        raise BadInput(
            "faults",
            entry.value,
            _remedy(entry, f"its family must be one of {', '.join(FAMILIES)}"),
        )
    return kind


def _remedy(entry: EntryPoint, problem: str) -> str:
    name = entry.dist.name if entry.dist is not None else entry.name
    return f"mend or uninstall {name}, which brings it as a fault: {problem}"


def name_of(kind: type[Fault]) -> str:
    """What a plan calls a kind: its own name in the catalogue, else ``module:Class``, from which it can be imported."""
    if (
        kind in CATALOGUE
        or getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind
    ):
        return kind.__name__
    return f"{kind.__module__}:{kind.__qualname__}"


def find_kind(name: str, field: str = "kind") -> type[Fault]:
    """The kind of that name, in any case, or the class at ``module:Class``.

    Raises:
        BadInput: naming ``field``, if there is none.
    """
    module, _, attribute = name.partition(":")
    if attribute:
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise BadInput(
                field, name, f"install what has it, or put it on PYTHONPATH: {error}"
            ) from error
        if not isinstance(kind, type) or not issubclass(kind, Fault):
            raise BadInput(field, name, "name a subclass of faults.Fault")
        return kind
    named = {kind.__name__.lower(): kind for kind in kinds()}
    if name.lower() not in named:
        names = [kind.__name__ for kind in kinds()]
        closest = closest_name(name, names)
        remedy = (
            f"write {closest}; chaoskit faults lists all"
            if closest
            else f"use one of {', '.join(names)}"
        )
        raise BadInput(field, name, remedy)
    return named[name.lower()]
