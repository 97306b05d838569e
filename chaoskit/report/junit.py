"""Outcomes as JUnit XML: as properties of a pytest test, and as a separate file.

-> pytest_plugin.py records the properties. vocabulary.py: the verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from chaoskit.report.summary import (
    count_verdicts,
    loss_sentence,
    slowest_full_strength,
    slowest_recovery,
)
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Verdict

#: The element that each verdict becomes. JUnit has none for unknown, which must not look passed.
_ELEMENTS = {Verdict.FAILED: "failure", Verdict.UNKNOWN: "error", Verdict.ERROR: "error"}

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_properties(outcome: Outcome) -> list[tuple[str, str]]:
    """Return names and values for pytest's ``record_property``, such as ``chaoskit.verdict``.

    Phases are those of the slowest recovery. Characters that XML forbids are replaced.
    """
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
    return [(f"chaoskit.{name}", _NOT_XML.sub("\ufffd", text)) for name, text in properties]


def _recovery_properties(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the durations of the slowest recovery, in seconds; empty without a recovery.

    The time to full strength is that of the slowest recovery in this respect. It is left out if a
    recovery did not reach the full world.
    """
    recovery = slowest_recovery(outcome)
    if recovery is None:
        return []
    properties = [("recovery_s", _seconds(recovery.seconds))]
    full_strength_s = slowest_full_strength(outcome)
    if full_strength_s is not None:
        properties.append(("full_strength_s", _seconds(full_strength_s)))
    for span in recovery.spans:
        name = span.name.replace(" ", "_")
        properties.append((f"phase.{name}_s", _seconds(span.seconds)))
        properties.append((f"reference.{name}_s", _seconds(span.reference_s)))
    return properties


def _fault_properties(outcome: Outcome) -> list[tuple[str, str]]:
    """Return a property with text and state for each fault, and one with its evidence."""
    properties: list[tuple[str, str]] = []
    for index, fault in enumerate(outcome.faults):
        evidence = (
            "; ".join(
                f"{observation.level}: {observation.observed}" for observation in fault.evidence
            )
            or "none"
        )
        properties += [
            (f"fault.{index}", f"{fault.fault}: {fault.state}"),
            (f"evidence.{index}", evidence),
        ]
    return properties


def _seconds(seconds: float) -> str:
    """Format seconds with six decimals."""
    return f"{seconds:.6f}"


def write_junit(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a JUnit file with a test case for each experiment.

    The directory of the file is created if necessary. Unknown runs and harness errors become
    errors.

    Raises:
        OSError: if the file cannot be written.
    """
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
    """Add the test case of an outcome, with its properties and the reasons of its verdict."""
    names = {"classname": f"chaoskit.{outcome.stack}.{outcome.job}", "name": outcome.name}
    names = {key: _NOT_XML.sub("\ufffd", text) for key, text in names.items()}
    case = ET.SubElement(suite, "testcase", {**names, "time": f"{outcome.wall_s:.3f}"})
    properties = ET.SubElement(case, "properties")
    for name, text in junit_properties(outcome):
        ET.SubElement(properties, "property", {"name": name, "value": text})
    if element := _ELEMENTS.get(outcome.result):
        reasons = "\n".join(outcome.result_reasons) or "no reason was given"
        reasons = _NOT_XML.sub("\ufffd", "\n".join([reasons, *map(str, outcome.log_ends)]))
        message = f"{outcome.result}: {reasons.splitlines()[0]}"
        ET.SubElement(
            case, element, {"type": outcome.result.value, "message": message}
        ).text = reasons
