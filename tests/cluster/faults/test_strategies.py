"""Plans of faults that Hypothesis draws: a run can survive all of them, and they cover the required
cases.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from chaoskit.errors import BadInput
from chaoskit.vocabulary import STRIKE_PHASES
from faults import (
    CATALOGUE,
    Cut,
    Fault,
    FreezeNode,
    Hang,
    Kill,
    LinkDown,
    NaN,
    Rack,
    Raise,
    Reset,
    Straggle,
)
from faults.strategies import RECIPES, fault_plans, left_out
from faults.survival import REACH, reach, survivable

PARAMETERS = ("weight",)
Plan = tuple[Fault, ...]


@settings(deadline=None)
@given(data=st.data(), nodes=st.integers(2, 6), steps=st.integers(1, 40))
def test_every_plan_is_valid_and_leaves_survivors(
    data: st.DataObject, nodes: int, steps: int
) -> None:
    survivors = data.draw(st.integers(1, nodes - 1))
    plan = data.draw(
        fault_plans(
            nodes=nodes,
            steps=steps,
            survivors=survivors,
            most=7,
            parameters=PARAMETERS,
            sure=data.draw(st.booleans()),
        ),
        label="plan",
    )
    for fault in plan:
        fault.validate(nodes=nodes, steps=steps)
    assert survivable(plan, nodes=nodes, survivors=survivors)


@settings(deadline=None)
@given(data=st.data(), nodes=st.integers(2, 5), survivors=st.integers(1, 2))
def test_the_rule_holds_in_a_model_of_shrinking_worlds(
    data: st.DataObject, nodes: int, survivors: int
) -> None:
    """A survivable plan leaves the promised number of first processes, however its faults fall.

    The model gives ranks as the control plane does: survivors keep theirs, the highest fill the
    holes, joiners come any time.
    """
    survivors = min(survivors, nodes - 1)
    wild = fault_plans(
        nodes=nodes, steps=9, survivors=survivors, most=7, parameters=PARAMETERS, sure=False
    )
    plan = data.draw(wild)
    world = [f"first{rank}" for rank in range(nodes)]
    generator = data.draw(st.randoms(use_true_random=False))
    striking = [
        single
        for fault in plan
        if reach(fault) != "nothing"
        for single in fault.expand(nodes, generator)
    ]
    for number, fault in enumerate(data.draw(st.permutations(striking))):
        hole = (
            data.draw(st.integers(0, len(world) - 1)) if fault.rank == "most_shards" else fault.rank
        )
        assert isinstance(hole, int)
        if hole < len(world):
            world[hole] = ""
            if data.draw(st.booleans()):
                world[hole] = f"spare{number}"
            else:
                last = world.pop()
                if hole < len(world):
                    world[hole] = last
        while len(world) < nodes and data.draw(st.booleans()):
            world.append(f"late{number}")
    assert sum(worker.startswith("first") for worker in world) >= survivors


FEW = (Kill, Raise, NaN, Hang)


@pytest.fixture(scope="module", params=["few kinds", "all kinds"])
def plans(request: pytest.FixtureRequest) -> list[Plan]:
    """Return some hundred plans, the same every time."""
    kinds = FEW if request.param == "few kinds" else None
    drawn: list[Plan] = []

    @settings(
        max_examples=800, phases=[Phase.generate], database=None, derandomize=True, deadline=None
    )
    @given(fault_plans(nodes=3, steps=20, most=5, parameters=PARAMETERS, kinds=kinds, sure=False))
    def draw(plan: Plan) -> None:
        drawn.append(plan)

    draw()
    return drawn


def _simplest(condition: Callable[[Plan], bool]) -> Plan:
    """Return the simplest plan for which ``condition`` is true; the search fails if there is none."""
    plans = fault_plans(nodes=3, steps=20, most=5, parameters=PARAMETERS, kinds=FEW, sure=False)
    return find(
        plans,
        condition,
        settings=settings(max_examples=2000, database=None, derandomize=True, deadline=None),
    )


@pytest.mark.parametrize(
    "condition",
    [
        lambda plan: len({fault.at_step for fault in plan}) < len(plan),
        lambda plan: len({(fault.rank, fault.at_step) for fault in plan}) < len(plan),
        lambda plan: len(plan) > 3 and len({fault.rank for fault in plan}) == 2,
        lambda plan: any(fault.rank == 0 for fault in plan) and len(plan) == 2,
        lambda plan: len({fault.kind for fault in plan}) > 3,
        lambda plan: any(isinstance(fault, Hang) and fault.how == "gil" for fault in plan),
        lambda plan: any(isinstance(fault, NaN) and fault.where == "activation" for fault in plan),
    ],
)
def test_plans_cover_what_they_should(plans: list[Plan], condition: Callable[[Plan], bool]) -> None:
    """Plans cover faults in one step, on one rank in one step, on the same ranks repeatedly, and on
    rank 0.
    """
    assert any(condition(plan) for plan in plans)


def test_each_kind_is_drawn(plans: list[Plan]) -> None:
    drawn = {fault.kind for plan in plans for fault in plan}
    local = {kind.__name__ for kind in CATALOGUE if "local" in kind.substrates}
    assert drawn in ({kind.__name__ for kind in FEW}, local & set(RECIPES))


@pytest.mark.parametrize(
    "condition",
    [
        lambda fault: fault.after_s is not None,
        lambda fault: fault.after_s is not None and fault.kind == "Raise",  # must be armed
        *(lambda fault, phase=phase: fault.during == phase for phase in STRIKE_PHASES),
        lambda fault: fault.recovery == 2,
        lambda fault: fault.rank == "most_shards",
        lambda fault: fault.rank == "all_but_one",
    ],
)
def test_plans_cover_other_moments_and_roles(
    plans: list[Plan], condition: Callable[[Fault], bool]
) -> None:
    assert any(condition(fault) for plan in plans for fault in plan)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in CATALOGUE if "local" not in kind.substrates and kind.__name__ in RECIPES],
)
def test_kinds_of_another_substrate_are_drawn_and_valid(kind: type[Fault]) -> None:
    @settings(
        max_examples=30, phases=[Phase.generate], database=None, derandomize=True, deadline=None
    )
    @given(fault_plans(nodes=3, steps=20, least=1, kinds=[kind]))
    def draw(plan: Plan) -> None:
        assert plan
        for fault in plan:
            fault.validate(nodes=3, steps=20)

    draw()


@settings(deadline=None, max_examples=300)
@given(data=st.data(), nodes=st.integers(2, 6), steps=st.integers(1, 60))
def test_each_fault_of_a_plan_strikes(data: st.DataObject, nodes: int, steps: int) -> None:
    """Each fault strikes a rank that exists although each fault before it cost one rank.

    The faults are some steps apart, or in a recovery that is sure to come.
    """
    plan = data.draw(fault_plans(nodes=nodes, steps=steps, parameters=PARAMETERS), label="plan")
    assert all(fault.after_s is None for fault in plan)
    assert all(
        isinstance(fault.rank, int) and fault.rank < nodes - place
        for place, fault in enumerate(plan)
    )
    at_steps = [fault.at_step for fault in plan if fault.at_step is not None]
    assert all(late - early >= 6 for early, late in pairwise(at_steps))
    following = [fault for fault in plan if fault.during is not None]
    assert len(following) <= 1
    for fault in following:
        assert plan[1] is fault
        assert (
            plan[0].kind in ("Kill", "Exit", "Raise", "KillNode", "KillAgent"),
            fault.recovery,
        ) == (True, 1)
        assert fault.during in ("recommit", "regroup")
        assert fault.rank != plan[0].rank


def test_more_faults_than_can_strike_are_refused() -> None:
    with pytest.raises(BadInput, match="least=3") as refused:
        fault_plans(nodes=3, steps=30, least=3)
    assert "use 2 or less" in refused.value.remedy
    with pytest.raises(BadInput, match="least=3"):
        fault_plans(nodes=5, steps=12, least=3)


@pytest.mark.slow
@pytest.mark.costly
def test_the_example_of_the_page_runs_as_it_stands(pytester: pytest.Pytester) -> None:
    page = (Path(__file__).parents[3] / "docs" / "replay.md").read_text()
    text = page.partition("## Plans drawn at random\n\n")[2].partition("\n\ndraws plans")[0]
    pytester.makeini("[pytest]\nchaos_detection = relaxed\n")
    pytester.makepyfile(test_page=textwrap.dedent(text))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--chaos-report", "report")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*chaoskit: 5 runs, *"])


def test_a_plan_holds_what_its_substrate_can_do() -> None:
    plans = fault_plans(nodes=3, steps=20, substrate="netns")
    config = settings(max_examples=2000, database=None, derandomize=True, deadline=None)
    assert find(
        plans, lambda plan: any("local" not in fault.substrates for fault in plan), settings=config
    )
    with pytest.raises(BadInput, match="substrate='the moon'"):
        fault_plans(nodes=3, steps=9, substrate="the moon")


def test_a_fault_that_heals_outlasts_two_heartbeats_of_the_run() -> None:
    """A link may be idle between two heartbeats: a shorter fault would leave no evidence."""

    @settings(
        max_examples=100, phases=[Phase.generate], database=None, derandomize=True, deadline=None
    )
    @given(
        fault_plans(
            nodes=3, steps=20, least=1, kinds=[Cut, Reset, LinkDown, FreezeNode], heartbeat_ms=250
        )
    )
    def draw(plan: Plan) -> None:
        for fault in plan:
            lasts_s = (
                fault.thaw_after_s
                if isinstance(fault, FreezeNode)
                else getattr(fault, "heal_after_s", 0.0)
            )
            assert lasts_s >= 0.5

    draw()
    with pytest.raises(BadInput, match="heartbeat_ms=0"):
        fault_plans(nodes=3, steps=9, heartbeat_ms=0)


def test_a_side_counts_with_all_its_ranks_and_a_rack_as_the_world() -> None:
    assert survivable([Cut(rank=1, side=(2,), at_step=3)], nodes=3)
    assert not survivable([Cut(rank=1, side=(0, 2), at_step=3)], nodes=3)
    assert not survivable([Rack(rank=1, at_step=3)], nodes=4)


def test_a_role_counts_as_often_as_it_strikes() -> None:
    assert survivable([Kill(rank="all_but_one", at_step=3)], nodes=4)
    assert not survivable([Kill(rank="all", at_step=3)], nodes=4)
    assert not survivable([Kill(rank="all_but_one", at_step=3), Kill(rank=1, at_step=4)], nodes=4)
    assert survivable([Straggle(rank="all", at_step=3, delay_ms=5.0)], nodes=4)


def test_the_same_exception_at_an_unknown_moment_may_fall_into_any_step() -> None:
    later = Raise(rank=1, after_s=0.3)
    assert survivable([Raise(rank=1, at_step=3), later], nodes=2)
    assert not survivable([*[Raise(rank=1, at_step=3)] * 2, later], nodes=2)


def test_plans_shrink_to_the_simplest() -> None:
    """Plans shrink to fewer faults, simpler kinds, lower ranks, earlier steps, and the default
    phase.
    """
    assert _simplest(lambda plan: len(plan) >= 1) == (Kill(rank=0, at_step=0),)
    assert _simplest(lambda plan: any((fault.at_step or 0) >= 7 for fault in plan)) == (
        Kill(rank=0, at_step=7),
    )
    assert _simplest(lambda plan: any(fault.rank == 2 for fault in plan)) == (
        Kill(rank=2, at_step=0),
    )
    assert _simplest(lambda plan: any(isinstance(fault, Raise) for fault in plan)) == (
        Raise(rank=0, at_step=0),
    )


# -- kinds -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UnknownKind(Fault):
    """A kind without a recipe and without a reach."""

    force: float


@pytest.mark.parametrize("kind", left_out())
def test_kinds_that_no_plan_holds(kind: str) -> None:
    """A kind of the catalogue without a recipe is listed as a skipped test, so that it is not
    forgotten.
    """
    pytest.skip(f"{kind} has no entry in faults.strategies.RECIPES and faults.survival.REACH")


def test_a_new_kind_is_left_out_until_it_has_a_recipe() -> None:
    assert left_out((*CATALOGUE, UnknownKind)) == sorted([*left_out(), "UnknownKind"])
    with pytest.raises(BadInput, match="UnknownKind"):
        fault_plans(nodes=3, steps=9, kinds=[Kill, UnknownKind])


def test_a_kind_of_unknown_reach_counts_as_the_worst() -> None:
    """Two faults of unknown reach may take two nodes and every replacement: only their number can
    save the run.
    """
    unknown = UnknownKind(rank=1, at_step=3, force=1.0)
    assert reach(unknown) == "node"
    assert survivable([unknown], nodes=2)
    assert not survivable([unknown, unknown], nodes=2)
    assert survivable([Kill(rank=1, at_step=3)] * 5, nodes=2)


def test_the_same_exception_too_often_in_one_step_looks_like_a_bug() -> None:
    assert survivable([Raise(rank=1, at_step=3)] * 2, nodes=2)
    assert not survivable([Raise(rank=1, at_step=3)] * 3, nodes=2)


@given(fault_plans(nodes=3, steps=9, kinds=[Hang, Kill]))
@settings(phases=[Phase.generate], deadline=None)
def test_only_the_kinds_that_were_asked_for(plan: Plan) -> None:
    assert {fault.kind for fault in plan} <= {"Hang", "Kill"}


def test_each_recipe_has_a_reach() -> None:
    assert set(RECIPES) <= set(REACH)


@pytest.mark.parametrize(("nodes", "survivors"), [(1, 1), (3, 3), (3, 0)])
def test_a_plan_that_can_hit_no_rank_is_refused(nodes: int, survivors: int) -> None:
    with pytest.raises(BadInput, match="survivors"):
        fault_plans(nodes=nodes, steps=9, survivors=survivors)


def test_faults_do_not_need_hypothesis() -> None:
    """The import of faults does not import Hypothesis, which takes time."""
    code = "import sys, faults, faults.survival; sys.exit('hypothesis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_strategies_without_hypothesis_name_the_extra() -> None:
    """Hypothesis is no dependency of chaoskit, and the error names the extra to install."""
    code = "import sys; sys.modules['hypothesis'] = None; import faults.strategies"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert (
        process.stderr.splitlines()[-1]
        == "ImportError: plans are drawn by Hypothesis: pip install 'chaoskit[plans]'"
    )
