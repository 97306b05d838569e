"""Attribution of a longer recovery to a phase. It explains a change and decides nothing. Pure.

-> versions/looks.py adds the phase to the finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from chaoskit.history import record
from chaoskit.history.finding import WHOLE
from chaoskit.history.record import RunRecord
from chaoskit.vocabulary import RECOVERY_PHASES

#: Phases that end no later than the recovery does. Their sum is the recovery.
_PHASES = tuple(
    record.phase_name(phase)
    for phase in RECOVERY_PHASES[: RECOVERY_PHASES.index("first good step") + 1]
)
#: The share of the recovery's growth that all other phases must reach for the whole to have grown.
_REST_LEAST = 0.5


def grown_phase(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> str:
    """Return the phase that made recoveries longer, such as ``restored``, or :data:`WHOLE`; "" if
    unknown.

    It is the phase whose median grew most, in seconds. If the rest of the recovery grew by half as
    large a share as the recovery or more, the cause is not this phase alone. It is a slower
    machine, or code that several phases run.
    """
    runs_before, runs_after = (
        [run for run in runs if record.came_back(run) and record.RECOVERY in run.metrics]
        for runs in (before, after)
    )
    phases = [
        name for name in _PHASES if any(name in run.metrics for run in runs_before + runs_after)
    ]
    if not (runs_before and runs_after and phases):
        return ""
    growth = {name: _median_s(runs_after, name) - _median_s(runs_before, name) for name in phases}
    grown_most = max(phases, key=lambda name: growth[name])
    recovery_s = [
        median(run.metrics[record.RECOVERY].value for run in runs)
        for runs in (runs_before, runs_after)
    ]
    rest_s = [
        median(run.metrics[record.RECOVERY].value - _phase_s(run, grown_most) for run in runs)
        for runs in (runs_before, runs_after)
    ]
    if growth[grown_most] <= 0 or recovery_s[1] <= recovery_s[0]:
        return ""
    rest_growth = rest_s[1] / rest_s[0] - 1 if rest_s[0] > 0 else 0.0
    return (
        WHOLE
        if rest_growth >= _REST_LEAST * (recovery_s[1] / recovery_s[0] - 1)
        else grown_most.partition(".")[2]
    )


def _median_s(runs: Sequence[RunRecord], name: str) -> float:
    """Return the median length of a phase."""
    return median(_phase_s(run, name) for run in runs)


def _phase_s(run: RunRecord, name: str) -> float:
    """Return the length of a phase in a run; 0 if the run does not have it."""
    metric = run.metrics.get(name)
    return 0.0 if metric is None else metric.value
