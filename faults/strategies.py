"""Hypothesis strategies that draw plans of faults; they need the extra ``plans``.

``import faults`` does not import this module.

    from faults.strategies import fault_plans

    @given(faults=fault_plans(nodes=4, steps=30))
    def test_any_plan_is_survived(chaos, faults): ...

Plans shrink towards fewer faults, simpler kinds, steps instead of other moments, lower ranks
instead of roles, earlier steps and the default phase.

-> faults/survival.py: the rule by which a plan is survivable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("plans are drawn by Hypothesis: pip install 'chaoskit[plans]'") from error

from chaoskit.errors import BadInput
from chaoskit.faults import CATALOGUE
from chaoskit.faults.base import Fault
from chaoskit.faults.kinds import kinds as kinds_known
from chaoskit.faults.numbers.numeric import WHERES
from chaoskit.faults.possible import moments
from chaoskit.faults.processes.hang import HOWS
from chaoskit.faults.survival import REACH, struck_by, survivable
from chaoskit.typed import typed_arguments
from chaoskit.vocabulary import STRIKE_PHASES, TRIGGER_PHASES


@dataclass(frozen=True, slots=True)
class Scope:
    """Limits within which a fault is drawn.

    Attributes:
        steps: number of steps of the run.
        parameters: names of model parameters that numeric faults may poison.
        settled: first step at which a rank may hang. A hang in the first steps, before any step
            time is known, is found only after ``startup_s``.
        heartbeat_s: interval of the heartbeats between agents and coordinator. A link may carry
            nothing between two heartbeats, so a shorter fault may show nothing.
    """

    steps: int
    parameters: Sequence[str]
    settled: int
    heartbeat_s: float

    def beats(self, *numbers: int) -> st.SearchStrategy[float]:
        """Return a strategy for the duration of one of these numbers of heartbeats, in seconds."""
        return st.sampled_from([number * self.heartbeat_s for number in numbers])


Fields = st.SearchStrategy[dict[str, Any]]
Recipe = Callable[[Scope], Fields]

#: Roles that a fault may have instead of a rank, as far as the plan stays survivable.
_ROLES = ("any", "most_shards", "minority", "all_but_one")
#: Seconds after the first committed step: in the first steps, in the middle of a short run, too
#: late.
_TIMES_S = (0.0, 0.1, 0.3, 1.0)
#: Phases of a recovery in which the rank's main thread stops, for faults that need it.
_AT_HOOKS = ("recommit", "restore")


def _step_fields(scope: Scope, **others: st.SearchStrategy[Any]) -> Fields:
    """Return a strategy for the fields of a fault in any phase of a step.

    Args:
        others: field -> strategy, for fields beside the moment.
    """
    at_step, phase = st.integers(0, scope.steps - 1), st.sampled_from(TRIGGER_PHASES)
    return st.fixed_dictionaries({"at_step": at_step, "phase": phase, **others})


def _moment_fields(scope: Scope, during: Sequence[str], **others: st.SearchStrategy[Any]) -> Fields:
    """Return a strategy for the fields of a fault at a step, at a time, or in a recovery.

    Another fault must cause the recovery: without one, the fault strikes no rank.

    Args:
        during: phases of a recovery to draw from.
        others: field -> strategy, for fields beside the moment.
    """
    phase = st.sampled_from(TRIGGER_PHASES)
    timed = st.fixed_dictionaries({"after_s": st.sampled_from(_TIMES_S), "phase": phase, **others})
    in_recovery = st.fixed_dictionaries(
        {"during": st.sampled_from(during), "recovery": st.integers(1, 2), **others}
    )
    return _step_fields(scope, **others) | _step_fields(scope, **others) | timed | in_recovery


def _from_outside(scope: Scope) -> Fields:
    """Draw a moment of a fault that needs no help of the worker."""
    return _moment_fields(scope, STRIKE_PHASES)


def _from_within(scope: Scope) -> Fields:
    """Draw a moment of a fault for which the rank must stop at a hook."""
    return _moment_fields(scope, _AT_HOOKS)


def _preempt(scope: Scope) -> Fields:
    return _moment_fields(scope, STRIKE_PHASES, grace_s=st.sampled_from((0.5, 0.05)))


def _freeze(scope: Scope) -> Fields:
    """Draw a freeze that is longer than the lease of a node, or about as long."""
    return _moment_fields(scope, STRIKE_PHASES, thaw_after_s=scope.beats(20, 4))


def _crash_loop(scope: Scope) -> Fields:
    return _step_fields(scope, times=st.integers(2, 3))


def _hang(scope: Scope) -> Fields:
    """Draw a hang at a step, since the step time may not be known yet at other moments."""
    first = min(scope.settled, scope.steps - 1)
    return _step_fields(
        scope, at_step=st.integers(first, scope.steps - 1), how=st.sampled_from(HOWS)
    )


def _nan(scope: Scope) -> Fields:
    """Draw the poisoned value; nothing if the scope names no parameters."""
    if not scope.parameters:
        return st.nothing()
    parameter = st.sampled_from(scope.parameters)
    gradient = _step_fields(
        scope,
        phase=st.sampled_from(("forward", "backward")),
        parameter=parameter,
        where=st.just("gradient"),
    )
    wheres = [where for where in WHERES if where != "gradient"]
    # a weight that is poisoned in the last backward pass reaches no gradient any more
    return gradient | _step_fields(
        scope,
        phase=st.just("forward"),
        parameter=parameter,
        where=st.sampled_from(wheres),
        sticky=st.just(False),
    )


def _deadlock(scope: Scope) -> Fields:
    """Draw a step at which the time of a step is known, as for a hang."""
    first = min(scope.settled, scope.steps - 1)
    return _step_fields(scope, at_step=st.integers(first, scope.steps - 1))


def _straggle(scope: Scope) -> Fields:
    """Draw a delay that is far from the limit of a hang."""
    return _step_fields(scope, delay_ms=st.sampled_from((5.0, 20.0)), steps=st.integers(1, 5))


def _data_stall(scope: Scope) -> Fields:
    return _step_fields(scope, phase=st.just("forward"), stall_ms=st.sampled_from((5.0, 50.0)))


def _replace(scope: Scope) -> Fields:
    return _moment_fields(scope, STRIKE_PHASES, back_after_s=st.sampled_from((0.3, 0.0)))


def _cut(scope: Scope) -> Fields:
    """Draw a cut that is shorter or longer than a lease, in one direction or both."""
    return _moment_fields(
        scope,
        STRIKE_PHASES,
        apart_from=st.sampled_from(("all", "ranks", "coordinator")),
        direction=st.sampled_from(("both", "in", "out")),
        heal_after_s=scope.beats(20, 2),
    )


def _link_down(scope: Scope) -> Fields:
    return _moment_fields(scope, STRIKE_PHASES, heal_after_s=scope.beats(20, 2))


def _flap(scope: Scope) -> Fields:
    return _moment_fields(scope, STRIKE_PHASES, times=st.integers(1, 3))


def _bad_link(**fields: st.SearchStrategy[Any]) -> Recipe:
    """Return a recipe for a link that is bad from the forward phase of a step on, for 0.5 or 1 s.

    A link must carry something while it is bad, or the fault shows nothing.

    Args:
        fields: field -> strategy, for the fields that say how bad it is.
    """

    def draw(scope: Scope) -> Fields:
        heal_after_s = st.sampled_from((1.0, 0.5))
        steps = st.integers(0, max(0, scope.steps - 10))
        return st.fixed_dictionaries({"at_step": steps, "heal_after_s": heal_after_s, **fields})

    return draw


def _clock_jump(scope: Scope) -> Fields:
    return _step_fields(scope, seconds=st.sampled_from((3600.0, -3600.0)))


#: Recipe of each kind of fault: it draws all fields but the rank. Keyed by name, simplest first, so
#: that a kind can be entered before it exists. Plans leave out kinds of the catalogue that are
#: missing here; see :func:`left_out`. Missing are faults with an outcome that depends on more than
#: the plan: a flipped bit is found only with the right checks on; a twin has no bad batch; limits
#: need control groups, and a job that reaches them; a load fails only when one is due; the size of
#: a rack, and the sizes of the world, are settings of the run.
RECIPES: dict[str, Recipe] = {
    "Kill": _from_outside,
    "Raise": _from_within,
    "NaN": _nan,
    "Hang": _hang,
    "Exit": _from_within,
    "Deadlock": _deadlock,
    "Straggle": _straggle,
    "DataStall": _data_stall,
    "ClockJump": _clock_jump,
    "KillAgent": _from_outside,
    "KillNode": _from_outside,
    "Preempt": _preempt,
    "FreezeNode": _freeze,
    "CrashLoop": _crash_loop,
    "KillCoordinator": _from_outside,
    "ReplaceNode": _replace,
    "LoseNode": _from_outside,
    "Cut": _cut,
    "Reset": _cut,
    "LinkDown": _link_down,
    "Flap": _flap,
    "Delay": _bad_link(delay_ms=st.sampled_from((2.0, 10.0))),
    "Loss": _bad_link(share=st.sampled_from((0.01, 0.05))),
    "Bandwidth": _bad_link(bits_per_s=st.sampled_from((5e6, 2e6))),
}


def left_out(catalogue: Collection[type[Fault]] = CATALOGUE) -> list[str]:
    """Return the names of kinds that plans leave out: their recipe or their cost is unknown."""
    named = {*RECIPES}.intersection(REACH)
    return sorted(
        kind.__name__ for kind in catalogue if kind.__name__ not in named and kind.drawn is None
    )


def _recipe(kind: type[Fault]) -> Recipe:
    """Return a recipe for a kind of another distribution, with the values that it names."""
    drawn = {name: st.sampled_from(values) for name, values in (kind.drawn or {}).items()}
    phases = moments(kind)[0].recoveries
    return lambda scope: (
        _moment_fields(scope, phases, **drawn) if phases else _step_fields(scope, **drawn)
    )


@typed_arguments
def fault_plans(
    *,
    nodes: int,
    steps: int,
    kinds: Collection[type[Fault]] | None = None,
    substrate: str = "local",
    survivors: int = 1,
    least: int = 0,
    most: int = 4,
    parameters: Sequence[str] = (),
    settled: int = 5,
    heartbeat_ms: int = 50,
    sure: bool = True,
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Return a strategy for plans that a run of ``nodes`` nodes must survive.

    A plan is survivable in the sense of :func:`faults.survival.survivable`. Each of its faults
    strikes, and none hides another: they are due some steps apart, or in the recovery from the
    first one, at ranks that exist whatever was lost before.

    With ``sure=False`` several faults may strike at once: in the same step, at a time, in a
    recovery that may not come, or at a rank that may be gone. Some faults of such a plan may not
    strike, and a run with them is *unknown*.

    Args:
        nodes: number of nodes of the run.
        steps: number of steps of the run.
        kinds: kinds of faults to draw from; None for all kinds of the catalogue that can be drawn
            and that ``substrate`` supports.
        substrate: name of the substrate that must support each kind, if ``kinds`` is None.
        survivors: number of processes that must live from the first step to the last.
        least, most: limits of the number of faults. With ``sure`` there are at most as many as
            ``nodes - survivors``, and as fit into the run 6 steps apart.
        parameters: names of model parameters for numeric faults; there are none without names.
        settled: first step at which a rank may hang.
        sure: each fault must strike; a plan then has fewer faults than nodes.
        heartbeat_ms: heartbeat interval of the run (``RunConfig.heartbeat_ms``). Networks are cut
            and nodes frozen for 2 to 20 heartbeats.

    Raises:
        BadInput: if no plan can be drawn, or one of ``kinds`` has no recipe.
    """
    if not 1 <= survivors < nodes:
        raise BadInput(
            "survivors", survivors, f"use 1 to {nodes - 1}, so that a rank of {nodes} can be hit"
        )
    if heartbeat_ms < 1:
        raise BadInput("heartbeat_ms", heartbeat_ms, "use that of the run, at least 1")
    if kinds is not None and (unknown := left_out(kinds)):
        raise BadInput("kinds", unknown[0], f"use kinds with a recipe: {', '.join(RECIPES)}")
    scope = Scope(steps, tuple(parameters), settled, heartbeat_ms / 1000)
    possible = [kind for kind in kinds_known() if substrate in kind.substrates]
    if not possible:
        raise BadInput("substrate", substrate, "use one that a fault of the catalogue names")
    classes = {kind.__name__: kind for kind in (possible if kinds is None else kinds)}
    foreign_recipes = {
        name: _recipe(kind)
        for name, kind in classes.items()
        if name not in RECIPES and kind.drawn is not None
    }
    recipes = {**RECIPES, **foreign_recipes}
    faults = [
        _aim_strategy(classes[name], recipe(scope))
        for name, recipe in recipes.items()
        if name in classes
    ]
    if sure:
        return _sure_plans(
            [(classes[name], recipe(scope)) for name, recipe in recipes.items() if name in classes],
            nodes=nodes,
            survivors=survivors,
            scope=scope,
            least=least,
            most=most,
        )
    # ranks come last: their number, and the rank that is never hit, decide whether a plan is
    # survivable
    unaimed = st.lists(st.one_of(faults), min_size=least, max_size=most)
    return unaimed.flatmap(lambda drawn: _plan_strategy(drawn, nodes, survivors)).filter(
        lambda plan: survivable(plan, nodes=nodes, survivors=survivors) and _has_first_moment(plan)
    )


def _has_first_moment(plan: Sequence[Fault]) -> bool:
    """Return True if a fault strikes outside of recoveries, or the plan is empty.

    Otherwise no recovery would come in which a fault could strike.
    """
    return not plan or any(fault.during is None for fault in plan)


_Aim = Callable[[int | str], Fault]


def _aim_strategy(kind: type[Fault], recipe: Fields) -> st.SearchStrategy[_Aim]:
    return recipe.map(lambda values: lambda rank: kind(rank=rank, **values))


def _plan_strategy(
    drawn: Sequence[_Aim], nodes: int, survivors: int
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Return a strategy that gives ranks and roles to drawn faults.

    Few faults get any of them; many get only ranks above the survivors'.
    """
    are_few = len(drawn) <= nodes - survivors
    size: dict[str, Any] = {"min_size": len(drawn), "max_size": len(drawn)}
    ranks = st.lists(st.integers(0 if are_few else survivors, nodes - 1), **size)
    roles = st.lists(st.sampled_from(("", "", "", *_ROLES)) if are_few else st.just(""), **size)
    plans = st.tuples(ranks, roles).map(
        lambda drawn_at: tuple(
            aim(role or rank) for aim, rank, role in zip(drawn, *drawn_at, strict=True)
        )
    )
    return plans.filter(
        lambda plan: all(struck_by(fault, nodes) for fault in plan)
    )  # a world of 2 ranks has no minority


# -- plans of which each fault strikes -------------------------------------------------------------

#: Steps between two faults, and after the last one, so that the effects of each are over and
#: visible.
_APART = 6
#: Faults that surely end a process: a fault in a recovery needs one of them before it.
_SURELY_LOSE = frozenset({"Kill", "Exit", "Raise", "KillNode", "KillAgent"})
#: Phases of a recovery that each rank of the new membership reaches.
_SURELY_REACHED = ("recommit", "regroup")


def _sure_plans(
    recipes: Sequence[tuple[type[Fault], Fields]],
    *,
    nodes: int,
    survivors: int,
    scope: Scope,
    least: int,
    most: int,
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Return a strategy for plans in which all faults strike, as many as fit into the run.

    Each fault has a moment and a rank of its own. Raises BadInput if ``least`` faults do not fit.
    """
    slots = [
        *range(min(scope.settled, max(0, scope.steps - 1)), max(1, scope.steps - _APART), _APART)
    ] or [0]
    count = min(most, nodes - survivors, len(slots))
    if least > count:
        remedy = f"use {count} or less: each is due {_APART} steps from another; or sure=False"
        raise BadInput("least", least, remedy)

    @st.composite
    def plans(draw: st.DrawFn) -> tuple[Fault, ...]:
        number = draw(st.integers(least, count))
        steps = sorted(
            draw(st.lists(st.sampled_from(slots), unique=True, min_size=number, max_size=number))
        )
        plan: list[Fault] = []
        for place, step in enumerate(steps):
            kind, fields = draw(st.sampled_from(recipes))
            # each fault before this one may have cost a rank
            rank = draw(st.integers(0, nodes - 1 - place))
            plan.append(_sure_fault(draw, kind, fields, rank, step, plan))
        return tuple(plan)

    return plans()


def _sure_fault(
    draw: st.DrawFn,
    kind: type[Fault],
    fields: Fields,
    rank: int,
    step: int,
    before: Sequence[Fault],
) -> Fault:
    """Return a fault at its step, or in a recovery that the first fault surely causes."""
    values = draw(fields)
    first = before[0] if len(before) == 1 and before[0].kind in _SURELY_LOSE else None
    follows = first is not None and rank != first.rank and values.get("during") in _SURELY_REACHED
    if follows:
        return kind(rank=rank, **values | {"recovery": 1})
    own = {
        name: value
        for name, value in values.items()
        if name not in ("at_step", "after_s", "during", "recovery")
    }
    return kind(rank=rank, at_step=step, **own)
