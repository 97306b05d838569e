"""Expectations of this suite. ``chaos.run`` itself checks that the verdict is ``passed``.

-> suites/recovery/jobs.py has the jobs; experiment/properties/ the checks of the verdict.
"""

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
AT = 8  # step in which most faults strike: step times are known by then
FROZEN_S = 3.0  # three relaxed leases: a node is given up by then, however busy the coordinator is


def survives(
    chaos: Chaos, *faults: Fault, job: str = STEADY, goal: JournalFlag | None = None, **plan: Any
) -> Outcome:
    """Run a job in which every fault must take effect, and cost no step, sample or bit of any loss.

    Return its outcome. The bits are not compared without a twin (``twin=False``).

    Args:
        goal: goal of an open-ended run, beside the goals in ``until``.
        plan: further fields of the plan; three nodes, one spare and 40 steps by default.

    Raises:
        VerdictError: if the verdict is not ``passed``.
        AssertionError: if a step was lost, or a loss has other bits.
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
    """Run a job in which faults must cost nothing, until the world is full.

    The last membership must be full. Return the outcome. Raises as :func:`survives` does.
    """
    settings: dict[str, Any] = (
        {"steps": 90} | plan | {"until": {"world": nodes} | plan.get("until", {})}
    )
    outcome = survives(chaos, *faults, nodes=nodes, **settings)
    assert len(outcome.records("plan")[-1]["members"]) == nodes
    return outcome


def given_up(outcome: Outcome) -> set[str]:
    """Return the causes for which ranks were given up."""
    return {record["cause"] for record in outcome.records("detected")}


def is_left_alone(chaos: Chaos, *faults: Fault, job: str = STEADY, **plan: Any) -> Outcome:
    """Run a job in which no rank may be given up: the first membership takes all steps.

    Return its outcome. Raises as :func:`survives` does.
    """
    outcome = survives(chaos, *faults, job=job, **plan)
    assert outcome.recoveries == []
    assert outcome.false_alarms == 0
    assert outcome.records("detected") == []
    assert len(outcome.records("plan")) == 1
    return outcome


def victim(outcome: Outcome, number: int) -> str:
    """Return the worker that the n-th fault struck; the first one has number 0.

    It must have struck only one.
    """
    (record,) = [
        injection
        for injection in outcome.records("injected")
        if injection["fault"] == f"fault{number}"
    ]
    return str(record["worker"])
