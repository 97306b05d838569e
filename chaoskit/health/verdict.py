"""Verdict on a node from its findings: pure.

-> ``coordinator/detectors/fitness.py`` and ``coordinator/handlers/on_measurement.py``: act on it in
a run. ``cli/machine/node.py`` and ``launcher/quarantined.py``: before a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from chaoskit.wire.messages import Finding


class NodeStanding(StrEnum):
    """Admission of a node, which decides whether it may be given workers."""

    ADMITTED = "admitted"
    WARNED = "admitted with warnings"
    REFUSED = "refused"


class HealthVerdict(msgspec.Struct, frozen=True):
    """Verdict on a node.

    ``reasons`` are the reasons of a refusal, or the warnings of a node that is admitted with
    warnings.
    """

    node: str
    standing: NodeStanding
    reasons: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """True if the node may not be given workers."""
        return self.standing == NodeStanding.REFUSED

    @property
    def exit_code(self) -> int:
        """Exit status of ``chaoskit node check``: 1 for a refused node, otherwise 0."""
        return int(self.refused)


def decide(node: str, findings: Iterable[Finding]) -> HealthVerdict:
    """Return the verdict: a bad finding refuses the node, and warnings never do.

    Its reasons are the findings of the worst severity, as :func:`describe` writes them.
    """
    listed = list(findings)
    for severity, standing in (("bad", NodeStanding.REFUSED), ("warn", NodeStanding.WARNED)):
        reasons = tuple(describe(finding) for finding in listed if finding.severity == severity)
        if reasons:
            return HealthVerdict(node, standing, reasons)
    return HealthVerdict(node, NodeStanding.ADMITTED)


def describe(finding: Finding) -> str:
    """Return a finding as a line of text: name, value, and limit and detail if it has them."""
    text = f"{finding.what}={show(finding.value)}"
    text += f", limit {show(finding.limit)}" if finding.limit != "" else ""
    return f"{text}: {finding.detail}" if finding.detail else text


def show(value: float | str) -> str:
    """Return a value as text for people; a text is returned unchanged.

    A number that is whole, or 10^4 or more, is written as an integer; others have four digits.
    """
    if isinstance(value, str):
        return value
    is_whole = math.isfinite(value) and (abs(value) >= 1e4 or value == int(value))
    return f"{value:.0f}" if is_whole else f"{value:.4g}"
