"""Simpler variants of an experiment: fewer steps, nodes and spares, default settings, simpler and
earlier faults.

-> faults/survival.py: which faults a job must survive. experiment/shrink/minimise.py: fewer faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.experiment.plan.plan import Experiment, plan_experiment
from chaoskit.experiment.plan.planfile import Planned
from chaoskit.faults import Fault, Kill
from chaoskit.faults.survival import rank_of, reach, step_of, survivable

# fields for place and time, which are not reset to defaults
_MOMENT = ("rank", "at_step", "after_s", "during", "recovery")
_STEPS_AFTER = 2  # the last fault needs a step in which to show, and one step after it
#: Before this step a hang is detected only after ``startup_s``, because no step time is known. Such
#: a run is correct, but too slow to try.
_EARLIEST = {"Hang": 5}


def with_faults(experiment: Planned, faults: Sequence[Any]) -> Planned:
    """Return the same experiment with these faults in place of its own."""
    return replace(experiment, faults=tuple(faults), asked=())


def simpler(experiment: Planned) -> Iterator[Planned]:
    """Yield experiments to try in place of this one, the boldest first; none for a command.

    Each is simpler in one respect and in none less simple, so repeated use ends. A survivable plan
    is replaced only by survivable plans: else every search would end at a run that lost everything.
    """
    if isinstance(experiment, CommandExperiment):
        return
    must_survive = _survivable(experiment)
    for changes in _changes(experiment):
        try:
            candidate = _changed(experiment, **changes)
        except BadInput:  # for example a rank that does not exist with fewer nodes
            continue
        if _survivable(candidate) or not must_survive:
            yield candidate


def _survivable(experiment: Experiment) -> bool:
    """Return whether the job must survive the faults."""
    return survivable(experiment.faults, nodes=experiment.config.nodes)


def _changed(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment with changed arguments, checked like any other plan.

    Raises:
        BadInput: if it is not a plan that could be run.
    """
    settings = {
        name: getattr(experiment.config, name)
        for name in RunConfig.__struct_fields__
        if name != "job"
    }
    plan = {
        "steps": experiment.steps,
        "options": experiment.config.job.options,
        "faults": experiment.faults,
        "name": experiment.name,
        "deadline_s": experiment.deadline_s,
        "max_lost_steps": experiment.max_lost_steps,
    }
    return plan_experiment(experiment.job, **{**plan, **settings, **changes})


def _changes(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Yield the changes to try, as arguments of ``plan_experiment``, the boldest first."""
    faults = experiment.faults
    yield from ({"steps": steps} for steps in _fewer_steps(experiment))
    yield from _plainer_settings(experiment.config)
    yield from ({"faults": changed} for changed in _moved_together(faults))
    for position, fault in enumerate(faults):
        for plainer in _plainer(fault):
            yield {"faults": (*faults[:position], plainer, *faults[position + 1 :])}


def _fewer_steps(experiment: Experiment) -> Iterable[int]:
    """Return smaller numbers of steps that still contain all faults, the smallest first.

    The result is empty if the number of steps is not known.
    """
    last_fault_step = max(
        (step for fault in experiment.faults if (step := step_of(fault)) is not None), default=-1
    )
    if experiment.steps is None:
        return []
    return sorted(
        steps
        for steps in {last_fault_step + 1 + _STEPS_AFTER, experiment.steps // 2}
        if last_fault_step < steps < experiment.steps
    )


def _plainer_settings(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield changes to fewer nodes, no spares, and default settings."""
    yield from ({"nodes": nodes} for nodes in range(1, config.nodes))
    if config.spares:
        yield {"spares": 0}
    for name, default in zip(
        RunConfig.__struct_fields__[1:], RunConfig.__struct_defaults__, strict=True
    ):
        if name not in ("nodes", "spares") and getattr(config, name) != default:
            yield {name: default}


# -- faults ----------------------------------------------------------------------------------------


def _moved_together(faults: Sequence[Fault]) -> Iterator[tuple[Fault, ...]]:
    """Yield all faults at lower ranks, or all earlier by the same number of steps.

    Simultaneous faults stay simultaneous.
    """
    ranks = sorted({rank for fault in faults if (rank := rank_of(fault)) is not None})
    for first_rank in (0, 1):
        lower_ranks: dict[int | None, int] = {
            rank: first_rank + position for position, rank in enumerate(ranks)
        }
        if sum(lower_ranks.values()) < sum(ranks):
            yield tuple(
                replace(fault, rank=lower_ranks.get(rank_of(fault), fault.rank)) for fault in faults
            )
    steps = [step_of(fault) for fault in faults]
    steps_to_earliest = [
        step - _EARLIEST.get(fault.kind, 0)
        for fault, step in zip(faults, steps, strict=True)
        if step is not None
    ]
    least_steps = min(steps_to_earliest, default=0)
    for steps_earlier in sorted({least_steps, least_steps // 2, 1}, reverse=True):
        if 0 < steps_earlier <= least_steps:
            yield tuple(
                fault if step is None else replace(fault, at_step=step - steps_earlier)
                for fault, step in zip(faults, steps, strict=True)
            )


def _plainer(fault: Fault) -> Iterator[Fault]:
    """Yield simpler forms of a fault: a kill, default fields, an earlier step."""
    if not isinstance(fault, Kill) and reach(fault) == "process":
        moment = {
            name: getattr(fault, name) for name in (*_MOMENT, "phase") if hasattr(fault, name)
        }
        yield Kill(**moment)
    for field in fields(fault):
        if (
            field.name not in _MOMENT
            and field.default is not MISSING
            and getattr(fault, field.name) != field.default
        ):
            yield replace(fault, **{field.name: field.default})
    at_step, earliest = step_of(fault), _EARLIEST.get(fault.kind, 0)
    if at_step is not None:
        earlier = sorted({earliest, at_step // 2, at_step - 1})
        yield from (replace(fault, at_step=step) for step in earlier if earliest <= step < at_step)
