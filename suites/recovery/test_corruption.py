"""Tests of flipped bits, non-finite numbers and bad data: found before they are committed.

-> runtime/integrity/voting.py finds corrupt ranks; runtime/integrity/nonfinite_guard.py bad numbers.
"""

from __future__ import annotations

import pytest

from chaoskit import Chaos
from chaoskit.faults import BadBatch, BitFlip, ClockJump, DataStall, Kill, NaN
from chaoskit.suites.recovery.expect import AT, WORLDS, is_left_alone, survives, victim

BIT = 23  # lowest bit of the exponent: twice or half the value
WEIGHT = "head.weight"


@pytest.mark.promise("the minority is replaced before the step commits", world=4, where="optimizer")
@pytest.mark.parametrize("where", ["weight", "optimizer"])
@pytest.mark.parametrize("world", [3, 4])
def test_a_flipped_bit_of_the_state_convicts_its_rank(chaos: Chaos, world: int, where: str) -> None:
    """A rank with another state than the others is replaced before the commit.

    All ranks compare their whole state in every step.
    """
    fault = BitFlip(rank=1, at_step=AT, parameter=WEIGHT, bit=BIT, where=where)
    outcome = survives(chaos, fault, nodes=world, state_hash_steps=1)
    convicted = {(record["worker"], record["cause"]) for record in outcome.records("detected")}
    assert convicted == {(victim(outcome, 0), "corrupt")}


@pytest.mark.promise(
    "The one whose state is not what it was after its last commit, or that computes a shard in two ways, "
    "convicts itself"
)
def test_of_two_ranks_the_one_that_contradicts_itself_is_replaced(chaos: Chaos) -> None:
    """Two ranks have no majority, but each remembers its state after the last commit."""
    fault = BitFlip(rank=1, at_step=AT, parameter=WEIGHT, bit=BIT, where="optimizer")
    outcome = survives(chaos, fault, nodes=2, state_hash_steps=1)
    assert [record["worker"] for record in outcome.records("detected")] == [victim(outcome, 0)]


@pytest.mark.promise(
    "every rank compares every segment with its maker's checksum before it commits",
    world=2,
    phase="backward",
)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce"])
def test_a_damaged_result_is_never_committed(chaos: Chaos, world: int, phase: str) -> None:
    """A rank that received wrong bits takes the step from the others, and none is replaced."""
    fault = BitFlip(
        rank=world - 1, at_step=AT, phase=phase, parameter=WEIGHT, bit=BIT, where="received"
    )
    outcome = survives(chaos, fault, nodes=world)
    assert {record["verdict"] for record in outcome.records("corrupt")} == {"transfer"}
    assert outcome.records("detected") == []


@pytest.mark.promise("a second rank computes one shard, too", world=3)
@pytest.mark.parametrize("world", WORLDS)
def test_a_wrong_gradient_is_found_by_an_audit(chaos: Chaos, world: int) -> None:
    """A second rank computes the shard, too, and differs: the step is computed again."""
    audited = 2 * world + 1  # a step in which the shard of rank 1 is audited
    fault = BitFlip(
        rank=1, at_step=audited, phase="backward", parameter=WEIGHT, bit=BIT, where="gradient"
    )
    outcome = survives(chaos, fault, nodes=world, audit_every=1)
    assert {record["verdict"] for record in outcome.records("corrupt")} == {"transient"}


@pytest.mark.promise(
    "another rank computes the shard again, and the batch is blamed, not a rank", world=3
)
@pytest.mark.parametrize("world", WORLDS)
def test_a_bad_batch_is_skipped_and_nobody_blamed(chaos: Chaos, world: int) -> None:
    """Every rank that computes the shard finds it bad: the step counts without an update."""
    outcome = survives(chaos, BadBatch(at_step=AT, shard=world - 1), nodes=world, twin=False)
    assert [step for step, loss in enumerate(outcome.losses) if loss is None] == [AT]
    assert outcome.records("detected") == []


@pytest.mark.promise("a bad batch is written down as skipped")
def test_a_bad_batch_and_a_loss_in_the_same_step(chaos: Chaos) -> None:
    """The rank that computed the bad shard is lost; its replacement finds the same."""
    faults = [BadBatch(at_step=AT, shard=1), Kill(rank=1, at_step=AT, phase="reduce")]
    outcome = survives(chaos, *faults, nodes=3, twin=False)
    assert [step for step, loss in enumerate(outcome.losses) if loss is None] == [AT]


@pytest.mark.promise("attribution by recomputing the shard on another rank", where="activation")
@pytest.mark.parametrize("where", ["weight", "gradient", "activation"])
def test_broken_hardware_makes_nan_again_and_again(chaos: Chaos, where: str) -> None:
    """Another rank computes the shard and finds it finite: the rank is to blame, not the batch."""
    fault = NaN(rank=2, at_step=AT, parameter=WEIGHT, where=where, sticky=where != "weight")
    outcome = survives(chaos, fault, nodes=3)
    assert {record["worker"] for record in outcome.records("detected")} == {victim(outcome, 0)}


@pytest.mark.promise("A clock that jumps has no consequence for its rank.", seconds=86400.0)
@pytest.mark.parametrize("seconds", [86400.0, -86400.0])
def test_a_clock_that_jumps_while_a_rank_is_lost(chaos: Chaos, seconds: float) -> None:
    """The recovery from a loss does not depend on a wall clock that is a day off."""
    outcome = survives(
        chaos, ClockJump(rank=0, at_step=AT - 1, seconds=seconds), Kill(rank=1, at_step=AT)
    )
    assert [record["worker"] for record in outcome.records("detected")] == [victim(outcome, 1)]


@pytest.mark.promise("the next batch of one rank comes late")
def test_batches_that_come_late_on_all_ranks(chaos: Chaos) -> None:
    """Slow storage is no fault of a rank."""
    is_left_alone(
        chaos, *[DataStall(rank=rank, at_step=AT + rank, stall_ms=80) for rank in range(3)]
    )
