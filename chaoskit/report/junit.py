"""Outcomes as JUnit XML: as properties of a pytest test, and as a file of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from chaoskit.report.summary import count_verdicts, loss_sentence, slowest, slowest_full_strength
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Verdict

#: The element that tells a CI system what happened. JUnit has no word for unknown, and it must not look passed.
_ELEMENTS = {Verdict.FAILED: "failure", Verdict.UNKNOWN: "error", Verdict.ERROR: "error"}

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_properties(outcome: Outcome) -> list[tuple[str, str]]:
    """Names and values for pytest's ``record_property``. Phases are those of the slowest recovery."""
    properties = [
        ("verdict", outcome.verdict.value),
        ("job", outcome.job),
        ("stack", outcome.stack),
        ("substrate", outcome.substrate),
        ("nodes", str(outcome.nodes)),
        ("seed", str(outcome.seed)),
        *([("session", outcome.session)] if outcome.session else []),
        ("lost_steps", str(outcome.lost_steps)),
        *([] if outcome.false_alarms is None else [("false_alarms", str(outcome.false_alarms))]),
        ("losses", loss_sentence(outcome)),
        *_recovery_properties(outcome),
        *_fault_properties(outcome),
        *((f"reason.{index}", reason) for index, reason in enumerate(outcome.result_reasons)),
        ("directory", outcome.directory),
    ]
    return [(f"chaoskit.{name}", _NOT_XML.sub("\ufffd", value)) for name, value in properties]


def _recovery_properties(outcome: Outcome) -> list[tuple[str, str]]:
    recovery = slowest(outcome)
    if recovery is None:
        return []
    properties = [("recovery_s", _seconds(recovery.seconds))]
    full = slowest_full_strength(outcome)
    if full is not None:
        properties.append(("full_strength_s", _seconds(full)))
    for span in recovery.spans:
        name = span.name.replace(" ", "_")
        properties.append((f"phase.{name}_s", _seconds(span.seconds)))
        properties.append((f"reference.{name}_s", _seconds(span.reference_s)))
    return properties


def _fault_properties(outcome: Outcome) -> list[tuple[str, str]]:
    """A fault is its text and state; its evidence carries the same number."""
    properties: list[tuple[str, str]] = []
    for index, fault in enumerate(outcome.faults):
        seen = "; ".join(f"{one.level}: {one.observed}" for one in fault.evidence) or "none"
        properties += [
            (f"fault.{index}", f"{fault.fault}: {fault.state}"),
            (f"evidence.{index}", seen),
        ]
    return properties


def _seconds(value: float) -> str:
    return f"{value:.6f}"


def write_junit(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write one test suite with a test case an experiment."""
    counts = count_verdicts(outcomes)
    totals = {
        "name": "chaoskit",
        "tests": str(len(outcomes)),
        "failures": str(counts[Verdict.FAILED]),
        "errors": str(counts[Verdict.ERROR] + counts[Verdict.UNKNOWN]),
        "skipped": "0",
        "time": f"{sum(outcome.wall_s for outcome in outcomes):.3f}",
    }
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", totals)
    for outcome in outcomes:
        _add_case(suite, outcome)
    ET.indent(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _add_case(suite: ET.Element, outcome: Outcome) -> None:
    names = {"classname": f"chaoskit.{outcome.stack}.{outcome.job}", "name": outcome.name}
    names = {key: _NOT_XML.sub("\ufffd", value) for key, value in names.items()}
    case = ET.SubElement(suite, "testcase", {**names, "time": f"{outcome.wall_s:.3f}"})
    properties = ET.SubElement(case, "properties")
    for name, value in junit_properties(outcome):
        ET.SubElement(properties, "property", {"name": name, "value": value})
    if element := _ELEMENTS.get(outcome.result):
        reasons = "\n".join(outcome.result_reasons) or "no reason was given"
        reasons = _NOT_XML.sub("\ufffd", "\n".join([reasons, *map(str, outcome.log_ends)]))
        message = f"{outcome.result}: {reasons.splitlines()[0]}"
        ET.SubElement(
            case, element, {"type": outcome.result.value, "message": message}
        ).text = reasons
