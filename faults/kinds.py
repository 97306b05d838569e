"""Registry of fault classes: this package's, those of other distributions, and ``module:Class``.

-> experiment/plan/planfile.py reads and writes plans with these names.
"""

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
    """Return the catalogue, followed by the faults of other installed distributions.

    Raises:
        BadInput: if an entry point is no fault, cannot be imported, or has an unknown family or a
            name that is taken.
    """
    classes = list(CATALOGUE)
    for point in sorted(entry_points(group=GROUP)):
        kind = _loaded(point)
        if kind.__name__ in {other.__name__ for other in classes}:
            raise BadInput(
                "faults", point.value, _remedy(point, f"there is another {kind.__name__}")
            )
        classes.append(kind)
    return tuple(classes)


def _loaded(point: EntryPoint) -> type[Fault]:
    """Return the fault that an entry point names.

    Raise BadInput if it names none, cannot be imported, or has an unknown family.
    """
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise BadInput("faults", point.value, _remedy(point, str(error))) from error
    if not isinstance(kind, type) or not issubclass(kind, Fault):
        raise BadInput("faults", point.value, _remedy(point, "it is no subclass of faults.Fault"))
    if kind.family not in FAMILIES:
        raise BadInput(
            "faults",
            point.value,
            _remedy(point, f"its family must be one of {', '.join(FAMILIES)}"),
        )
    return kind


def _remedy(point: EntryPoint, problem: str) -> str:
    name = point.dist.name if point.dist is not None else point.name
    return f"correct or uninstall {name}, which provides it as a fault: {problem}"


def name_of(kind: type[Fault]) -> str:
    """Return the name of a kind in plans.

    It is the class name for a kind of the catalogue, otherwise ``module:Class``, from which it can
    be imported. A class that cannot be imported, such as a local one, has its class name, too.
    """
    if (
        kind in CATALOGUE
        or getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind
    ):
        return kind.__name__
    return f"{kind.__module__}:{kind.__qualname__}"


def find_kind(name: str, field: str = "kind") -> type[Fault]:
    """Return the kind of that name, in upper or lower case, or the class at ``module:Class``.

    Raises:
        BadInput: naming ``field``, if there is no such kind, or the class is no fault.
    """
    module, _, attribute = name.partition(":")
    if attribute:
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise BadInput(
                field,
                name,
                f"install its distribution, or add its directory to PYTHONPATH: {error}",
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
