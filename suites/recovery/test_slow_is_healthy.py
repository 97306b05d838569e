"""Negative tests: jobs that are slow and healthy. No rank is given up, no membership changes.

The meaning of "slow" follows from the limits of the run, so that a case proves as much with relaxed
limits as with those of production. ``test_every_fault.py`` tests that hangs beyond the limits are
found.

-> coordinator/detectors/phase_limits.py has the limits; coordinator/detectors/hang.py applies them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from chaoskit import Chaos, RunConfig
from chaoskit.faults import Hang, Straggle
from chaoskit.process.linux import die_with_parent
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.suites.goals import all_took_effect
from chaoskit.suites.recovery.expect import AT, JOBS, WORLDS, is_left_alone, survives


def hang_floor_s(chaos: Chaos) -> float:
    """Return the age below which no phase of a step is called a hang in this test."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(RunConfig)}
    return float((defaults | chaos.limits | chaos.defaults)["hang_floor_ms"]) / 1000


def longer_than_a_phase(chaos: Chaos) -> dict[str, Any]:
    """Return options of a job that works for longer than a phase of a step may take."""
    return {"seconds": 2.5 * hang_floor_s(chaos)}


@pytest.mark.parametrize("world", WORLDS)
def test_an_unbroken_run(chaos: Chaos, world: int) -> None:
    """No rank is given up in a run without a fault."""
    is_left_alone(chaos, nodes=world)


@pytest.mark.slow
@pytest.mark.promise(
    'Work between steps** that may be slow belongs into `trainer.long_phase("name")`.'
)
def test_a_long_evaluation(chaos: Chaos) -> None:
    """A rank evaluates for longer than a phase may take, as declared; the others wait."""
    is_left_alone(
        chaos, job=f"{JOBS}:evaluating", steps=20, options=longer_than_a_phase(chaos), twin=False
    )


def test_work_between_two_steps_that_nobody_declared(chaos: Chaos) -> None:
    """Saving or logging outside of a step has wide limits."""
    is_left_alone(
        chaos, job=f"{JOBS}:saving", steps=20, options=longer_than_a_phase(chaos), twin=False
    )


@pytest.mark.slow
@pytest.mark.promise("shown as a long phase, never called a hang; the others wait")
def test_a_long_compilation_in_the_middle_of_a_step(chaos: Chaos) -> None:
    """A rank compiles, as torch does for new code."""
    options = longer_than_a_phase(chaos)
    is_left_alone(chaos, job=f"{JOBS}:compiling", nodes=2, steps=20, options=options, twin=False)


@pytest.mark.slow
@pytest.mark.promise(
    "A rank that imports, compiles or is in a declared `trainer.long_phase()` is never called hung."
)
def test_a_rank_that_starts_slowly(chaos: Chaos) -> None:
    """The others wait for it before the first step, and do not begin without it."""
    options = longer_than_a_phase(chaos)
    outcome = is_left_alone(
        chaos, job=f"{JOBS}:starting_slowly", steps=20, options=options, spares=0, twin=False
    )
    assert {point.world for point in outcome.steps} == {3}


@pytest.mark.parametrize("job", ["uneven", "growing"])
def test_steps_of_different_length(chaos: Chaos, job: str) -> None:
    """A duration that is long for one step may be usual for the next."""
    is_left_alone(chaos, job=f"{JOBS}:{job}", steps=20, twin=False)


@pytest.mark.promise("A rank that is slow within the limit is not given up for it.")
def test_a_rank_that_is_slow_within_the_limit(chaos: Chaos) -> None:
    """Every phase of one step begins late on one rank, by almost half of the limit."""
    is_left_alone(chaos, Straggle(rank=1, at_step=AT, delay_ms=400 * hang_floor_s(chaos), steps=1))


@pytest.mark.promise("or the CPU time of the burning thread")
def test_a_rank_that_shares_its_cpu(chaos: Chaos) -> None:
    """Another thread of the process takes half of a CPU for itself."""
    # lasts until its evidence has come
    fault = Straggle(rank=1, at_step=AT, how="duty", cpu_fraction=0.5, steps=1000)
    is_left_alone(chaos, fault, goal=all_took_effect(chaos, 1))


@pytest.mark.promise("the kernel's count of times that it was throttled")
@pytest.mark.skipif(bool(unavailable("cpu")), reason=unavailable("cpu"))
def test_a_rank_with_a_share_of_a_cpu(chaos: Chaos) -> None:
    """The kernel lets the process run only for a part of each tenth of a second."""
    fault = Straggle(rank=1, at_step=AT, how="quota", cpu_fraction=0.15, steps=10)
    is_left_alone(chaos, fault, job="gpt", nodes=2, spares=0, steps=20, options={"size": "tiny"})


@contextmanager
def crowd(count: int) -> Iterator[None]:
    """Run ``count`` processes that do nothing but use a core."""
    parent = os.getpid()
    loops = [
        subprocess.Popen(
            [sys.executable, "-c", "while True: pass"],
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 -- as in chaoskit.cli.testing.test
        )
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.promise("not counting time without a CPU", world=2)
@pytest.mark.parametrize("world", [2, 4])
def test_a_crowded_machine(chaos: Chaos, world: int) -> None:
    """Twice as many processes as cores compete with the ranks: to wait for a CPU is no hang."""
    with crowd(2 * (os.cpu_count() or 1)):
        is_left_alone(chaos, job="gpt", nodes=world, steps=20, options={"size": "tiny"}, twin=False)


def test_a_hang_on_a_crowded_machine_is_found(chaos: Chaos) -> None:
    """The limits that spare a rank without a CPU still find a rank that hangs."""
    with crowd(2 * (os.cpu_count() or 1)):
        outcome = survives(chaos, Hang(rank=1, at_step=AT, how="gil"), steps=20, twin=False)
    assert [(record["rank"], record["cause"]) for record in outcome.records("detected")] == [
        (1, "hung")
    ]
