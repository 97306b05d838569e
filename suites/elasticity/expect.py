"""What the tests of this suite expect of a run. That the verdict is ``passed`` is checked by ``chaos.run`` itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.experiment.outcome import Outcome
from chaoskit.pytest_plugin import Chaos
from chaoskit.suites.recovery.expect import STEADY, journal, survives
from chaoskit.vocabulary import Event
from faults import Fault

#: All runs of this suite have the same twin: it is trained once.
STEPS = 130
OPTIONS = {"step_s": 0.08}
POLICY = ElasticPolicy(min_replicas=2, max_replicas=4, scaling_timeout_s=0, faulty_scale_down_timeout_s=0.5)


def resizes(chaos: Chaos, *faults: Fault, **plan: Any) -> Outcome:
    """A run of changing size that costs nothing: no step, no sample, no bit of any loss."""
    settings: dict[str, Any] = {"nodes": 4, "spares": 0, "steps": STEPS, "options": OPTIONS, "elastic": POLICY} | plan
    outcome = survives(chaos, *faults, job=STEADY, shards=4, **settings)
    assert outcome.ledger is not None
    assert outcome.ledger.samples > 0
    assert not outcome.ledger.missing
    assert not outcome.ledger.repeated
    return outcome


def nobody_is_lost(outcome: Outcome) -> None:
    """Whoever goes has left in time."""
    assert journal(outcome, Event.DETECTED) == []
    assert journal(outcome, Event.EVICTED) == []
    assert outcome.recoveries == []


def sizes(outcome: Outcome) -> list[int]:
    """Of the worlds that committed steps, one after the other."""
    first = outcome.steps[0].world
    return [first, *(after.world for before, after in pairwise(outcome.steps) if before.world != after.world)]
