"""What became of one number of one series, from some runs to others."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from chaoskit.history.ranks import RatioEstimate

Unit = Literal["s", "steps", "ratio", "count"]

#: In place of a phase, of a recovery of which more than one grew.
WHOLE = "whole"


class NumberChange(StrEnum):
    """What became of one number of one series."""

    REGRESSED = "regressed"
    BETTER = "better"
    UNCHANGED = "unchanged"
    UNDECIDED = "undecided"  # too few runs, or too unlike each other
    INCOMPARABLE = "incomparable"  # seconds of another machine, or of one that was not as fast
    NO_REFERENCE = "no reference"

    @property
    def is_open(self) -> bool:
        """Whether nothing was shown: it fails under ``--chaos-strict`` only."""
        return self in (
            NumberChange.UNDECIDED,
            NumberChange.INCOMPARABLE,
            NumberChange.NO_REFERENCE,
        )


class NumberFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One number of one series, before and now.

    Attributes:
        metric: such as ``recovery / step``. before, after: its median, or of what is counted the share of runs that
            missed it; None where there is none.
        ratio: how many times greater it is now; None for what is counted.
        reason: why nothing can be said, or what is worse.
        phase: of a recovery that takes longer, the phase that grew; :data:`WHOLE` if more than one did, "" if that is
            not known.
        accepted: why it is no failure that this is worse, and until when; "" where it was not accepted.
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
        """Whether it is worse, and was not accepted."""
        return self.change is NumberChange.REGRESSED and not self.accepted
