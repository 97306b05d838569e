"""Rules from files and plain values. An invalid rule is refused by its name and field.

-> ``logrule.py``: the fields of a rule. ``rules/engine.py``: how it is evaluated.
``settings_file.py``: how files are read.
"""

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

#: Keys below which HyperPod has the list: in the YAML of a job, and in requests to its agent.
LIST_KEYS = ("logMonitoringConfiguration", "log_monitoring_configuration")


def read_rules(path: str | Path) -> list[LogRule]:
    """Return the rules in a YAML or JSON file.

    The file has a list of rules, or such a list below ``logMonitoringConfiguration`` at any depth.

    Raises:
        BadInput: if the file cannot be read or has no rules, or naming an invalid rule and its
            field.
    """
    lists = [
        rule_list
        for document in read_documents("rules", named_path("rules", path))
        for rule_list in find_lists(document)
    ]
    if not lists:
        raise BadInput(
            "rules", str(path), "write a list of rules, or one below logMonitoringConfiguration"
        )
    return parse_rules([rule for rule_list in lists for rule in rule_list])


def load_rules(given: str | Path | Sequence[object] | None) -> tuple[LogRule, ...]:
    """Return the rules that a user gives to a run; () for none.

    They come from a file, or are a list of rules and plain values.

    Raises:
        BadInput: naming the rule and its field. Also if the file cannot be read or has no rules, or
            two rules have one name.
    """
    given = convert("rules", given, str | Path | Sequence[object] | None)
    if isinstance(given, (str, Path)):
        return tuple(read_rules(given))
    rules = [
        plain_structs(convert(f"rules[{place}]", rule, LogRule))
        if isinstance(rule, LogRule)
        else rule
        for place, rule in enumerate(given or ())
    ]
    return tuple(parse_rules(rules)) if rules else ()


def find_lists(document: Any) -> list[list[Any]]:
    """Return the lists of rules in a document: itself, or those below HyperPod's keys."""
    if isinstance(document, list) and any(
        isinstance(rule, dict) and "logPattern" in rule for rule in document
    ):
        return [document]
    lists: list[list[Any]] = []
    for key, content in document.items() if isinstance(document, dict) else ():
        if key in LIST_KEYS:
            lists.append(content if isinstance(content, list) else [content])
        else:
            lists += find_lists(content)
    for content in document if isinstance(document, list) else ():
        lists += find_lists(content)
    return lists


def parse_rules(plain_rules: list[Any]) -> list[LogRule]:
    """Return the rules in plain values, such as those of JSON.

    Raises:
        BadInput: naming the rule and its field; also if two rules have one name, or there is none.
    """
    rules = [_parse(number, plain_rule) for number, plain_rule in enumerate(plain_rules)]
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"rule {name!r}: name", name, "give each rule a name of its own")
    if not rules:
        raise BadInput("rules", [], "write at least one rule")
    return rules


def _parse(number: int, plain_rule: Any) -> LogRule:
    """Return the rule in a plain value, the ``number``-th of a list.

    Raise BadInput if it is bad.
    """
    if not isinstance(plain_rule, dict):
        raise BadInput(
            f"rule {number}", plain_rule, "write name, logPattern and what is expected of it"
        )
    name = plain_rule.get("name")
    place = f"rule {name!r}" if name else f"rule {number}"
    for field in ("name", "logPattern"):
        if not plain_rule.get(field):
            raise BadInput(
                f"{place}: {field}", plain_rule.get(field), "give each rule a name and a logPattern"
            )
    try:
        rule = msgspec.convert(plain_rule, LogRule, strict=False)  # HyperPod accepts "300"
    except msgspec.ValidationError as error:
        raise _bad_field(place, plain_rule, str(error)) from None
    _validate(place, rule)
    checked: LogRule = convert(place, rule, LogRule)
    return checked


def _bad_field(place: str, plain_rule: dict[str, Any], error: str) -> BadInput:
    """Return the BadInput for a plain value that msgspec refused with this message."""
    unknown_field = re.search(r"unknown field `(.+?)`", error)
    if unknown_field:
        names = [field.encode_name for field in msgspec.structs.fields(LogRule)]
        return BadInput(
            f"{place}: {unknown_field[1]}",
            plain_rule[unknown_field[1]],
            name_remedy(unknown_field[1], names),
        )
    wrong_field = re.search(r"\$\.(\w+)", error)
    field = wrong_field[1] if wrong_field else ""
    if field == "operator":
        return BadInput(f"{place}: operator", plain_rule[field], "use gt, gteq, lt, lteq or eq")
    if field == "action":
        return BadInput(
            f"{place}: action", plain_rule[field], "use restart-process, replace-node or alert"
        )
    return BadInput(f"{place}: {field}", plain_rule.get(field), error.partition(" - at")[0])


def _validate(place: str, rule: LogRule) -> None:
    """Raise BadInput for a rule that cannot work, such as one with a bad pattern."""
    for field, pattern in (("logPattern", rule.pattern), ("stopPattern", rule.stop_pattern)):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadInput(
                f"{place}: {field}", pattern, f"correct the regular expression: {error}"
            ) from None
    for attribute in ("start_cutoff_s", "frequency_s"):
        seconds = getattr(rule, attribute)
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise BadInput(
                f"{place}: {NAMES[attribute]}", seconds, "use more than 0 seconds, or leave it out"
            )
    if rule.data_points < 1:
        raise BadInput(f"{place}: metricEvaluationDataPoints", rule.data_points, "use 1 or more")
    if (rule.threshold is None) != (rule.operator is None):
        missing_field = "operator" if rule.operator is None else "metricThreshold"
        raise BadInput(
            f"{place}: {missing_field}", None, "give metricThreshold and operator, or neither"
        )
    if rule.threshold is None:
        return
    if not math.isfinite(rule.threshold):
        raise BadInput(
            f"{place}: metricThreshold",
            rule.threshold,
            "use a finite number: NaN is found without it",
        )
    groups = len(outer_groups(rule.pattern))
    if groups != 1:
        remedy = "capture one number: (...) around it, and (?:...) for other groups"
        raise BadInput(f"{place}: logPattern", rule.pattern, f"{remedy}; it captures {groups}")
