"""Uneven work in real runs: a slow rank costs its share, the bits stay, and who is merely slow is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaoskit.experiment.outcome import Outcome
from chaoskit.journal import Record, read_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Event
from faults import Delay, Kill, Straggle

SHARD_S = 0.02
AT = 6


def journal(outcome: Outcome, *events: Event) -> list[Record]:
    """The records of these events, in order of time."""
    return [record for record in read_journals(Path(outcome.directory) / "journal") if record.event in events]


def run(chaos: Chaos, *faults: Any, job: str = "paced", **plan: Any) -> Outcome:
    """An experiment that must pass: four ranks, sixteen shards."""
    settings = {"nodes": 4, "spares": 0, "shards": 16, "steps": 40, "deadline_s": 90.0}
    outcome = chaos.run(job, faults=faults, **settings | {"options": {"shard_s": SHARD_S}} | plan)
    if plan.get("reduction") != "fast":  # its bits depend on who has which shards
        outcome.assert_same_losses_as_twin()
    return outcome


def loads(outcome: Outcome) -> list[list[int]]:
    """How many shards each rank had, by generation."""
    return [[len(member["shards"]) for member in plan["members"]] for plan in journal(outcome, Event.PLAN)]


def half_speed(steps: int) -> Straggle:
    """Both phases of a shard begin late, by as much as the shard takes together."""
    return Straggle(rank=1, at_step=AT, delay_ms=SHARD_S / 2 * 1000, steps=steps)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_rank_at_half_speed_costs_its_share(chaos: Chaos, reduction: str) -> None:
    outcome = run(chaos, half_speed(100), reduction=reduction, buckets=2)
    first, second, *_ = loads(outcome)
    assert first == [4, 4, 4, 4]
    assert second[1] <= 3, "two, where nothing else needs the CPUs"
    assert min(second[0], second[2], second[3]) >= 4
    moved = [record["step"] for record in journal(outcome, Event.COMMIT) if record["generation"] == 2]
    assert AT < min(moved) <= AT + 15, "ten on a quiet machine"
    assert outcome.false_alarms == 0
    assert outcome.lost_steps == 0


def test_when_it_recovers_all_get_as_many_as_before(chaos: Chaos) -> None:
    outcome = run(chaos, half_speed(16), steps=60)
    assert loads(outcome)[1][1] <= 3
    assert loads(outcome)[-1] == [4, 4, 4, 4]


def test_the_shares_of_the_others_hold_when_a_rank_dies(chaos: Chaos) -> None:
    """The world shrinks in the middle of it, and grows again."""
    outcome = run(chaos, half_speed(100), Kill(rank=3, at_step=20), steps=50)
    assert loads(outcome)[1][1] <= 3
    (shrunk,) = [counts for counts in loads(outcome) if len(counts) == 3][:1]
    assert shrunk[1] < min(shrunk[0], shrunk[2])
    assert len(loads(outcome)[-1]) == 4


def test_a_rank_over_the_limit_is_replaced_by_a_spare_on_another_node(chaos: Chaos) -> None:
    fault = Straggle(rank=1, at_step=AT, delay_ms=60.0, steps=1000)
    outcome = run(chaos, fault, spares=1, slow_limit=3.0, slow_steps=10, steps=60, balance=False)
    (lost,) = journal(outcome, Event.DETECTED)
    assert (lost["worker"], lost["cause"]) == ("node1.0", "slow")
    nodes = [member["node"] for member in journal(outcome, Event.PLAN)[-1]["members"]]
    assert "node1" not in nodes
    assert outcome.lost_steps == 0
    assert outcome.false_alarms == 0


def test_slow_input_is_told_from_slow_computation(chaos: Chaos) -> None:
    options = {"shard_s": SHARD_S, "read_s": 2 * SHARD_S}
    outcome = run(chaos, job="jobs/uneven.py:slow_input", options=options, slow_limit=2.0, spares=1)
    told = journal(outcome, Event.STRAGGLER)
    assert [(record["rank"], record["kind"]) for record in told] == [(1, "input")]
    assert told[0]["score"] > 2
    assert loads(outcome)[1][1] in (1, 2)
    assert journal(outcome, Event.DETECTED) == [], "another node would read as slowly"


@pytest.mark.parametrize("job", ["gpt", "paced"])
def test_in_an_even_run_no_shard_moves(chaos: Chaos, job: str) -> None:
    """Four ranks on however few CPUs there are, and a machine that may do other things."""
    options: dict[str, Any] = {"size": "tiny", "batch": 32} if job == "gpt" else {"shard_s": 0.004}
    outcome = run(chaos, job=job, options=options, steps=100)
    assert loads(outcome) == [[4, 4, 4, 4]]


@pytest.mark.chaos(substrate="netns")
def test_a_slow_network_is_told_and_the_node_that_is_slow_to_reach(chaos: Chaos) -> None:
    fault = Delay(rank=2, at_step=20, delay_ms=30.0)
    if reason := fault.unavailable():
        pytest.skip(reason)
    outcome = run(chaos, fault, options={"shard_s": 0.004}, steps=60, slow_limit=2.0)
    told = journal(outcome, Event.STRAGGLER)
    assert {record["kind"] for record in told} == {"network"}
    assert any(record["detail"].startswith("node2 is slow to reach") for record in told)
    assert journal(outcome, Event.DETECTED, Event.REBALANCED) == []
