"""Uneven work with measured times: these runs are alone on the machine, because other load moves
shares, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.uneven import AT, SHARD_S, journal, loads, run

from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Event
from faults import Delay, Kill, Straggle

JOBS = Path(__file__).parents[2] / "jobs"
pytestmark = [pytest.mark.slow, pytest.mark.chaos(detection="relaxed")]


def half_speed(steps: int) -> Straggle:
    """Return a fault that delays both phases of a shard, in all by the length of the shard."""
    return Straggle(rank=1, at_step=AT, delay_ms=SHARD_S / 2 * 1000, steps=steps)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_rank_at_half_speed_costs_its_share(chaos: Chaos, reduction: str) -> None:
    """The delay of a fault is measured, and moves shards within a few steps."""
    outcome = run(chaos, half_speed(100), reduction=reduction, buckets=2)
    first, second, *_ = loads(outcome)
    assert first == [4, 4, 4, 4]
    assert second[1] <= 3, "two, where nothing else needs the CPUs"
    assert min(second[0], second[2], second[3]) >= 4
    moved = [
        record["step"] for record in journal(outcome, Event.COMMIT) if record["generation"] == 2
    ]
    assert AT < min(moved) <= AT + 15, "ten on a quiet machine"
    assert outcome.false_alarms == 0
    assert outcome.lost_steps == 0


def test_when_it_recovers_all_get_as_many_as_before(chaos: Chaos) -> None:
    outcome = run(chaos, half_speed(16), steps=60)
    assert loads(outcome)[1][1] <= 3
    assert loads(outcome)[-1] == [4, 4, 4, 4]


def test_the_shares_of_the_others_hold_when_a_rank_dies(chaos: Chaos) -> None:
    """The world shrinks while a rank is slow, and grows again."""
    outcome = run(chaos, half_speed(100), Kill(rank=3, at_step=20), until={"world": 4})
    assert loads(outcome)[1][1] <= 3
    (shrunk,) = [counts for counts in loads(outcome) if len(counts) == 3][:1]
    assert shrunk[1] < min(shrunk[0], shrunk[2])
    assert len(loads(outcome)[-1]) == 4


def test_a_rank_over_the_limit_is_replaced_by_a_spare_on_another_node(chaos: Chaos) -> None:
    fault = Straggle(rank=1, at_step=AT, delay_ms=60.0, steps=1000)
    outcome = run(chaos, fault, spares=1, slow_limit=3.0, slow_steps=10, steps=60, balance=False)
    (lost,) = journal(outcome, Event.DETECTED)
    assert (lost["rank"], lost["cause"]) == (1, "slow")
    first, last = (journal(outcome, Event.PLAN)[at]["members"] for at in (0, -1))
    assert first[1]["node"] not in {member["node"] for member in last}
    assert outcome.lost_steps == 0
    assert outcome.false_alarms == 0


def test_slow_input_is_told_from_slow_computation(chaos: Chaos) -> None:
    options = {"shard_s": SHARD_S, "read_s": 2 * SHARD_S}
    outcome = run(
        chaos,
        job=f"{JOBS / 'training' / 'uneven.py'}:slow_input",
        options=options,
        slow_limit=2.0,
        spares=1,
    )
    reports = journal(outcome, Event.STRAGGLER)
    assert [(record["rank"], record["kind"]) for record in reports] == [(1, "input")]
    assert reports[0]["score"] > 2
    assert loads(outcome)[1][1] in (1, 2)
    assert journal(outcome, Event.DETECTED) == [], "another node would read as slowly"


@pytest.mark.parametrize("job", ["gpt", "paced"])
def test_in_an_even_run_no_shard_moves(chaos: Chaos, job: str) -> None:
    """No shard moves with four ranks on any number of CPUs, on a machine that may do other work."""
    options: dict[str, Any] = {"size": "tiny", "batch": 32} if job == "gpt" else {"shard_s": 0.004}
    outcome = run(chaos, job=job, options=options, steps=100)
    assert loads(outcome) == [[4, 4, 4, 4]]


@pytest.mark.chaos(substrate="netns", detection="relaxed")
def test_a_slow_network_is_told_and_the_node_that_is_slow_to_reach(chaos: Chaos) -> None:
    fault = Delay(rank=2, at_step=20, delay_ms=30.0)
    if reason := fault.unavailable():
        pytest.skip(reason)
    outcome = run(chaos, fault, options={"shard_s": 0.004}, steps=60, slow_limit=2.0)
    reports = journal(outcome, Event.STRAGGLER)
    assert {record["kind"] for record in reports} == {"network"}
    assert any(record["detail"].startswith("node2 is slow to reach") for record in reports)
    assert journal(outcome, Event.DETECTED, Event.REBALANCED) == []
