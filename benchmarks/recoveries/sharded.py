"""Time from the loss of a rank or its node to the next step of a fully sharded job, and the steps
lost.
"""

from __future__ import annotations

from benchmarks.harness.bars import Bar
from benchmarks.harness.lab import Lab, show_progress
from benchmarks.recoveries.recovery import PLACES, durations, unchanged
from chaoskit.runlog.outcome import Outcome
from faults import Fault, Kill, KillNode

#: What a recovery may take beside the step that is repeated.
GRACE_S = 1.0
#: Committed steps that it may cost: copies are made of every step.
LOST_STEPS = 1

_STRIKE, _STEPS = 12, 20


def sharded(lab: Lab) -> list[Bar]:
    """Measure FSDP2 on four ranks with a warm spare.

    The state of a rank is in its node's memory and in that of a partner.
    """
    places = PLACES[: lab.repeats(len(PLACES))]
    kills: list[Fault] = [Kill(rank=rank, at_step=_STRIKE, phase=phase) for rank, phase in places]
    nodes: list[Fault] = [
        KillNode(rank=rank, at_step=_STRIKE, phase=phase) for rank, phase in places
    ]
    bars: list[Bar] = []
    for what, faults in (("SIGKILL of a rank", kills), ("loss of a node", nodes)):
        show_progress(f"  {what}")
        outcomes = [lab.run(fault, job="fsdp", steps=_STEPS, twin=True) for fault in faults]
        bars.append(_next_step(f"FSDP2, {what}: every rank's next step, at full world", outcomes))
        bars.append(
            unchanged(
                "sharded", f"FSDP2, {what}: same losses and weights", outcomes, most=LOST_STEPS
            )
        )
    return bars


def _next_step(name: str, outcomes: list[Outcome]) -> Bar:
    recoveries = [outcome.recoveries[0] for outcome in outcomes]
    pairs = [(recovery.seconds, recovery.step_seconds + GRACE_S) for recovery in recoveries]
    return durations("sharded", name, pairs, f"a step + {GRACE_S:g} s")
