"""Expectations of this suite. ``chaos.run`` itself checks that the verdict is ``passed``.

-> suites/recovery/expect.py: the expectations that it shares; storms.py has the plans.
"""

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
    """Run a job of changing size that must cost nothing: no step, no sample, no bit of any loss.

    Return its outcome. Raises as :func:`chaoskit.suites.recovery.expect.survives` does.

    Args:
        through: sizes that the world must have had, in this order, before the run ends. All faults
            must have taken effect, too.
        plan: further fields of the plan.
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


def no_rank_is_lost(outcome: Outcome) -> None:
    """Assert that every rank that leaves does so in time."""
    assert outcome.records("detected") == []
    assert outcome.records("evicted") == []
    assert outcome.recoveries == []


def sizes(outcome: Outcome) -> list[int]:
    """Return the sizes of the worlds that committed steps, in order."""
    first = outcome.steps[0].world
    return [
        first,
        *(after.world for before, after in pairwise(outcome.steps) if before.world != after.world),
    ]
