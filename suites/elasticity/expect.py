"""What the tests of this suite expect of a run. That the verdict is ``passed`` is checked by ``chaos.run`` itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from chaoskit import Chaos, ElasticPolicy, Outcome
from chaoskit.faults import Fault
from chaoskit.suites.goals import all_took_effect
from chaoskit.suites.recovery.expect import STEADY, survives

STEPS = 160
OPTIONS = {"step_s": 0.08}
POLICY = ElasticPolicy(
    min_replicas=2, max_replicas=4, scaling_timeout_s=0, faulty_scale_down_timeout_s=0.5
)


def resizes(chaos: Chaos, *faults: Fault, through: tuple[int, ...] = (), **plan: Any) -> Outcome:
    """A run of changing size that costs nothing: no step, no sample, no bit of any loss.

    Args:
        through: the run goes on until all faults have taken effect and the world has had these sizes, in this order.
    """
    goal = all_took_effect(chaos, len(faults), *through)
    settings: dict[str, Any] = {
        "nodes": 4,
        "spares": 0,
        "steps": STEPS,
        "options": OPTIONS,
        "elastic": POLICY,
    } | plan
    outcome = survives(chaos, *faults, job=STEADY, shards=4, goal=goal, **settings)
    assert outcome.ledger is not None
    assert outcome.ledger.samples > 0
    assert not outcome.ledger.missing
    assert not outcome.ledger.repeated
    return outcome


def nobody_is_lost(outcome: Outcome) -> None:
    """Every rank that goes has left in time."""
    assert outcome.records("detected") == []
    assert outcome.records("evicted") == []
    assert outcome.recoveries == []


def sizes(outcome: Outcome) -> list[int]:
    """Of the worlds that committed steps, one after the other."""
    first = outcome.steps[0].world
    return [
        first,
        *(after.world for before, after in pairwise(outcome.steps) if before.world != after.world),
    ]
