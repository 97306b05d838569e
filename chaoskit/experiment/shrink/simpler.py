"""What is simpler than an experiment: fewer steps, nodes and spares, default settings, plainer and earlier faults."""

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

_MOMENT = (
    "rank",
    "at_step",
    "after_s",
    "during",
    "recovery",
)  # where and when: what the other fields are not
_STEPS_AFTER = 2  # the last fault needs a step in which to show, and one after it
#: Before this step a hang is found only after ``startup_s``, as no step time is known: correct, and too slow to try.
_EARLIEST = {"Hang": 5}


def with_faults(experiment: Planned, faults: Sequence[Any]) -> Planned:
    """The same experiment with some of its faults."""
    return replace(experiment, faults=tuple(faults), asked=())


def simpler(experiment: Planned) -> Iterator[Planned]:
    """Experiments to try in place of this one, the boldest first. Of a command, only faults can be left out.

    Each is simpler in one respect and in none less simple, so repeated use ends. A plan that must be survived is only
    replaced by plans that must be survived: else every search would end at a run that lost everything.
    """
    if isinstance(experiment, CommandExperiment):
        return
    must_survive = _survivable(experiment)
    for changes in _changes(experiment):
        try:
            candidate = _changed(experiment, **changes)
        except BadInput:  # such as a rank that is not there with fewer nodes
            continue
        if _survivable(candidate) or not must_survive:
            yield candidate


def _survivable(experiment: Experiment) -> bool:
    return survivable(experiment.faults, nodes=experiment.config.nodes)


def _changed(experiment: Experiment, **changes: Any) -> Experiment:
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
    faults = experiment.faults
    yield from ({"steps": steps} for steps in _fewer_steps(experiment))
    yield from _plainer_settings(experiment.config)
    yield from ({"faults": changed} for changed in _moved_together(faults))
    for place, fault in enumerate(faults):
        for plainer in _plainer(fault):
            yield {"faults": (*faults[:place], plainer, *faults[place + 1 :])}


def _fewer_steps(experiment: Experiment) -> Iterable[int]:
    last = max(
        (step for fault in experiment.faults if (step := step_of(fault)) is not None), default=-1
    )
    if experiment.steps is None:
        return []
    return sorted(
        steps
        for steps in {last + 1 + _STEPS_AFTER, experiment.steps // 2}
        if last < steps < experiment.steps
    )


def _plainer_settings(config: RunConfig) -> Iterator[dict[str, Any]]:
    yield from ({"nodes": nodes} for nodes in range(1, config.nodes))
    if config.spares:
        yield {"spares": 0}
    for name, default in zip(
        RunConfig.__struct_fields__[1:], RunConfig.__struct_defaults__, strict=True
    ):
        if name not in ("nodes", "spares") and getattr(config, name) != default:
            yield {name: default}


# -- faults -------------------------------------------------------------------------------------------------------


def _moved_together(faults: Sequence[Fault]) -> Iterator[tuple[Fault, ...]]:
    """All faults at lower ranks, or earlier by as many steps: what strikes together still does."""
    ranks = sorted({rank for fault in faults if (rank := rank_of(fault)) is not None})
    for first in (0, 1):
        lower: dict[int | None, int] = {rank: first + place for place, rank in enumerate(ranks)}
        if sum(lower.values()) < sum(ranks):
            yield tuple(
                replace(fault, rank=lower.get(rank_of(fault), fault.rank)) for fault in faults
            )
    steps = [step_of(fault) for fault in faults]
    rooms = [
        step - _EARLIEST.get(fault.kind, 0)
        for fault, step in zip(faults, steps, strict=True)
        if step is not None
    ]
    room = min(rooms, default=0)
    for by in sorted({room, room // 2, 1}, reverse=True):
        if 0 < by <= room:
            yield tuple(
                fault if step is None else replace(fault, at_step=step - by)
                for fault, step in zip(faults, steps, strict=True)
            )


def _plainer(fault: Fault) -> Iterator[Fault]:
    """One fault: as a kill, with default fields, earlier."""
    if not isinstance(fault, Kill) and reach(fault) == "process":
        moment = {
            name: getattr(fault, name) for name in (*_MOMENT, "phase") if hasattr(fault, name)
        }
        yield Kill(**moment)
    for item in fields(fault):
        if (
            item.name not in _MOMENT
            and item.default is not MISSING
            and getattr(fault, item.name) != item.default
        ):
            yield replace(fault, **{item.name: item.default})
    at_step, earliest = step_of(fault), _EARLIEST.get(fault.kind, 0)
    if at_step is not None:
        earlier = sorted({earliest, at_step // 2, at_step - 1})
        yield from (replace(fault, at_step=step) for step in earlier if earliest <= step < at_step)
