"""Rules from files and plain values: what is wrong in one is refused with its name and field."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.errors import BadInput, name_remedy
from chaoskit.logrule import NAMES, LogRule
from chaoskit.rules.patterns import outer_groups
from chaoskit.settings_file import read_documents
from chaoskit.typed import convert, named_path, plain_structs

#: Where HyperPod has the list: in the YAML of a job, and in requests to its agent.
LIST_KEYS = ("logMonitoringConfiguration", "log_monitoring_configuration")


def read_rules(path: str | Path) -> list[LogRule]:
    """The rules in a YAML or JSON file: a list, or the list below ``logMonitoringConfiguration`` at any depth.

    Raises:
        BadInput: naming the rule and its field.
    """
    lists = [
        found
        for document in read_documents("rules", named_path("rules", path))
        for found in find_lists(document)
    ]
    if not lists:
        raise BadInput(
            "rules", str(path), "write a list of rules, or one below logMonitoringConfiguration"
        )
    return parse_rules([entry for found in lists for entry in found])


def load_rules(given: str | Path | Sequence[object] | None) -> tuple[LogRule, ...]:
    """Rules as users give them to a run: a file, or a list of rules and of plain values; () for none.

    Raises:
        BadInput: naming the rule and its field.
    """
    given = convert("rules", given, str | Path | Sequence[object] | None)
    if isinstance(given, (str, Path)):
        return tuple(read_rules(given))
    entries = [
        plain_structs(convert(f"rules[{place}]", entry, LogRule))
        if isinstance(entry, LogRule)
        else entry
        for place, entry in enumerate(given or ())
    ]
    return tuple(parse_rules(entries)) if entries else ()


def find_lists(document: Any) -> list[list[Any]]:
    """The lists of rules in a document: itself, or what stands below HyperPod's keys."""
    if isinstance(document, list) and any(
        isinstance(one, dict) and "logPattern" in one for one in document
    ):
        return [document]
    found: list[list[Any]] = []
    for key, value in document.items() if isinstance(document, dict) else ():
        if key in LIST_KEYS:
            found.append(value if isinstance(value, list) else [value])
        else:
            found += find_lists(value)
    for value in document if isinstance(document, list) else ():
        found += find_lists(value)
    return found


def parse_rules(entries: list[Any]) -> list[LogRule]:
    """Rules from plain values, such as JSON has them.

    Raises:
        BadInput: naming the rule and its field.
    """
    rules = [_parse(number, entry) for number, entry in enumerate(entries)]
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"rule {name!r}: name", name, "give each rule a name of its own")
    if not rules:
        raise BadInput("rules", [], "write at least one rule")
    return rules


def _parse(number: int, entry: Any) -> LogRule:
    if not isinstance(entry, dict):
        raise BadInput(f"rule {number}", entry, "write name, logPattern and what is expected of it")
    name = entry.get("name")
    said = f"rule {name!r}" if name else f"rule {number}"
    for field in ("name", "logPattern"):
        if not entry.get(field):
            raise BadInput(
                f"{said}: {field}", entry.get(field), "give each rule a name and a logPattern"
            )
    try:
        rule = msgspec.convert(entry, LogRule, strict=False)  # HyperPod takes "300" for 300, too
    except msgspec.ValidationError as error:
        raise _refused(said, entry, str(error)) from None
    _validate(said, rule)
    checked: LogRule = convert(said, rule, LogRule)
    return checked


def _refused(said: str, entry: dict[str, Any], error: str) -> BadInput:
    unknown = re.search(r"unknown field `(.+?)`", error)
    if unknown:
        names = [field.encode_name for field in msgspec.structs.fields(LogRule)]
        return BadInput(f"{said}: {unknown[1]}", entry[unknown[1]], name_remedy(unknown[1], names))
    wrong = re.search(r"\$\.(\w+)", error)
    field = wrong[1] if wrong else ""
    if field == "operator":
        return BadInput(f"{said}: operator", entry[field], "use gt, gteq, lt, lteq or eq")
    if field == "action":
        return BadInput(
            f"{said}: action", entry[field], "use restart-process, replace-node or alert"
        )
    return BadInput(f"{said}: {field}", entry.get(field), error.partition(" - at")[0])


def _validate(said: str, rule: LogRule) -> None:
    for field, pattern in (("logPattern", rule.pattern), ("stopPattern", rule.stop_pattern)):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadInput(
                f"{said}: {field}", pattern, f"mend the regular expression: {error}"
            ) from None
    for attribute in ("start_cutoff_s", "frequency_s"):
        value = getattr(rule, attribute)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise BadInput(
                f"{said}: {NAMES[attribute]}", value, "use more than 0 seconds, or leave it out"
            )
    if rule.data_points < 1:
        raise BadInput(f"{said}: metricEvaluationDataPoints", rule.data_points, "use 1 or more")
    if (rule.threshold is None) != (rule.operator is None):
        lacking = "operator" if rule.operator is None else "metricThreshold"
        raise BadInput(f"{said}: {lacking}", None, "give metricThreshold and operator, or neither")
    if rule.threshold is None:
        return
    if not math.isfinite(rule.threshold):
        raise BadInput(
            f"{said}: metricThreshold",
            rule.threshold,
            "use a finite number: NaN is found without it",
        )
    groups = len(outer_groups(rule.pattern))
    if groups != 1:
        remedy = "capture one number: (...) around it, and (?:...) for other groups"
        raise BadInput(f"{said}: logPattern", rule.pattern, f"{remedy}; it captures {groups}")
