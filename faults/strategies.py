"""Hypothesis strategies that draw plans of faults. Not imported by ``import faults``.

    from faults.strategies import fault_plans

    @given(fault_plans(nodes=4, steps=30))
    def test_any_plan_is_survived(faults): ...

Plans shrink towards fewer faults, simpler kinds, lower ranks, earlier steps and the default phase.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from chaoskit.errors import BadInput
from chaoskit.vocabulary import TRIGGER_PHASES
from faults import CATALOGUE
from faults.base import Fault
from faults.hang import HOWS
from faults.numeric import WHERES
from faults.survival import REACH, survivable


@dataclass(frozen=True, slots=True)
class Scope:
    """Within which a fault is drawn.

    Attributes:
        steps: that the run has.
        parameters: names of model parameters that numeric faults may poison.
        settled: first step at which a rank may hang. A hang in the first steps, before any step time is known, is
            found only after ``startup_s``.
    """

    steps: int
    parameters: Sequence[str]
    settled: int


Fields = st.SearchStrategy[dict[str, Any]]
Recipe = Callable[[Scope], Fields]


def _anywhere(scope: Scope, **more: st.SearchStrategy[Any]) -> Fields:
    at_step, phase = st.integers(0, scope.steps - 1), st.sampled_from(TRIGGER_PHASES)
    return st.fixed_dictionaries({"at_step": at_step, "phase": phase, **more})


def _hang(scope: Scope) -> Fields:
    first = min(scope.settled, scope.steps - 1)
    return _anywhere(scope, at_step=st.integers(first, scope.steps - 1), how=st.sampled_from(HOWS))


def _nan(scope: Scope) -> Fields:
    if not scope.parameters:
        return st.nothing()
    parameter = st.sampled_from(scope.parameters)
    gradient = _anywhere(
        scope, phase=st.sampled_from(("forward", "backward")), parameter=parameter, where=st.just("gradient")
    )
    others = [where for where in WHERES if where != "gradient"]
    # A weight that is poisoned in the last backward pass reaches no gradient any more.
    return gradient | _anywhere(
        scope, phase=st.just("forward"), parameter=parameter, where=st.sampled_from(others), sticky=st.just(False)
    )


def _deadlock(scope: Scope) -> Fields:
    first = min(scope.settled, scope.steps - 1)
    return _anywhere(scope, at_step=st.integers(first, scope.steps - 1))


def _straggle(scope: Scope) -> Fields:
    """Slow, and far from the limit of a hang."""
    return _anywhere(scope, delay_ms=st.sampled_from((5.0, 20.0)), steps=st.integers(1, 5))


def _data_stall(scope: Scope) -> Fields:
    return _anywhere(scope, phase=st.just("forward"), stall_ms=st.sampled_from((5.0, 50.0)))


def _clock_jump(scope: Scope) -> Fields:
    return _anywhere(scope, seconds=st.sampled_from((3600.0, -3600.0)))


#: How each kind of fault is drawn: its fields but the rank. By name, simplest first, so that a kind can be entered
#: before it exists. A kind of the catalogue that is missing here is left out of plans; see :func:`left_out`.
RECIPES: dict[str, Recipe] = {
    "Kill": _anywhere,
    "Raise": _anywhere,
    "NaN": _nan,
    "Hang": _hang,
    "Exit": _anywhere,
    "Deadlock": _deadlock,
    "Straggle": _straggle,
    "DataStall": _data_stall,
    "ClockJump": _clock_jump,
}


def left_out(catalogue: Collection[type[Fault]] = CATALOGUE) -> list[str]:
    """Kinds that no plan holds, because nobody has said how they are drawn or what they cost."""
    return sorted(kind.__name__ for kind in catalogue if kind.__name__ not in RECIPES or kind.__name__ not in REACH)


def fault_plans(
    *,
    nodes: int,
    steps: int,
    kinds: Collection[type[Fault]] | None = None,
    survivors: int = 1,
    least: int = 0,
    most: int = 4,
    parameters: Sequence[str] = (),
    settled: int = 5,
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Plans that a run of ``nodes`` nodes must survive, in the sense of :func:`faults.survival.survivable`.

    Several faults may strike at once, in the same step, one after the other, and the same rank again.

    Args:
        kinds: of faults to draw from; None: all of the catalogue that can be drawn.
        survivors: processes that must live from the first step to the last.
        least, most: number of faults.
        parameters: names of model parameters for numeric faults; without any, there are no such faults.
        settled: first step at which a rank may hang.

    Raises:
        BadInput: if no plan can be drawn, or a kind that nobody has said how to draw is asked for.
    """
    if not 1 <= survivors < nodes:
        raise BadInput("survivors", survivors, f"use 1 to {nodes - 1}, so that a rank of {nodes} can be hit")
    if kinds is not None and (unknown := left_out(kinds)):
        raise BadInput("kinds", unknown[0], f"use kinds with a recipe: {', '.join(RECIPES)}")
    scope = Scope(steps, tuple(parameters), settled)
    classes = {kind.__name__: kind for kind in (CATALOGUE if kinds is None else kinds)}
    faults = [_drawn(classes[name], recipe(scope)) for name, recipe in RECIPES.items() if name in classes]
    # Ranks come last: whether a plan is survivable depends on how many there are and on who is never hit.
    anonymous = st.lists(st.one_of(faults), min_size=least, max_size=most)
    return anonymous.flatmap(lambda drawn: _aimed(drawn, nodes, survivors)).filter(
        lambda plan: survivable(plan, nodes=nodes, survivors=survivors)
    )


_Aim = Callable[[int], Fault]


def _drawn(kind: type[Fault], recipe: Fields) -> st.SearchStrategy[_Aim]:
    return recipe.map(lambda values: lambda rank: kind(rank=rank, **values))


def _aimed(drawn: Sequence[_Aim], nodes: int, survivors: int) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Any ranks for a few faults; for many, only those above the survivors'."""
    lowest = 0 if len(drawn) <= nodes - survivors else survivors
    ranks = st.lists(st.integers(lowest, nodes - 1), min_size=len(drawn), max_size=len(drawn))
    return ranks.map(lambda chosen: tuple(aim(rank) for aim, rank in zip(drawn, chosen, strict=True)))
