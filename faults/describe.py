"""Plain data of the catalogue of faults: parameters, moments, evidence, and support.

-> faults/base.py: the texts of each fault, as class attributes.
-> cli/testing/faults.py prints the catalogue; docs/generate/faults_page.py makes the page.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from chaoskit.faults import Fault
from chaoskit.faults.base import FAMILIES
from chaoskit.faults.kinds import find_kind, kinds
from chaoskit.faults.possible import Moments, moments

_ARGUMENT = re.compile(r"^(\w+): (.*)$")
#: The default of a field that is left out only where another one, such as ``node``, is given.
_UNNAMED = ("rank", "")
_ARMED = "the rank stood at the named phase, and waited there until the fault was in"


def catalogue() -> list[dict[str, Any]]:
    """Return all faults as plain data, by families, with the support by this machine.

    Raises BadInput as :func:`chaoskit.faults.kinds.kinds` does.
    """
    return [entry(kind) | {"here": here(kind)} for family in FAMILIES for kind in of_family(family)]


def of_family(family: str) -> list[type[Fault]]:
    """Return the faults of one family, in the catalogue's order; none for an unknown family.

    Raises BadInput as :func:`chaoskit.faults.kinds.kinds` does.
    """
    return [kind for kind in kinds() if kind.family == family]


def find(name: str) -> type[Fault]:
    """Return the fault of that name, in upper or lower case, or the class at ``module:Class``.

    Raises:
        BadInput: naming ``name``, if there is no such fault.
    """
    return find_kind(name, "name")


def here(kind: type[Fault]) -> dict[str, str]:
    """Return the support for a fault by this machine.

    ``state`` is ``yes``, ``in part`` or ``no``; ``reason`` says why.
    """
    if reason := kind.unavailable():
        return {"state": "no", "reason": reason}
    reason = kind.restricted()
    return {"state": "in part" if reason else "yes", "reason": reason and f"not {reason}"}


def entry(kind: type[Fault]) -> dict[str, Any]:
    """Return one fault as plain data, which is the same on every machine."""
    return {
        "name": kind.__name__,
        "family": kind.family,
        "effect": kind.effect,
        "description": _description(kind),
        "parameters": _parameters(kind),
        "moments": [_plain(form) for form in moments(kind)],
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


def _plain(form: Moments) -> dict[str, Any]:
    """Return the moments of a form as plain data."""
    plain = {
        "phases": form.phases,
        "times": form.times,
        "recoveries": form.recoveries,
        "roles": form.roles,
    }
    return {"form": dict(form.form), **plain}


def _armed(kind: type[Fault]) -> str:
    """Return the evidence that a fault was armed, as a sentence."""
    from_outside = any(kind(**{**kind.sample, **form}).from_outside for form in kind.forms)
    return f"{_ARMED}; at a time, its process was alive" if from_outside else _ARMED


def _example(kind: type[Fault]) -> str:
    """Return the example of a fault, with the double quotes of code formatters."""
    return kind.example.format(name=kind.__name__, fault=str(kind(**kind.sample)).replace("'", '"'))


def _description(kind: type[Fault]) -> str:
    """Return the docstring without its ``Args:``, one paragraph a line."""
    text, _, _ = (inspect.getdoc(kind) or "").partition("Args:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n".join(filter(None, paragraphs)).replace("``", "`")


def _parameters(kind: type[Fault]) -> list[dict[str, Any]]:
    """Return all parameters of a fault with their types, defaults and descriptions."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        meanings |= _meanings(base) if is_dataclass(base) else {}
    parameters = []
    for declared in fields(kind):
        required = declared.default is MISSING or (declared.name, declared.default) == _UNNAMED
        parameters.append(
            {
                "name": declared.name,
                "type": str(declared.type),
                "required": required,
                "default": None
                if required
                else getattr(declared.default, "value", declared.default),
                "meaning": meanings.get(declared.name, ""),
            }
        )
    return parameters


def _meanings(kind: type) -> dict[str, str]:
    """Return the descriptions of parameters in the ``Args:`` section of one class.

    The section of a class describes only the parameters that the class adds.
    """
    _, _, section = (inspect.getdoc(kind) or "").partition("Args:\n")
    meanings: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section).splitlines():
        begins = _ARGUMENT.match(line)
        if begins:
            name = begins[1]
            meanings[name] = begins[2]
        elif name and line.startswith(" "):
            meanings[name] += " " + line.strip()
    return {name: meaning.replace("``", "`") for name, meaning in meanings.items()}


def own_parameters(kind: type[Fault]) -> list[dict[str, Any]]:
    """Return the parameters that a fault does not share with all others."""
    common = _parameters(Fault)
    return [parameter for parameter in _parameters(kind) if parameter not in common]


def common_parameters() -> list[dict[str, Any]]:
    """Return the parameters of all faults: the rank and the moment."""
    return _parameters(Fault)


def signature(parameter: dict[str, Any]) -> str:
    """Return a parameter in the form of a call, with its default if it has one."""
    return (
        parameter["name"]
        if parameter["required"]
        else f"{parameter['name']}={parameter['default']!r}"
    )


def moments_in_words(kind: type[Fault]) -> list[str]:
    """Return the moments that a fault can take, in one line, or a line for each form that differs."""
    forms: dict[str, list[str]] = {}
    for form_moments in moments(kind):
        words = [f"in {', '.join(form_moments.phases)} of a step"] if form_moments.phases else []
        words += ["at a time"] if form_moments.times else []
        words += (
            [f"during {', '.join(form_moments.recoveries)} of a recovery"]
            if form_moments.recoveries
            else []
        )
        form = ", ".join(f"{name}={value!r}" for name, value in form_moments.form.items())
        forms.setdefault("; ".join(words), []).append(form)
    if len(forms) == 1:
        return list(forms)
    return [f"{' or '.join(names)}: {words}" for words, names in forms.items()]


def sorted_roles(kind: type[Fault]) -> list[str]:
    """Return the roles that any form of a fault accepts, in the order in which roles are listed."""
    return list(dict.fromkeys(role for form in moments(kind) for role in form.roles))
