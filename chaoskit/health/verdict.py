"""What follows from the findings about one node: pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from chaoskit.wire.messages import Finding


class Standing(StrEnum):
    """Whether a node may be given workers."""

    ADMITTED = "admitted"
    WARNED = "admitted with warnings"
    REFUSED = "refused"


class HealthVerdict(msgspec.Struct, frozen=True):
    """``reasons``: why it is refused; of one that is admitted with warnings, the warnings. Else there are none."""

    node: str
    standing: Standing
    reasons: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        return self.standing == Standing.REFUSED

    @property
    def exit_code(self) -> int:
        """Exit status of ``chaoskit node check``."""
        return int(self.refused)


def decide(node: str, findings: Iterable[Finding]) -> HealthVerdict:
    """One bad finding is enough to refuse a node; warnings alone never are."""
    known = list(findings)
    for severity, standing in (("bad", Standing.REFUSED), ("warn", Standing.WARNED)):
        reasons = tuple(describe(one) for one in known if one.severity == severity)
        if reasons:
            return HealthVerdict(node, standing, reasons)
    return HealthVerdict(node, Standing.ADMITTED)


def describe(finding: Finding) -> str:
    """One line for people."""
    text = f"{finding.what}={show(finding.value)}"
    text += f", limit {show(finding.limit)}" if finding.limit != "" else ""
    return f"{text}: {finding.detail}" if finding.detail else text


def show(value: float | str) -> str:
    """A value as people read it."""
    if isinstance(value, str):
        return value
    whole = math.isfinite(value) and (abs(value) >= 1e4 or value == int(value))
    return f"{value:.0f}" if whole else f"{value:.4g}"
