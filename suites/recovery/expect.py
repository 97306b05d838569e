"""What the tests of this suite expect of a run. That the verdict is ``passed`` is checked by ``chaos.run`` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaoskit.experiment.outcome import Outcome
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Event
from faults import Fault

JOBS = Path(__file__).with_name("jobs.py")
STEADY = f"{JOBS}:steady"
WORLDS = (2, 3, 4)
PHASES = ("forward", "backward", "reduce", "optimizer")
AT = 8  # the step in which most faults strike: step times are known by then
WIDE_S = 30.0  # no recovery may have waited for a time-out of a minute or more; benchmarks measure

#: From the healing to a membership of everybody: far above what it takes (see benchmarks/results), on any machine.
BACK_S = 15.0


def survives(chaos: Chaos, *faults: Fault, job: str = STEADY, **plan: Any) -> Outcome:
    """A run in which every fault takes effect, and that costs nothing: no step, no sample, no bit of any loss."""
    settings: dict[str, Any] = {"nodes": 3, "spares": 1, "steps": 40} | plan
    outcome = chaos.run(job, faults=faults, **settings)
    assert all(recovery.seconds < WIDE_S for recovery in outcome.recoveries)
    assert outcome.lost_steps == 0
    if settings.get("twin", True):
        outcome.assert_same_losses_as_twin()
    return outcome


def heals(chaos: Chaos, *faults: Fault, nodes: int = 4, **plan: Any) -> Outcome:
    """The faults cost nothing, and the last membership is the full world."""
    settings: dict[str, Any] = {"steps": 90, "options": {"full": nodes}} | plan
    outcome = survives(chaos, *faults, nodes=nodes, **settings)
    last = journal(outcome, Event.PLAN)[-1]
    assert len(last["members"]) == nodes
    healed_ns = max((record.t_ns for record in journal(outcome, Event.LIFTED)), default=last.t_ns)
    assert last.t_ns - healed_ns < BACK_S * 1e9
    return outcome


def given_up(outcome: Outcome) -> set[str]:
    """Causes for which ranks were given up."""
    return {record["cause"] for record in journal(outcome, Event.DETECTED)}


def is_left_alone(chaos: Chaos, *faults: Fault, job: str = STEADY, **plan: Any) -> Outcome:
    """A run in which nobody is given up, and the first membership trains from the first step to the last."""
    outcome = survives(chaos, *faults, job=job, **plan)
    assert outcome.recoveries == []
    assert outcome.false_alarms == 0
    assert journal(outcome, Event.DETECTED) == []
    assert len(journal(outcome, Event.PLAN)) == 1
    return outcome


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """The journal records of these events, by time."""
    return [record for record in read_journals(Path(outcome.directory) / "journal") if record.event in events]


def victim(outcome: Outcome, number: int) -> str:
    """The worker that the n-th fault struck, once."""
    (record,) = [one for one in journal(outcome, Event.INJECTED) if one["fault"] == f"fault{number}"]
    return str(record["worker"])
