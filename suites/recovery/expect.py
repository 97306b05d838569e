"""What the tests of this suite expect of a run. That the verdict is ``passed`` is checked by ``chaos.run`` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaoskit import Chaos, Outcome
from chaoskit.faults import Fault
from chaoskit.suites.goals import JournalFlag

JOBS = Path(__file__).with_name("jobs.py")
STEADY = f"{JOBS}:steady"
WORLDS = (2, 3, 4)
PHASES = ("forward", "backward", "reduce", "optimizer")
AT = 8  # the step in which most faults strike: step times are known by then
FROZEN_S = (
    3.0  # three relaxed leases: by then a node is given up, however late the coordinator looks
)


def survives(
    chaos: Chaos, *faults: Fault, job: str = STEADY, goal: JournalFlag | None = None, **plan: Any
) -> Outcome:
    """A run in which every fault takes effect, and that costs nothing: no step, no sample, no bit of any loss.

    Args:
        goal: of an open-ended run, which goes on until it is reached, and what ``until`` says beside it.
    """
    settings: dict[str, Any] = {"nodes": 3, "spares": 1, "steps": 40}
    if goal is not None:
        settings |= {"watch": goal, "deadline_s": 240.0}
        plan["until"] = goal.until | plan.get("until", {})
    settings |= plan
    outcome = chaos.run(job, faults=faults, **settings)
    assert outcome.lost_steps == 0
    if settings.get("twin", True):
        outcome.assert_same_losses_as_twin()
    return outcome


def heals(chaos: Chaos, *faults: Fault, nodes: int = 4, **plan: Any) -> Outcome:
    """The faults cost nothing, and the run goes on until the world is full: so is the last membership."""
    settings: dict[str, Any] = (
        {"steps": 90} | plan | {"until": {"world": nodes} | plan.get("until", {})}
    )
    outcome = survives(chaos, *faults, nodes=nodes, **settings)
    assert len(outcome.records("plan")[-1]["members"]) == nodes
    return outcome


def given_up(outcome: Outcome) -> set[str]:
    """Causes for which ranks were given up."""
    return {record["cause"] for record in outcome.records("detected")}


def is_left_alone(chaos: Chaos, *faults: Fault, job: str = STEADY, **plan: Any) -> Outcome:
    """A run in which nobody is given up, and the first membership trains from the first step to the last."""
    outcome = survives(chaos, *faults, job=job, **plan)
    assert outcome.recoveries == []
    assert outcome.false_alarms == 0
    assert outcome.records("detected") == []
    assert len(outcome.records("plan")) == 1
    return outcome


def victim(outcome: Outcome, number: int) -> str:
    """The worker that the n-th fault struck, once."""
    (record,) = [one for one in outcome.records("injected") if one["fault"] == f"fault{number}"]
    return str(record["worker"])
