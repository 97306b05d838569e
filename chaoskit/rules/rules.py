"""Rules as HyperPod's ``logMonitoringConfiguration`` has them, with additions of ours.

Names, types and meaning are those of the training operator, as its documentation and its agent have them:
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator-usage.html and the class ``LogEvaluator`` of
``hyperpod-elastic-agent``: a pattern is matched from the start of a line, and the first group is the number.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from chaoskit.errors import BadInput
from chaoskit.rules.files import read_documents
from chaoskit.rules.patterns import outer_groups

Operator = Literal["gt", "gteq", "lt", "lteq", "eq"]
Action = Literal["restart-process", "replace-node", "alert"]

#: Where HyperPod has the list: in the YAML of a job, and in requests to its agent.
LIST_KEYS = ("logMonitoringConfiguration", "log_monitoring_configuration")

_NAMES = {
    "pattern": "logPattern",
    "start_cutoff_s": "expectedStartCutOffInSeconds",
    "frequency_s": "expectedRecurringFrequencyInSeconds",
    "threshold": "metricThreshold",
    "data_points": "metricEvaluationDataPoints",
    "stop_pattern": "stopPattern",
    "fault_on_match": "faultOnMatch",
}


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_NAMES):
    """What one kind of line must look like, and how often it must come. In files the names are HyperPod's.

    Args:
        name: under which verdicts are reported; unique in a list.
        pattern: ``logPattern``, a regular expression, matched from the start of the line. Its one group that lies in
            no other one is the metric.
        start_cutoff_s: ``expectedStartCutOffInSeconds``: no match for longer than this after the start is ``hanging``.
        frequency_s: ``expectedRecurringFrequencyInSeconds``: no match for longer than this after one is ``hanging``.
        threshold, operator: ``metricThreshold``: a metric of which ``metric operator threshold`` is true is too slow
            (or too high, too low). HyperPod takes whole numbers, we any.
        data_points: ``metricEvaluationDataPoints``: so many of them in a row are ``slow``.
        stop_pattern: ``stopPattern``: a line that ends the watch.
        fault_on_match: ``faultOnMatch``: the first match is ``faulted``.
        action: ours: what is to be done when the rule fires.
    """

    name: str
    pattern: str
    start_cutoff_s: float | None = None
    frequency_s: float | None = None
    threshold: float | None = None
    operator: Operator | None = None
    data_points: int = 1
    stop_pattern: str = ""
    fault_on_match: bool = False
    action: Action = "restart-process"


def read_rules(path: str | Path) -> list[Rule]:
    """The rules in a YAML or JSON file: a list, or the list below ``logMonitoringConfiguration`` at any depth.

    Raises:
        BadInput: naming the rule and its field.
    """
    lists = [found for document in read_documents("rules", Path(path)) for found in find_lists(document)]
    if not lists:
        raise BadInput("rules", str(path), "write a list of rules, or one below logMonitoringConfiguration")
    return parse_rules([entry for found in lists for entry in found])


def find_lists(document: Any) -> list[list[Any]]:
    """The lists of rules in a document: itself, or what stands below HyperPod's keys."""
    if isinstance(document, list) and any(isinstance(one, dict) and "logPattern" in one for one in document):
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


def parse_rules(entries: list[Any]) -> list[Rule]:
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


def _parse(number: int, entry: Any) -> Rule:
    if not isinstance(entry, dict):
        raise BadInput(f"rule {number}", entry, "write name, logPattern and what is expected of it")
    name = entry.get("name")
    said = f"rule {name!r}" if name else f"rule {number}"
    for field in ("name", "logPattern"):
        if not entry.get(field):
            raise BadInput(f"{said}: {field}", entry.get(field), "give each rule a name and a logPattern")
    try:
        rule = msgspec.convert(entry, Rule, strict=False)  # HyperPod takes "300" for 300, too
    except msgspec.ValidationError as error:
        raise _refused(said, entry, str(error)) from None
    _validate(said, rule)
    return rule


def _refused(said: str, entry: dict[str, Any], error: str) -> BadInput:
    unknown = re.search(r"unknown field `(.+?)`", error)
    if unknown:
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(Rule))
        return BadInput(f"{said}: {unknown[1]}", entry[unknown[1]], f"use one of {known}")
    wrong = re.search(r"\$\.(\w+)", error)
    field = wrong[1] if wrong else ""
    if field == "operator":
        return BadInput(f"{said}: operator", entry[field], "use gt, gteq, lt, lteq or eq")
    if field == "action":
        return BadInput(f"{said}: action", entry[field], "use restart-process, replace-node or alert")
    return BadInput(f"{said}: {field}", entry.get(field), error.partition(" - at")[0])


def _validate(said: str, rule: Rule) -> None:
    for field, pattern in (("logPattern", rule.pattern), ("stopPattern", rule.stop_pattern)):
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadInput(f"{said}: {field}", pattern, f"mend the regular expression: {error}") from None
    for attribute in ("start_cutoff_s", "frequency_s"):
        value = getattr(rule, attribute)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise BadInput(f"{said}: {_NAMES[attribute]}", value, "use more than 0 seconds, or leave it out")
    if rule.data_points < 1:
        raise BadInput(f"{said}: metricEvaluationDataPoints", rule.data_points, "use 1 or more")
    if (rule.threshold is None) != (rule.operator is None):
        lacking = "operator" if rule.operator is None else "metricThreshold"
        raise BadInput(f"{said}: {lacking}", None, "give metricThreshold and operator, or neither")
    if rule.threshold is None:
        return
    if not math.isfinite(rule.threshold):
        raise BadInput(f"{said}: metricThreshold", rule.threshold, "use a finite number: NaN is found without it")
    groups = len(outer_groups(rule.pattern))
    if groups != 1:
        remedy = "capture one number: (...) around it, and (?:...) for other groups"
        raise BadInput(f"{said}: logPattern", rule.pattern, f"{remedy}; it captures {groups}")
