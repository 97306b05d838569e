"""Findings of a comparison: the change of one number of one series between two sets of runs.

-> history/compare.py: the rules by which a number is regressed, unchanged or undecided.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from chaoskit.history.ratio_estimate import RatioEstimate

Unit = Literal["s", "steps", "ratio", "count"]

#: The phase of a finding if more than one phase of a recovery grew.
WHOLE = "whole"


class NumberChange(StrEnum):
    """The change of one number of one series."""

    REGRESSED = "regressed"
    BETTER = "better"
    UNCHANGED = "unchanged"
    UNDECIDED = "undecided"  # too few runs, or they differ too much
    INCOMPARABLE = "incomparable"  # another machine or speed, or a test without comparable runs
    NO_REFERENCE = "no reference"  # no earlier run has the number

    @property
    def is_open(self) -> bool:
        """True if the change remains unclear.

        Such findings fail a session under ``--chaos-strict`` only.
        """
        return self in (
            NumberChange.UNDECIDED,
            NumberChange.INCOMPARABLE,
            NumberChange.NO_REFERENCE,
        )


class NumberFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A number of a series, before and now.

    Attributes:
        series: the name of the series; "" for a test without runs.
        title: the title of its runs, or the name of a test.
        metric: its name, such as ``recovery / step``; "all" for all numbers, "test" for failures of
            the test's own assertions.
        before: the earlier median; for counted numbers, the share of runs that missed it; None if
            there is none.
        after: the present one, likewise.
        ratio: by how much it grew; None for counted numbers, and if one side lacks the number.
        reason: why the change remains unclear, or what is worse; "" if the numbers tell it.
        phase: the phase of a longer recovery that grew; :data:`WHOLE` if more than one did, "" if
            that is not known.
        accepted: why the regression is no failure, and until when; "" if it was not accepted.
    """

    series: str
    title: str
    metric: str
    unit: Unit
    change: NumberChange
    before: float | None = None
    after: float | None = None
    ratio: RatioEstimate | None = None
    reason: str = ""
    phase: str = ""
    accepted: str = ""

    @property
    def is_failure(self) -> bool:
        """True if the number got worse, and the change was not accepted."""
        return self.change is NumberChange.REGRESSED and not self.accepted
