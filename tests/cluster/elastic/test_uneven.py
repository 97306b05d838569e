"""Uneven work in real runs: a slow rank costs its share, the bits stay, and a rank that is merely
slow is kept.

The times that ranks report are injected, so that the load of the machine does not matter. Real ones
are measured in ``tests/cluster/timing/test_uneven_work.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.goals import Flag, workers_lost
from support.uneven import AT, journal, loads, run

from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import Heartbeat, Plan
from faults import Kill

QUICK_BEATS = {"heartbeat_ms": 50, "lease_beats": 20}  # ranks report their pace with heartbeats


def measured(chaos: Chaos, *faults: Any, flag: Flag, **plan: Any) -> Outcome:
    """Run ranks with injected times, until ``flag`` is up."""
    options = {"slow": [1], "from_step": AT} | plan.pop("options", {})
    goal = flag.until | plan.pop("until", {})
    settings = {
        "job": "../../jobs/training/uneven.py:measured",
        "steps": 20,
        "until": goal,
        "watch": flag,
    } | QUICK_BEATS
    return run(chaos, *faults, options=options, **settings | plan)


def shares(path: Path, condition: Callable[[list[list[int]]], bool]) -> Flag:
    """Return the goal that the shares of all memberships so far meet a condition."""
    counts: list[list[int]] = []

    def is_met(message: Any) -> bool:
        counts.extend(
            [[len(member.shards) for member in message.members]]
            if isinstance(message, Plan)
            else []
        )
        return condition(counts)

    return Flag(path, is_met)


@pytest.mark.promise(
    "a slow rank gets fewer, so it costs its share and not the job", reduction="exact"
)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_rank_at_half_speed_gets_half_as_many_shards(
    chaos: Chaos, tmp_path: Path, reduction: str
) -> None:
    """Shards move from the slow rank to the others, so that all end at about the same time; no step
    is lost.
    """
    flag = shares(tmp_path / "moved", lambda plans: len(plans) == 2)
    outcome = measured(chaos, flag=flag, reduction=reduction, buckets=2)
    first, second, *_ = loads(outcome)
    assert first == [4, 4, 4, 4]
    assert second[1] == 2
    assert sorted(second) == [2, 4, 5, 5]
    assert outcome.false_alarms == 0
    assert outcome.lost_steps == 0


def test_a_rank_that_recovers_gets_as_many_shards_as_before(chaos: Chaos, tmp_path: Path) -> None:
    """The shares are those of the beginning again when all ranks are alike."""
    even = [4, 4, 4, 4]
    flag = shares(tmp_path / "moved", lambda plans: len(plans) >= 3 and plans[-1] == even)
    outcome = measured(chaos, flag=flag, options={"recovers_after": 5})
    first, second, *_, last = loads(outcome)
    assert (first, second[1], last) == (even, 2, even)


@pytest.mark.slow
@pytest.mark.promise("After a loss the shares of the living hold")
def test_unequal_shares_outlive_the_death_of_another_rank(chaos: Chaos, tmp_path: Path) -> None:
    """The slow rank has the smallest share of the smaller world; then the world grows again."""
    flag = workers_lost(tmp_path / "lost")
    outcome = measured(chaos, Kill(rank=3, at_step=60), flag=flag, steps=80, until={"world": 4})
    assert loads(outcome)[1][1] == 2
    shrunk = next(counts for counts in loads(outcome) if len(counts) == 3)
    assert shrunk[1] < min(shrunk[0], shrunk[2])
    assert len(loads(outcome)[-1]) == 4


@pytest.mark.promise(
    "Only if a spare is ready on another node: it takes the rank, and the slow node gets no more workers."
)
def test_a_rank_over_the_limit_of_its_run_is_replaced(chaos: Chaos, tmp_path: Path) -> None:
    """Its successor is on another node; the replacement costs no step."""
    flag = workers_lost(tmp_path / "lost")
    limits = {"slow_limit": 3.0, "slow_steps": 10, "balance": False, "spares": 1}
    outcome = measured(
        chaos, flag=flag, options={"factor": 4.0}, until={"world": 4}, check=False, **limits
    )
    problems = [check.name for check in outcome.checks if check.verdict != Verdict.PASSED]
    assert problems == ["no false alarm"], "no fault explains the times that are told"
    (lost,) = journal(outcome, Event.DETECTED)
    assert (lost["rank"], lost["cause"]) == (1, "slow")
    first, last = (journal(outcome, Event.PLAN)[at]["members"] for at in (0, -1))
    assert first[1]["node"] not in {member["node"] for member in last}
    assert outcome.lost_steps == 0


@pytest.mark.slow
@pytest.mark.promise("the same, most of it in the fetch of batches")
def test_a_slow_input_is_no_reason_to_replace_a_rank(chaos: Chaos, tmp_path: Path) -> None:
    """A slow input costs a rank its share, and not its place: it would be as slow on another node."""
    flag = shares(tmp_path / "moved", lambda plans: len(plans) == 2)
    limits = {"slow_limit": 2.0, "slow_steps": 10, "spares": 1}
    outcome = measured(
        chaos, flag=flag, options={"factor": 3.0, "part": "input"}, steps=60, **limits
    )
    reports = journal(outcome, Event.STRAGGLER)
    assert [(record["rank"], record["kind"]) for record in reports] == [(1, "input")]
    assert reports[0]["score"] == pytest.approx(3.0)
    assert loads(outcome)[1][1] == 1
    assert journal(outcome, Event.DETECTED) == []


def test_equal_ranks_keep_equal_shares(chaos: Chaos, tmp_path: Path) -> None:
    """Ranks that report equal times keep equal shares, also on a machine with fewer CPUs than
    ranks.
    """
    flag = shares(tmp_path / "begun", bool)
    outcome = measured(chaos, flag=flag, steps=100, options={"slow": []})
    assert loads(outcome) == [[4, 4, 4, 4]]


def test_a_slow_network_is_told_and_no_shard_moves(chaos: Chaos, tmp_path: Path) -> None:
    """The network is reported, and no rank is blamed, if all ranks wait for longer than they
    compute.
    """
    slow_beats: Counter[str] = Counter()  # heartbeats that report slow steps

    def is_slow_for_long(message: Any) -> bool:
        if isinstance(message, Heartbeat):
            slow_beats[message.node] += any(
                beat.effort is not None and beat.effort.steps > 45 for beat in message.beats
            )
        return len(slow_beats) == 4 and min(slow_beats.values()) > 20

    flag = Flag(tmp_path / "slow", is_slow_for_long)
    options = {"slow": [0, 1, 2, 3], "part": "wait", "factor": 11.0, "from_step": 40}
    outcome = measured(chaos, flag=flag, options=options, steps=60, slow_limit=2.0)
    assert {record["kind"] for record in journal(outcome, Event.STRAGGLER)} == {"network"}
    assert journal(outcome, Event.DETECTED, Event.REBALANCED) == []
