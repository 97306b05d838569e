"""Shrinking experiments: simpler candidates, the end of a search, and a broken job with a plan that is
really shrunk.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import Experiment, plan_experiment
from chaoskit.experiment.plan.planfile import encode, load, save
from chaoskit.experiment.shrink.search import (
    BudgetSpent,
    Symptoms,
    describe,
    shrink,
    shrink_to_file,
)
from chaoskit.experiment.shrink.simpler import simpler
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Verdict
from faults import Fault, Hang, Kill, NaN, Raise
from faults.strategies import fault_plans
from faults.survival import survivable

UNFAITHFUL = Path(__file__).parents[2] / "jobs" / "wrong" / "unfaithful.py"
JOB = f"{UNFAITHFUL}:faithful"
WRONG: Symptoms = frozenset(["losses equal the twin's"])
FINE: Symptoms = frozenset()


def planned(*faults: Fault, nodes: int = 4, steps: int = 30, **config: Any) -> Experiment:
    return plan_experiment(JOB, nodes=nodes, steps=steps, faults=faults, **config)


def oracle(fails: Callable[[Experiment], bool]) -> Callable[[Experiment, float], Symptoms]:
    return lambda experiment, deadline_s: WRONG if fails(experiment) else FINE


# -- candidates ------------------------------------------------------------------------------------


@given(data=st.data(), nodes=st.integers(2, 4))
@settings(deadline=None, max_examples=examples(15))
def test_what_is_simpler_is_valid_and_ends(data: st.DataObject, nodes: int) -> None:
    """The descent ends for any failing candidates, and a plan that must be survived stays one."""
    faults = data.draw(
        fault_plans(nodes=nodes, steps=30, parameters=("0.weight",), most=3, sure=False)
    )
    config = {"spares": data.draw(st.integers(0, 2)), "shards": data.draw(st.sampled_from((0, 6)))}
    experiment, tried = planned(*faults, nodes=nodes, **config), set()
    for _ in range(200):
        candidates = list(simpler(experiment))
        for candidate in candidates:
            assert encode(candidate) not in tried | {encode(experiment)}
            assert survivable(candidate.faults, nodes=candidate.config.nodes)
        if not candidates:
            break
        tried.add(encode(experiment))
        experiment = data.draw(st.sampled_from(candidates))
    assert not list(simpler(experiment))


def test_the_simplest_experiments() -> None:
    """If everything fails, nothing is left; if any fault is needed, one kill in the only step of
    two nodes is left.
    """
    faults = [
        NaN(rank=3, at_step=20, parameter="0.bias", where="activation"),
        Hang(rank=2, at_step=9, phase="reduce", how="gil"),
        Raise(rank=1, at_step=20, message="x"),
    ]
    broken = planned(
        *faults,
        spares=2,
        shards=6,
        buckets=2,
        seed=9,
        transport="tcp",
        reduction="fast",
        deadline_s=9,
    )
    nothing = shrink(broken, oracle(lambda candidate: True), budget_s=60).experiment
    assert (nothing.faults, nothing.config.nodes, nothing.steps) == ((), 1, 1)
    single = shrink(broken, oracle(lambda candidate: len(candidate.faults) > 0), budget_s=60)
    assert single.complete
    assert single.experiment == planned(
        Kill(rank=0, at_step=0), nodes=2, steps=1, spares=0, deadline_s=9
    )


def test_what_strikes_together_is_moved_together() -> None:
    """Two faults in one step stay in one step, the earliest that fails."""

    def fails(candidate: Experiment) -> bool:
        steps = [fault.at_step for fault in candidate.faults]
        return len(steps) > 1 and min(steps) >= 4 and max(steps.count(step) for step in steps) == 2

    faults = [Kill(rank=1, at_step=5), Raise(rank=2, at_step=17), Kill(rank=3, at_step=17)]
    shrunk = shrink(planned(*faults, seed=3, deadline_s=9), oracle(fails), budget_s=60)
    pair = [Kill(rank=0, at_step=4), Kill(rank=1, at_step=4)]
    assert shrunk.experiment == planned(*pair, nodes=3, steps=7, spares=0, deadline_s=9)


# -- budget, flakiness, symptoms -------------------------------------------------------------------


class Clock:
    """A clock that runs move forward."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


@given(budget_s=st.integers(0, 60), runs_max=st.integers(0, 60), run_s=st.integers(1, 3))
@settings(deadline=None, max_examples=examples(40))
def test_the_budget_is_kept_and_the_best_so_far_is_kept_too(
    budget_s: int, runs_max: int, run_s: int
) -> None:
    """No run begins after the end of the budget, and the result has failed."""
    clock, begun_s, failed = Clock(), [], []

    def run(experiment: Experiment, deadline_s: float) -> Symptoms:
        begun_s.append(clock())
        clock.time_s += run_s
        fails = {1, 2} <= {fault.rank for fault in experiment.faults}
        failed.extend([encode(experiment)] if fails else [])
        return WRONG if fails else FINE

    broken = planned(*(Kill(rank=rank, at_step=9) for rank in (1, 3, 2)))
    shrunk = shrink(broken, run, budget_s=budget_s, runs_max=runs_max, now_s=clock)
    assert len(begun_s) == shrunk.runs <= runs_max
    assert all(start_s < budget_s for start_s in begun_s)
    assert encode(shrunk.experiment) in failed or (not failed and shrunk.experiment == broken)
    assert shrunk.complete <= (len(shrunk.experiment.faults) == 2)


def test_a_run_that_is_broken_off_says_nothing() -> None:
    """The run in progress at the end raises, and the best plan so far is kept."""
    runs = 0

    def run(experiment: Experiment, deadline_s: float) -> Symptoms:
        nonlocal runs
        runs += 1
        if runs == 6:
            raise BudgetSpent
        return WRONG

    shrunk = shrink(
        planned(Kill(rank=1, at_step=9), Kill(rank=2, at_step=9), seed=1), run, budget_s=math.inf
    )
    assert (shrunk.complete, shrunk.runs) == (False, 6)
    assert len(shrunk.experiment.faults) == 0


def test_what_does_not_fail_again_is_left_alone() -> None:
    broken = planned(Kill(rank=1, at_step=9))
    shrunk = shrink(broken, oracle(lambda candidate: False), budget_s=60)
    assert (shrunk.experiment, shrunk.failures, shrunk.trials, shrunk.complete) == (
        broken,
        0,
        10,
        False,
    )


def test_another_failure_is_another_story() -> None:
    """A candidate that fails in another way than the original does not mislead the search."""

    def run(experiment: Experiment, deadline_s: float) -> Symptoms:
        if len(experiment.faults) == 2:
            return WRONG
        return frozenset(["training completed"])

    broken = planned(Kill(rank=1, at_step=9), Kill(rank=2, at_step=9), nodes=4)
    shrunk = shrink(broken, run, budget_s=60)
    assert len(shrunk.experiment.faults) == 2
    assert shrunk.symptoms == WRONG


@pytest.mark.parametrize("rate", [0.8, 0.5])
def test_flaky_failures_are_shrunk_too(rate: float) -> None:
    """Most of twenty seeded searches end at the two faults that matter, and none at fewer."""
    exact = 0
    for seed in range(20):
        generator = random.Random(seed)
        fails = oracle(
            lambda candidate: (
                {1, 2} <= {f.at_step for f in candidate.faults} and generator.random() < rate  # noqa: B023
            )
        )
        broken = planned(*(Kill(rank=1, at_step=step) for step in (7, 1, 4, 2, 9)), nodes=2)
        shrunk = shrink(broken, fails, budget_s=60)
        steps = {fault.at_step for fault in shrunk.experiment.faults}
        assert steps >= {1, 2} or not shrunk.failures
        exact += steps == {1, 2}
    assert exact >= 15


# -- real runs -------------------------------------------------------------------------------------

#: The pair comes first, as the search tries it first.
#: Other orders are tested above, where runs cost nothing.
TWO_AT_ONCE = (
    Kill(rank=1, at_step=12, phase="backward"),
    Raise(rank=2, at_step=12, message="x"),
    Raise(rank=3, at_step=4, phase="backward"),
    Kill(rank=3, at_step=20, phase="optimizer"),
)


@pytest.mark.slow
def test_a_broken_job_is_shrunk_to_what_breaks_it(tmp_path: Path) -> None:
    """Two of four faults are left, which strike in one step, and the minimal file fails again."""
    job = f"{UNFAITHFUL}:loses_two"
    save(
        plan_experiment(job, steps=30, faults=TWO_AT_ONCE, nodes=4, spares=0, buckets=2),
        tmp_path / "plan.json",
    )
    done = _chaoskit(
        "replay",
        "plan.json",
        "--shrink",
        "--budget-s",
        "240",
        "--json",
        "--report",
        "out",
        at=tmp_path,
    )
    assert done.returncode == Verdict.FAILED.exit_code, done.stderr
    printed = json.loads(done.stdout)
    assert printed["symptoms"] == ["losses equal the twin's"]
    assert f"chaoskit replay {printed['plan']}" in done.stderr
    minimal = load(tmp_path / printed["plan"])
    assert len(minimal.faults) == 2
    # both may be lost in one step, if the coordinator hears of them together
    first, second = sorted(fault.at_step for fault in minimal.faults)
    assert second - first <= 1
    assert len({fault.rank for fault in minimal.faults}) == 2
    assert minimal.steps < 30

    again = _chaoskit(
        "replay", printed["plan"], "--times", "3", "--json", "--report", "again", at=tmp_path
    )
    assert again.returncode == Verdict.FAILED.exit_code, again.stderr
    printed = json.loads(again.stdout)
    assert printed["failed"] >= 1
    assert printed["failure_interval"][0] < printed["failed"] / 3 <= printed["failure_interval"][1]

    # A single fault of the pair is survived: only the pair breaks the job.
    save(replace(minimal, faults=minimal.faults[:1]), tmp_path / "one.json")
    assert _chaoskit("replay", "one.json", "--report", "one", at=tmp_path).returncode == 0


def _chaoskit(*arguments: str, at: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chaoskit", *arguments]
    return subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.promise("The budget is strict: a run that is under way when it ends is broken off.")
def test_a_search_out_of_time_leaves_the_plan_and_nothing_running(
    chaos: Chaos, tmp_path: Path
) -> None:
    """A run that is broken off ends its processes, and the next run works."""
    endless = plan_experiment(
        f"{UNFAITHFUL}:never_ends", nodes=2, steps=10, faults=[Kill(rank=1, at_step=3)]
    )
    lines: list[str] = []
    path = tmp_path / "minimal.json"
    shrunk = shrink_to_file(
        chaos.harness, endless, path, budget_s=3.0, twin=False, tell=lines.append
    )
    assert (shrunk.runs, shrunk.failures, shrunk.complete) == (1, 0, False)
    assert load(path) == endless
    chaos.run(JOB, nodes=2, steps=10, faults=[Kill(rank=1, at_step=3)])


def test_a_file_that_cannot_be_written_is_refused_before_any_run(chaos: Chaos) -> None:
    before = set(chaos.harness.directory.iterdir())
    with pytest.raises(BadInput, match="can be written"):
        shrink_to_file(chaos.harness, planned(), Path("/proc/nowhere/minimal.json"), budget_s=3.0)
    assert set(chaos.harness.directory.iterdir()) == before


def test_an_experiment_in_words() -> None:
    assert (
        describe(planned(Kill(rank=1, at_step=9), spares=2))
        == "1 fault, 4 nodes, 2 spares, 30 steps"
    )
