"""Hypothesis strategies that draw plans of faults. Not imported by ``import faults``; needs the extra ``plans``.

    from faults.strategies import fault_plans

    @given(faults=fault_plans(nodes=4, steps=30))
    def test_any_plan_is_survived(chaos, faults): ...

Plans shrink towards fewer faults, simpler kinds, steps instead of other moments, lower ranks instead of roles, earlier
steps and the default phase.
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
    """Within which a fault is drawn.

    Attributes:
        steps: that the run has.
        parameters: names of model parameters that numeric faults may poison.
        settled: first step at which a rank may hang. A hang in the first steps, before any step time is known, is
            found only after ``startup_s``.
        heartbeat_s: interval in which agents and coordinator hear of each other. Between two heartbeats a link may
            carry nothing, so a fault that is over sooner may show nothing.
    """

    steps: int
    parameters: Sequence[str]
    settled: int
    heartbeat_s: float

    def beats(self, *numbers: int) -> st.SearchStrategy[float]:
        """The time of one of these numbers of heartbeats, in seconds."""
        return st.sampled_from([number * self.heartbeat_s for number in numbers])


Fields = st.SearchStrategy[dict[str, Any]]
Recipe = Callable[[Scope], Fields]

#: Roles that a fault may aim at instead of a rank, as often as a plan can bear it.
_ROLES = ("any", "most_shards", "minority", "all_but_one")
#: Seconds after the first committed step: while the first steps are taken, in the middle of a short run, or too late.
_TIMES_S = (0.0, 0.1, 0.3, 1.0)
#: Phases of a recovery in which the rank's main thread stops, for faults that need it.
_AT_HOOKS = ("recommit", "restore")


def _anywhere(scope: Scope, **more: st.SearchStrategy[Any]) -> Fields:
    at_step, phase = st.integers(0, scope.steps - 1), st.sampled_from(TRIGGER_PHASES)
    return st.fixed_dictionaries({"at_step": at_step, "phase": phase, **more})


def _any_time(scope: Scope, during: Sequence[str], **more: st.SearchStrategy[Any]) -> Fields:
    """At a step, at a time, or in a recovery that another fault causes. A fault that nothing causes strikes no rank."""
    phase = st.sampled_from(TRIGGER_PHASES)
    timed = st.fixed_dictionaries({"after_s": st.sampled_from(_TIMES_S), "phase": phase, **more})
    follow = st.fixed_dictionaries(
        {"during": st.sampled_from(during), "recovery": st.integers(1, 2), **more}
    )
    return _anywhere(scope, **more) | _anywhere(scope, **more) | timed | follow


def _from_outside(scope: Scope) -> Fields:
    return _any_time(scope, STRIKE_PHASES)


def _from_within(scope: Scope) -> Fields:
    return _any_time(scope, _AT_HOOKS)


def _preempt(scope: Scope) -> Fields:
    return _any_time(scope, STRIKE_PHASES, grace_s=st.sampled_from((0.5, 0.05)))


def _freeze(scope: Scope) -> Fields:
    """Longer than the lease of a node, and perhaps no longer than that."""
    return _any_time(scope, STRIKE_PHASES, thaw_after_s=scope.beats(20, 4))


def _crash_loop(scope: Scope) -> Fields:
    return _anywhere(scope, times=st.integers(2, 3))


def _hang(scope: Scope) -> Fields:
    """At a step: at another moment, the step time may not be known yet."""
    first = min(scope.settled, scope.steps - 1)
    return _anywhere(scope, at_step=st.integers(first, scope.steps - 1), how=st.sampled_from(HOWS))


def _nan(scope: Scope) -> Fields:
    if not scope.parameters:
        return st.nothing()
    parameter = st.sampled_from(scope.parameters)
    gradient = _anywhere(
        scope,
        phase=st.sampled_from(("forward", "backward")),
        parameter=parameter,
        where=st.just("gradient"),
    )
    others = [where for where in WHERES if where != "gradient"]
    # A weight that is poisoned in the last backward pass reaches no gradient any more.
    return gradient | _anywhere(
        scope,
        phase=st.just("forward"),
        parameter=parameter,
        where=st.sampled_from(others),
        sticky=st.just(False),
    )


def _deadlock(scope: Scope) -> Fields:
    first = min(scope.settled, scope.steps - 1)
    return _anywhere(scope, at_step=st.integers(first, scope.steps - 1))


def _straggle(scope: Scope) -> Fields:
    """Slow, and far from the limit of a hang."""
    return _anywhere(scope, delay_ms=st.sampled_from((5.0, 20.0)), steps=st.integers(1, 5))


def _data_stall(scope: Scope) -> Fields:
    return _anywhere(scope, phase=st.just("forward"), stall_ms=st.sampled_from((5.0, 50.0)))


def _replace(scope: Scope) -> Fields:
    return _any_time(scope, STRIKE_PHASES, back_after_s=st.sampled_from((0.3, 0.0)))


def _cut(scope: Scope) -> Fields:
    """Shorter or longer than a lease, on one side or both."""
    return _any_time(
        scope,
        STRIKE_PHASES,
        apart_from=st.sampled_from(("all", "ranks", "coordinator")),
        direction=st.sampled_from(("both", "in", "out")),
        heal_after_s=scope.beats(20, 2),
    )


def _link_down(scope: Scope) -> Fields:
    return _any_time(scope, STRIKE_PHASES, heal_after_s=scope.beats(20, 2))


def _flap(scope: Scope) -> Fields:
    return _any_time(scope, STRIKE_PHASES, times=st.integers(1, 3))


def _bad_link(**fields: st.SearchStrategy[Any]) -> Recipe:
    """Early in a step, and for a while: a link must carry something while it is bad, or the fault shows nothing."""

    def draw(scope: Scope) -> Fields:
        heal_after_s = st.sampled_from((1.0, 0.5))
        steps = st.integers(0, max(0, scope.steps - 10))
        return st.fixed_dictionaries({"at_step": steps, "heal_after_s": heal_after_s, **fields})

    return draw


def _clock_jump(scope: Scope) -> Fields:
    return _anywhere(scope, seconds=st.sampled_from((3600.0, -3600.0)))


#: How each kind of fault is drawn: its fields but the rank. By name, simplest first, so that a kind can be entered
#: before it exists. A kind of the catalogue that is missing here is left out of plans; see :func:`left_out`. So are
#: those of which a plan alone does not say how its run ends: a flipped bit is found only with the right checks on, a
#: bad batch is no twin's, a node has limits only where control groups can be made, and they bite only where a job
#: wants more, a load fails only where one is due, and how large a rack is, and whether the world may change its size,
#: are settings of the run.
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
    """Kinds that no plan holds, because nothing says how they are drawn or what they cost."""
    named = {*RECIPES}.intersection(REACH)
    return sorted(
        kind.__name__ for kind in catalogue if kind.__name__ not in named and kind.drawn is None
    )


def _recipe(kind: type[Fault]) -> Recipe:
    """How a kind of another distribution is drawn: at any moment that it can take, with the values that it names."""
    drawn = {name: st.sampled_from(values) for name, values in (kind.drawn or {}).items()}
    phases = moments(kind)[0].recoveries
    return lambda scope: _any_time(scope, phases, **drawn) if phases else _anywhere(scope, **drawn)


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
    """Plans that a run of ``nodes`` nodes must survive, in the sense of :func:`faults.survival.survivable`.

    Each fault of a plan strikes, and none hides another: they are due some steps apart, or in the recovery from the
    first one, at ranks that are there whatever was lost before. With ``sure=False`` several faults may strike at once,
    in the same step, at a time, or in a recovery that may not come, and at a rank that may be gone: such a plan may
    leave faults that did not strike, and a run with them is *unknown*.

    Args:
        kinds: of faults to draw from; None: all of the catalogue that can be drawn, and that ``substrate`` can do.
        survivors: processes that must live from the first step to the last.
        least, most: number of faults.
        parameters: names of model parameters for numeric faults; without any, there are no such faults.
        settled: first step at which a rank may hang.
        sure: whether each fault must strike; then a plan has fewer faults than nodes.
        heartbeat_ms: of the run (``RunConfig.heartbeat_ms``); networks are cut and nodes frozen for 2 to 20 heartbeats.

    Raises:
        BadInput: if no plan can be drawn, or a kind is asked for that nothing says how to draw.
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
    brought = {
        name: _recipe(kind)
        for name, kind in classes.items()
        if name not in RECIPES and kind.drawn is not None
    }
    recipes = {**RECIPES, **brought}
    faults = [
        _drawn(classes[name], recipe(scope)) for name, recipe in recipes.items() if name in classes
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
    # Ranks come last: whether a plan is survivable depends on how many there are and on which is never hit.
    anonymous = st.lists(st.one_of(faults), min_size=least, max_size=most)
    return anonymous.flatmap(lambda drawn: _aimed(drawn, nodes, survivors)).filter(
        lambda plan: survivable(plan, nodes=nodes, survivors=survivors) and _begins(plan)
    )


def _begins(plan: Sequence[Fault]) -> bool:
    """Whether something happens before the first recovery; a plan without this is refused."""
    return not plan or any(fault.during is None for fault in plan)


_Aim = Callable[[int | str], Fault]


def _drawn(kind: type[Fault], recipe: Fields) -> st.SearchStrategy[_Aim]:
    return recipe.map(lambda values: lambda rank: kind(rank=rank, **values))


def _aimed(
    drawn: Sequence[_Aim], nodes: int, survivors: int
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Any ranks and roles for a few faults; for many, only ranks above the survivors'."""
    few = len(drawn) <= nodes - survivors
    count: dict[str, Any] = {"min_size": len(drawn), "max_size": len(drawn)}
    ranks = st.lists(st.integers(0 if few else survivors, nodes - 1), **count)
    roles = st.lists(st.sampled_from(("", "", "", *_ROLES)) if few else st.just(""), **count)
    plans = st.tuples(ranks, roles).map(
        lambda drawn_at: tuple(
            aim(role or rank) for aim, rank, role in zip(drawn, *drawn_at, strict=True)
        )
    )
    return plans.filter(
        lambda plan: all(struck_by(fault, nodes) for fault in plan)
    )  # of 2 ranks, no minority


# -- plans of which each fault strikes ----------------------------------------------------------------------------

#: Steps between two faults, so that the first one is felt and over, and behind the last one, so that it can be seen.
_APART = 6
#: Faults that surely end a process: what is due in a recovery needs one of them before it.
_SURELY_LOSE = frozenset({"Kill", "Exit", "Raise", "KillNode", "KillAgent"})
#: Phases of a recovery to which each rank of the new membership comes.
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
    """Plans of which each fault strikes a rank of its own moment, of as many faults as fit into the run."""
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
    """A fault at its step, or in the recovery from the first one, which surely causes one."""
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
