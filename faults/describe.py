"""The catalogue of faults as plain data: parameters, moments, evidence, and what this machine can do of it."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, fields
from typing import Any

from chaoskit.faults import Fault
from chaoskit.faults.base import FAMILIES
from chaoskit.faults.kinds import find_kind, kinds
from chaoskit.faults.possible import Moments, moments

_ARGUMENT = re.compile(r"^(\w+): (.*)$")
_STANDS = "the rank stood at the named phase, and waited there until the fault was in"


def catalogue() -> list[dict[str, Any]]:
    """Every fault as plain data, in the order of families, with what this machine can do of it."""
    return [entry(kind) | {"here": here(kind)} for family in FAMILIES for kind in of_family(family)]


def of_family(family: str) -> list[type[Fault]]:
    """The faults of one family, in the catalogue's order."""
    return [kind for kind in kinds() if kind.family == family]


def find(name: str) -> type[Fault]:
    """The fault of that name, in any case.

    Raises:
        BadInput: if there is none.
    """
    return find_kind(name, "name")


def here(kind: type[Fault]) -> dict[str, str]:
    """What this machine can do of a fault: ``state`` is ``yes``, ``in part`` or ``no``; ``reason`` says why."""
    if reason := kind.unavailable():
        return {"state": "no", "reason": reason}
    reason = kind.restricted()
    return {"state": "in part" if reason else "yes", "reason": reason and f"not {reason}"}


def entry(kind: type[Fault]) -> dict[str, Any]:
    """One fault as plain data: the same on every machine."""
    return {
        "name": kind.__name__,
        "family": kind.family,
        "effect": kind.effect,
        "description": _description(kind),
        "parameters": _parameters(kind),
        "moments": [_plain(one) for one in moments(kind)],
        "evidence": {"armed": _armed(kind), "effective": kind.evidence, "impactful": kind.impact},
        "caught": dict(kind.caught),
        "stands_for": kind.stands_for,
        "counted": [
            {
                "study": row.study.name,
                "incident": row.name,
                "count": row.count,
                "percent": row.percent,
                "share": row.share,
            }
            for row in kind.counted
        ],
        "unlisted": kind.unlisted,
        "undo": kind.undo,
        "substrates": list(kind.substrates),
        "example": _example(kind),
    }


def _plain(one: Moments) -> dict[str, Any]:
    plain = {
        "phases": one.phases,
        "times": one.times,
        "recoveries": one.recoveries,
        "roles": one.roles,
    }
    return {"form": dict(one.form), **plain}


def _armed(kind: type[Fault]) -> str:
    from_outside = any(kind(**{**kind.sample, **form}).from_outside for form in kind.forms)
    return f"{_STANDS}; at a time, its process was alive" if from_outside else _STANDS


def _example(kind: type[Fault]) -> str:
    """With the quotes that formatters want."""
    return kind.example.format(name=kind.__name__, fault=str(kind(**kind.sample)).replace("'", '"'))


def _description(kind: type[Fault]) -> str:
    """The docstring without its ``Args:``, a paragraph a line."""
    text, _, _ = (inspect.getdoc(kind) or "").partition("Args:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n".join(filter(None, paragraphs)).replace("``", "`")


def _parameters(kind: type[Fault]) -> list[dict[str, Any]]:
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        meanings |= _meanings(base) if issubclass(base, Fault) else {}
    parameters = []
    for item in fields(kind):
        required = item.default is MISSING
        parameters.append(
            {
                "name": item.name,
                "type": str(item.type),
                "required": required,
                "default": None if required else getattr(item.default, "value", item.default),
                "meaning": meanings.get(item.name, ""),
            }
        )
    return parameters


def _meanings(kind: type[Fault]) -> dict[str, str]:
    """What the docstring's ``Args:`` says about each parameter. Bases say what they bring themselves."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section).splitlines():
        begins = _ARGUMENT.match(line)
        if begins:
            name = begins[1]
            found[name] = begins[2]
        elif name and line.startswith(" "):
            found[name] += " " + line.strip()
    return {name: meaning.replace("``", "`") for name, meaning in found.items()}


def own_parameters(kind: type[Fault]) -> list[dict[str, Any]]:
    """The parameters that a fault does not share with all others."""
    common = _parameters(Fault)
    return [parameter for parameter in _parameters(kind) if parameter not in common]


def common_parameters() -> list[dict[str, Any]]:
    """The parameters that say which rank a fault strikes, and when."""
    return _parameters(Fault)


def signature(parameter: dict[str, Any]) -> str:
    """A parameter with its default, if it has one."""
    return (
        parameter["name"]
        if parameter["required"]
        else f"{parameter['name']}={parameter['default']!r}"
    )


def moments_in_words(kind: type[Fault]) -> list[str]:
    """The moments that a fault can take; a line for each form where they differ."""
    forms: dict[str, list[str]] = {}
    for one in moments(kind):
        said = [f"in {', '.join(one.phases)} of a step"] if one.phases else []
        said += ["at a time"] if one.times else []
        said += [f"during {', '.join(one.recoveries)} of a recovery"] if one.recoveries else []
        form = ", ".join(f"{name}={value!r}" for name, value in one.form.items())
        forms.setdefault("; ".join(said), []).append(form)
    if len(forms) == 1:
        return list(forms)
    return [f"{' or '.join(names)}: {said}" for said, names in forms.items()]


def sorted_roles(kind: type[Fault]) -> list[str]:
    """The roles that any form of a fault can be given, in the order in which roles are listed."""
    return list(dict.fromkeys(role for one in moments(kind) for role in one.roles))
