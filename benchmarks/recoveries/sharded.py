"""How long the loss of a rank, or of its node, keeps a fully sharded job from the next step, and what it costs."""

from __future__ import annotations

from benchmarks.harness.bars import Bar
from benchmarks.harness.lab import Lab, say
from benchmarks.recoveries.recovery import PLACES, durations, unchanged
from chaoskit.runlog.outcome import Outcome
from faults import Fault, Kill, KillNode

#: What a recovery may take beside the step that is repeated.
GRACE_S = 1.0
#: Committed steps that it may cost: copies are made of every step.
LOST_STEPS = 1

_STRIKE, _STEPS = 12, 20


def sharded(lab: Lab) -> list[Bar]:
    """FSDP2 on four ranks, a warm spare: the state of a rank is in its node's memory, and in that of a partner."""
    places = PLACES[: lab.repeats(len(PLACES))]
    kills: list[Fault] = [Kill(rank=rank, at_step=_STRIKE, phase=phase) for rank, phase in places]
    nodes: list[Fault] = [
        KillNode(rank=rank, at_step=_STRIKE, phase=phase) for rank, phase in places
    ]
    found: list[Bar] = []
    for what, faults in (("SIGKILL of a rank", kills), ("loss of a node", nodes)):
        say(f"  {what}")
        outcomes = [lab.run(fault, job="fsdp", steps=_STEPS, twin=True) for fault in faults]
        found.append(_next_step(f"FSDP2, {what}: every rank's next step, at full world", outcomes))
        found.append(
            unchanged(
                "sharded", f"FSDP2, {what}: same losses and weights", outcomes, most=LOST_STEPS
            )
        )
    return found


def _next_step(name: str, outcomes: list[Outcome]) -> Bar:
    recoveries = [outcome.recoveries[0] for outcome in outcomes]
    pairs = [(recovery.seconds, recovery.step_seconds + GRACE_S) for recovery in recoveries]
    return durations("sharded", name, pairs, f"a step + {GRACE_S:g} s")
