"""Nodes that are short of a resource.

The others wait for such a node, or go on without what it lost, until it is well again.
"""

from __future__ import annotations

import pytest

from chaoskit import Chaos
from chaoskit.faults import Fault, Kill, LimitCpu, LimitIo, LimitMemory, LimitPids
from chaoskit.substrate.limits.device import device_of
from chaoskit.suites.goals import all_took_effect, happened
from chaoskit.suites.recovery.expect import AT, JOBS, heals, is_left_alone, survives


def require(fault: type[Fault]) -> None:
    if reason := fault.unavailable():
        pytest.skip(reason)


@pytest.mark.promise("the kernel counts periods in which it held the node back")
def test_a_node_with_little_cpu_time_is_waited_for(chaos: Chaos) -> None:
    require(LimitCpu)
    is_left_alone(
        chaos,
        LimitCpu(rank=1, at_step=AT, cores=0.1, lift_after_s=0.5),
        goal=all_took_effect(chaos, 1),
    )


@pytest.mark.promise("the kernel counts processes of the node that it killed for want of memory")
def test_a_node_without_memory_loses_processes(chaos: Chaos) -> None:
    require(LimitMemory)
    goal = happened(chaos, "detected")
    outcome = survives(chaos, LimitMemory(rank=1, at_step=AT, lift_after_s=0.5), goal=goal)
    assert outcome.recoveries


@pytest.mark.promise("the kernel counts processes and threads that it refused")
def test_a_node_that_can_start_no_process_has_a_rank_again_later(chaos: Chaos) -> None:
    require(LimitPids)
    heals(chaos, LimitPids(rank=1, at_step=AT), Kill(rank=1, at_step=AT + 2), nodes=3, spares=0)


@pytest.mark.promise(
    "the kernel counts so many written bytes that the node used up what it may write"
)
def test_a_node_that_writes_slowly_is_waited_for(chaos: Chaos) -> None:
    require(LimitIo)
    if device_of(chaos.harness.directory) is None:
        pytest.skip(f"{chaos.harness.directory} lies on no disk")
    is_left_alone(chaos, LimitIo(rank=1, at_step=AT), job=f"{JOBS}:writing")
