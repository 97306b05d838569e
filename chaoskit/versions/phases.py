"""Which phase of a recovery grew. It explains a change, and decides nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from chaoskit.history import record
from chaoskit.history.finding import WHOLE
from chaoskit.history.record import RunRecord
from chaoskit.vocabulary import RECOVERY_PHASES

#: Phases that end no later than the recovery does: together they are all of it.
_PHASES = tuple(
    record.phase_name(phase)
    for phase in RECOVERY_PHASES[: RECOVERY_PHASES.index("first good step") + 1]
)
#: If all that is not the phase that grew most grew by at least this share of what the recovery did, all of it grew.
_REST_LEAST = 0.5


def grown_phase(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> str:
    """The phase by which recoveries got longer: such as ``restored``, or :data:`WHOLE`; "" if that is not known.

    It is the phase whose median grew most, in seconds. Where the rest of the recovery grew as well, by half as large a
    share as the recovery did or more, it is not this phase alone: a slower machine, or code that several phases run.
    """
    early, late = (
        [run for run in runs if record.came_back(run) and record.RECOVERY in run.metrics]
        for runs in (before, after)
    )
    phases = [name for name in _PHASES if any(name in run.metrics for run in early + late)]
    if not (early and late and phases):
        return ""
    growth = {name: _median(late, name) - _median(early, name) for name in phases}
    most = max(phases, key=lambda name: growth[name])
    whole = [median(run.metrics[record.RECOVERY].value for run in runs) for runs in (early, late)]
    rest = [
        median(run.metrics[record.RECOVERY].value - _value(run, most) for run in runs)
        for runs in (early, late)
    ]
    if growth[most] <= 0 or whole[1] <= whole[0]:
        return ""
    grew = rest[1] / rest[0] - 1 if rest[0] > 0 else 0.0
    return WHOLE if grew >= _REST_LEAST * (whole[1] / whole[0] - 1) else most.partition(".")[2]


def _median(runs: Sequence[RunRecord], name: str) -> float:
    return median(_value(run, name) for run in runs)


def _value(run: RunRecord, name: str) -> float:
    found = run.metrics.get(name)
    return 0.0 if found is None else found.value
